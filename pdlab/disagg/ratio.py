"""How many workers prefill and how many decode: from the workload, by the cost model.

Each side is a queue of its own. A side keeps up while its workers together have more seconds than
the requests need of it; the pair that carries the most requests a second has both sides equally
busy, as nearly as whole workers allow (Zhong et al. 2024, DistServe, section 4.2, plan the same way
with a simulator for each pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlab.costmodel import StepShape, StepTimes, causal_pairs
from pdlab.requirements import require_int, require_number
from pdlab.workload.serving import StepSpan
from pdlab.workload.traces import TraceRequest


@dataclass(frozen=True)
class Need:
    """Seconds that a request takes of each side, on average. Predicted, unless corrected."""

    prefill_s: float
    decode_s: float
    """Its share of the steps that it decodes in, beside as many others as `batch` says."""

    def corrected(self, prefill: float, decode: float) -> Need:
        """With what steps took over what they should have taken, for each side."""
        for name, factor in (("prefill", prefill), ("decode", decode)):
            require_number(name, factor, 1e-6, 1e6)
        return Need(self.prefill_s * prefill, self.decode_s * decode)


@dataclass(frozen=True)
class Split:
    """x workers that prefill and y that decode."""

    num_prefill: int
    num_decode: int
    capacity_rps: float
    """Requests a second that the busier side carries."""
    prefill_use: float
    """Part of the time that the prefill side is busy at that rate, and the decode side."""
    decode_use: float

    def __str__(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


def need_of(
    requests: Sequence[TraceRequest],
    prefill_times: StepTimes,
    decode_times: StepTimes,
    *,
    batch: int = 16,
) -> Need:
    """What a workload needs, by two machines' step times.

    Args:
        batch: sequences that decode together.

    Raises:
        ValueError: there is no request, or `batch` is out of range.
    """
    if not requests:
        raise ValueError("requests has no request")
    require_int("batch", batch, least=1, most=100_000)
    prefill_s = decode_s = 0.0
    for request in requests:
        tokens, out = request.num_prompt_tokens, request.num_output_tokens
        prefill_s += prefill_times.step_s(StepShape(1, tokens, causal_pairs(0, tokens), 0, 0))
        context = tokens + out // 2
        step = StepShape(0, 0, 0, batch, batch * context, context)
        decode_s += (out - 1) * decode_times.step_s(step) / batch
    return Need(prefill_s / len(requests), decode_s / len(requests))


def split(need: Need, num_workers: int) -> Split:
    """The division of workers that carries the most; of two alike, that with fewer to prefill.

    Raises:
        ValueError: there are fewer than two workers.
    """
    require_int("num_workers", num_workers, least=2, most=100_000)
    return max(splits(need, num_workers), key=lambda each: (each.capacity_rps, each.num_decode))


def splits(need: Need, num_workers: int) -> list[Split]:
    """Every division of the workers, and what it carries."""
    found = []
    for num_prefill in range(1, num_workers):
        num_decode = num_workers - num_prefill
        limits = [
            num_prefill / need.prefill_s if need.prefill_s else float("inf"),
            num_decode / need.decode_s if need.decode_s else float("inf"),
        ]
        rate = min(limits)
        found.append(
            Split(
                num_prefill,
                num_decode,
                rate,
                prefill_use=rate * need.prefill_s / num_prefill,
                decode_use=rate * need.decode_s / num_decode,
            )
        )
    return found


def measured_over_predicted(steps: Sequence[StepSpan], times: StepTimes) -> float:
    """How much longer a worker's steps took than `times` says, in all; 1 if there is no step.

    Contexts are not in a span, so decodes count with none: what is compared is mostly weights.
    """
    took = sum(step.wall_s for step in steps)
    should = sum(step.num_steps * times.step_s(_shape(step)) for step in steps)
    return took / should if took and should else 1.0


def _shape(step: StepSpan) -> StepShape:
    tokens = step.num_prompt_tokens
    pairs = sum(causal_pairs(0, count) for count in step.prompts.values())
    return StepShape(len(step.prompts), tokens, pairs, len(step.decodes), 0)
