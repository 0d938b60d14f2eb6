"""Ranks in processes of this machine, each a fresh interpreter with a torch of its own.

What they compute travels between them by gloo; what they are told, and what they answer, over a
socket pair to the engine's process. Each loads the weights by the model's name and keeps its share.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch

from pdlab.child import Child, SocketChannel, be_child
from pdlab.engine.config import EngineConfig
from pdlab.machine import deal, physical_cores
from pdlab.models import Model
from pdlab.models.loading import weights_by_name
from pdlab.models.shard_plan import ShardPlan
from pdlab.parallel.gloo import DistributedWires
from pdlab.parallel.group import RankLost, serve
from pdlab.parallel.rank import Rank

LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True)
class RankSpec:
    """All that a rank's process is told at first."""

    number: int
    plan: ShardPlan
    model: Model
    """Without weights, and without what is not needed to make them."""
    config: EngineConfig
    meeting: str
    """Where the ranks meet."""
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
    wires = DistributedWires(spec.number, spec.plan.num_ranks, spec.meeting)
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

    def __init__(self, spec: RankSpec, cores: Sequence[int], meeting: tempfile.TemporaryDirectory):
        self._meeting = meeting  # its files are removed when the last line is gone
        environment = {"OMP_NUM_THREADS": str(spec.num_threads)}
        if sys.platform in LOOPBACK:  # a name that does not resolve must not keep ranks apart
            environment["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
        self._child = Child(
            f"rank {spec.number}", __name__, spec, cores=cores, environment=environment
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
    meeting = tempfile.TemporaryDirectory(prefix="pdlab-ranks-")
    shares = deal(plan.num_ranks, physical_cores())
    lines: list[ProcessLine] = []
    try:
        for number, cores in enumerate(shares):
            spec = RankSpec(
                number,
                plan,
                model.outline,
                config,
                Path(meeting.name, "store").as_uri(),
                config.rank_threads or len(cores),
            )
            cpus = [cpu for core in cores for cpu in core]
            lines.append(ProcessLine(spec, cpus, meeting))
    except BaseException:
        for line in lines:
            line.close(force=True)
        raise
    return lines
