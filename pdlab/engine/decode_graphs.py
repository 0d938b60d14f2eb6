"""Decode steps replayed from CUDA graphs: one launch instead of some ten a layer.

A graph repeats kernels with the addresses and sizes that they were recorded with. So a decode batch
is padded to the next of a few sizes, the buckets, and its numbers are copied to where the bucket's
graph reads them:

    5 decodes, bucket 8     token ids   17  4  9  9 81 |  0  0  0
                            slots       67 12 30 99  5 | -1 -1 -1     stored nowhere
                            contexts    52 13 15  4 22 |  0  0  0     nothing is read

Padding needs no block of its own: kernels store nothing for a slot below 0, and read nothing for an
empty context. Lengths and tables differ from step to step, but nothing that is launched depends on
them.

vLLM and SGLang do it with the same buckets (1, 2, 4, then every 8th) and record all of them when
they start; here a bucket is recorded when it is first needed. The buckets share a memory pool for
what a pass needs meanwhile, since only one is replayed at a time.

Which batches, which bucket, what is in the buffers: none of it needs a GPU. Without one, "replay"
calls the function anew, on the same buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdlab.engine.gpu_rows import Layout, Rows, table_width
from pdlab.trace import DROPPED

Compute = Callable[[Rows], tuple[Tensor, ...]]
"""Results with a row for each row given."""
Replay = Callable[[], tuple[Tensor, ...]]
Capture = Callable[[Replay], Replay]
"""Takes a function of no arguments, and returns what repeats its work; both fill the same results
on every call."""


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and `most`, ascending."""
    return [n for n in (1, 2, 4, *range(8, most, 8)) if n < most] + [most]


class DecodeBuffers:
    """Where the graph of one bucket reads its numbers.

    Args:
        size: rows, and sequences.
        max_blocks: most blocks of a sequence.
    """

    def __init__(self, size: int, max_blocks: int, device: torch.device):
        self._numbers = torch.zeros((4, size), dtype=torch.int32, device=device)
        shape = (size, table_width(max_blocks))
        tables = torch.full(shape, DROPPED, dtype=torch.int32, device=device)
        no_chunks = torch.zeros(1, dtype=torch.int32, device=device)
        token_ids, positions, slots, context_lens = self._numbers
        self.rows = Rows(token_ids, positions, slots, context_lens, tables, no_chunks, size)

    def fill(self, layout: Layout) -> None:
        """Write a batch of decodes, and padding behind it.

        Tables are written as wide as the batch needs: what an earlier one left behind that, or in
        the rows of padding, lies behind every context.
        """
        num_rows, size = layout.num_decodes, self._numbers.shape[1]
        numbers = np.zeros((4, size), np.int32)
        numbers[2] = -1
        numbers[:3, :num_rows] = layout.numbers
        numbers[3, :num_rows] = layout.context_lens
        self._numbers.copy_(torch.from_numpy(numbers))
        width = layout.block_tables.shape[1]
        self.rows.block_tables[:num_rows, :width].copy_(torch.from_numpy(layout.block_tables))


class DecodeGraphs:
    """Computes batches of decodes, each in the bucket that it fits.

    Args:
        compute: what is recorded; launches the same kernels whatever the numbers in its rows.
        most: decodes of the largest bucket.
        max_blocks: most blocks of a sequence.
        capture: how it is recorded.
    """

    def __init__(
        self,
        compute: Compute,
        most: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
    ):
        self._compute = compute
        self._sizes = bucket_sizes(most)
        self._max_blocks = max_blocks
        self._device = device
        self._capture = capture
        self._buckets: dict[int, tuple[DecodeBuffers, Replay]] = {}

    def takes(self, layout: Layout) -> bool:
        """Whether the batch is decodes alone, and not too many."""
        return not layout.num_chunks and layout.num_decodes <= self._sizes[-1]

    def run(self, layout: Layout) -> tuple[Tensor, ...]:
        """Copies of the results' rows, padding cut off: the next replay writes over the results."""
        size = self._sizes[bisect_left(self._sizes, layout.num_decodes)]
        if size in self._buckets:
            buffers, replay = self._buckets[size]
            buffers.fill(layout)
        else:
            # Filled first: what is computed on the way to a graph is then this step, once more.
            buffers = DecodeBuffers(size, self._max_blocks, self._device)
            buffers.fill(layout)
            replay = self._capture(partial(self._compute, buffers.rows))
            self._buckets[size] = buffers, replay
        return tuple(result[: layout.num_decodes].clone() for result in replay())


def call_again(compute: Replay) -> Replay:
    """A capture for where there are no graphs."""
    return compute


class CudaCapture:
    """Records CUDA graphs that share a memory pool.

    A first run, outside of the graph, compiles kernels and sets libraries up, which cannot be
    recorded. It uses the stream that records: libraries keep handles and workspaces by stream, and
    memory is shared within one. Other threads may use CUDA meanwhile, as transports of K and V do.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Replay) -> Replay:
        others = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(others)
        with torch.cuda.stream(self._stream):
            compute()
        others.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            results = compute()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return replay
