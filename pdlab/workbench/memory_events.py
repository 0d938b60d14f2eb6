"""What one step did to memory, in words. The most telling event comes first."""

from __future__ import annotations

from collections.abc import Iterator

from pdlab.trace.records import DROPPED, BlockMove, SequenceRecord, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.memory_data import block_tables

Tables = dict[str, list[int]]
NOTHING = "No block changed hands: K and V went into slots that were already taken."
IDLE = "No block changed hands."


def memory_events(trace: Trace, index: int) -> list[str]:
    """One sentence for each thing that step number `index` of the trace did to blocks."""
    record = trace.steps[index]
    before = trace.steps[index - 1] if index else None
    tables = _tables(before) if before else {}
    size = trace.engine["block_size"]
    events = [
        *_preemptions(record, tables),
        *_swap_ins(record),
        *_hits(record, size),
        *_forks(record),
        *_copies(record, tables),
        *_drops(record, tables),
        *_evictions(record, before, size),
        *_finished(record),
        *_taken(record),
    ]
    return events or [NOTHING if record.num_tokens else IDLE]


def hit_blocks(part: SequenceRecord, size: int) -> range:
    """Logical blocks that a sequence found in the prefix cache in this step."""
    if not part.num_cached_tokens:
        return range(0)
    return range((part.start - part.num_cached_tokens) // size, -(-part.start // size))


def name_blocks(blocks: list[int], place: str = "block") -> str:
    """[3, 4, 5, 9] -> `blocks 3–5 and 9`."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    names = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    return f"{place}{'s' * (len(blocks) > 1)} {_list(names)}"


def _tables(record: StepRecord) -> Tables:
    return {name: held.block_table for name, held in block_tables(record).items()}


def _preemptions(record: StepRecord, before: Tables) -> Iterator[str]:
    for name in record.preempted:
        if name in record.swapped:
            host = [b for b in record.swapped[name] if b != DROPPED]
            yield f"{name} was swapped out: its K and V went to {name_blocks(host, 'host block')}."
        else:
            lost = [b for b in before.get(name, []) if b != DROPPED]
            yield (
                f"{name} was preempted: it gave {_count(len(lost))} back, "
                "and will compute them again."
            )


def _swap_ins(record: StepRecord) -> Iterator[str]:
    tables = _tables(record)
    taken = {p.sequence_id: p.blocks_taken for p in record.sequences}
    for name, moves in _by_sequence(record, "swap_in").items():
        targets = [m.target for m in moves]
        fresh = {DROPPED, *targets, *taken.get(name, [])}
        kept = len(set(tables.get(name, [])) - fresh)
        note = f"; its other {_count(kept)} had stayed in the prefix cache" if kept else ""
        yield f"{name} came back from host memory into {name_blocks(targets)}{note}."


def _hits(record: StepRecord, size: int) -> Iterator[str]:
    tables = _tables(record)
    for part in record.sequences:
        hits = hit_blocks(part, size)
        if not hits:
            continue
        found = f"{part.sequence_id} found {_count(len(hits))} ({part.num_cached_tokens} tokens)"
        table = tables.get(part.sequence_id, [])
        blocks = {table[i] for i in hits if i < len(table)} - {DROPPED}
        others = [n for n, t in tables.items() if n != part.sequence_id and blocks & set(t)]
        shared = f", shared with {_list(others)}" if others else ""
        yield f"{found} in the prefix cache{shared}."


def _forks(record: StepRecord) -> Iterator[str]:
    children: dict[str, list[str]] = {}
    for part in record.sequences:
        if part.forked_from:
            children.setdefault(part.forked_from, []).append(part.sequence_id)
    tables = _tables(record)
    for parent, names in children.items():
        count = _count(len([b for b in tables.get(names[0], []) if b != DROPPED]))
        one = len(names) == 1
        verbs = ("forks", "shares") if one else ("fork", "share")
        yield f"{_list(names)} {verbs[0]} from {parent} and {verbs[1]} its {count}: nothing copied."


def _copies(record: StepRecord, before: Tables) -> Iterator[str]:
    for move in record.moves:
        if move.kind == "copy":
            holders = [name for name, table in before.items() if move.source in table]
            others = [name for name in holders if name != move.sequence_id]
            users = holders if move.sequence_id in holders else [*holders, move.sequence_id]
            state = f"was shared by {_list(users)}" if others else "keeps a prefix for others"
            if move.source in record.blocks_of_others:
                state = "is also held by another engine"
            yield (
                f"Block {move.source} {state}; {move.sequence_id} wrote: "
                f"copied to block {move.target}."
            )


def _drops(record: StepRecord, before: Tables) -> Iterator[str]:
    for name, table in _tables(record).items():
        old = before.get(name, [])
        gone = [b for b, new in zip(old, table, strict=False) if new == DROPPED != b]
        if gone:
            yield (
                f"{name} gave {name_blocks(gone)} back: "
                f"no query will see {'it' if len(gone) == 1 else 'them'} again."
            )


def _evictions(record: StepRecord, before: StepRecord | None, size: int) -> Iterator[str]:
    """Blocks that held a cached prefix, were free, and were taken for something else."""
    tables = _tables(record)
    found = {
        tables[p.sequence_id][i]
        for p in record.sequences
        for i in hit_blocks(p, size)
        if i < len(tables.get(p.sequence_id, []))
    }
    taken = {b for p in record.sequences for b in p.blocks_taken}
    taken |= {m.target for m in record.moves if m.kind != "swap_out"}
    evicted = [b for b in (before.cached_blocks if before else []) if b in taken - found]
    if evicted:
        lost = "its cached prefix is" if len(evicted) == 1 else "their cached prefixes are"
        yield f"{name_blocks(evicted).capitalize()} had to be evicted: {lost} gone."


def _finished(record: StepRecord) -> Iterator[str]:
    freed, cached = set(record.blocks_freed), set(record.cached_blocks)
    tables = _tables(record)
    for part in record.sequences:
        if part.finish_reason:
            back = freed & set(tables.get(part.sequence_id, []))
            kept = len(back & cached)
            note = f"; {kept} of them still hold{'s' * (kept == 1)} a cached prefix" if kept else ""
            yield f"{part.sequence_id} finished ({_count(len(back))} given back{note})."


def _taken(record: StepRecord) -> Iterator[str]:
    moved = {m.target for m in record.moves if m.kind != "swap_out"}
    for part in record.sequences:
        if taken := [b for b in part.blocks_taken if b not in moved]:
            yield f"{part.sequence_id} took {name_blocks(taken)}."


def _by_sequence(record: StepRecord, kind: str) -> dict[str, list[BlockMove]]:
    found: dict[str, list[BlockMove]] = {}
    for move in record.moves:
        if move.kind == kind:
            found.setdefault(move.sequence_id, []).append(move)
    return found


def _count(blocks: int) -> str:
    return f"{blocks} block" if blocks == 1 else f"{blocks} blocks"


def _list(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
