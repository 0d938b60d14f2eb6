"""`pdlab bench overlap` keeps what it measured, and refuses what it cannot measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.bench.overlap import OverlapCost, OverlapCosts, measure_overlap


def test_the_gain_is_that_of_the_median_round() -> None:
    cost = OverlapCost("cpu int8", 8, 2.0, [0.040, 0.048, 0.050], [0.040, 0.024, 0.040], 0.0)
    assert cost.gain == 1.25
    assert cost.most == pytest.approx(48 / 32)


def test_what_was_measured_survives_saving(tmp_path: Path) -> None:
    cost = OverlapCost("torch fp32", 1, 0.0, [0.1, 0.25], [0.125, 0.5], 0.001)
    found = OverlapCosts([cost], "a model", 8, 2, True, {"threads": 2}, {"torch": "2"})
    found.save(tmp_path / "overlap.json")
    assert OverlapCosts.load(tmp_path / "overlap.json") == found


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"backends": ["triton"]}, "backend"),
        ({"batches": [0]}, "batch"),
        ({"readers_ms": [-1]}, "reader_ms"),
        ({"num_steps": 1}, "num_steps"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused(knobs: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        measure_overlap("no such model", **knobs)
