"""The Stepper's frames: what one request looks like at every moment of a recorded run.

A frame is plain data, ready for JSON. The first frame is the tokenized prompt; then comes one
frame for every step between the request's arrival and its end, including the steps in which it
waited or was preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdlab.trace.records import SequenceRecord, StepRecord
from pdlab.trace.trace import Trace

Frame = dict[str, Any]


def stepper_frames(trace: Trace, request_id: str) -> list[Frame]:
    """One frame for the tokenized prompt and one for each step of the request's life.

    Positions are in tokens, times in seconds. `computed` counts the tokens that have K and V in
    the cache after the step, `known` those that exist at all (prompt and sampled ones), and
    `start` to `end` are the positions computed in this very step.

    Raises:
        ValueError: the trace holds no request of that name.
    """
    if request_id not in trace.requests:
        known = ", ".join(trace.requests) or "none"
        raise ValueError(f"request_id={request_id!r} is not in this trace; it holds: {known}")
    frames = [_tokenize_frame(trace, request_id)]
    for step in _lifetime(trace, request_id):
        frames.append(_step_frame(trace, request_id, step, frames[-1]))
    return frames


def token_strings(trace: Trace, request_id: str) -> list[tuple[int, str]]:
    """Id and shown string of every token of a request: its prompt, then what was sampled."""
    ids = trace.requests[request_id].prompt_ids + trace.output_ids(request_id)
    return [(i, trace.tokens.get(i, f"<{i}>")) for i in ids]


def _lifetime(trace: Trace, request_id: str) -> Iterator[StepRecord]:
    """Steps from the first that knows the request to the one that finishes it."""
    for step in trace.steps:
        mine = _own_record(step, request_id)
        resident = any(r.request_id == request_id for r in step.residents)
        if mine or resident or request_id in step.waiting or request_id in step.preempted:
            yield step
        if mine and mine.finish_reason:
            return


def _tokenize_frame(trace: Trace, request_id: str) -> Frame:
    count = len(trace.requests[request_id].prompt_ids)
    return {
        "kind": "tokenize",
        "step": None,
        "title": f"The prompt becomes {_tokens(count)}",
        "note": "Nothing is computed yet: no K, no V, no block taken.",
        "start": 0,
        "end": 0,
        "computed": 0,
        "cached": 0,
        "known": count,
        "sampled": None,
        "finish_reason": None,
        "top": [],
        "text": "",
        "tables": {},
        "batch": [],
    }


def _step_frame(trace: Trace, request_id: str, step: StepRecord, previous: Frame) -> Frame:
    mine = _own_record(step, request_id)
    kind = mine.phase if mine else _idle_kind(step, request_id)
    resident = next((r for r in step.residents if r.request_id == request_id), None)
    frame: Frame = {
        "kind": kind,
        "step": step.step,
        "start": mine.start if mine else 0,
        "end": mine.end if mine else 0,
        "computed": resident.num_computed_tokens if resident else 0,
        "cached": _cached(mine, previous),
        "known": previous["known"] + (mine is not None and mine.sampled is not None),
        "sampled": previous["known"] if mine and mine.sampled is not None else None,
        "finish_reason": mine.finish_reason if mine else None,
        "top": _candidates(trace, mine),
        "text": previous["text"] + (mine.text if mine else ""),
    }
    frame["title"], frame["note"] = _caption(frame, step, mine)
    return frame | _step_numbers(step)


def _step_numbers(step: StepRecord) -> Frame:
    """What the whole step did, for every request together, as the record has it."""
    return {
        "wall_s": step.wall_s,
        "stage_s": dict(step.stage_s),
        "flops": step.total_flops,
        "bytes": step.total_bytes,
        "bytes_moved": dict(step.bytes_moved),
        "kv_used_bytes": step.kv_used_bytes,
        "kv_wasted_bytes": step.kv_wasted_bytes,
        "num_free_blocks": step.num_free_blocks,
        "tables": {r.request_id: [r.block_table, r.num_computed_tokens] for r in step.residents},
        "batch": [[s.request_id, s.phase, s.num_tokens] for s in step.sequences],
        "waiting": len(step.waiting),
    }


def _own_record(step: StepRecord, request_id: str) -> SequenceRecord | None:
    return next((s for s in step.sequences if s.request_id == request_id), None)


def _idle_kind(step: StepRecord, request_id: str) -> str:
    return "preempted" if request_id in step.preempted else "waiting"


def _cached(mine: SequenceRecord | None, previous: Frame) -> int:
    """Tokens found in the prefix cache: where the first chunk starts when nothing ran before."""
    if mine and mine.phase == "prefill" and previous["computed"] == 0:
        return mine.start
    return previous["cached"]


def _candidates(trace: Trace, mine: SequenceRecord | None) -> list[dict[str, Any]]:
    if mine is None:
        return []
    return [
        {
            "id": c.token_id,
            "text": trace.tokens.get(c.token_id, f"<{c.token_id}>"),
            "p": c.probability,
            "chosen": c.token_id == mine.sampled,
        }
        for c in mine.top
    ]


def _caption(frame: Frame, step: StepRecord, mine: SequenceRecord | None) -> tuple[str, str]:
    """The frame's message in one line, and one sentence on why it is so."""
    if mine is None:
        return _idle_caption(frame["kind"])
    if mine.phase == "decode":
        title = f"Decode: {_tokens(mine.num_tokens)} in, the next token out"
        note = (
            f"One query looks back at {_tokens(mine.end)} in the KV cache; "
            "the step reads every weight once."
        )
    elif mine.sampled is None:
        title = f"Prefill, one chunk: {_tokens(mine.num_tokens)} at once"
        note = f"Positions {mine.start} to {mine.end - 1}; the prompt goes on, so nothing is drawn."
    else:
        title = f"Prefill: {_tokens(mine.num_tokens)} at once, then the next token"
        note = "All positions share one read of the weights; the last one's logits give the token."
    if len(step.sequences) > 1:
        others = len(step.sequences) - 1
        note += f" {others} other request{'s' * (others > 1)} ran in the same step."
    if mine.finish_reason:
        note += f" Finished: {mine.finish_reason}."
    return title, note


def _idle_caption(kind: str) -> tuple[str, str]:
    if kind == "preempted":
        return "Preempted: its blocks were taken back", "Another request needed the memory."
    return "Waiting: this step ran for other requests", "No K or V was computed for this request."


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
