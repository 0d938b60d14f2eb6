"""Who owns each block and each byte of memory at one step of a recorded run.

A step's picture is taken after its forward pass and before finished sequences give their blocks
back. A block that is both held and named in `cached_blocks` is therefore held: it becomes free, and
keeps its prefix, when the step ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pdlab.trace.records import DROPPED, Resident, StepRecord
from pdlab.trace.trace import Trace


class Owner(NamedTuple):
    """One use of a physical block: the sequence, which of its blocks this is, slots filled."""

    sequence_id: str
    logical: int
    filled: int


class Ledger(NamedTuple):
    """Where the bytes are at one step.

    `used`, `wasted`, `others`, `cached` and `free` add up to the KV pool; `swapped` and `host_free`
    to the host pool. `others` are blocks that only other engines on the same memory hold; what
    those have in host memory no record says, and it counts as `host_free`. `shared` is what the
    pool would hold beside that if nothing were shared, and `activations` the step's peak, or None
    where nobody measured it.
    """

    weights: int
    used: int
    wasted: int
    others: int
    cached: int
    free: int
    open: int
    swapped: int
    host_free: int
    shared: int
    activations: int | None

    @property
    def pool(self) -> int:
        return self.used + self.wasted + self.others + self.cached + self.free

    @property
    def host(self) -> int:
        return self.swapped + self.host_free


def block_bytes(trace: Trace) -> int:
    """Bytes of one block: K and V of all layers, scales included."""
    return round(trace.engine["block_size"] * trace.engine["kv_bytes_per_token"])


def kv_capacity_bytes(trace: Trace) -> int:
    """Bytes of the whole KV pool."""
    return int(trace.engine["num_blocks"]) * block_bytes(trace)


def num_host_blocks(trace: Trace) -> int:
    """Blocks of the pool in host memory."""
    return int(trace.engine.get("num_swap_blocks", 0))


def shares_memory(trace: Trace) -> bool:
    """Whether other engines held blocks of this trace's pool at any step."""
    return any(record.blocks_of_others for record in trace.steps)


def block_owners(trace: Trace, record: StepRecord) -> dict[int, list[Owner]]:
    """For each physical block that a sequence holds: its owners, in order of their tables."""
    size = trace.engine["block_size"]
    owners: dict[int, list[Owner]] = {}
    for resident in block_tables(record).values():
        for logical, block in enumerate(resident.block_table):
            if block != DROPPED:
                filled = max(0, min(size, resident.num_computed_tokens - logical * size))
                owners.setdefault(block, []).append(Owner(resident.sequence_id, logical, filled))
    return owners


def block_tables(record: StepRecord) -> dict[str, Resident]:
    """What every sequence holds at the end of the step, those included that fork off in it.

    A fork may be recorded as holding nothing yet: it then holds what its parent holds.
    """
    tables = {r.sequence_id: r for r in record.residents}
    for part in record.sequences:
        parent = tables.get(part.forked_from or "")
        if parent and part.sequence_id not in tables:
            tables[part.sequence_id] = replace(parent, sequence_id=part.sequence_id)
    return tables


def cached_free_blocks(record: StepRecord) -> list[int]:
    """Blocks that nobody holds and that keep a prefix, the next to be evicted first."""
    held = {block for resident in record.residents for block in resident.block_table}
    return [block for block in record.cached_blocks if block not in held]


def ledger(trace: Trace, record: StepRecord) -> Ledger:
    """The bytes of one step."""
    cached = len(cached_free_blocks(record)) * block_bytes(trace)
    others = len(record.blocks_of_others) * block_bytes(trace)
    taken = record.kv_used_bytes + record.kv_wasted_bytes
    return Ledger(
        weights=int(trace.model.get("weight_bytes", 0)),
        used=record.kv_used_bytes,
        wasted=record.kv_wasted_bytes,
        others=others,
        cached=cached,
        free=kv_capacity_bytes(trace) - taken - others - cached,
        open=int(trace.engine.get("kv_open_bytes", 0)),
        swapped=record.kv_swapped_bytes,
        host_free=num_host_blocks(trace) * block_bytes(trace) - record.kv_swapped_bytes,
        shared=record.kv_shared_bytes,
        activations=record.activation_peak_bytes,
    )
