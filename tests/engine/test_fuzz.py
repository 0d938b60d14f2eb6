"""Thousands of random workloads keep every promise of scheduler and memory; planted bugs do not."""

import os
from collections import Counter

import pytest

from tests.engine.fuzz import fuzz
from tests.engine.mutants import MUTANTS, Mutant, planted

RUNS = int(os.environ.get("PDLAB_FUZZ_RUNS", "2000"))
PARTS = 8
RUNS_FOR_A_MUTANT = 1500  # most need less than 50


@pytest.mark.parametrize("part", range(PARTS))
def test_random_workloads_keep_every_promise(part):
    happened: Counter[str] = Counter()
    for seed in range(part, RUNS, PARTS):
        try:
            happened.update(fuzz(seed))
        except BaseException as error:
            error.add_note(f"in fuzz({seed})")
            raise
    rare = {what: count for what, count in happened.items() if count < RUNS // PARTS // 20}
    assert not rare, "the workloads are too tame to prove anything"


@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Mutant):
    with planted(bug):
        assert first_failure(bug.seed) is not None, f"{RUNS_FOR_A_MUTANT} runs did not notice"


@pytest.mark.parametrize("module", sorted({bug.module for bug in MUTANTS}))
def test_planting_alone_breaks_nothing(module: str):
    with planted(Mutant("nothing changed", module, ())):
        assert first_failure(runs=30) is None


def first_failure(first: int = 0, runs: int = RUNS_FOR_A_MUTANT) -> BaseException | None:
    for seed in (first, *range(runs)):
        try:
            fuzz(seed)
        except Exception as error:
            return error
    return None
