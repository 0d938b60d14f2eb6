"""Seconds of a step from what it computes: what the simulator runs on instead of a model.

A step's time is taken as a sum of costs: of the step itself, of each prompt and each decode, of
each token, and of what attention reads. The sum is not exact (the time of a product of matrices
grows in jumps), so a fit carries its own error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from pdlab.costmodel.fit import nonnegative_least_squares
from pdlab.requirements import require_int, require_number


class StepShape(NamedTuple):
    """What decides how long a step takes."""

    num_prompts: int
    """Sequences of which a chunk of known tokens is computed."""
    num_prompt_tokens: int
    """Tokens of all these chunks."""
    num_prompt_pairs: int
    """Query-key pairs of the chunks under the causal mask, in one layer and head."""
    num_decodes: int
    num_context_tokens: int
    """Tokens that the decodes read, each its own included, summed over the decodes."""
    num_longest_context_tokens: int = 0
    """Tokens that the decode with the longest context reads; 0 where that is not known."""


class StepTimes(Protocol):
    """A machine and a model, as far as time goes."""

    @property
    def basis(self) -> str:
        """Where the times come from, and whether they were measured, published or predicted."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""


@dataclass(frozen=True)
class LinearStepTimes:
    """A step's seconds as a sum of non-negative costs."""

    basis: str
    base_s: float
    """Of any step."""
    rows_s: float
    """Added if the step computes more than one token: a product of two matrices is another kernel
    than that of a matrix and a vector."""
    prompt_s: float
    """Of each prompt chunk."""
    prompt_token_s: float
    """Of each of their tokens."""
    prompt_pair_s: float
    """Of each query-key pair of theirs."""
    decode_s: float
    """Of each decode."""
    context_s: float
    """Of each token that a decode reads."""
    padded_context_s: float
    """Of each token that the decodes read if all are padded to the longest context, which is how
    the engine's attention takes them in one call."""
    two_rows_s: float | None = None
    """In place of `rows_s` if the step computes two tokens; None for the same. Products of so few
    rows have kernels of their own: three rows may well take longer than four."""
    three_rows_s: float | None = None
    """As `two_rows_s`, for three."""
    median_error: float = 0.0
    """Of the fit: relative, 0.05 is 5%."""
    worst_error: float = 0.0
    num_samples: int = 0
    """Steps that it was fitted to."""

    def __post_init__(self) -> None:
        if not isinstance(self.basis, str):
            raise ValueError(f"basis={self.basis!r:.60} must be a text")
        for name in (*COSTS, "median_error", "worst_error"):
            if getattr(self, name) is not None or name not in FEW_ROWS:
                require_number(name, getattr(self, name), 0, LONGEST_S)
        require_int("num_samples", self.num_samples, least=0)

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        # called for every simulated step: plain arithmetic, nothing is built
        prompts, tokens, pairs, decodes, context, longest = shape
        padded = decodes * longest
        seconds = (
            self.base_s
            + self.prompt_s * prompts
            + self.prompt_token_s * tokens
            + self.prompt_pair_s * pairs
            + self.decode_s * decodes
            + self.context_s * context
            + self.padded_context_s * (padded if padded > context else context)
        )
        rows = tokens + decodes
        if rows < 2:
            return seconds
        few = None if rows > 3 else self.two_rows_s if rows == 2 else self.three_rows_s
        return seconds + (self.rows_s if few is None else few)

    def times(self, factor: float) -> LinearStepTimes:
        """All costs multiplied: a machine of another pace."""
        costs = {name: getattr(self, name) for name in COSTS}
        return replace(self, **{name: cost and factor * cost for name, cost in costs.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinearStepTimes:
        """The inverse of `to_dict`; a TypeError or ValueError for anything else."""
        return cls(**values)


COSTS = (
    "base_s",
    "rows_s",
    "prompt_s",
    "prompt_token_s",
    "prompt_pair_s",
    "decode_s",
    "context_s",
    "padded_context_s",
    "two_rows_s",
    "three_rows_s",
)
"""The costs that a step's time is the sum of."""
FEW_ROWS = {"two_rows_s": 2, "three_rows_s": 3}
"""Those of steps that compute just so many tokens."""
NUM_REFITS = 3
LARGEST_FACTOR = 10.0
"""Between a measured time and the fit, as far as weights go."""
LONGEST_S = 1e6
"""More seconds than any step takes."""


def fit_step_times(samples: Sequence[tuple[StepShape, float]], basis: str) -> LinearStepTimes:
    """Least squares over non-negative costs, weighing relative errors alike.

    So 5% off counts the same for a decode as for a long prompt. A cost that no sample tells apart
    from the others comes out as 0, those of few rows as None where no sample has so few.

    Args:
        samples: shapes of steps and their seconds.
        basis: what they were measured on.

    Raises:
        ValueError: there are fewer different shapes than costs, or a time is not above 0.
    """
    shapes = {shape for shape, _ in samples}
    seen = {shape.num_prompt_tokens + shape.num_decodes for shape in shapes}
    names = [name for name in COSTS if FEW_ROWS.get(name, 1) in {1, *seen}]
    if len(shapes) < len(names):
        raise ValueError(f"samples has {len(shapes)} different shapes, the limit is {len(names)}")
    for shape, seconds in samples:
        if not 0 < seconds < LONGEST_S:
            raise ValueError(f"samples has seconds={seconds} of {shape}, not above the limit 0")
    units = [_with_costs("", {each: float(each == name) for each in names}) for name in names]
    amounts = np.array([[unit.step_s(shape) for unit in units] for shape, _ in samples])
    measured = np.array([seconds for _, seconds in samples])
    scales = measured
    for _ in range(NUM_REFITS):
        costs = nonnegative_least_squares(amounts / scales[:, None], measured / scales)
        # from now on errors relative to the fit: relative to the measurement, of two that differ
        # by chance the faster would weigh more, and noise would make all times too short
        scales = np.maximum(amounts @ costs, measured / LARGEST_FACTOR)
    errors = np.abs(amounts @ costs / measured - 1)
    return replace(
        _with_costs(basis, dict(zip(names, costs.tolist(), strict=True))),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        num_samples=len(samples),
    )


def _with_costs(basis: str, costs: Mapping[str, float]) -> LinearStepTimes:
    return LinearStepTimes.from_dict({"basis": basis} | dict(costs))
