"""Thousands of random workloads keep every promise of the scheduler, and planted bugs do not."""

import os
from collections import Counter

import pytest

from tests.engine.fuzz import fuzz
from tests.engine.mutants import MUTANTS, Mutant, planted

RUNS = int(os.environ.get("PDLAB_FUZZ_RUNS", "2000"))
PARTS = 8
RUNS_FOR_A_MUTANT = 400


@pytest.mark.parametrize("part", range(PARTS))
def test_random_workloads_keep_every_promise(part):
    happened: Counter[str] = Counter()
    for seed in range(part, RUNS, PARTS):
        try:
            happened.update(fuzz(seed))
        except BaseException as error:
            error.add_note(f"in fuzz({seed})")
            raise
    rare = {what: count for what, count in happened.items() if count < RUNS // PARTS // 10}
    assert not rare, "the workloads are too tame to prove anything"


@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: Mutant):
    with planted(bug):
        assert first_failure() is not None, f"{RUNS_FOR_A_MUTANT} runs did not notice"


def test_the_code_without_a_planted_bug_passes_the_same_runs():
    untouched = Mutant("nothing changed", MUTANTS[0].module, ())
    with planted(untouched):
        assert first_failure() is None


def first_failure() -> BaseException | None:
    for seed in range(RUNS_FOR_A_MUTANT):
        try:
            fuzz(seed)
        except Exception as error:
            return error
    return None
