"""Ranks in processes of this machine, each a fresh interpreter with a torch of its own.

Each pair of ranks has a socket between them, and each rank one to the engine's process, for what it
is told and what it answers. Each loads the weights by the model's name and keeps its share.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch

from pdlab.child import Child, SocketChannel, be_child
from pdlab.engine.config import EngineConfig
from pdlab.machine import deal, physical_cores
from pdlab.models import Model
from pdlab.models.loading import weights_by_name
from pdlab.models.shard_plan import ShardPlan
from pdlab.parallel.group import RankLost, serve
from pdlab.parallel.rank import Rank
from pdlab.parallel.sockets import SocketWires


@dataclass(frozen=True)
class RankSpec:
    """All that a rank's process is told at first."""

    number: int
    plan: ShardPlan
    model: Model
    """Without weights, and without what is not needed to make them."""
    config: EngineConfig
    others: dict[int, int]
    """By rank, the descriptor of the socket to it."""
    num_threads: int


# --- in the rank's process ----------------------------------------------------------------------


def main(descriptor: int) -> NoReturn:
    """A rank's process; the spec is the first thing it hears."""
    be_child(descriptor, _work)


def _work(channel: SocketChannel, messages: list[Any]) -> None:
    spec, *others = messages
    torch.set_num_threads(spec.num_threads)
    serve(partial(_make, spec), _messages(channel, others), _Replies(channel))


def _make(spec: RankSpec) -> Rank:
    wires = SocketWires({rank: socket.socket(fileno=fd) for rank, fd in spec.others.items()})
    weights = weights_by_name(spec.model.name, spec.model.dtype, spec.model.device)
    return Rank(spec.plan, spec.number, spec.model, weights, spec.config, wires)


def _messages(channel: SocketChannel, first: list[Any]) -> Iterator[Any]:
    """What is said, until the other end is gone."""
    yield from first
    try:
        while True:
            yield from channel.receive()
            wait([channel.fileno()])
    except EOFError:
        return


class _Replies:
    def __init__(self, channel: SocketChannel):
        self._channel = channel

    def send(self, message: tuple[int | None, Any]) -> None:
        self._channel.send(message)
        self._channel.drain()


# --- in the engine's process --------------------------------------------------------------------


class ProcessLine:
    """A rank in a process; see `Line`."""

    def __init__(self, spec: RankSpec, cores: Sequence[int]):
        self._child = Child(
            f"rank {spec.number}",
            __name__,
            spec,
            cores=cores,
            environment={"OMP_NUM_THREADS": str(spec.num_threads)},
            descriptors=list(spec.others.values()),
        )

    @property
    def process_id(self) -> int:
        return self._child.process.pid

    def send(self, message: Any) -> None:
        self._child.channel.send(message)

    def receive(self, patience_s: float) -> list[Any]:
        channel = self._child.channel
        try:
            if messages := channel.receive():
                return messages
            if patience_s:
                wait([channel.fileno()], patience_s)
            return channel.receive()
        except EOFError:
            raise RankLost(self._child.reason()) from None

    def close(self, force: bool) -> None:
        if force and not self._child.is_closed:
            self._child.kill()
        self._child.close()


def process_lines(model: Model, config: EngineConfig) -> list[ProcessLine]:
    """A process for each rank of a resolved configuration, on cores of its own if there are
    enough."""
    plan = ShardPlan(model.config, config.tensor_parallel, config.pipeline_parallel)
    lines: list[ProcessLine] = []
    with ExitStack() as ours, ExitStack() as on_error:
        ends = _mesh(plan.num_ranks, ours)
        for number, cores in enumerate(deal(plan.num_ranks, physical_cores())):
            num_threads = config.rank_threads or len(cores)
            spec = RankSpec(number, plan, model.outline, config, ends[number], num_threads)
            lines.append(ProcessLine(spec, [cpu for core in cores for cpu in core]))
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
