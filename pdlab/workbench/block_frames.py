"""The BlockTableView's frames: tables, pool and host memory at each step, ready for JSON."""

from __future__ import annotations

from typing import Any

from pdlab.trace.records import DROPPED, Resident, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.memory_data import block_tables, cached_free_blocks
from pdlab.workbench.memory_events import hit_blocks, memory_events

Frame = dict[str, Any]


def block_frames(trace: Trace, most: int | None = None) -> list[Frame]:
    """One frame for each of the first `most` steps.

    `tables` and `host` list sequences in the order of the record, each with its block table and
    the tokens that have K and V; `hits` are the logical blocks [first, after the last) that came
    from the prefix cache; `others` the physical blocks that only other engines hold; `new` those
    taken or written by a copy in this step.
    """
    steps = trace.steps[:most]
    size = trace.engine["block_size"]
    hits: dict[str, tuple[int, int]] = {}
    computed: dict[str, int] = {}
    frames = []
    for index, record in enumerate(steps):
        _follow_hits(record, size, hits)
        held = block_tables(record)
        computed |= {name: resident.num_computed_tokens for name, resident in held.items()}
        following = trace.steps[index + 1] if index + 1 < len(trace.steps) else None
        frames.append(
            {
                "step": record.step,
                "phase": record.phase,
                "tables": [_table(resident, record, hits) for resident in held.values()],
                "host": [
                    {"id": name, "blocks": blocks, "computed": computed.get(name, 0)}
                    for name, blocks in record.swapped.items()
                ],
                "waiting": [name for name in record.waiting if name not in record.swapped],
                "cached": cached_free_blocks(record),
                "others": record.blocks_of_others,
                "evict_first": record.cached_blocks[:1],
                "num_cached": len(record.cached_blocks),
                "num_free": record.num_free_blocks,
                "next_taken": _taken(following) if following else [],
                "new": _taken(record),
                "moves": [list(move) for move in record.moves],
                "events": memory_events(trace, index),
            }
        )
    return frames


def _table(resident: Resident, record: StepRecord, hits: dict[str, tuple[int, int]]) -> Frame:
    name = resident.sequence_id
    part = next((p for p in record.sequences if p.sequence_id == name), None)
    did = None if part is None else "fork" if part.forked_from else part.phase
    return {
        "id": name,
        "blocks": resident.block_table,
        "computed": resident.num_computed_tokens,
        "hits": list(hits.get(name, (0, 0))),
        "did": did,
        "finished": bool(part and part.finish_reason),
    }


def _follow_hits(record: StepRecord, size: int, hits: dict[str, tuple[int, int]]) -> None:
    """Keep, for each sequence, which of its blocks came from the cache; recomputing forgets it."""
    for name in record.preempted:
        if name not in record.swapped:
            hits.pop(name, None)
    for part in record.sequences:
        found = hit_blocks(part, size)
        if found:
            hits[part.sequence_id] = (found.start, found.stop)
        elif part.forked_from and part.forked_from in hits:
            hits[part.sequence_id] = hits[part.forked_from]


def _taken(record: StepRecord) -> list[int]:
    """Blocks that a step took: for tokens to come, for private copies, and for swapping in."""
    moved = [m.target for m in record.moves if m.kind != "swap_out"]
    taken = [b for p in record.sequences for b in p.blocks_taken if b != DROPPED]
    return list(dict.fromkeys(moved + taken))
