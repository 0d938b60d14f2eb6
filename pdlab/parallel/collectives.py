"""What the ranks of a parallel engine exchange in a step, counted as it is sent.

Sums are made in rank order on whoever makes them, so a row's sum depends neither on the rows beside
it nor on the way it was sent; a ring, where each part of a tensor is summed in another order, does
not promise that. Two ways are had, as in the custom all-reduce of vLLM and TensorRT-LLM:

one-shot  each rank sends all it has to each other, and sums             (n - 1) x size, one round
two-shot  each rank sums a part of the columns, and sends them around    2 (n - 1) / n x size, two
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from pdlab.costmodel import is_one_shot
from pdlab.models.shard_plan import Shard, ShardPlan, cut
from pdlab.parallel.wires import Wires
from pdlab.trace import CollectiveKind, CollectivePart, CollectiveRecord


class Communicator:
    """One rank's part in what is exchanged. `records` has what it sent since `begin`."""

    def __init__(self, plan: ShardPlan, shard: Shard, wires: Wires):
        self.plan = plan
        self.shard = shard
        self.micro_batch = 0
        self.records: list[CollectiveRecord] = []
        self._wires = wires
        first = shard.stage * plan.tensor_parallel
        self._stage = range(first, first + plan.tensor_parallel)
        self._others = [rank for rank in self._stage if rank != shard.rank]

    def begin(self) -> None:
        """A step: forget what was recorded before."""
        self.records, self.micro_batch = [], 0

    def all_reduce(self, part: CollectivePart, layer: int | None, x: Tensor) -> Tensor:
        """The sum of what the ranks of this stage have, [num_rows, num_columns] on each."""
        x = x.contiguous()
        method = self._one_shot if is_one_shot(len(self._stage), x.nbytes) else self._two_shot
        return self._recorded("all_reduce", part, layer, x, method)

    def gather(self, part: CollectivePart, x: Tensor) -> Tensor | None:
        """On the stage's first rank the columns of all, side by side; None on the others.

        Args:
            x: [num_rows, this rank's part of the vocabulary].
        """
        gathered: list[Tensor] = []

        def to_first(x: Tensor) -> tuple[Tensor, int]:
            if self.shard.place:
                self._wires.send(self._stage[0], x)
                self._wires.flush()
                return x, x.nbytes
            sizes = map(len, cut(self.plan.config.vocab_size, len(self._stage)))
            others = zip(self._stage, sizes, strict=True)
            gathered.append(x)
            gathered.extend(self._receive(r, x.new_empty(len(x), n)) for r, n in list(others)[1:])
            return x, 0

        self._recorded("gather", part, None, x.contiguous(), to_first)
        return torch.cat(gathered, dim=1) if gathered else None

    def send_on(self, x: Tensor) -> None:
        """Send hidden states to the next stage, [num_tokens, hidden_size]."""

        def to_next(x: Tensor) -> tuple[Tensor, int]:
            self._wires.send(self.shard.rank + len(self._stage), x)
            return x, x.nbytes

        self._recorded("send", "hidden", None, x.contiguous(), to_next)

    def receive_on(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The hidden states that the stage before sent."""
        x = torch.empty(num_tokens, self.plan.config.hidden_size, dtype=dtype, device=device)
        return self._receive(self.shard.rank - len(self._stage), x)

    def flush(self) -> None:
        """Wait until all has left."""
        self._wires.flush()

    def _one_shot(self, x: Tensor) -> tuple[Tensor, int]:
        for rank in self._others:
            self._wires.send(rank, x)
        parts = {rank: self._receive(rank, torch.empty_like(x)) for rank in self._others}
        parts[self.shard.rank] = x
        self._wires.flush()
        return self._sum(parts), len(self._others) * x.nbytes

    def _two_shot(self, x: Tensor) -> tuple[Tensor, int]:
        columns = dict(zip(self._stage, cut(x.shape[1], len(self._stage)), strict=True))
        shares = {rank: x[:, c.start : c.stop].contiguous() for rank, c in columns.items()}
        mine = shares[self.shard.rank]
        for rank in self._others:
            self._wires.send(rank, shares[rank])
        parts = {rank: self._receive(rank, torch.empty_like(mine)) for rank in self._others}
        whole = {self.shard.rank: self._sum(parts | {self.shard.rank: mine})}
        for rank in self._others:
            self._wires.send(rank, whole[self.shard.rank])
        for rank in self._others:
            whole[rank] = self._receive(rank, torch.empty_like(shares[rank]))
        self._wires.flush()
        sent = x.nbytes - mine.nbytes + len(self._others) * mine.nbytes
        return torch.cat([whole[rank] for rank in self._stage], dim=1), sent

    def _sum(self, parts: dict[int, Tensor]) -> Tensor:
        first, *others = (parts[rank] for rank in self._stage)
        total = first.clone()
        for part in others:
            total += part
        return total

    def _receive(self, source: int, into: Tensor) -> Tensor:
        self._wires.receive(source, into)
        return into

    def _recorded(
        self,
        kind: CollectiveKind,
        part: CollectivePart,
        layer: int | None,
        x: Tensor,
        exchange: Callable[[Tensor], tuple[Tensor, int]],
    ) -> Tensor:
        """Do it, and note how long it took; `exchange` tells how many bytes it sent."""
        start_s = time.perf_counter()
        result, sent = exchange(x)
        wall_s = time.perf_counter() - start_s
        self.records.append(
            CollectiveRecord(
                kind,
                part,
                self.shard.rank,
                layer,
                self.micro_batch,
                x.nbytes,
                sent,
                start_s,
                wall_s,
            )
        )
        return result
