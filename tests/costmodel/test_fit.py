"""The fit of a + b n + c n^2."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.costmodel import fit_linear_quadratic

LENGTHS = (16, 64, 128, 512, 1024, 2048, 4096)
POSITIVE = st.floats(1e-4, 1)


@given(constant=POSITIVE, linear=POSITIVE, quadratic=POSITIVE)
def test_exact_times_give_back_their_coefficients(
    constant: float, linear: float, quadratic: float
) -> None:
    constant, linear, quadratic = constant * 1e-1, linear * 1e-4, quadratic * 1e-7
    seconds = [constant + linear * n + quadratic * n**2 for n in LENGTHS]
    fit = fit_linear_quadratic(LENGTHS, seconds)
    assert fit.seconds(1000) == pytest.approx(constant + linear * 1e3 + quadratic * 1e6)
    assert (fit.constant_s, fit.linear_s) == pytest.approx((constant, linear), rel=1e-3)
    assert fit.quadratic_s == pytest.approx(quadratic, rel=1e-3)
    assert fit.r_squared == pytest.approx(1)


@given(st.lists(st.floats(1e-3, 10), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_no_coefficient_is_negative_and_no_better_fit_is_near(seconds: list[float]) -> None:
    fit = fit_linear_quadratic(LENGTHS, seconds)
    best = np.array([fit.constant_s, fit.linear_s, fit.quadratic_s])
    assert (best >= 0).all()
    powers = np.array([[1.0, n, n**2] for n in LENGTHS])

    def error(coefficients: np.ndarray) -> float:
        return float(np.sum((powers @ coefficients / np.array(seconds) - 1) ** 2))

    typical = np.median(seconds) / np.array([1.0, 4096, 4096**2])
    for step in np.vstack([np.diag(typical), -np.diag(typical)]) * 1e-3:
        assert error(best) <= error(np.maximum(best + step, 0)) + 1e-9


def test_a_straight_line_has_no_quadratic_part() -> None:
    fit = fit_linear_quadratic(LENGTHS, [1e-3 * n for n in LENGTHS])
    assert fit.quadratic_share(4096) == pytest.approx(0, abs=1e-9)
    assert fit.crossover > 1e9 or math.isinf(fit.crossover)


def test_share_and_crossover_describe_the_same_curve() -> None:
    """Equal parts at 14,336 tokens make the quadratic part 1/15 of both at 1,024."""
    seconds = [n / 1e4 + n**2 / (1e4 * 14_336) for n in LENGTHS]
    fit = fit_linear_quadratic(LENGTHS, seconds)
    assert fit.crossover == pytest.approx(14_336, rel=1e-6)
    assert fit.quadratic_share(1024) == pytest.approx(1 / 15, rel=1e-6)
    assert fit.quadratic_share(14_336) == pytest.approx(1 / 2, rel=1e-6)


def test_a_relative_error_counts_alike_at_short_and_long_lengths() -> None:
    seconds = [1e-3 * n for n in LENGTHS]
    seconds[-1] *= 1.5
    fit = fit_linear_quadratic(LENGTHS, seconds)
    assert fit.seconds(16) == pytest.approx(seconds[0], rel=0.1)
    assert fit.r_squared < 1


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        ([1, 2, 3], [1, 2], "lengths has 3 values and seconds has 2"),
        ([1, 2, 2], [1, 2, 3], "lengths has 2 different values, below the limit 3"),
        ([0, 1, 2], [1, 2, 3], "lengths holds 0.0, which is not above the limit 0"),
        ([1, 2, 3], [1, -2, 3], "seconds holds -2.0, which is not above the limit 0"),
        ([1, 2, 3], [1, math.nan, 3], "seconds holds nan"),
    ],
)
def test_bad_values_are_named(lengths: list, seconds: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_linear_quadratic(lengths, seconds)
