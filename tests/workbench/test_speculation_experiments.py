"""What the lesson on speculation and overlap runs, and its pictures."""

from __future__ import annotations

import pytest

import pdlab
from pdlab.bench.speculation import Counts, DraftCost, Scene, SpeculationCosts
from pdlab.models.catalog import SHAPES
from pdlab.workbench import OverlapView, figures
from pdlab.workbench import speculation_experiments as lab
from pdlab.workbench.speculation_data import Drafting
from pdlab.workbench.speculation_experiments.runs import lines_of
from tests.helpers import random_model

MODEL = random_model(SHAPES["tiny-llama"], seed=3)
LOOP = [5, 6, 7, 8] * 6
WAYS = {"plain": None, "k = 3": pdlab.PromptLookup(num_tokens=3)}


@pytest.fixture(scope="module")
def compared() -> lab.Compared:
    return lab.compare(MODEL, WAYS, [LOOP], 12, backend="torch")


# --- runs ---------------------------------------------------------------------------------------


def test_ways_write_the_same_and_only_drafts_are_drafted(compared: lab.Compared) -> None:
    assert compared.token_ids["k = 3"] == compared.token_ids["plain"]
    assert compared.num_equal("k = 3") == len(compared.token_ids["plain"][0])
    assert list(compared.drafted) == ["k = 3"]
    assert compared.told("k = 3").num_drafted > 0
    assert compared.told("plain").num_drafted == 0
    assert compared.told("plain").speedup == pytest.approx(1)
    assert compared.tokens_s("plain") > 0


def test_equal_tokens_end_where_one_differs() -> None:
    run = lab.Compared({}, {"plain": [[1, 2, 3, 4]], "other": [[1, 2, 9, 4]]}, {})
    assert run.num_equal("other") == 2


def test_rounds_follow_each_other_in_one_trace() -> None:
    run = lab.compare(MODEL, WAYS, [LOOP], 6, rounds=2, backend="torch")
    assert len(run.traces["plain"].requests) == 2
    lengths = lab.draft_lengths(run.traces["k = 3"])
    assert sum(drafted for drafted, _ in lengths) == run.told("k = 3").num_drafted
    assert all(stood <= drafted <= 3 for drafted, stood in lengths)


def test_steps_cost_by_rows() -> None:
    costs = lab.step_costs({"tiny": MODEL}, rows=(1, 3), rounds=2, backend="torch")
    assert set(costs.seconds["tiny"]) == {1, 3}
    made = lab.StepCosts({"a": {1: 2.0, 2: 3.0, 5: 4.0}})
    assert made.ratio("a", 5) == 2
    assert made.slope("a") == pytest.approx((0.5 + 0.25) / 2)


def test_a_function_drafts_no_more_than_it_is_asked_for() -> None:
    run = lab.compare(
        MODEL, {"plain": None, "long": lab.Guessing(lambda _ids, _n: [1] * 50, 4)}, [LOOP], 6,
        backend="torch",
    )  # fmt: skip
    assert run.token_ids["long"] == run.token_ids["plain"]
    assert {drafted for drafted, _ in lab.draft_lengths(run.traces["long"])} <= set(range(5))


def test_batches_decode_together() -> None:
    runs = lab.batch_gains(
        MODEL, pdlab.PromptLookup(3), LOOP, sizes=(1, 2), max_tokens=4, backend="torch"
    )
    assert {size: len(run.token_ids["drafts"]) for size, run in runs.items()} == {1: 1, 2: 2}


def test_own_work_is_all_but_the_model(compared: lab.Compared) -> None:
    work = lab.own_work(compared.traces["k = 3"])
    assert set(work) == {"model", "schedule", "draft", "prepare", "sample", "deliver"}
    assert work["model"] > 0
    assert work["draft"] > 0


def test_loops_with_and_without_overlap() -> None:
    loops = lab.overlap_loops(
        MODEL, LOOP, batch=2, waits_s=(0.0,), num_steps=6, rounds=1, backend="torch"
    )
    assert [loop.overlap for loop in loops] == [False, True]
    view = OverlapView({f"overlap={loop.overlap}": loop.trace for loop in loops}, num_steps=2)
    assert view.lanes["overlap=True"].hidden_s > 0


def test_all_that_was_measured_is_in_the_table() -> None:
    """However far the prediction is off; where there was no such scene, it says so."""

    def cost(drafter: str, speedup: float) -> DraftCost:
        return DraftCost(drafter, 9.0, 0.1, 0.01, speedup, 4, 4, Counts(), theorem=2.5, formula=1.5)

    scenes = [
        Scene("fp32", "copy", 1, [cost("plain", 1.0), cost("a", 1.25), cost("b", 0.5)]),
        Scene("fp32", "copy", 8, [cost("plain", 1.0), cost("a", 7.0)]),
    ]
    machine = {"processor": "a test", "date": "2026-01-01T00"}
    costs = SpeculationCosts(scenes, "made", "cpu", 4, 1, machine, {})
    head, a, b, *_, source = lines_of(costs)
    assert head.split()[-6:] == ["batch", "of", "1", "batch", "of", "8"]
    assert a.split()[-6:] == ["2.50", "1.50", "1.25", "2.50", "1.50", "7.00"]
    assert b.split()[-5:] == ["2.50", "1.50", "0.50", "not", "measured"]
    assert "recorded on a test, 2026-01-01" in source
    assert lab.recorded_lines()


# --- rejection ----------------------------------------------------------------------------------


def test_what_is_kept_and_what_is_missing_are_p() -> None:
    dice = lab.Rejection(p=[0.5, 0.3, 0.2], q=[0.2, 0.7, 0.1])
    assert [k + m for k, m in zip(dice.kept, dice.missing, strict=True)] == pytest.approx(dice.p)
    rejected = 1 - dice.acceptance
    assert [rejected * r for r in dice.residual] == pytest.approx(dice.missing)
    same = lab.Rejection(p=[0.5, 0.5], q=[0.5, 0.5])
    assert (same.acceptance, same.residual) == (1, [0, 0])


def test_bad_dice_are_refused() -> None:
    with pytest.raises(ValueError, match="p has 2 tokens and q 1"):
        lab.Rejection([0.5, 0.5], [1])
    with pytest.raises(ValueError, match="q="):
        lab.Rejection([0.5, 0.5], [0.5, 0.6])


# --- pictures -----------------------------------------------------------------------------------


def told(**changes: object) -> Drafting:
    values: dict = {
        "drafter": "made", "num_steps": 10, "num_drawn": 10, "num_tokens": 20, "wall_s": 2.0,
        "num_drafts": 10, "num_drafted": 20, "num_accepted": 10, "num_cut": 5,
        "positions": [(10, 8), (8, 2)], "by_tokens": [0, 5, 0, 5], "plain_s": 0.1,
        "cost_ratio": 0.2, "check_slope": 0.1, "speedup": 1.25, "against": "a test",
    }  # fmt: skip
    return Drafting(**values | changes)


def test_acceptance_is_drawn_by_place() -> None:
    [line] = figures.acceptance_by_position({"made": told()}, "a test").data
    assert list(line.y) == [0.8, 0.25]
    with pytest.raises(ValueError, match="no draft"):
        figures.acceptance_by_position({"made": told(positions=[])}, "a test")


def test_speedups_stand_beside_their_predictions() -> None:
    free, paid, measured = figures.predicted_speedups({"made": told()}, "a test").data
    a = told().acceptance
    assert free.y[0] == pytest.approx((1 + a + a * a) / 1.4)
    assert paid.y[0] == pytest.approx((1 + a + a * a) / 1.6)
    assert list(measured.y) == [1.25]
    with pytest.raises(ValueError, match="no measured speed-up"):
        figures.predicted_speedups({"made": told(speedup=None)}, "a test")


def test_rejection_is_drawn_in_two_parts() -> None:
    dice = lab.Rejection(p=[0.5, 0.5], q=[0.8, 0.2])
    q, kept, missing, drawn = figures.rejection_figure(dice, ["a", "b"], [3, 1]).data
    assert list(q.y) == [0.8, 0.2]
    assert [k + m for k, m in zip(kept.y, missing.y, strict=True)] == pytest.approx(dice.p)
    assert list(missing.base) == dice.kept
    assert list(drawn.y) == [0.75, 0.25]


def test_rows_are_drawn_in_plain_steps() -> None:
    line, _ = figures.step_rows(lab.StepCosts({"a": {1: 0.02, 6: 0.03}}), "a test").data
    assert list(line.y) == [1, 1.5]
    with pytest.raises(ValueError, match="costs is empty"):
        figures.step_rows(lab.StepCosts({}), "a test")


def test_batches_lengths_and_own_work_are_drawn() -> None:
    predicted, measured = figures.batch_figure({1: 2.0, 8: 1.1}, {1: 1.9, 8: 0.9}, "a test").data
    assert (list(predicted.y), list(measured.y)) == ([2.0, 1.1], [1.9, 0.9])
    drafted, stood = figures.draft_length_figure({"x": [(4, 2), (8, 8)]}, "a test").data
    assert (list(drafted.y), list(stood.y)) == ([4, 8], [2, 8])
    figure = figures.own_work_figure({"x": {"model": 0.9, "sample": 0.1}}, "a test")
    assert [list(t.x) for t in figure.data] == [[900], [100]]
    assert "10.0%" in figure.layout.title.text
