"""The predicted gain: the formula on the cost model's times."""

import pytest

from pdlab.costmodel import Hardware
from pdlab.speculate import first_layers, predict_gain, speedup

from ..helpers import TINY, random_model

MODEL = random_model(TINY)


def machine(flops: float, bandwidth: float) -> Hardware:
    return Hardware("made up", "cpu", {"fp32": flops}, bandwidth, 2**30, source="a test")


SLOW_MEMORY, SLOW_COMPUTE = machine(1e15, 1e9), machine(1e9, 1e15)


def test_where_memory_is_slow_a_check_is_nearly_free() -> None:
    gain = predict_gain(MODEL, None, SLOW_MEMORY, acceptance=0.8, num_tokens=4)
    assert gain.check_ratio == pytest.approx(1.0, abs=0.15)
    assert gain.cost_ratio == 0
    assert gain.speedup == pytest.approx(speedup(0.8, 4, 0.0, gain.check_ratio))
    assert gain.provenance == "predicted"


def test_where_compute_is_slow_every_checked_token_costs_a_step() -> None:
    gain = predict_gain(MODEL, None, SLOW_COMPUTE, acceptance=0.8, num_tokens=4)
    assert gain.check_ratio == pytest.approx(5.0, rel=0.01)
    assert gain.speedup < 1


def test_a_draft_model_costs_what_it_reads() -> None:
    gains = [
        predict_gain(MODEL, draft, SLOW_MEMORY, acceptance=0.8, num_tokens=4)
        for draft in (first_layers(MODEL, 1), MODEL)
    ]
    assert 0.4 < gains[0].cost_ratio < 0.9
    assert gains[1].cost_ratio == 1
    assert gains[0].speedup > gains[1].speedup


def test_a_batch_shares_the_weights() -> None:
    alone, many = (
        predict_gain(MODEL, None, SLOW_COMPUTE, acceptance=0.8, num_tokens=4, batch=batch)
        for batch in (1, 32)
    )
    assert many.check_ratio == pytest.approx(alone.check_ratio, rel=0.01)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"context": 0}, {"acceptance": 2}])
def test_what_is_out_of_range_is_named(wrong) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        predict_gain(MODEL, None, SLOW_MEMORY, **{"acceptance": 0.5, "num_tokens": 2} | wrong)
