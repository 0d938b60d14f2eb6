"""`pdlab bench speculation`: what it counts, what it predicts, and what it keeps."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pdlab import DraftModel, PromptLookup
from pdlab.bench import speculation
from pdlab.bench.speculation import (
    BATCHES,
    DRAFTERS,
    PLAIN,
    TARGETS,
    Counts,
    SpeculationCosts,
    measure_speculation,
)
from pdlab.bench.speculation_prompts import TASKS
from pdlab.cli import app
from pdlab.shipped import shipped
from pdlab.speculate import expected_tokens
from pdlab.trace import DraftRecord

from ..helpers import random_model, random_prompt


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model that is quick, and prompts of its tokens."""
    monkeypatch.setattr(speculation, "load", lambda *_, **__: random_model())
    monkeypatch.setattr(
        speculation, "TASKS", {"copy": [random_prompt(5, seed=i) * 3 for i in (0, 1)]}
    )


@pytest.fixture
def found(small: None) -> SpeculationCosts:
    return measure_speculation(
        "tiny",
        targets=["fp32"],
        tasks=["copy"],
        batches=[2],
        drafters={
            "lookup": PromptLookup(num_tokens=3, longest=2, shortest=1),
            "itself": DraftModel(random_model(), num_tokens=2),
        },
        num_tokens=20,
        rounds=2,
        backend="torch",
    )


def test_each_drafter_stands_beside_plain_decoding(found: SpeculationCosts) -> None:
    [scene] = found.scenes
    assert (scene.target, scene.task, scene.batch) == ("fp32", "copy", 2)
    plain, lookup, itself = scene.costs
    assert [cost.drafter for cost in scene.costs] == ["plain", "lookup", "itself"]
    assert (plain.speedup, plain.theorem, plain.num_equal) == (1, 1, 2)
    for cost in scene.costs:
        assert cost.counts.num_tokens == 2 * 2 * 19  # the first token of each came with its prompt
        assert cost.tokens_s > 0
    assert plain.counts.num_parts == plain.counts.num_tokens
    assert lookup.counts.num_drafts > 0
    assert lookup.byte_ratio is None
    assert itself.acceptance == 1
    assert itself.by_position == [1, 1]
    assert itself.byte_ratio == 1
    assert itself.cost_ratio > 0
    assert itself.counts.num_parts < plain.counts.num_parts


def test_the_formula_with_what_checking_took_is_the_measurement_where_acceptance_is_one_number(
    found: SpeculationCosts,
) -> None:
    """The same at each position: of what is drafted by the model itself, all stands."""
    itself = found.scenes[0].costs[2]
    counts = itself.counts
    assert counts.num_tokens / counts.num_parts == pytest.approx(counts.expected_tokens(1.0))
    assert itself.theorem > itself.formula or itself.check_ratio <= 1


def test_what_is_saved_is_read_back(found: SpeculationCosts, tmp_path: Path) -> None:
    path = tmp_path / "speculation.json"
    found.save(path)
    read = SpeculationCosts.load(path)
    assert [cost.counts for cost in read.scenes[0].costs] == [
        cost.counts for cost in found.scenes[0].costs
    ]
    assert read.scenes[0].costs[1].speedup == pytest.approx(
        found.scenes[0].costs[1].speedup, rel=1e-3
    )
    assert (read.model, read.rounds, read.machine) == ("tiny", 2, found.machine)


def test_positions_are_counted_as_far_as_they_were_looked_at() -> None:
    counts = Counts()
    for token_ids, accepted in (([1, 2, 3], 1), ([1, 2], 2), ([1], 0)):
        counts.add(step_with(DraftRecord(token_ids, accepted, None, [])))
    counts.add(step_with(None))
    assert counts.reached == [3, 2]
    assert counts.stood == [2, 1]
    assert (counts.num_drafts, counts.num_drafted, counts.num_accepted) == (3, 6, 3)
    assert (counts.num_rejected, counts.num_parts, counts.num_tokens) == (2, 4, 7)
    twice = Counts.sum_of([counts, counts, Counts()])
    assert twice.reached == [6, 4]
    assert twice.num_drafts == 6
    # drafts of 2 tokens on average, in three parts of four
    assert counts.expected_tokens(0.5) == 1 + 0.75 * (expected_tokens(0.5, 2) - 1)


def step_with(draft: DraftRecord | None) -> Any:
    """As much of a step's record as is counted: one sequence."""
    put_out = [0] * (1 + (draft.num_accepted if draft else 0))
    return SimpleNamespace(sequences=[SimpleNamespace(draft=draft, put_out=put_out)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"num_tokens": 1}, "num_tokens=1"),
        ({"batches": [9]}, "batch=9"),
        ({"tasks": ["sing"]}, "'sing' is not one of copy"),
    ],
)
def test_what_is_out_of_range_is_named(small: None, wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        measure_speculation("tiny", **wrong)


def test_the_command_prints_what_was_measured(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlab.bench.speculation_prompts.TASKS", {"copy": []})
    asked = ["--target", "fp32", "--batch", "1", "--rounds", "1", "--tokens", "12"]
    asked += ["--drafter", "prompt_lookup:3", "--backend", "torch"]
    asked += ["--save", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["bench", "speculation", *asked], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "fp32, copy, batch 1" in result.output
    assert "prompt_lookup:3" in result.output
    assert (tmp_path / "out.json").exists()


def test_there_are_eight_prompts_of_each_task_all_different() -> None:
    for prompts in TASKS.values():
        assert len({str(prompt) for prompt in prompts}) == 8


def test_the_shipped_measurement_leaves_nothing_out() -> None:
    """Every drafter, on every target, task and batch, whatever came of it."""
    costs = SpeculationCosts.load(shipped("data") / "measured" / "speculation.json")
    found = [(scene.target, scene.task, scene.batch) for scene in costs.scenes]
    assert found == list(product(TARGETS, TASKS, BATCHES))
    for scene in costs.scenes:
        assert [cost.drafter for cost in scene.costs] == [PLAIN, *DRAFTERS]
