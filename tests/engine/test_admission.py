"""What an engine lets in, and what it says to the rest: that request alone fails."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdlab import Engine, EngineConfig, Model, NaiveGenerator, SamplingParams
from tests.helpers import TINY, random_model

ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [2**40],
        [2**70],
        "\ud800",
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": 3}],
        [1, "2"],
        3,
        b"abc",
        None,
    ],
    ids=str,
)
def test_a_bad_prompt_fails_alone(smollm2: Model, bad: object) -> None:
    with Engine(smollm2, EngineConfig(num_blocks=8)) as engine:
        good, refused = engine.generate(["hi", bad], ONE)
        assert good.finish_reason == "length"
        assert refused.finish_reason == "error"
        assert isinstance(refused.error, ValueError)
        assert engine.pool.num_free == 8


@pytest.mark.parametrize(
    "prompts",
    [None, 3, b"abc", {"role": "user", "content": "x"}, np.array([1, 2]), torch.tensor([1, 2])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_prompt_at_all_is_named(prompts: object) -> None:
    with Engine(random_model()) as engine, pytest.raises(ValueError, match=r"^prompts must be"):
        engine.generate(prompts, ONE)


def test_tuples_do_as_lists_do() -> None:
    with Engine(random_model()) as engine:
        assert len(engine.generate((1, 2, 3), ONE)) == 1
        assert len(engine.generate(([1, 2], [3]), (ONE, ONE))) == 2


def test_a_pool_larger_than_memory_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=r"num_blocks=10000000000 .* GiB"):
        Engine(random_model(), EngineConfig(num_blocks=10**10))


def test_exact_mode_is_refused_where_rows_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that treats the last row of a product differently."""
    model = random_model(replace(TINY, hidden_size=24))
    linear = torch.nn.functional.linear

    def uneven(x, weight, bias=None):
        out = linear(x, weight, bias)
        out[-1] *= 1 + 1e-6
        return out

    with Engine(model, EngineConfig(exact=True)):
        pass
    monkeypatch.setattr(torch.nn.functional, "linear", uneven)
    with pytest.raises(ValueError, match="exact=True cannot be kept"):
        Engine(model, EngineConfig(exact=True))


def test_a_probe_without_a_trace_is_refused() -> None:
    config = EngineConfig(record_trace=False)
    with (
        Engine(random_model(), config) as engine,
        pytest.raises(ValueError, match="record_trace=False"),
        engine.probe(),
    ):
        pass


def test_an_abort_is_in_the_trace() -> None:
    with Engine(random_model()) as engine:
        request_id = engine.submit([1, 2, 3])
        engine.step()
        engine.abort(request_id)
        assert list(engine.trace.aborted) == [request_id]


@pytest.mark.parametrize("prompt", [[-1], [10**6]])
def test_the_cacheless_baseline_refuses_unknown_tokens(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="vocab_size is 61"):
        NaiveGenerator(random_model()).generate(prompt, ONE)
