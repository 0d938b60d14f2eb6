"""Fit seconds = a + b n + c n^2 to measured prefill times.

The lesson's question is whether prefill "costs O(n^2)". The answer is the share of c n^2 at the
lengths people use, so every coefficient must be a cost, which is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Array = np.ndarray
NUM_TERMS = 3


@dataclass(frozen=True)
class LinearQuadraticFit:
    """seconds = constant + linear * n + quadratic * n^2, with no negative coefficient."""

    constant_s: float
    linear_s: float
    """Seconds a token."""
    quadratic_s: float
    """Seconds a token squared."""
    r_squared: float
    """Share of the variance of the seconds that the fit explains; 1 is a perfect fit."""

    def seconds(self, length: float) -> float:
        return self.constant_s + self.linear_s * length + self.quadratic_s * length**2

    def quadratic_share(self, length: float) -> float:
        """Share of c n^2 in the time at `length` tokens, 0 to 1."""
        total = self.seconds(length)
        return self.quadratic_s * length**2 / total if total else 0.0

    @property
    def crossover(self) -> float:
        """Length in tokens at which the quadratic part equals the linear one; inf if never."""
        return self.linear_s / self.quadratic_s if self.quadratic_s else math.inf


def fit_linear_quadratic(lengths: Sequence[float], seconds: Sequence[float]) -> LinearQuadraticFit:
    """Least squares over non-negative coefficients, weighing relative errors alike.

    Each row is divided by its seconds, so that being 5% off counts the same at 64 tokens as at
    4,096.

    Raises:
        ValueError: for different numbers of lengths and seconds, for fewer than three different
            lengths, and for a value that is not above 0.
    """
    n, measured = np.asarray(lengths, dtype=float), np.asarray(seconds, dtype=float)
    _check_points(n, measured)
    scale = n.max()  # keeps the columns near 1, so that n^2 costs no precision
    powers = np.stack([(n / scale) ** power for power in range(NUM_TERMS)], axis=1)
    coefficients = nonnegative_least_squares(powers / measured[:, None], np.ones_like(n))
    constant, linear, quadratic = coefficients / scale ** np.arange(NUM_TERMS)
    residual = float(np.sum((measured - powers @ coefficients) ** 2))
    spread = float(np.sum((measured - measured.mean()) ** 2))
    r_squared = 1 - residual / spread if spread else float(residual == 0)
    return LinearQuadraticFit(float(constant), float(linear), float(quadratic), r_squared)


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """The x >= 0 that minimises |matrix x - target|, by trying every subset of columns.

    The non-negative optimum (Lawson and Hanson 1974, chapter 23) is the best of the unconstrained
    fits on a subset of the columns that come out non-negative. Meant for few columns: 8 have 255
    subsets.
    """
    scales = np.abs(matrix).max(axis=0)
    scales[scales == 0] = 1.0  # a column of zeros gets no part in any case
    # Rotated, many rows become one for each column: what is minimised stays the same.
    rotated = np.asarray(np.linalg.qr(np.column_stack([matrix / scales, target]), mode="r"))
    scaled, target = rotated[:, :-1], rotated[:, -1]
    num_columns = matrix.shape[1]
    best, best_error = np.zeros(num_columns), float(target @ target)
    for size in range(1, num_columns + 1):
        for subset in map(list, combinations(range(num_columns), size)):
            solution = np.linalg.lstsq(scaled[:, subset], target, rcond=None)[0]
            error = float(np.sum((scaled[:, subset] @ solution - target) ** 2))
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[subset] = solution
    return best / scales


def _check_points(lengths: Array, seconds: Array) -> None:
    if lengths.shape != seconds.shape:
        raise ValueError(f"lengths has {lengths.size} values and seconds has {seconds.size}")
    if len(np.unique(lengths)) < NUM_TERMS:
        different = len(np.unique(lengths))
        raise ValueError(f"lengths has {different} different values, below the limit {NUM_TERMS}")
    for name, values in (("lengths", lengths), ("seconds", seconds)):
        if not (values > 0).all():
            raise ValueError(f"{name} holds {values.min()}, which is not above the limit 0")
