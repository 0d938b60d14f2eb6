"""Teacher forcing computes what serving computes, over the same storage, and gives it back."""

from dataclasses import replace

import pytest
import torch

from pdlab import Engine, EngineConfig, NaiveGenerator, SamplingParams
from pdlab.engine.forced import ForcedRun, forced_logits

from ..helpers import SHAPES, TINY, random_model, random_prompt

EXACT = EngineConfig(exact=True, block_size=4)


@pytest.mark.parametrize(("shape", "chunk_size"), list(zip(SHAPES, (1, 5, 16, 100), strict=True)))
def test_forced_logits_are_those_of_the_plain_run(shape: str, chunk_size: int) -> None:
    model = random_model(SHAPES[shape])
    text = random_prompt(23)
    forced = torch.cat(list(forced_logits(model, text, EXACT, chunk_size=chunk_size)))
    assert torch.equal(forced, NaiveGenerator(model, exact=True).logits(text))


@pytest.mark.parametrize(
    ("kv_format", "window"), [("fp32", 9), ("bf16", None), ("int4:token:4", None), ("fp8/int8", 9)]
)
def test_forced_logits_lead_to_the_tokens_that_the_engine_generates(
    kv_format: str, window: int | None
) -> None:
    model, prompt = random_model(), random_prompt(21)
    config = replace(EXACT, kv_format=kv_format, window=window)
    with Engine(model, config) as engine:
        [output] = engine.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True))
    text = prompt + output.token_ids
    logits = torch.cat(list(forced_logits(model, text[:-1], config, chunk_size=8)))
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output.token_ids


@pytest.mark.parametrize("kv_format", ["int8:head", "int4:channel/int8:channel"])
def test_block_wise_formats_one_token_at_a_time_are_what_decoding_reads(kv_format: str) -> None:
    model, text = random_model(), random_prompt(22)
    config = EngineConfig(block_size=4, kv_format=kv_format, attention_backend="reference")
    by_token = torch.cat(list(forced_logits(model, text, config, chunk_size=1)))
    exactly = torch.cat(list(forced_logits(model, text, replace(config, kv_format="fp32"))))
    torch.testing.assert_close(by_token[:4], exactly[:4])  # the first block was not full yet
    assert not torch.allclose(by_token[5:], exactly[5:], rtol=1e-4, atol=1e-4)


def test_blocks_behind_the_window_are_given_back() -> None:
    model, text = random_model(), random_prompt(100)
    config = EngineConfig(block_size=4, window=8, sink_tokens=2)
    run = ForcedRun(model, config, longest=100, chunk_size=4)
    logits = torch.cat(list(run.logits(text)))
    assert logits.shape == (100, TINY.vocab_size)
    assert run.peak_blocks <= run.memory.manager.pool.num_blocks <= 5
    kept = ~run.read_kv()[0, 0, :, 0, 0].isnan()
    assert kept[:2].all()
    assert kept[-7:].all()
    assert not kept[4:88].any()


def test_heavy_tokens_stay_behind_the_window() -> None:
    model, text = random_model(), random_prompt(60)
    config = EngineConfig(block_size=4, window=8, heavy_tokens=8, enable_prefix_cache=False)
    run = ForcedRun(model, config, longest=60, chunk_size=4)
    assert len(list(run.logits(text))) == 15
    kept = ~run.read_kv()[0, 0, :, 0, 0].isnan()
    assert 8 + 7 <= int(kept.sum()) < 60


def test_a_run_that_was_left_or_failed_does_no_harm_to_the_next() -> None:
    model, text = random_model(), random_prompt(30)
    config = EngineConfig(block_size=4, kv_format="int8:channel")
    run = ForcedRun(model, config, longest=30, chunk_size=7)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    right = torch.cat(list(run.logits(text)))
    next(run.logits(random_prompt(25, seed=1)))
    assert torch.equal(torch.cat(list(run.logits(text))), right)
    with pytest.raises(KeyboardInterrupt):
        next(run.logits(text, [fail]))
    assert torch.equal(torch.cat(list(run.logits(text))), right)


def test_the_iterator_of_an_earlier_text_says_that_it_is_stale() -> None:
    model, first, second = random_model(), random_prompt(10), random_prompt(8, seed=1)
    run = ForcedRun(model, EngineConfig(block_size=4), longest=10, chunk_size=4)
    right = torch.cat(list(run.logits(second)))
    a, b = run.logits(first), run.logits(second)
    next(a)
    rows = [next(b)]
    with pytest.raises(RuntimeError, match="started when 6 tokens of this one were left"):
        next(a)
    assert torch.equal(torch.cat([*rows, *b]), right)
    a = run.logits(first)
    assert [len(next(a)) for _ in range(3)] == [4, 4, 2]
    next(run.logits(second))
    assert list(a) == []  # it had been read to its end


@pytest.mark.parametrize("kv_format", ["int8:head", "int4:channel/int8:channel"])
def test_block_wise_formats_cost_about_the_same_however_the_text_is_cut(kv_format: str) -> None:
    model, text = random_model(replace(TINY, max_model_len=256)), random_prompt(200)
    config = EngineConfig(block_size=16, kv_format=kv_format)
    exactly = torch.cat(list(forced_logits(model, text, replace(config, kv_format="fp32"))))
    by_chunk = {
        size: torch.cat(list(forced_logits(model, text, config, chunk_size=size)))
        for size in (1, 256)
    }
    for logits in by_chunk.values():
        assert logits.shape == exactly.shape
        assert 0 < (logits - exactly).norm() / exactly.norm() < 0.1
    assert (by_chunk[1] - by_chunk[256]).norm() / exactly.norm() < 0.1


def test_texts_that_cannot_be_run_are_refused() -> None:
    model = random_model()
    with pytest.raises(ValueError, match="129 tokens, it must have 1 to 128"):
        forced_logits(model, random_prompt(129), EngineConfig())
    with pytest.raises(ValueError, match="0 tokens"):
        forced_logits(model, [], EngineConfig())
    with pytest.raises(ValueError, match="token id 61"):
        next(forced_logits(model, [61], EngineConfig()))
    with pytest.raises(ValueError, match="chunk_size=0"):
        forced_logits(model, [1], EngineConfig(), chunk_size=0)
    for size in (2.5, "a", True, None):
        with pytest.raises(ValueError, match=f"chunk_size={size!r} must be an integer"):
            ForcedRun(model, EngineConfig(), longest=4, chunk_size=size)
    with pytest.raises(ValueError, match=r"longest=2\.5 must be an integer"):
        ForcedRun(model, EngineConfig(), longest=2.5)
    run = ForcedRun(model, EngineConfig(), longest=4)
    with pytest.raises(ValueError, match="a text has 20 tokens, longest is 4"):
        next(run.logits(random_prompt(20)))
    with pytest.raises(ValueError, match="a text has 0 tokens"):
        next(run.logits([]))
    with pytest.raises(ValueError, match="call logits"):
        ForcedRun(model, EngineConfig(), longest=4).read_kv()
