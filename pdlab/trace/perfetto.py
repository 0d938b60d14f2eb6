"""A trace in the Chrome trace-event format, which ui.perfetto.dev and chrome://tracing open.

Source: Google, "Trace Event Format" (complete events X, counters C, instants i, metadata M). Times
are microseconds since the engine was made.

    process "engine"     steps     | step 0: prefill       | step 1: decode | ...
                                   | qkv | attention | mlp | ...
                         host      | schedule 1 | tell 0 | wait 1 | book 1 | ...  (with overlap)
                         compute                | compute 1 ......|
                         counters  KV bytes (used, wasted, swapped); sequences (prefill, ...)
    process "sequences"  r0        | waiting | prefill 0-37 | decode | swapped out | decode | ...
                         r0.1                                 | fork from r0 | decode | ...

Blocks that a step copied (copy-on-write, swap) are instants on the track of their sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from pdlab.trace.records import SequenceRecord, StepRecord
from pdlab.trace.trace import Trace

Event = dict[str, Any]

ENGINE, SEQUENCES = 1, 2
"""Process ids."""
STEPS = 1
"""Thread id of the engine's track of steps."""
LANES = {"host": 2, "compute": 3}
"""Thread ids of the lanes of steps with overlap."""
PER_LAYER = ("qkv", "attention", "mlp", "probe")
"""Stages that run once in each layer; the record holds their sum over the layers."""


def save_perfetto(trace: Trace, path: str | PathLike[str]) -> None:
    """Write `to_perfetto(trace)` as JSON."""
    text = json.dumps(to_perfetto(trace), ensure_ascii=False, separators=(",", ":"))
    Path(path).write_text(text, encoding="utf-8")


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """The trace as a JSON object of trace events, in order of time.

    Durations are the recorded ones. Stages are laid end to end in the order in which they first
    ran: those that run in every layer alternate in reality, and appear once with their sum.
    """
    num_layers = trace.model.get("config", {}).get("num_layers")
    events: list[Event] = []
    for record in trace.steps:
        events += _step_events(record, num_layers)
        events += _counter_events(record)
        events += [
            _slice(
                f"{span.name} {record.step}", (ENGINE, LANES[span.lane]), span.start_s, span.wall_s
            )
            for span in record.spans
        ]
    for track, (name, arrival_s) in enumerate(_sequences(trace).items(), start=1):
        events += _sequence_events(trace, name, arrival_s, track)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))  # the outer slice first
    return {
        "traceEvents": [*_names(trace), *events],
        "displayTimeUnit": "ms",
        "otherData": {"machine": trace.machine, "model": trace.model, "engine": trace.engine},
    }


def _sequences(trace: Trace) -> dict[str, float | None]:
    """Every sequence, and when it began to wait: None for one that forks off when it first runs."""
    return {
        name: None if index else request.arrival_s
        for request in trace.requests.values()
        for index, name in enumerate(request.sequence_ids)
    }


def _names(trace: Trace) -> Iterator[Event]:
    """What processes and tracks are called."""
    yield _metadata("process_name", ENGINE, 0, f"engine: {trace.model.get('name', 'unnamed')}")
    yield _metadata("thread_name", ENGINE, STEPS, "steps")
    if any(record.spans for record in trace.steps):
        for lane, track in LANES.items():
            yield _metadata("thread_name", ENGINE, track, lane)
    yield _metadata("process_name", SEQUENCES, 0, "sequences")
    for track, name in enumerate(_sequences(trace), start=1):
        yield _metadata("thread_name", SEQUENCES, track, name)


def _step_events(record: StepRecord, num_layers: int | None) -> Iterator[Event]:
    yield _slice(
        f"step {record.step}: {record.phase}",
        (ENGINE, STEPS),
        record.start_s,
        record.wall_s,
        phase=record.phase,
        tokens=record.num_tokens,
        sequences=len(record.sequences),
        flops=record.total_flops,
        bytes_moved=record.total_bytes,
    )
    start_s = record.start_s
    for stage, duration_s in record.stage_s.items():
        args = {"sum_over_layers": num_layers} if stage in PER_LAYER and num_layers else {}
        yield _slice(stage, (ENGINE, STEPS), start_s, duration_s, **args)
        start_s += duration_s


def _counter_events(record: StepRecord) -> Iterator[Event]:
    """Who runs, from the start of the step on; what KV they held, as recorded at its end."""
    phases = [sequence.phase for sequence in record.sequences]
    yield _counter(
        "sequences",
        record.start_s,
        prefill=phases.count("prefill"),
        decode=phases.count("decode"),
        waiting=len(record.waiting),
    )
    yield _counter(
        "KV bytes",
        record.start_s + record.wall_s,
        used=record.kv_used_bytes,
        wasted=record.kv_wasted_bytes,
        swapped=record.kv_swapped_bytes,
    )


def _sequence_events(
    trace: Trace, sequence_id: str, arrival_s: float | None, track: int
) -> Iterator[Event]:
    """A sequence's life: waiting or preempted until a step runs it, then that step's part in it."""
    idle_since = None if arrival_s is None else ("waiting", arrival_s)
    place = (SEQUENCES, track)
    for record in trace.steps:
        if sequence_id in record.preempted:
            idle_since = (_how_preempted(record, sequence_id), record.start_s)
        yield from _move_events(record, sequence_id, place)
        part = _part(record, sequence_id)
        if part is None:
            continue
        if idle_since is not None:
            name, since_s = idle_since
            yield _slice(name, place, since_s, record.start_s - since_s)
            idle_since = None
        yield _slice(
            _part_name(part),
            place,
            record.start_s,
            record.wall_s,
            step=record.step,
            tokens=part.num_tokens,
            cached_tokens=part.num_cached_tokens,
            context=part.end,
            sampled=None if part.sampled is None else trace.tokens.get(part.sampled),
        )
        if part.finish_reason:
            end_s = record.start_s + record.wall_s
            yield _instant(f"finished: {part.finish_reason}", place, end_s)
    if idle_since is not None and trace.steps:
        name, since_s = idle_since
        end_s = trace.steps[-1].start_s + trace.steps[-1].wall_s
        yield _slice(name, place, since_s, max(0.0, end_s - since_s))


def _move_events(record: StepRecord, sequence_id: str, place: tuple[int, int]) -> Iterator[Event]:
    for move in record.moves:
        if move.sequence_id == sequence_id:
            name = f"{move.kind.replace('_', ' ')}: block {move.source} to {move.target}"
            yield _instant(name, place, record.start_s)


def _how_preempted(record: StepRecord, sequence_id: str) -> str:
    return "swapped out" if sequence_id in record.swapped else "preempted"


def _part_name(part: SequenceRecord) -> str:
    if part.forked_from:
        return f"fork from {part.forked_from}"
    return f"prefill {part.start}-{part.end}" if part.phase == "prefill" else "decode"


def _part(record: StepRecord, sequence_id: str) -> SequenceRecord | None:
    return next((part for part in record.sequences if part.sequence_id == sequence_id), None)


# --- events --------------------------------------------------------------------------------------


def _slice(
    name: str, place: tuple[int, int], start_s: float, duration_s: float, /, **args: Any
) -> Event:
    return _event("X", name, place, start_s, **args) | {"dur": duration_s * 1e6}


def _instant(name: str, place: tuple[int, int], time_s: float) -> Event:
    return _event("i", name, place, time_s) | {"s": "t"}


def _counter(name: str, time_s: float, /, **values: int) -> Event:
    return _event("C", name, (ENGINE, STEPS), time_s, **values)


def _metadata(kind: str, process: int, track: int, name: str) -> Event:
    return _event("M", kind, (process, track), 0.0, name=name)


def _event(kind: str, name: str, place: tuple[int, int], time_s: float, /, **args: Any) -> Event:
    process, track = place
    event = {"ph": kind, "name": name, "pid": process, "tid": track, "ts": time_s * 1e6}
    return event | {"args": args} if args else event
