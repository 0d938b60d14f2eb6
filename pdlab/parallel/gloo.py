"""Wires of torch.distributed: gloo between processors, NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from pdlab.parallel.wires import PATIENCE_S


class DistributedWires:
    """Point-to-point messages of the process's default group. Joins it; `close` leaves it.

    Args:
        init_method: where the ranks meet, as `torch.distributed.init_process_group` has it.
        backend: `gloo` or `nccl`.
    """

    def __init__(self, rank: int, num_ranks: int, init_method: str, backend: str = "gloo"):
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        self._leaving: list[tuple[dist.Work, Tensor]] = []

    def send(self, target: int, x: Tensor) -> None:
        work = dist.isend(x, target)
        assert work is not None
        self._leaving.append((work, x))

    def receive(self, source: int, into: Tensor) -> None:
        try:
            dist.recv(into, source)
        except RuntimeError as error:
            said = str(error).partition(" This is typically")[0]  # gloo gives advice too
            raise ConnectionError(f"rank {source} cannot be heard: {said}") from error

    def flush(self) -> None:
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()

    def close(self) -> None:
        dist.destroy_process_group()
