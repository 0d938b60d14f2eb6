"""Step times: a sum of costs, and its fit."""

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.costmodel import LinearStepTimes, StepShape, causal_pairs, fit_step_times
from pdlab.costmodel.step_times import COSTS

KNOWN = LinearStepTimes(
    "made up",
    base_s=0.05,
    rows_s=0.03,
    prompt_s=1e-3,
    prompt_token_s=1.6e-3,
    prompt_pair_s=6e-7,
    decode_s=3e-3,
    context_s=4e-6,
    padded_context_s=1.5e-5,
    two_rows_s=0.02,
    three_rows_s=0.045,
)


def shapes() -> list[StepShape]:
    """Decodes alike and unlike, prompts whole and cut, and both together."""
    decodes = [(0, 0, 0), (1, 64, 64), (1, 1500, 1500), (2, 128, 64), (3, 900, 500), (8, 4096, 512)]
    decodes += [(32, 2048, 64), (8, 2240, 1792), (16, 2944, 1024)]
    prompts = [(0, 0, 0), (1, 1, 1), (1, 256, causal_pairs(0, 256)), (4, 256, 4 * 2080)]
    prompts += [(1, 1024, causal_pairs(0, 1024)), (1, 64, causal_pairs(1000, 64))]
    return [StepShape(*p, *d) for p in prompts for d in decodes if p[0] or d[0]]


def test_the_cost_of_a_step_is_the_sum_of_its_parts() -> None:
    shape = StepShape(2, 300, 25_000, 3, 600, 400)
    parts = 0.05 + 0.03 + 2 * 1e-3 + 300 * 1.6e-3 + 25_000 * 6e-7 + 3 * 3e-3
    assert KNOWN.step_s(shape) == pytest.approx(parts + 600 * 4e-6 + 1200 * 1.5e-5)


def test_a_step_of_one_token_needs_no_product_of_matrices() -> None:
    alone = StepShape(0, 0, 0, 1, 64, 64)
    assert KNOWN.step_s(alone) == pytest.approx(0.05 + 3e-3 + 64 * 1.9e-5)
    assert KNOWN.step_s(StepShape(1, 1, 1, 0, 0)) == pytest.approx(0.05 + 1e-3 + 1.6e-3 + 6e-7)


def test_two_and_three_tokens_have_costs_of_their_own() -> None:
    """Measured: with three rows the products take 122 ms, with four 104, with two 92."""
    two, three, four = (StepShape(0, 0, 0, n, 0) for n in (2, 3, 4))
    assert [KNOWN.step_s(each) for each in (two, three, four)] == pytest.approx(
        [0.05 + 0.02 + 2 * 3e-3, 0.05 + 0.045 + 3 * 3e-3, 0.05 + 0.03 + 4 * 3e-3]
    )
    beside = StepShape(1, 2, 3, 1, 0)
    assert KNOWN.step_s(beside) == pytest.approx(0.05 + 0.045 + 1e-3 + 2 * 1.6e-3 + 3 * 6e-7 + 3e-3)
    alike = replace(KNOWN, two_rows_s=None, three_rows_s=None)
    assert alike.step_s(three) == pytest.approx(0.05 + 0.03 + 3 * 3e-3)


@pytest.mark.parametrize("absent", [2, 3])
def test_few_rows_that_were_not_measured_cost_what_many_do(absent: int) -> None:
    seen = [s for s in shapes() if s.num_prompt_tokens + s.num_decodes != absent]
    fit = fit_step_times([(shape, KNOWN.step_s(shape)) for shape in seen], "made up")
    costs = {2: fit.two_rows_s, 3: fit.three_rows_s}
    assert costs.pop(absent) is None
    assert costs == {5 - absent: pytest.approx({2: 0.045, 3: 0.02}[absent], rel=1e-6)}
    assert fit.step_s(StepShape(0, 0, 0, absent, 0)) == pytest.approx(0.08 + absent * 3e-3)


def test_a_machine_of_another_pace_takes_that_much_longer_for_every_step() -> None:
    for times in (KNOWN, replace(KNOWN, two_rows_s=None, three_rows_s=None)):
        for shape in shapes():
            assert times.times(1.5).step_s(shape) == pytest.approx(1.5 * times.step_s(shape))


def test_where_the_longest_context_is_unknown_no_padding_counts() -> None:
    assert KNOWN.step_s(StepShape(0, 0, 0, 4, 400)) == KNOWN.step_s(StepShape(0, 0, 0, 4, 400, 100))


def test_exact_times_give_back_their_costs() -> None:
    fit = fit_step_times([(shape, KNOWN.step_s(shape)) for shape in shapes()], "made up")
    for name in COSTS:
        assert getattr(fit, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name
    assert fit.worst_error < 1e-9
    assert (fit.basis, fit.num_samples) == ("made up", len(shapes()))


def test_noise_of_five_percent_leaves_every_step_near_the_truth() -> None:
    draw = random.Random(1)
    noisy = [(s, KNOWN.step_s(s) * draw.uniform(0.95, 1.05)) for s in shapes() for _ in range(5)]
    fit = fit_step_times(noisy, "made up")
    assert 0.01 < fit.median_error < 0.04
    assert fit.worst_error < 0.1
    for shape in shapes():
        assert fit.step_s(shape) == pytest.approx(KNOWN.step_s(shape), rel=0.04)


def test_noise_does_not_make_times_shorter() -> None:
    """Weighed by the measurements themselves, the fastest would count most: here 36% too little."""
    draw = random.Random(2)
    noisy = [(s, KNOWN.step_s(s) * draw.uniform(0.3, 1.7)) for s in shapes() for _ in range(40)]
    fit = fit_step_times(noisy, "made up")
    ratios = [fit.step_s(shape) / KNOWN.step_s(shape) for shape in shapes()]
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.03)


@given(st.lists(st.floats(1e-3, 1), min_size=len(shapes()), max_size=len(shapes())))
def test_no_cost_is_negative_and_more_work_never_takes_less(seconds: list[float]) -> None:
    fit = fit_step_times(list(zip(shapes(), seconds, strict=True)), "any")
    assert all((getattr(fit, name) or 0) >= 0 for name in COSTS)
    less, more = StepShape(1, 100, 5050, 2, 200, 100), StepShape(2, 200, 10_100, 3, 400, 150)
    assert fit.step_s(less) <= fit.step_s(more)


def test_json_gives_back_the_same_times() -> None:
    fit = fit_step_times([(shape, KNOWN.step_s(shape)) for shape in shapes()], "made up")
    assert LinearStepTimes.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "1", True, None])
def test_a_cost_that_is_no_cost_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="decode_s="):
        replace(KNOWN, decode_s=value)


def test_too_few_shapes_and_times_that_are_none_are_refused() -> None:
    samples = [(shape, 0.1) for shape in shapes()]
    with pytest.raises(ValueError, match=r"samples has 9 different shapes, the limit is 10"):
        fit_step_times(samples[:9] * 3, "few")
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"samples has seconds={seconds} of StepShape"):
            fit_step_times([*samples, (shapes()[0], seconds)], "wrong")
