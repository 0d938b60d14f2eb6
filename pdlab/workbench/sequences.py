"""Which sequences a trace holds: a request that asks for several samples has several."""

from __future__ import annotations

from pdlab.trace.records import RequestRecord
from pdlab.trace.trace import Trace


def sequence_ids(trace: Trace) -> list[str]:
    """Every sequence of the trace, request by request in order of arrival."""
    return [name for request in trace.requests.values() for name in request.sequence_ids]


def request_of(trace: Trace, sequence_id: str) -> RequestRecord:
    """The request that a sequence belongs to.

    Raises:
        ValueError: the trace holds no such sequence.
    """
    for request in trace.requests.values():
        if sequence_id in request.sequence_ids:
            return request
    known = ", ".join(sequence_ids(trace)) or "none"
    raise ValueError(f"sequence_id={sequence_id!r} is not in this trace; it holds: {known}")


def sequence_index(trace: Trace) -> dict[str, int]:
    """Number of each sequence, which gives it its colour."""
    return {name: index for index, name in enumerate(sequence_ids(trace))}
