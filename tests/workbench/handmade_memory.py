"""A trace made by hand in which memory does everything it can: hits, forks, copies, swap, drops.

The recorder below keeps block tables only, by the rules of the engine: full blocks are cached by
the text up to their end, free blocks are taken before cached ones are evicted, who writes into a
shared block copies it first. Every number of a record is counted from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdlab.trace.records import (
    DROPPED,
    BlockMove,
    RequestRecord,
    Resident,
    SequenceRecord,
    StepRecord,
)
from pdlab.trace.trace import Trace

from .handmade import KV_BYTES, WORDS

Text = tuple[int, ...]


class MemoryRecorder:
    """Writes steps one after another, and keeps the books of a pool and of a host pool."""

    def __init__(self, block_size: int = 4, num_blocks: int = 12, num_host: int = 6) -> None:
        self.size = block_size
        self.empty, self.cached = list(range(num_blocks)), []
        self.host = list(range(num_host))
        self.text_of: dict[int, Text] = {}
        self.tables: dict[str, list[int]] = {}
        self.swapped: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.ids: dict[str, list[int]] = {}
        self.moves: list[BlockMove] = []
        self.trace = Trace(
            machine={"processor": "handmade", "cores": 2, "date": "2025-01-01T00:00:00Z"},
            model={"name": "handmade", "dtype": "float32", "weight_bytes": 5_380_000},
            engine={
                "block_size": block_size,
                "num_blocks": num_blocks,
                "num_swap_blocks": num_host,
                "kv_bytes_per_token": KV_BYTES,
                "kv_open_bytes": 0,
            },
            tokens=dict(enumerate(WORDS)),
        )

    def submit(self, name: str, ids: Sequence[int], n: int = 1) -> None:
        prompt = "".join(WORDS[i] for i in ids)
        self.trace.requests[name] = RequestRecord(name, prompt, list(ids), {"n": n}, 0.0)
        for sequence in self.trace.requests[name].sequence_ids:
            self.ids[sequence], self.computed[sequence] = list(ids), 0

    def step(
        self,
        scheduled: Mapping[str, int | None],
        *,
        forks: Mapping[str, str] | None = None,
        waiting: Sequence[str] = (),
        swap_out: Sequence[str] = (),
        swap_in: Sequence[str] = (),
        preempt: Sequence[str] = (),
        drop: Mapping[str, int] | None = None,
        finish: Sequence[str] = (),
    ) -> StepRecord:
        """One step; `scheduled`: tokens that each sequence computes, None for all it has."""
        self.moves = []
        for name in preempt:
            self._free(self.tables.pop(name))
            self.computed[name] = 0
        for name in swap_out:
            self._swap_out(name)
        for name in swap_in:
            self._swap_in(name)
        parts = [self._run(name, count, name in finish) for name, count in scheduled.items()]
        parts += [self._fork(child, parent) for child, parent in (forks or {}).items()]
        for name, count in (drop or {}).items():
            dropped, self.tables[name][:count] = self.tables[name][:count], [DROPPED] * count
            self._free(dropped)
        residents = [Resident(n, list(t), self.computed[n]) for n, t in self.tables.items()]
        freed = self._free([b for name in finish for b in self.tables.pop(name)])
        record = self._record(parts, residents, freed, [*preempt, *swap_out], waiting)
        self.trace.steps.append(record)
        return record

    # --- blocks --------------------------------------------------------------------------------

    def _take(self) -> int:
        block = self.empty.pop(0) if self.empty else self.cached.pop(0)
        self.text_of.pop(block, None)
        return block

    def _free(self, blocks: list[int]) -> list[int]:
        """Take back those blocks that no table names any more, a table's end first."""
        held = {DROPPED, *(b for table in self.tables.values() for b in table)}
        gone = [b for b in dict.fromkeys(reversed(blocks)) if b not in held]
        for block in gone:
            (self.cached if block in self.text_of else self.empty).append(block)
        return gone

    def _swap_out(self, name: str) -> None:
        table = self.tables.pop(name)
        self.swapped[name] = [self.host.pop(0) for _ in table]
        pairs = zip(table, self.swapped[name], strict=True)
        self.moves += [BlockMove("swap_out", a, b, name) for a, b in pairs]
        self._free(table)

    def _swap_in(self, name: str) -> None:
        host = self.swapped.pop(name)
        self.tables[name] = [self._take() for _ in host]
        pairs = zip(host, self.tables[name], strict=True)
        self.moves += [BlockMove("swap_in", a, b, name) for a, b in pairs]
        self.host = sorted(self.host + host)

    # --- sequences -----------------------------------------------------------------------------

    def _run(self, name: str, count: int | None, finished: bool) -> SequenceRecord:
        owner = next(r for r in self.trace.requests.values() if name in r.sequence_ids)
        table = self.tables.setdefault(name, [])
        hits = 0 if table else self._find(name)
        start = self.computed[name] = self.computed[name] or hits
        end = len(self.ids[name]) if count is None else start + count
        taken: list[int] = []
        self._own_last_block(name, start)
        while len(table) * self.size < end:
            taken.append(self._take())
            table.append(taken[-1])
        for logical, block in enumerate(table):
            if (logical + 1) * self.size <= end and block != DROPPED:
                self.text_of.setdefault(block, tuple(self.ids[name][: (logical + 1) * self.size]))
        self.computed[name] = end
        return SequenceRecord(
            sequence_id=name,
            phase="decode" if start >= len(owner.prompt_ids) and end == start + 1 else "prefill",
            start=start,
            token_ids=self.ids[name][start:end],
            blocks_taken=taken,
            num_cached_tokens=hits,
            sampled=self._sample(name) if end == len(self.ids[name]) else None,
            finish_reason="length" if finished else None,
        )

    def _find(self, name: str) -> int:
        """Put cached blocks of the same text into an empty table; returns their tokens."""
        blocks = {text: block for block, text in self.text_of.items()}
        ids, table = self.ids[name], self.tables[name]
        while (end := (len(table) + 1) * self.size) < len(ids) and tuple(ids[:end]) in blocks:
            table.append(blocks[tuple(ids[:end])])
        self.cached = [b for b in self.cached if b not in table]
        return len(table) * self.size

    def _own_last_block(self, name: str, start: int) -> None:
        """Copy the block that is about to be written, if another table names it too."""
        logical = start // self.size
        table = self.tables[name]
        if logical < len(table) and sum(table[logical] in t for t in self.tables.values()) > 1:
            target = self._take()
            self.moves.append(BlockMove("copy", table[logical], target, name))
            table[logical] = target

    def _fork(self, child: str, parent: str) -> SequenceRecord:
        self.tables[child] = list(self.tables[parent])
        self.computed[child] = start = self.computed[parent]
        sampled = self._sample(child)
        return SequenceRecord(child, "prefill", start, [], [], forked_from=parent, sampled=sampled)

    def _sample(self, name: str) -> int:
        self.ids[name].append((len(self.ids[name]) * 5 + len(name)) % len(WORDS))
        return self.ids[name][-1]

    # --- the record ----------------------------------------------------------------------------

    def _record(self, parts, residents, freed, preempted, waiting) -> StepRecord:
        slots = [
            (block, max(0, min(self.size, r.num_computed_tokens - i * self.size)))
            for r in residents
            for i, block in enumerate(r.block_table)
            if block != DROPPED
        ]
        fills: dict[int, int] = {}
        for block, filled in slots:
            fills[block] = max(fills.get(block, 0), filled)
        used = sum(fills.values())
        tokens = sum(part.num_tokens for part in parts)
        wall = 0.012 + 0.0021 * tokens
        return StepRecord(
            step=len(self.trace.steps),
            start_s=sum(s.wall_s for s in self.trace.steps),
            wall_s=wall,
            stage_s={"qkv": 0.3 * wall, "attention": 0.2 * wall, "mlp": 0.4 * wall},
            sequences=parts,
            residents=residents,
            waiting=list(waiting),
            preempted=preempted,
            blocks_freed=freed,
            num_free_blocks=len(self.empty) + len(self.cached),
            kv_used_bytes=used * KV_BYTES,
            kv_wasted_bytes=(len(fills) * self.size - used) * KV_BYTES,
            flops={"qkv": 40_000_000 * tokens, "mlp": 150_000_000 * tokens},
            bytes_moved={"weights": 538_000_000, "kv_read": used * KV_BYTES},
            moves=self.moves,
            swapped={name: list(table) for name, table in self.swapped.items()},
            cached_blocks=list(self.cached),
            kv_shared_bytes=(sum(filled for _, filled in slots) - used) * KV_BYTES,
            kv_swapped_bytes=sum(map(len, self.swapped.values())) * self.size * KV_BYTES,
            activation_peak_bytes=40_000 * tokens,
            activation_total_bytes=300_000 * tokens,
        )


def memory_moves() -> Trace:
    """Two samples of `r0` fork; `r1` finds r0's prefix and is swapped; `r2` evicts, drops."""
    run = MemoryRecorder()
    shared = [2, 3, 4, 5, 6, 7, 8, 9]
    run.submit("r0", [*shared, 10, 11, 12, 13, 14, 15], n=2)
    run.submit("r1", [*shared, 1, 2, 3, 4, 5])
    run.submit("r2", [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 8, 7, 6, 5, 4, 3])
    run.step({"r0": 14}, forks={"r0.1": "r0"}, waiting=("r1", "r2"))
    run.step({"r0": 1, "r0.1": 1, "r1": None}, waiting=("r2",))
    run.step({"r0": 1, "r0.1": 1, "r1": 1}, waiting=("r2",))
    run.step({"r0": 1, "r0.1": 1, "r1": 1}, waiting=("r2",), finish=("r0",))
    run.step({"r0.1": 1, "r2": 8}, swap_out=("r1",))
    run.step({"r0.1": 1, "r2": 9}, finish=("r0.1",))
    run.step({"r2": 1}, drop={"r2": 2})
    run.step({"r1": 1, "r2": 1}, swap_in=("r1",))
    run.step({"r1": 1}, waiting=("r2",), preempt=("r2",))
    run.step({"r1": 1, "r2": None}, finish=("r1",))
    run.step({"r2": 1})
    run.step({"r2": 1}, finish=("r2",))
    return run.trace
