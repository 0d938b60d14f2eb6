"""The GPU's forward pass without a GPU: its kernels' torch references stand in for them here.

With the kernels themselves, in Triton's interpreter: tests/kernels/triton/interpreted.
"""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdlab_kernels.triton import reference

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.attention import AttentionInputs
from pdlab.engine import admission, triton_forward
from pdlab.engine.batch import BatchInputs
from pdlab.engine.decode_graphs import DecodeBuffers, DecodeGraphs, bucket_sizes, call_again
from pdlab.engine.gpu_rows import lay_out
from pdlab.engine.timing import StageClock
from pdlab.engine.triton_forward import TritonForward
from pdlab.models.catalog import SHAPES as CATALOG
from tests.helpers import random_model, random_prompt, tie_gaps, watch

CPU = torch.device("cpu")
SHAPES = {name: CATALOG[name] for name in CATALOG if name.startswith("tiny")}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


def engine_of(shape="tiny-llama", *, graphs=True, fast=True, model=None, **knobs) -> Engine:
    """By torch, or by the GPU's forward pass with references for kernels."""
    model = model or random_model(SHAPES[shape], seed=3)
    engine = Engine(model, EngineConfig(backend="torch", cuda_graphs=graphs, **knobs))
    if fast:
        runner = engine.runner
        runner.fast = TritonForward(
            model, engine.kv_cache, engine.config, runner.windows, kernels=reference
        )
    return engine


def run(engine: Engine, prompts, params=GREEDY, *, kv=True):
    """Tokens of each prompt, and what was seen of it."""
    with engine:
        seen = watch(engine, kv=kv)
        outputs = engine.generate(prompts, params)
    return [o.token_ids for o in outputs], [seen[o.request_id] for o in outputs]


def decodes(*tokens: int, block_size: int = 4, context: int = 6) -> BatchInputs:
    """One decode for each token; sequence i has blocks 10 i and 10 i + 1."""
    n = len(tokens)
    tables = [[10 * i + j for j in range(-(-context // block_size))] for i in range(n)]
    slots = [table[-1] * block_size + (context - 1) % block_size for table in tables]
    reads = AttentionInputs(list(range(n + 1)), [context] * n, tables)
    return BatchInputs(list(tokens), [context - 1] * n, slots, reads, list(range(n)))


# --- rows ----------------------------------------------------------------------------------------


def test_decodes_come_first_and_chunks_keep_their_order():
    reads = AttentionInputs([0, 3, 4, 6, 7], [3, 9, 6, 1], [[5], [1, -1, 2, 99], [3, 4], [7]])
    inputs = BatchInputs([10, 11, 12, 20, 30, 31, 40], [0, 1, 2, 8, 4, 5, 0], [0] * 7, reads, [2])
    layout = lay_out(inputs, 4)
    assert layout.numbers[0].tolist() == [20, 40, 10, 11, 12, 30, 31]
    assert layout.numbers[1].tolist() == [8, 0, 0, 1, 2, 4, 5]
    assert layout.context_lens.tolist() == [9, 1, 3, 6]
    assert layout.block_tables.tolist() == [
        [1, -1, 2, -1], [7, -1, -1, -1], [5, -1, -1, -1], [3, 4, -1, -1]
    ]  # fmt: skip
    assert (layout.num_decodes, layout.chunk_starts.tolist()) == (2, [0, 3, 5])
    assert layout.numbers[0][layout.places].tolist() == inputs.token_ids
    assert layout.numbers.flags.c_contiguous
    assert not layout.is_sorted
    assert lay_out(decodes(1, 2), 4).is_sorted


# --- buckets and padding -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 4, 5]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (9, [1, 2, 4, 8, 9]),
    ],
)
def test_buckets(most, sizes):
    assert bucket_sizes(most) == sizes


def test_padding_stores_nothing_and_sees_nothing_whatever_was_there_before():
    buffers = DecodeBuffers(4, 8, CPU)
    rows = buffers.rows
    buffers.fill(lay_out(decodes(1, 2, 3, 4, context=30), 4))
    assert rows.slots.min() >= 0
    buffers.fill(lay_out(decodes(7, context=6), 4))
    assert rows.token_ids.tolist() == [7, 0, 0, 0]
    assert rows.positions.tolist() == [5, 0, 0, 0]
    assert rows.slots.tolist() == [5, -1, -1, -1]
    assert rows.context_lens.tolist() == [6, 0, 0, 0]
    assert rows.block_tables[0, :2].tolist() == [0, 1]
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in rows[:5])


def test_a_bucket_is_captured_once_and_its_buffers_stay():
    captured, addresses = [], set()

    def capture(compute):
        captured.append(compute)
        return compute

    def compute(rows):
        addresses.add(rows.token_ids.data_ptr())
        return (rows.token_ids * 2,)

    graphs = DecodeGraphs(compute, 4, 8, CPU, capture)
    kept = None
    for tokens in ([1, 2, 3], [5, 6, 7, 8], [9, 1, 1], [4]):
        layout = lay_out(decodes(*tokens), 4)
        assert graphs.takes(layout)
        [result] = graphs.run(layout)
        assert result.tolist() == [2 * token for token in tokens]
        kept = result if kept is None else kept
    assert kept.tolist() == [2, 4, 6], "a replay wrote over what it had handed out"
    assert len(captured) == len(addresses) == 2


def test_chunks_and_more_decodes_than_the_largest_bucket_are_not_replayed():
    graphs = DecodeGraphs(lambda rows: (), 2, 8, CPU, call_again)
    assert not graphs.takes(lay_out(decodes(1, 2, 3), 4))
    reads = AttentionInputs([0, 2], [2], [[0]])
    assert not graphs.takes(lay_out(BatchInputs([1, 2], [0, 1], [0, 1], reads, [1]), 4))


# --- in the engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_kv_are_those_of_torch(shape, graphs):
    prompts = [random_prompt(n, 256) for n in (1, 7, 16, 33)]
    _, theirs = run(engine_of(shape, fast=False, chunk_size=16, max_num_seqs=4), prompts)
    _, ours = run(engine_of(shape, graphs=graphs, chunk_size=16, max_num_seqs=4), prompts)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.logits, other.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.kv[-1], other.kv[-1], rtol=1e-4, atol=1e-4)


@settings(max_examples=15)
@given(data=st.data())
def test_lossless_knobs_change_greedy_tokens_at_near_ties_only(data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    block_size = data.draw(st.sampled_from([1, 4, 7, 16]))
    engine = engine_of(
        graphs=data.draw(st.booleans()),
        block_size=block_size,
        num_blocks=-(-(max(lengths) + 7) // block_size) + data.draw(st.sampled_from([0, 2, 100])),
        num_swap_blocks=data.draw(st.sampled_from([0, 50])),
        preemption="recompute",
        chunk_size=data.draw(st.sampled_from([None, 1, 3, 16])),
        max_num_seqs=5,
        max_num_batched_tokens=data.draw(st.sampled_from([5, 11, 200])),
        enable_prefix_cache=data.draw(st.booleans()),
    )
    prompts = [random_prompt(length, 256) for length in lengths]
    tokens, _ = run(engine, prompts, kv=False)
    for prompt, drawn in zip(prompts, tokens, strict=True):
        assert max(tie_gaps(engine.model, prompt, drawn)) < 1e-3


def test_padding_touches_no_block_of_the_cache():
    """Three decodes in a bucket of four: every block that no sequence had is still zero."""
    prompts = [random_prompt(n, 256) for n in (5, 9, 14)]
    written = []
    for graphs in (False, True):
        engine = engine_of(graphs=graphs, max_num_seqs=4, num_blocks=40, enable_prefix_cache=False)
        tensors = engine.kv_cache.tensors
        run(engine, prompts, kv=False)
        written.append([tensor.abs().amax((0, 2, 3, 4)) > 0 for tensor in tensors])
    for eager, padded in zip(*written, strict=True):
        assert torch.equal(eager, padded)
        assert padded.sum() == 1 + 1 + 2  # 16 tokens a block


@pytest.mark.parametrize("kv_format", ["fp16", "fp8", "int8", "int4", "fp16/int8", "int8:token:8"])
def test_kv_formats(kv_format):
    prompts = [random_prompt(45, 256), random_prompt(7, 256)]
    _, [theirs, _] = run(engine_of(fast=False, kv_format=kv_format, chunk_size=20), prompts)
    _, [ours, _] = run(engine_of(kv_format=kv_format, chunk_size=20), prompts)
    torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "knobs", [{"window": 9}, {"window": 20, "sink_tokens": 5, "block_size": 4}]
)
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral"])
def test_windows_hide_the_same_tokens(knobs, shape):
    prompts = [random_prompt(40, 256), random_prompt(3, 256)]
    _, theirs = run(engine_of(shape, fast=False, chunk_size=11, **knobs), prompts, kv=False)
    _, ours = run(engine_of(shape, chunk_size=11, **knobs), prompts, kv=False)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.logits, other.logits, rtol=1e-4, atol=1e-4)


def test_a_model_in_bf16_gives_logits_in_fp32():
    model = pdlab.load("random:tiny-llama", dtype="bf16")
    prompts = [random_prompt(20, 256)]
    _, [theirs] = run(engine_of(model=model, fast=False), prompts, kv=False)
    _, [ours] = run(engine_of(model=model), prompts, kv=False)
    assert ours.logits[0].dtype == torch.float32
    torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=0.05, atol=0.05)


def test_layers_are_told_of_and_a_replayed_step_is_one_stage():
    told = []
    with engine_of() as engine:
        engine.runner.on_layer = lambda batch, layer: told.append(layer)
        engine.generate([random_prompt(9, 256)], SamplingParams(max_tokens=1))
        engine.runner.on_layer = None
        engine.generate([random_prompt(9, 256)], SamplingParams(max_tokens=3, ignore_eos=True))
        last = engine.trace.steps[-1].stage_s
    assert told == [0, 1, 2]
    assert "forward" in last
    assert "mlp" not in last


def test_a_closed_engine_is_gone_at_once():
    """No cycle keeps buffers and graphs until garbage is collected: they are in a GPU's memory."""
    gc.collect()
    gc.disable()
    try:
        with engine_of() as engine:
            engine.generate([random_prompt(9, 256)], GREEDY)
            kept = weakref.ref(engine.runner.fast)
        assert kept() is None
    finally:
        gc.enable()


def test_activations_are_counted_where_no_graph_hides_them():
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with engine_of() as engine, engine.measure_activations():
        engine.generate([random_prompt(9, 256)], params)
        assert all("forward" not in step.stage_s for step in engine.trace.steps)


def test_a_probe_is_shown_every_layer_and_prompts_are_weighed():
    prompt = random_prompt(9, 256)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    found = []
    for fast in (True, False):
        with engine_of(fast=fast) as engine:
            with engine.probe(layers=[0, 2]):
                engine.generate([prompt], SamplingParams(max_tokens=2))
            assert {capture.layer for capture in engine.trace.captures} == {0, 2}
            [output] = engine.generate([prompt], params)
            found.append([x.logprob for x in output.prompt_logprobs[1:]])
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)


class FakeEvent:
    """A CUDA event on a stream whose work takes a second between any two."""

    seconds = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        FakeEvent.seconds += 1
        self.at = FakeEvent.seconds

    def synchronize(self):
        assert self.at == FakeEvent.seconds, "the last event is the one to wait for"

    def elapsed_time(self, later):
        return 1000.0 * (later.at - self.at)


def test_on_a_gpu_stages_are_timed_between_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = StageClock(torch.device("cuda"))
    for stage in ("qkv", "mlp", "qkv"):
        clock.lap(stage)
    assert clock.stage_s == {"qkv": 2.0, "mlp": 1.0}
    clock.lap("mlp")
    assert clock.stage_s == clock.stage_s == {"qkv": 2.0, "mlp": 2.0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("knobs", [{}, {"window": 20, "sink_tokens": 4}, {"kv_format": "int8"}])
def test_on_a_gpu_all_ways_agree(knobs):
    model = pdlab.load("random:smollm2-135m", device="cuda", dtype="fp32")
    prompts = [random_prompt(n, 256) for n in (1, 30, 75)]
    found = []
    for way in ({"backend": "torch"}, {"cuda_graphs": False}, {"cuda_graphs": True}):
        engine = Engine(model, EngineConfig(**knobs, **way, chunk_size=32, max_num_seqs=4))
        assert engine.config.backend == way.get("backend", "triton")
        found.append(run(engine, prompts, kv=False)[1])
    for seen in found[1:]:
        for mine, other in zip(seen, found[0], strict=True):
            torch.testing.assert_close(mine.logits, other.logits, rtol=0.02, atol=0.02)


# --- who gets it ---------------------------------------------------------------------------------


def test_without_a_gpu_it_is_refused_and_auto_takes_torch():
    model = random_model(SHAPES["tiny-llama"], seed=3)
    with pytest.raises(ValueError, match="backend='triton' cannot be had: "):
        Engine(model, EngineConfig(backend="triton"))
    with Engine(model) as engine:
        assert engine.config.backend == "torch"


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"exact": True}, "exact=True"),
        ({"attention_backend": "reference"}, "attention_backend='reference'"),
        ({"kv_head_groups": 2}, "kv_head_groups=2"),
    ],
)
def test_what_the_kernels_cannot_do_is_named(knobs, reason, monkeypatch):
    monkeypatch.setattr(triton_forward, "find_spec", lambda name: name)
    model = random_model(SHAPES["tiny-llama"], seed=3)
    assert reason in triton_forward.why_not(model, EngineConfig(kv_format="fp32", **knobs))


def test_packed_weights_are_refused():
    model = pdlab.load("random:tiny-llama", weights="int8")
    reason = triton_forward.why_not(model, EngineConfig(kv_format="fp32"))
    assert reason == "Triton is not installed" or "weights are int8" in reason


def test_auto_on_a_gpu_is_triton_unless_something_keeps_it(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda"), packed=None)
    reasons = [None, "no"]
    monkeypatch.setattr(triton_forward, "why_not", lambda model, config: reasons.pop(0))
    assert admission._backend(on_gpu, EngineConfig()) == "triton"
    assert admission._backend(on_gpu, EngineConfig()) == "torch"
    assert admission._backend(on_gpu, replace(EngineConfig(), backend="torch")) == "torch"
