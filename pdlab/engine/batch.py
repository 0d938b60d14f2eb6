"""From a scheduled batch to the flat arrays a forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

from pdlab.attention import AttentionInputs
from pdlab.engine.scheduler import ScheduledBatch


@dataclass(frozen=True)
class BatchInputs:
    """All tokens of a step in one row after another, no padding.

    Attributes:
        token_ids, positions, slot_mapping: one entry a token; the slot is where its K and V go.
        attention: which of these rows belong to whom, and which blocks they may read.
        sample_rows: the rows whose logits are needed, in batch order.
    """

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    attention: AttentionInputs
    sample_rows: list[int]


def prepare(batch: ScheduledBatch, block_size: int) -> BatchInputs:
    """Lay out a batch. Knows where each token goes; knows nothing of the model."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    sample_rows: list[int] = []
    for part in batch.scheduled:
        table = part.sequence.block_table
        token_ids += part.token_ids
        positions += range(part.start, part.end)
        slots += [
            table[p // block_size] * block_size + p % block_size
            for p in range(part.start, part.end)
        ]
        starts.append(len(token_ids))
        if part.samples:
            sample_rows += range(len(token_ids) - 1 - len(part.draft), len(token_ids))
    attention = AttentionInputs(
        query_starts=starts,
        context_lens=[part.end for part in batch.scheduled],
        block_tables=[part.sequence.block_table for part in batch.scheduled],
    )
    return BatchInputs(token_ids, positions, slots, attention, sample_rows)
