"""Wires of torch.distributed: gloo between processors, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlab.child.gloo import break_off, gloo_group, reason_of
from pdlab.parallel.wires import PATIENCE_S


class DistributedWires:
    """Point-to-point messages between the ranks of one engine; waits until all have met.

    Between GPUs each direction has a communicator of its own: NCCL serves those who share one in
    order, and two ranks that send before they receive would wait for each other. What NCCL does has
    been run nowhere yet: no machine with two GPUs was at hand.

    Args:
        store: where these ranks meet, and no others.
        host: the address whose interface this rank uses.
        gpu: that this rank has for itself; None sends tensors of a GPU through the processor.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        *,
        host: str = "127.0.0.1",
        gpu: torch.device | None = None,
    ):
        self._store = store
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._gpu = gpu
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self._lanes: dict[tuple[int, int], Any] = {}
        self._leaving: list[tuple[dist.Work, Tensor]] = []
        self._gloo: Any = gloo_group(
            dist.PrefixStore("gloo", store), rank, num_ranks, host, timedelta(seconds=PATIENCE_S)
        )

    def send(self, target: int, x: Tensor) -> None:
        with _lost(f"rank {target}"):
            if self._goes_by_nccl(x):
                work = self._lane(self._rank, target).send([x], 1, 0)
            else:
                x = x.cpu()
                work = self._gloo.send([x], target, 0)
        self._leaving.append((work, x))

    def receive(self, source: int, into: Tensor) -> None:
        with _lost(f"rank {source}"):
            if self._goes_by_nccl(into):
                self._lane(source, self._rank).recv([into], 0, 0).wait()
                self._finish()
                return
            on_processor = torch.empty_like(into, device="cpu") if into.is_cuda else into
            self._gloo.recv([on_processor], source, 0).wait()
        if on_processor is not into:
            into.copy_(on_processor)

    def flush(self) -> None:
        with _lost("a rank"):
            for work, _ in self._leaving:
                work.wait()
            self._finish()
        self._leaving.clear()

    def hang_up(self) -> None:
        """End what is waited for, from another thread. No more can be sent or received."""
        for other in self._others:
            break_off(self._gloo, other)

    def close(self) -> None:
        self._leaving.clear()
        self._lanes.clear()
        del self._gloo

    def _goes_by_nccl(self, x: Tensor) -> bool:
        return x.is_cuda and self._gpu is not None

    def _lane(self, source: int, target: int) -> Any:
        """Of the messages of one rank to another: two ranks of its own."""
        if (source, target) not in self._lanes:
            nccl: Any = dist.ProcessGroupNCCL
            store = dist.PrefixStore(f"nccl/{source}-{target}", self._store)
            me = int(self._rank == target)
            self._lanes[source, target] = nccl(store, me, 2, nccl.Options())
        return self._lanes[source, target]

    def _finish(self) -> None:
        """NCCL's `wait` only queues on the stream; this is over, and its time told, when it is."""
        if self._gpu is not None:
            torch.cuda.current_stream(self._gpu).synchronize()


@contextmanager
def _lost(who: str) -> Iterator[None]:
    """Says it as wires do."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"{who} is gone: {reason_of(error)}") from error
