"""A step's rows in pieces that follow each other through a pipeline."""

from __future__ import annotations

from bisect import bisect_right

from pdlab.attention import AttentionInputs
from pdlab.engine.batch import BatchInputs
from pdlab.models.shard_plan import cut


def cut_batch(inputs: BatchInputs, most: int) -> list[BatchInputs]:
    """The rows of a batch in up to `most` pieces of even size, in order.

    A cut may fall within the rows of one sequence: of a prompt's tokens the later ones find the K
    and V of the earlier ones in the cache, as with chunked prefill.
    """
    num_rows = len(inputs.token_ids)
    if most == 1:
        return [inputs]
    return [_rows(inputs, rows) for rows in cut(num_rows, min(most, num_rows))]


def _rows(inputs: BatchInputs, rows: range) -> BatchInputs:
    span = slice(rows.start, rows.stop)
    starts = inputs.attention.query_starts
    first = bisect_right(starts, rows.start) - 1
    own_starts, context_lens, tables = [0], [], []
    for i in range(first, len(starts) - 1):
        if starts[i] >= rows.stop:
            break
        end = min(starts[i + 1], rows.stop)
        own_starts.append(end - rows.start)
        context_lens.append(inputs.attention.context_lens[i] - (starts[i + 1] - end))
        tables.append(inputs.attention.block_tables[i])
    return BatchInputs(
        inputs.token_ids[span],
        inputs.positions[span],
        inputs.slot_mapping[span],
        AttentionInputs(own_starts, context_lens, tables),
        [row - rows.start for row in inputs.sample_rows if row in rows],
    )
