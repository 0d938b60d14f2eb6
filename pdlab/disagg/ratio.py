"""How many workers prefill and how many decode: from the workload, by the cost model.

Each side is a queue of its own. A side keeps up while its workers together have more seconds than
the requests need of it; the pair that carries the most requests a second has both sides equally
busy, as nearly as whole workers allow (Zhong et al. 2024, DistServe, section 4.2, plan the same way
with a simulator for each pair).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdlab.costmodel import StepShape, StepTimes, causal_pairs
from pdlab.disagg.serving import ClusterRun
from pdlab.engine import EngineConfig, RequestMetrics
from pdlab.requirements import require_int, require_number
from pdlab.workload.serving import ServedRequest, StepSpan
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
        batch: sequences that decode together; see `batch_of` for the most.

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


def batch_of(requests: Sequence[TraceRequest], config: EngineConfig) -> int:
    """Sequences that can decode together on one engine, by its seats and blocks.

    Raises:
        ValueError: there is no request.
    """
    if not requests:
        raise ValueError("requests has no request")
    tokens = sum(r.num_prompt_tokens + r.num_output_tokens / 2 for r in requests) / len(requests)
    room = int(config.num_blocks * config.block_size * (1 - config.watermark) / tokens)
    return max(1, min(room, config.max_num_seqs))


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


def corrected(
    need: Need, run: ClusterRun, prefill_times: StepTimes, decode_times: StepTimes
) -> Need:
    """What a workload needs, with how long the steps of a run took beside how long they should.

    Args:
        run: of workers with the roles `prefill` and `decode`; a side without a step stays as it is.
    """
    factors = {}
    for role, times in (("prefill", prefill_times), ("decode", decode_times)):
        steps = [step for each in run.workers.values() if each.role == role for step in each.steps]
        factors[role] = measured_over_predicted(steps, run.requests, times)
    return need.corrected(**factors)


def measured_over_predicted(
    steps: Iterable[StepSpan], requests: Iterable[ServedRequest], times: StepTimes
) -> float:
    """How much longer steps took than `times` says, in all; 1 if there is no step.

    Args:
        steps: of any number of workers; what a prefix cache or an earlier attempt spared is not in
            them, so that a chunk counts as if it came behind those that the steps tell of.
        requests: those that they served.
    """
    metrics = {request.request_id: request.metrics for request in requests}
    computed: Counter[str] = Counter()
    took = should = 0.0
    for step in sorted(steps, key=lambda step: step.start_s):
        took += step.wall_s
        should += step.num_steps * times.step_s(_shape(step, metrics, computed))
    return took / should if took and should else 1.0


def _shape(
    step: StepSpan, metrics: Mapping[str, RequestMetrics], computed: Counter[str]
) -> StepShape:
    """Of several steps in a row the one in the middle."""
    pairs = 0
    for name, count in step.prompts.items():
        pairs += causal_pairs(computed[name], count)
        computed[name] += count
    contexts = [0]
    for name in step.decodes:
        of_request = metrics[name.partition("~")[0]]  # without the number of its attempt
        num_before = bisect_left(of_request.token_times_s, step.start_s + 1e-9)
        contexts.append(of_request.num_prompt_tokens + num_before + (step.num_steps - 1) // 2)
    return StepShape(
        len(step.prompts),
        step.num_prompt_tokens,
        pairs,
        len(step.decodes),
        sum(contexts),
        max(contexts),
    )
