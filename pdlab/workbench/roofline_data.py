"""Steps as points under a roofline: what each step did, and what it should have taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pdlab.costmodel import Hardware, mbu, mfu, predict
from pdlab.costmodel.predict import ELEMENT_BYTES
from pdlab.engine.recorder import cost_of
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""How the cost model calls torch's dtypes."""
MAX_POINTS = 400
"""Steps that one picture shows; a longer trace is thinned evenly."""


class Point(NamedTuple):
    """One step under the roof. FLOPs and bytes are the step's own, over all its requests."""

    step: int
    phase: str
    num_tokens: int
    num_requests: int
    flops: int
    bytes: int
    wall_s: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes


def trace_dtype(trace: Trace) -> str:
    """The dtype the model computed in, as the cost model names it (`fp32`, `bf16` ...)."""
    name = str(trace.model.get("dtype", "float32"))
    return DTYPES.get(name, name)


def points(trace: Trace) -> list[Point]:
    """The steps that computed something, thinned evenly to at most MAX_POINTS."""
    return [_point(r) for r in _busy_steps(trace)]


def on_hardware(trace: Trace, hardware: Hardware) -> dict[str, Any]:
    """A machine's ceilings for the trace's dtype, and every point's predicted time on it.

    MFU and MBU compare the recorded times with these ceilings, so they mean something only for
    the machine that the trace was recorded on.
    """
    dtype = trace_dtype(trace)
    steps = _busy_steps(trace)
    costs = [cost_of(r) for r in steps]
    return {
        "name": hardware.name,
        "peak_flops_s": hardware.peak(dtype),
        "bandwidth_bytes_s": hardware.bandwidth_bytes_s,
        "provenance": hardware.provenance,
        "predicted_s": [predict(c, hardware, dtype).time_s for c in costs],
        "mfu": [mfu(c, r.wall_s, hardware, dtype) for c, r in zip(costs, steps, strict=True)],
        "mbu": [mbu(c, r.wall_s, hardware) for c, r in zip(costs, steps, strict=True)],
    }


def predicted_s(trace: Trace, record: StepRecord, hardware: Hardware) -> float:
    """Seconds the step takes at least, at a machine's ceilings."""
    return predict(cost_of(record), hardware, trace_dtype(trace)).time_s


def stage_floors_s(trace: Trace, record: StepRecord, hardware: Hardware) -> dict[str, float]:
    """Seconds each of the model's stages takes at least, at a machine's ceilings.

    A product of `rows` rows does 2 * rows FLOPs for each of its weights, so its FLOPs tell its
    weights; attention reads and writes the KV bytes.
    """
    dtype = trace_dtype(trace)
    sampled = sum(s.num_drawn for s in record.sequences)
    floors: dict[str, float] = {}
    for stage, flops in record.flops.items():
        if stage == "attention":
            num_bytes = float(record.bytes_moved["kv_read"] + record.bytes_moved["kv_write"])
        else:
            rows = sampled if stage == "logits" else record.num_tokens
            num_bytes = flops / (2 * max(rows, 1)) * ELEMENT_BYTES[dtype]
        floors[stage] = max(flops / hardware.peak(dtype), num_bytes / hardware.bandwidth_bytes_s)
    return floors


def supporting(trace: Trace, table: Mapping[str, Hardware]) -> Iterable[Hardware]:
    """The machines of a table that have a peak for the trace's dtype."""
    dtype = trace_dtype(trace)
    return [h for h in table.values() if dtype in h.peak_flops]


def _busy_steps(trace: Trace) -> list[StepRecord]:
    busy = [r for r in trace.steps if r.total_flops and r.total_bytes and r.wall_s > 0]
    return busy[:: -(-len(busy) // MAX_POINTS) or 1]


def _point(record: StepRecord) -> Point:
    return Point(
        step=record.step,
        phase=record.phase,
        num_tokens=record.num_tokens,
        num_requests=len(record.sequences),
        flops=record.total_flops,
        bytes=record.total_bytes,
        wall_s=record.wall_s,
    )
