"""The Stepper's frames: what one sequence looks like at every moment of a recorded run.

A frame is plain data, ready for JSON. The first frame is the tokenized prompt; then comes one
frame for every step between the sequence's arrival and its end, including the steps in which it
waited, was preempted, or lay in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdlab.trace.records import SequenceRecord, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.memory_data import block_tables
from pdlab.workbench.sequences import request_of

Frame = dict[str, Any]

IDLE = {
    "waiting": (
        "Waiting: this step ran for other sequences",
        "No K or V was computed for this sequence.",
    ),
    "preempted": ("Preempted: its blocks were taken back", "Another sequence needed the memory."),
    "swapped": (
        "Swapped out: its K and V wait in host memory",
        "Another sequence needed the blocks; these come back by a copy, not by computing again.",
    ),
}
"""Title and note of a step that ran without the sequence."""


def stepper_frames(trace: Trace, sequence_id: str) -> list[Frame]:
    """One frame for the tokenized prompt and one for each step of the sequence's life.

    Positions are in tokens, times in seconds. `computed` counts the tokens that have K and V in
    the cache after the step, `known` those that exist at all (prompt and sampled ones), and
    `start` to `end` are the positions computed in this very step.

    Raises:
        ValueError: the trace holds no sequence of that name.
    """
    frames = [_tokenize_frame(trace, sequence_id)]
    for step in _lifetime(trace, sequence_id):
        frames.append(_step_frame(trace, sequence_id, step, frames[-1]))
    return frames


def token_strings(trace: Trace, sequence_id: str) -> list[tuple[int, str]]:
    """Id and shown string of every token of a sequence: the prompt, then what was sampled."""
    ids = request_of(trace, sequence_id).prompt_ids + trace.output_ids(sequence_id)
    return [(i, trace.tokens.get(i, f"<{i}>")) for i in ids]


def _lifetime(trace: Trace, sequence_id: str) -> Iterator[StepRecord]:
    """Steps from the first that knows the sequence to the one that finishes it."""
    for step in trace.steps:
        mine = _own_record(step, sequence_id)
        resident = any(r.sequence_id == sequence_id for r in step.residents)
        idle = (*step.waiting, *step.preempted, *step.swapped)
        if mine or resident or sequence_id in idle:
            yield step
        if mine and mine.finish_reason:
            return


def _tokenize_frame(trace: Trace, sequence_id: str) -> Frame:
    count = len(request_of(trace, sequence_id).prompt_ids)
    return {
        "kind": "tokenize",
        "step": None,
        "title": f"The prompt becomes {_tokens(count)}",
        "note": "Nothing is computed yet: no K, no V, no block taken.",
        "start": 0,
        "end": 0,
        "computed": 0,
        "cached": 0,
        "forked_from": None,
        "known": count,
        "sampled": None,
        "finish_reason": None,
        "top": [],
        "text": "",
        "tables": {},
        "batch": [],
    }


def _step_frame(trace: Trace, sequence_id: str, step: StepRecord, previous: Frame) -> Frame:
    mine = _own_record(step, sequence_id)
    kind = _kind(step, sequence_id, mine)
    resident = block_tables(step).get(sequence_id)
    in_host = previous["computed"] if sequence_id in step.swapped else 0
    computed = resident.num_computed_tokens if resident else in_host
    frame: Frame = {
        "kind": kind,
        "step": step.step,
        "start": mine.start if mine else 0,
        "end": mine.end if mine else 0,
        "computed": computed,
        "cached": _cached(mine, previous, computed),
        "forked_from": mine.forked_from if mine else None,
        "known": previous["known"] + (len(mine.put_out) if mine else 0),
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
        "tables": {
            name: [r.block_table, r.num_computed_tokens] for name, r in block_tables(step).items()
        },
        "batch": [[s.sequence_id, s.phase, s.num_tokens] for s in step.sequences],
        "waiting": len(step.waiting),
        "cached_blocks": step.cached_blocks,
    }


def _own_record(step: StepRecord, sequence_id: str) -> SequenceRecord | None:
    return next((s for s in step.sequences if s.sequence_id == sequence_id), None)


def _kind(step: StepRecord, sequence_id: str, mine: SequenceRecord | None) -> str:
    """What the sequence did: prefill, decode, fork; waiting, preempted, or swapped to the host."""
    if mine:
        return "fork" if mine.forked_from else mine.phase
    if sequence_id in step.swapped:
        return "swapped"
    return "preempted" if sequence_id in step.preempted else "waiting"


def _cached(mine: SequenceRecord | None, previous: Frame, computed: int) -> int:
    """Tokens whose K and V others had computed: found in the prefix cache, or had by a fork."""
    if mine and mine.forked_from:
        return computed
    if mine and mine.num_cached_tokens:
        return mine.start
    return previous["cached"] if computed else 0


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
        return IDLE[frame["kind"]]
    title, note = _own_caption(mine)
    if mine.num_cached_tokens:
        note = f"{_tokens(mine.num_cached_tokens)} before them came from the prefix cache. " + note
    if len(step.sequences) > 1:
        others = len(step.sequences) - 1
        note += f" {others} other sequence{'s' * (others > 1)} ran in the same step."
    if mine.finish_reason:
        note += f" Finished: {mine.finish_reason}."
    return title, note


def _own_caption(mine: SequenceRecord) -> tuple[str, str]:
    if mine.forked_from:
        return (
            f"Forks from {mine.forked_from} and draws its own first token",
            "The prompt was computed once: both read the same blocks, and none was copied yet.",
        )
    if mine.phase == "decode":
        return (
            f"Decode: {_tokens(mine.num_tokens)} in, the next token out",
            f"One query looks back at {_tokens(mine.end)} in the KV cache; "
            "the step reads every weight once.",
        )
    if mine.sampled is None:
        return (
            f"Prefill, one chunk: {_tokens(mine.num_tokens)} at once",
            f"Positions {mine.start} to {mine.end - 1}; the prompt goes on, so nothing is drawn.",
        )
    return (
        f"Prefill: {_tokens(mine.num_tokens)} at once, then the next token",
        "All positions share one read of the weights; the last one's logits give the token.",
    )


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"
