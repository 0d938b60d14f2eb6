"""Ranks in processes of this machine, each a fresh interpreter with a torch of its own.

Each pair of ranks has a socket between them, and each rank one to the engine's process, for what it
is told and what it answers. Each loads the weights by the model's name and keeps its share.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NoReturn

import torch

from pdlab.child import Child, SocketChannel, be_child
from pdlab.engine.config import EngineConfig
from pdlab.machine import deal, physical_cores
from pdlab.models import Model
from pdlab.parallel.hosts.lines import ChannelLine, RankSpec, be_rank, specs_of
from pdlab.parallel.rank import Rank
from pdlab.parallel.sockets import SocketWires


@dataclass(frozen=True)
class _Told:
    """The first message to a rank's process."""

    spec: RankSpec
    others: dict[int, int]
    """By rank, the descriptor of the socket to it."""
    num_threads: int


# --- in the rank's process ----------------------------------------------------------------------


def main(descriptor: int) -> NoReturn:
    """A rank's process."""
    be_child(descriptor, _work)


def _work(channel: SocketChannel, messages: list[Any]) -> None:
    told, *others = messages
    torch.set_num_threads(told.num_threads)

    def make() -> Rank:
        ends = {rank: socket.socket(fileno=descriptor) for rank, descriptor in told.others.items()}
        spec: RankSpec = told.spec
        return spec.make(SocketWires(ends))

    be_rank(make, channel, others)


# --- in the engine's process --------------------------------------------------------------------


class ProcessLine(ChannelLine):
    """A rank in a process; see `Line`."""

    def __init__(self, told: _Told, cores: Sequence[int]):
        self._child = Child(
            f"rank {told.spec.number}",
            __name__,
            told,
            cores=cores,
            environment={"OMP_NUM_THREADS": str(told.num_threads)},
            descriptors=list(told.others.values()),
        )
        super().__init__(self._child.channel)

    @property
    def process_id(self) -> int:
        return self._child.process.pid

    def close(self, force: bool) -> None:
        if force and not self._child.is_closed:
            self._child.kill()
        self._child.close()

    def _wait(self, patience_s: float) -> None:
        self._child.channel.wait(patience_s)

    def _reason(self, end: EOFError) -> str:
        return self._child.reason()


def process_lines(model: Model, config: EngineConfig) -> list[ProcessLine]:
    """A process for each rank of a resolved configuration, on cores of its own if there are
    enough."""
    specs = specs_of(model, config)
    lines: list[ProcessLine] = []
    with ExitStack() as ours, ExitStack() as on_error:
        ends = _mesh(len(specs), ours)
        shares = deal(len(specs), physical_cores())
        for spec, own, cores in zip(specs, ends, shares, strict=True):
            told = _Told(spec.on_gpu(spec.number), own, config.rank_threads or len(cores))
            lines.append(ProcessLine(told, [cpu for core in cores for cpu in core]))
            on_error.callback(lines[-1].close, force=True)
        on_error.pop_all()
    return lines


def _mesh(num_ranks: int, owner: ExitStack) -> list[dict[int, int]]:
    """A socket between each pair of ranks; by rank, its ends by the other rank.

    Args:
        owner: closes them in this process, when the ranks have them.
    """
    ends: list[dict[int, int]] = [{} for _ in range(num_ranks)]
    for first, second in combinations(range(num_ranks), 2):
        pair = socket.socketpair()
        for mine, end, other in zip((first, second), pair, (second, first), strict=True):
            owner.enter_context(end)
            ends[mine][other] = end.fileno()
    return ends
