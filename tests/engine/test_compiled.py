"""The compiled step is one backend among others: same model, same knobs, same answers."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pdlab_kernels.cpu.attention_plan import AttentionPlan
from pdlab_kernels.cpu.target import TARGET

import pdlab
from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.beam import beam_search
from pdlab.models.catalog import SHAPES as CATALOG
from pdlab.quantize import fill_decoder, pack_decoder
from tests.helpers import TINY, random_model, random_prompt, run_watched, tie_gaps

if TARGET == "torch":
    pytest.skip("no compiled kernels here", allow_module_level=True)

SHAPES = {name: CATALOG[name] for name in CATALOG if name.startswith("tiny")}
WEIGHTS = ["fp32", "int8", "q8_0", "int4"]
NEAR_TIE = 1e-3
"""Logits of these models have a standard deviation near 1; rounding activations moves them 1e-5."""
KV_FORMATS = ["fp16", "bf16", "fp8", "int8", "int4", "fp16/int8", "int8:head", "int4:channel/int4"]

_models: dict[tuple[str, str], Model] = {}


def packed_model(shape: str, weights: str) -> Model:
    """A random model whose torch weights are those that the packed ones stand for."""
    if (shape, weights) not in _models:
        model = random_model(SHAPES[shape], seed=3)
        packed = pack_decoder(model.decoder, weights)
        if weights != "fp32":
            decoder = type(model.decoder)(model.config)
            decoder.load_state_dict(model.decoder.state_dict())
            fill_decoder(decoder, packed)
            model = replace(model, decoder=decoder, packed=packed)
        _models[shape, weights] = model
    return _models[shape, weights]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_logits_are_those_of_torch(shape, weights):
    model = packed_model(shape, weights)
    prompts = [random_prompt(n, 256) for n in (1, 7, 33)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    seen = {}
    for backend in ("torch", "cpu"):
        config = EngineConfig(backend=backend, chunk_size=16, max_num_seqs=4)
        _, seen[backend], engine = run_watched(model, config, prompts, params)
        assert engine.config.backend == backend
    for ours, theirs in zip(seen["cpu"], seen["torch"], strict=True):
        torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.kv[0], theirs.kv[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_number_of_threads_changes_no_bit(weights):
    model, prompts = packed_model("tiny-qwen3", weights), [random_prompt(n, 256) for n in (3, 40)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    runs = []
    for count in (1, 2, 3):
        with threads(count):
            config = EngineConfig(backend="cpu", chunk_size=12)
            runs.append(run_watched(model, config, prompts, params)[1])
    for others in runs[1:]:
        for ours, theirs in zip(runs[0], others, strict=True):
            assert all(map(torch.equal, ours.logits, theirs.logits))
            assert all(map(torch.equal, ours.kv, theirs.kv))


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(data=st.data())
def test_lossless_knobs_change_greedy_tokens_at_near_ties_only(shape, data):
    model = packed_model(shape, data.draw(st.sampled_from(WEIGHTS)))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    block_size = data.draw(st.sampled_from([1, 4, 7, 16]))
    config = EngineConfig(
        backend="cpu",
        block_size=block_size,
        num_blocks=-(-(max(lengths) + 7) // block_size) + data.draw(st.sampled_from([0, 2, 100])),
        num_swap_blocks=data.draw(st.sampled_from([0, 50])),
        preemption=data.draw(st.sampled_from(["recompute", "auto"])),
        chunk_size=data.draw(st.sampled_from([None, 1, 3, 16])),
        max_num_seqs=4,
        max_num_batched_tokens=data.draw(st.sampled_from([4, 11, 200])),
        kv_head_groups=data.draw(st.sampled_from([1, 2])),
        enable_prefix_cache=data.draw(st.booleans()),
    )
    if config.preemption == "auto" and config.num_swap_blocks:
        config = replace(config, preemption="swap")
    prompts = [random_prompt(length, 256) for length in lengths]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs, _, _ = run_watched(model, config, prompts, params, kv=False)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert max(tie_gaps(model, prompt, tokens)) < NEAR_TIE


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_has_the_same_bits_alone_and_among_others(weights):
    model = packed_model("tiny-llama", weights)
    prompts = [random_prompt(n, 256) for n in (5, 9, 14)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    config = EngineConfig(backend="cpu", enable_prefix_cache=False)
    _, together, _ = run_watched(model, replace(config, chunk_size=4), prompts, params)
    for prompt, mine in zip(prompts, together, strict=True):
        _, [alone], _ = run_watched(model, replace(config, chunk_size=4), [prompt], params)
        assert all(map(torch.equal, alone.logits, mine.logits))
        assert torch.equal(alone.kv[-1], mine.kv[-1])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_every_kv_format_is_read_and_written_as_by_torch(kv_format):
    model = packed_model("tiny-llama", "int8")
    prompts, params = [random_prompt(45, 256)], SamplingParams(max_tokens=20, ignore_eos=True)
    runs = {}
    for backend in ("torch", "cpu"):
        config = EngineConfig(backend=backend, kv_format=kv_format, chunk_size=20)
        runs[backend] = run_watched(model, config, prompts, params)
    [ours], [theirs] = runs["cpu"][1], runs["torch"][1]
    torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=0.02, atol=0.02)
    # what differs by 1e-6 may be rounded to the neighbouring code, and then differs by a step; in
    # later layers these steps have spread
    differs = (ours.kv[0] - theirs.kv[0])[:, 0].abs() > 1e-3
    assert differs.float().mean() < 0.01


@pytest.mark.parametrize(
    "knobs",
    [
        {"window": 9},
        {"window": 9, "sink_tokens": 3},
        {"window": 20, "sink_tokens": 5, "block_size": 4},
    ],
)
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mistral"])
def test_windows_hide_the_same_tokens(knobs, shape):
    model = packed_model(shape, "int8")
    prompts, params = [random_prompt(40, 256)], SamplingParams(max_tokens=8, ignore_eos=True)
    [ours], [theirs] = (
        run_watched(model, EngineConfig(backend=b, chunk_size=11, **knobs), prompts, params)[1]
        for b in ("cpu", "torch")
    )
    torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=1e-3, atol=1e-3)


def test_a_probe_is_shown_every_layer():
    model = packed_model("tiny-llama", "int4")
    with Engine(model, EngineConfig(backend="cpu")) as engine:
        with engine.probe(layers=[0, 2]):
            engine.generate([random_prompt(9, 256)], SamplingParams(max_tokens=2))
        assert {capture.layer for capture in engine.trace.captures} == {0, 2}


def test_several_samples_and_beams_work_as_by_torch():
    model, prompt = packed_model("tiny-llama", "int8"), random_prompt(20, 256)
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=7, ignore_eos=True)
    found = {}
    for backend in ("torch", "cpu"):
        config = EngineConfig(backend=backend)
        with Engine(model, config) as engine:
            [output] = engine.generate([prompt], params)
        beams = beam_search(model, prompt, max_tokens=5, config=config)
        found[backend] = (
            [c.token_ids for c in output.completions],
            [h.token_ids for h in beams.hypotheses],
        )
    assert found["cpu"] == found["torch"]


def test_the_trace_has_the_same_stages_and_candidates():
    model, prompt = packed_model("tiny-llama", "int8"), random_prompt(20, 256)
    steps = {}
    for backend in ("torch", "cpu"):
        with Engine(model, EngineConfig(backend=backend)) as engine:
            engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
        steps[backend] = engine.trace.steps
    for ours, theirs in zip(steps["cpu"], steps["torch"], strict=True):
        assert set(ours.stage_s) == set(theirs.stage_s)
        assert sum(ours.stage_s.values()) <= ours.wall_s
        assert all(seconds >= 0 for seconds in ours.stage_s.values())
        for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert [c.token_id for c in mine.top] == [c.token_id for c in other.top]


def test_layers_are_told_of_one_by_one():
    model = packed_model("tiny-llama", "int8")
    told = []
    with Engine(model, EngineConfig(backend="cpu")) as engine:
        engine.runner.on_layer = lambda batch, layer: told.append(layer)
        [output] = engine.generate([random_prompt(9, 256)], SamplingParams(max_tokens=1))
        engine.runner.on_layer = None
        [again] = engine.generate([random_prompt(9, 256)], SamplingParams(max_tokens=1))
    assert told == [0, 1, 2]
    assert output.token_ids == again.token_ids


def test_auto_compiles_packed_weights_and_leaves_plain_ones_to_torch():
    for weights, backend in (("fp32", "torch"), ("int4", "cpu")):
        with Engine(packed_model("tiny-llama", weights)) as engine:
            assert engine.config.backend == backend


@pytest.mark.parametrize(
    ("model", "knobs", "reason"),
    [
        (lambda: random_model(TINY), {}, "intermediate_size=48 is not a multiple of 32"),
        (lambda: packed_model("tiny-llama", "int8"), {"exact": True}, "exact=True"),
        (
            lambda: packed_model("tiny-llama", "int8"),
            {"attention_backend": "reference"},
            "attention_backend='reference'",
        ),
        (lambda: pdlab.load("random:tiny-llama", dtype="bf16"), {}, "bfloat16"),
        (
            lambda: packed_model("tiny-llama", "int8"),
            {"window": 16, "heavy_tokens": 16, "enable_prefix_cache": False},
            "heavy_tokens=16",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_auto_takes_torch(model, knobs, reason):
    model = model()
    with pytest.raises(ValueError, match=f"backend='cpu' cannot be had: .*{reason}"):
        Engine(model, EngineConfig(backend="cpu", **knobs))
    with Engine(model, EngineConfig(**knobs)) as engine:
        assert engine.config.backend == "torch"


def test_what_compiled_code_could_not_read_is_refused_before(monkeypatch):
    with Engine(packed_model("tiny-llama", "int8")) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        decoder = engine.runner.fast.decoder
        plan = AttentionPlan(decoder.kv, [0, 2], [2], [[0]], [0, 1])
        for token_ids, positions, rows, message in (
            ([1, 256], [0, 1], [1], "token_ids: 1 to 256, must be 0 to 255"),
            ([1, 2], [0, 1024], [1], "positions: 0 to 1024, must be 0 to 1023"),
            ([1, 2], [0, 1], [2], "sample_rows: 2 to 2, must be 0 to 1"),
            ([1], [0], [0], "plan: of 2 rows, for 1 tokens"),
        ):
            with pytest.raises(ValueError, match=message):
                decoder.run(token_ids, positions, plan, rows)
        monkeypatch.setattr("pdlab_kernels.cpu.decoder.MOST_CHUNKS", 10)
        with pytest.raises(ValueError, match="chunks of 10"):
            decoder.run([1, 2], [0, 1], plan, [1])


def test_weights_that_are_given_other_memory_stay_as_they_were():
    model = packed_model("tiny-llama", "int4")
    decoder = type(model.decoder)(model.config)
    decoder.load_state_dict(model.decoder.state_dict())
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with Engine(replace(model, decoder=decoder)) as engine:
        [before] = engine.generate([[1, 2, 3]], params)
        for parameter in decoder.parameters():
            parameter.data = torch.zeros(1)
        [after] = engine.generate([[1, 2, 3]], params)
    assert before.token_ids == after.token_ids


def test_activations_are_counted_by_torch():
    with Engine(packed_model("tiny-llama", "int8")) as engine, engine.measure_activations():
        engine.generate([random_prompt(20, 256)], SamplingParams(max_tokens=1))
    by_torch = EngineConfig(backend="torch")
    with Engine(packed_model("tiny-llama", "int8"), by_torch) as other, other.measure_activations():
        other.generate([random_prompt(20, 256)], SamplingParams(max_tokens=1))
    ours, theirs = engine.trace.steps[0], other.trace.steps[0]
    assert ours.activation_peak_bytes == theirs.activation_peak_bytes


def test_without_numba_torch_computes():
    program = (
        "import pdlab; from pdlab import *\n"
        "model = pdlab.load('random:tiny-llama', weights='int8')\n"
        "with Engine(model) as engine:\n"
        "    assert engine.config.backend == 'torch'\n"
        "    print(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].token_ids)\n"
        "try: Engine(model, EngineConfig(backend='cpu'))\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {"PDLAB_CPU_KERNELS": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "Numba" in done.stdout


def test_a_closed_engine_leaves_no_threads():
    before = threading.active_count()
    with threads(2), Engine(packed_model("tiny-llama", "int8")) as engine:
        engine.generate([random_prompt(9, 256)], SamplingParams(max_tokens=2))
        assert threading.active_count() == before + 1
    del engine
    for thread in threading.enumerate():
        if thread.name.startswith("kernel-helper"):
            thread.join(timeout=10)
    assert threading.active_count() == before
