"""An engine on several ranks does what one on one does: bit for bit where only layers are dealt
out, and up to the order of a sum where layers are cut."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.engine.batch import BatchInputs
from pdlab.engine.runner import RunnerLost
from pdlab.models import load_outline
from pdlab.models.shard_plan import ShardPlan
from pdlab.parallel import RankLost
from pdlab.parallel.commands import Ran
from pdlab.parallel.rank import Rank
from tests.helpers import Seen, random_model, random_prompt, relative_error, run_watched, watch
from tests.parallel.models import GRIDS, ODD, SHAPES, on_threads, while_waiting

PROMPTS = [random_prompt(length, ODD.vocab_size) for length in (13, 4, 22)]
PARAMS = [
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.8, seed=3, repetition_penalty=1.1),
    SamplingParams(max_tokens=7, logprobs=2, prompt_logprobs=2),
]
TOLERANCE = 2e-5
"""Of logits under tensor parallel, relative to the largest: sums are made in another order."""
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunk_size": 5, "max_num_batched_tokens": 11, "max_num_seqs": 3},
    "swapped": {"num_blocks": 13, "num_swap_blocks": 40, "preemption": "swap"},
    "recomputed": {"num_blocks": 13, "preemption": "recompute"},
    "int8": {"kv_format": "int8"},
    "mixed formats": {"kv_format": "fp8/int4:token:4"},
    "drafts": {"speculation": pdlab.PromptLookup(num_tokens=3)},
    "windowed": {"window": 6, "sink_tokens": 2, "block_size": 2},
    "overlapped": {"overlap": True},
}


def same_bits(ours: Seen, theirs: Seen) -> bool:
    return all(
        len(mine) == len(other)
        and all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, other, strict=True)
        )
        for mine, other in ((ours.logits, theirs.logits), (ours.kv, theirs.kv))
    )


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
@pytest.mark.parametrize(("stages", "pieces"), [(2, None), (3, 1), (5, 4)])
def test_a_pipeline_changes_no_bit_in_exact_mode(stages: int, pieces: int | None, knobs) -> None:
    model = random_model(ODD)
    config = on_threads(1, stages, micro_batches=pieces, exact=True, **knobs)
    one = replace(config, pipeline_parallel=1, micro_batches=None)
    tokens, seen, _ = run_watched(model, one, PROMPTS, PARAMS)
    ours, our_seen, engine = run_watched(model, config, PROMPTS, PARAMS)
    assert ours == tokens
    assert all(same_bits(a, b) for a, b in zip(our_seen, seen, strict=True))
    assert engine.pool.num_free == config.num_blocks


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_every_grid_computes_the_same_logits(grid: tuple[int, int], shape) -> None:
    model = random_model(shape)
    tokens, seen, _ = run_watched(model, on_threads(1, 1), PROMPTS, PARAMS)
    ours, our_seen, _ = run_watched(model, on_threads(*grid, micro_batches=None), PROMPTS, PARAMS)
    assert ours == tokens
    for mine, other in zip(our_seen, seen, strict=True):
        assert len(mine.logits) == len(other.logits)
        for a, b in zip([*mine.logits, *mine.kv], [*other.logits, *other.kv], strict=True):
            assert relative_error(a, b) < TOLERANCE


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_a_row_of_a_sharded_layer_does_not_depend_on_its_batch(knobs) -> None:
    """Exact mode's own promise, with sums over three ranks in it."""
    config = on_threads(3, 1, exact=True, **knobs)
    together, seen, _ = run_watched(random_model(ODD), config, PROMPTS, PARAMS)
    plain = on_threads(3, 1, exact=True, kv_format=config.kv_format, window=config.window)
    plain = replace(plain, sink_tokens=config.sink_tokens)
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        [tokens], [alone], _ = run_watched(random_model(ODD), plain, [prompt], [params], kv=False)
        assert tokens == together[i]
        for a, b in zip(alone.logits, seen[i].logits, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kv_format", ["int8:channel", "int4:channel/int4:token:4"])
def test_formats_that_scale_blocks(kv_format: str) -> None:
    """How a token is stored depends on its block, and so not on ranks while a step is one piece."""
    model = random_model(ODD)
    config = on_threads(2, 2, kv_format=kv_format)
    one = replace(config, tensor_parallel=1, pipeline_parallel=1)
    tokens, seen, _ = run_watched(model, one, PROMPTS, PARAMS)
    ours, our_seen, _ = run_watched(model, config, PROMPTS, PARAMS)
    assert ours == tokens
    for mine, other in zip(our_seen, seen, strict=True):
        for a, b in zip(mine.logits, other.logits, strict=True):
            assert relative_error(a, b) < 0.05  # a value at the edge of two codes may take either


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int8:channel", "int4:channel/int4:token:4"])
def test_what_is_computed_again_after_an_interrupt_is_the_same(
    kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is interrupted once; its pieces have been computed for good, all but the last."""
    model, config = random_model(ODD), on_threads(1, 2, kv_format=kv_format)
    tokens, seen, _ = run_watched(model, config, PROMPTS, PARAMS)
    with Engine(model, config) as engine:
        ours = watch(engine)
        ids = [engine.submit(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        while engine.scheduler.has_work:
            press = partial(signal.raise_signal, signal.SIGINT)
            with while_waiting(monkeypatch, press), pytest.raises(KeyboardInterrupt):
                engine.step()
            engine.step()
        assert [engine.collect(name).token_ids for name in ids] == tokens
    assert all(same_bits(ours[name], other) for name, other in zip(ids, seen, strict=True))


def test_prompts_that_begin_alike_share_blocks() -> None:
    with Engine(random_model(ODD), on_threads(3, 2, exact=True)) as engine:
        first, second = (engine.generate(PROMPTS[2], PARAMS[0])[0] for _ in range(2))
        assert second.token_ids == first.token_ids
        assert second.metrics.num_cached_tokens == 20
        forks = engine.generate(
            PROMPTS[0], SamplingParams(n=3, max_tokens=5, temperature=1, seed=1)
        )
        assert len(forks[0].completions) == 3


def test_what_is_stored_can_be_read_and_is_the_same() -> None:
    def stored(config: EngineConfig) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with Engine(random_model(ODD), config) as engine:
            request_id = engine.submit(PROMPTS[2], PARAMS[0])
            for _ in range(3):
                engine.step()
            sequence = engine.sequence_of(request_id)
            raw = engine.kv_cache.raw(sequence.block_table, sequence.num_computed_tokens)
            return engine.read_kv(request_id), raw

    config = on_threads(1, 3, exact=True, kv_format="int4:token:4")
    kv, raw = stored(config)
    whole_kv, whole_raw = stored(replace(config, pipeline_parallel=1))
    assert torch.equal(kv, whole_kv)
    assert all(torch.equal(a, b) for a, b in zip(raw, whole_raw, strict=True))


# --- what does not go, and what breaks ------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tensor_parallel": 4}, "tensor_parallel=4 is more than the model's 3 KV heads"),
        ({"pipeline_parallel": 6}, "pipeline_parallel=6 is more than the model's 5 layers"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be an integer >= 1"),
        ({"tensor_parallel": 2, "backend": "cpu"}, "backend='cpu' is for one rank"),
        ({"tensor_parallel": 3, "kv_head_groups": 3}, "kv_head_groups=3"),
        ({"micro_batches": 2}, "micro_batches=2 needs several ranks"),
        ({"pipeline_parallel": 2, "micro_batches": 0}, "micro_batches=0"),
        (
            {"pipeline_parallel": 2, "micro_batches": 2, "kv_format": "int8:channel"},
            "micro_batches=2 needs a kv_format with token scales",
        ),
        ({"pipeline_parallel": 2, "rank_host": "cloud"}, "rank_host='cloud'"),
        ({"pipeline_parallel": 2, "rank_link": 3}, "rank_link=3"),
        ({"pipeline_parallel": 2, "rank_host": "thread", "rank_threads": 1}, "rank_threads=1"),
        (
            {"tensor_parallel": 2, "window": 8, "heavy_tokens": 4, "enable_prefix_cache": False},
            "heavy_tokens=4",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(random_model(ODD), EngineConfig(**knobs))


def test_packed_weights_and_shared_memory_are_refused() -> None:
    config = on_threads(2, 1)
    with pytest.raises(ValueError, match="cannot be shared"):
        Engine.memory_for(random_model(ODD), config)
    memory = Engine.memory_for(random_model(ODD), on_threads(1, 1))
    with pytest.raises(ValueError, match="ranks keep K and V of their own"):
        Engine(random_model(ODD), config, memory=memory)
    with (
        Engine(random_model(ODD), config) as engine,
        pytest.raises(ValueError, match="cannot look into 2 ranks"),
        engine.probe(),
    ):
        pass


def test_what_only_one_rank_can_do_says_so() -> None:
    model, config = random_model(ODD), on_threads(2, 1)
    with pytest.raises(ValueError, match="only an Engine computes on several ranks"):
        pdlab.beam_search(model, PROMPTS[0], config=config, max_tokens=8)
    with (
        Engine(model, config) as engine,
        pytest.raises(ValueError, match="activations of 2 ranks"),
        engine.measure_activations(),
    ):
        pass


def test_a_model_without_weights_here_needs_ranks_that_load_them() -> None:
    outline = load_outline("random:tiny-llama")
    for knobs in ({}, {"speculation": pdlab.EarlyExit(1)}, {"speculation": pdlab.SelfDraft()}):
        ranks = 2 if knobs else 1
        with pytest.raises(ValueError, match=r"no weights here|needs the weights"):
            Engine(outline, EngineConfig(tensor_parallel=ranks, rank_host="thread", **knobs))
    prompt, params = [3, 14, 15, 9, 2], SamplingParams(max_tokens=5, ignore_eos=True)
    with Engine(pdlab.load("random:tiny-llama")) as engine:
        expected = engine.generate(prompt, params)[0].token_ids
    with Engine(outline, EngineConfig(tensor_parallel=2)) as engine:
        assert engine.generate(prompt, params)[0].token_ids == expected


def test_a_vocabulary_smaller_than_its_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the model's 2 tokens"):
        ShardPlan(replace(ODD, vocab_size=2), tensor_parallel=3)


def run_on(engine: Engine) -> None:
    """Until there is nothing to do: with overlap one more step may be computed already."""
    while engine.step():
        pass


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_fails_ends_all_requests_and_nothing_hangs(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken, run = threading.Event(), Rank._run

    def may_break(rank: Rank, micro_batches: list[BatchInputs]) -> Ran:
        if rank.shard.rank == 2 and is_broken.is_set():
            raise RuntimeError("out of order")
        return run(rank, micro_batches)

    monkeypatch.setattr(Rank, "_run", may_break)
    with Engine(random_model(ODD), on_threads(2, 2, overlap=overlap)) as engine:
        running = [engine.submit(prompt, PARAMS[0]) for prompt in PROMPTS[:2]]
        for _ in range(3):
            engine.step()
        is_broken.set()
        stream = engine.stream(PROMPTS[2], PARAMS[0])
        with pytest.raises(RankLost, match=r"rank 2 of 4 failed(.|\n)*out of order"):
            run_on(engine)
        outputs = [engine.collect(name) for name in running]
        assert [output.finish_reason for output in outputs] == ["error", "error"]
        assert all(isinstance(output.error, RunnerLost) for output in outputs)
        with pytest.raises(RankLost):
            list(stream)
        assert engine.pool.num_free == 64
        with pytest.raises(RankLost):
            engine.generate(PROMPTS[0], PARAMS[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pdlab-rank")]


def test_closing_ends_the_ranks_and_frees_them() -> None:
    gc.collect()
    for _ in range(2):
        with Engine(random_model(ODD), on_threads(3, 1)) as engine:
            watch(engine)
            engine.submit(PROMPTS[0])
            engine.step()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pdlab-rank")]
