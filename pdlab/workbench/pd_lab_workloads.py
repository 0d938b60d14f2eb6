"""Workloads of the PDLab: those of PolicyLab, those of the bench, and traces in files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from pdlab.bench.disaggregation import interrupted_chats, many_answers
from pdlab.disagg.simulated.search import at_rate
from pdlab.requirements import LARGEST_SEED, require_int
from pdlab.workbench import policy_lab_data
from pdlab.workload.scaling import scaled
from pdlab.workload.traces import TraceRequest, find_trace, read_trace, shipped_traces

PATTERNS = {"a document among chats": interrupted_chats, "many answers": many_answers}
"""As `pdlab.bench.disaggregation` measures them, over and over."""
DESCRIPTIONS = policy_lab_data.DESCRIPTIONS | {
    "a document among chats": "4 chats being written, and 5 documents of which little is: the "
    "bench's workload, over and over; no seed",
    "many answers": "16 short questions at once with long answers: the bench's workload, over and "
    "over; no seed",
}


def describe(workload: str) -> str:
    """In a sentence.

    Raises:
        ValueError: there is no such workload, nor such a file, or it holds no trace.
        OSError: the file cannot be read.
    """
    if workload in DESCRIPTIONS:
        return DESCRIPTIONS[workload]
    return f"{len(_trace(workload)):,} requests of the trace {find_trace(workload).name}"


def make_requests(
    workload: str, num_requests: int, rate_rps: float, seed: int, max_len: int
) -> tuple[TraceRequest, ...]:
    """The first requests of a workload, `rate_rps` a second on average.

    Args:
        workload: one of `DESCRIPTIONS`, a trace that comes with pdlab, or a file in the form of
            Azure's or Mooncake's traces. Its requests come in its own rhythm, and begin anew where
            it ends.
        seed: of what is drawn; of a trace, the number of the stretch of `num_requests` to take.
        max_len: tokens of a trace's request; longer prompts lose their end.

    Raises:
        ValueError, OSError: as `describe`, or a number is out of range.
    """
    require_int("seed", seed, 0, LARGEST_SEED // 4)
    if workload in policy_lab_data.DESCRIPTIONS:
        return policy_lab_data.make_requests(workload, num_requests, rate_rps, seed)
    if workload in PATTERNS:
        return tuple(_over_and_over(PATTERNS[workload](), num_requests, rate_rps))
    stretch = _stretch(_trace(workload), num_requests, seed)
    return tuple(_over_and_over(scaled(stretch, max_len=max_len), num_requests, rate_rps))


def num_cut(workload: str, num_requests: int, seed: int, max_len: int) -> int:
    """How many of a trace's requests are longer than `max_len`."""
    if workload in DESCRIPTIONS:
        return 0
    stretch = _stretch(_trace(workload), num_requests, seed)
    return sum(request.num_tokens > max_len for request in stretch)


def _over_and_over(
    requests: Sequence[TraceRequest], num_requests: int, rate_rps: float
) -> list[TraceRequest]:
    if requests[-1].arrival_s > requests[0].arrival_s:
        return at_rate(requests, rate_rps, num_requests / rate_rps)[:num_requests]
    count = len(requests)
    laps = math.ceil(num_requests / count)
    times_s = [round(i // count * count / rate_rps, 6) for i in range(laps * count)]
    coming = zip(times_s, list(requests) * laps, strict=True)
    return [replace(request, arrival_s=time_s) for time_s, request in coming][:num_requests]


def _stretch(
    requests: Sequence[TraceRequest], num_requests: int, number: int
) -> Sequence[TraceRequest]:
    begin = number * num_requests % len(requests)
    return requests[begin : begin + num_requests]


@lru_cache(maxsize=4)
def _trace(name: str) -> tuple[TraceRequest, ...]:
    try:
        path = find_trace(name)
    except ValueError:
        known = ", ".join((*DESCRIPTIONS, *shipped_traces()))
        raise ValueError(f"workload={name!r} is no file and none of {known}") from None
    return tuple(read_trace(path))
