"""A worker in a Ray actor, and the driver's end of it.

In the actor a thread of its own runs the engine, so a decode step never waits for the driver.
"""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from pdlab.child.ray_actor import GROUPS, ActorCalls, ActorPipe, Home, TalkingActor
from pdlab.child.ray_room import RayRoom
from pdlab.disagg.hosts.loop import CLOSE_S, START_S, Answer, Stop, serve
from pdlab.disagg.hosts.remote_host import RemoteHost
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.transport.frames import Frame
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.ray_transport import RayTransport


class WorkerActor(TalkingActor):
    """A worker, its loop, and the calls by which others talk to it."""

    def __init__(self, spec: WorkerSpec):
        super().__init__(_Pipe())
        if spec.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec.cores)  # of this thread, and those that it begins
        if spec.threads:
            torch.set_num_threads(spec.threads)
        worker = make_worker(_at_home(spec))
        self._transport = worker.transport
        self.begin(partial(serve, worker, self.pipe))

    @ray.method(concurrency_group="deliver")
    def deliver(
        self, sender: Address, number: int, frame: Frame, payload: np.ndarray | None
    ) -> None:
        assert isinstance(self._transport, RayTransport)
        self._transport.take_delivery(sender, number, frame, payload)

    @ray.method(concurrency_group="deliver")
    def ping(self) -> None: ...


class _Pipe(ActorPipe):
    def send(self, message: Any) -> None:
        # a trace may grow before it is pickled
        super().send(deepcopy(message) if isinstance(message, Answer) else message)


def _at_home(spec: WorkerSpec) -> WorkerSpec:
    """A worker whose TCP sockets listen on its node's address."""
    told = spec.transport.options
    if told.get("family") != "tcp" or "host" in told:
        return spec
    told = {**told, "host": ray.util.get_node_ip_address()}
    return replace(spec, transport=replace(spec.transport, options=told))


class RayHost(RemoteHost):
    """A worker in an actor. It begins at once; `hello` waits for it.

    Args:
        room, index: where it goes.
        prefix: of its name, which no other actor of Ray may have.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        room: RayRoom,
        index: int,
        prefix: str = "pdlab",
        *,
        start_timeout_s: float = START_S,
    ):
        self.actor = room.begin_actor(
            index, WorkerActor, spec, name=f"{prefix}-{spec.name}", groups=GROUPS | {"deliver": 1}
        )
        self._calls = ActorCalls(self.actor)
        self._home: Home | None = None
        super().__init__(spec.name, self._calls, start_timeout_s=start_timeout_s)

    @property
    def home(self) -> Home:
        """Where it lives; waits until it does."""
        if self._home is None:
            _ = self.hello
            self._home = Home(*ray.get(self.actor.home.remote()))
        return self._home

    @property
    def clock_offset_s(self) -> float:
        if self._clock_offset_s is None and self._shares_machine():
            self._clock_offset_s = 0.0
        return super().clock_offset_s

    def _shares_machine(self) -> bool:
        """Processes of one machine have one clock: CLOCK_MONOTONIC."""
        return self.home.node_id == ray.get_runtime_context().get_node_id()

    def kill(self) -> None:
        """End its process at once."""
        self._calls.kill()

    def close(self) -> None:
        """End it in good order, or, if it does not obey, by force."""
        if ray.is_initialized():
            self._calls.send(Stop())
        self._calls.close(CLOSE_S)
