"""A worker in a Ray actor, and the driver's end of it.

In the actor a thread of its own runs the engine, so a decode step never waits for the driver. Two
calls join them:

    driver  tell(commands) ---->  actor       returns at once
            listen() ---------->              returns when there is news; the next one follows

Calls that end with an error are how the driver learns of an actor's or a node's death.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from pdlab.disagg.hosts.loop import CLOSE_S, START_S, Answer, Stop, serve
from pdlab.disagg.hosts.remote_host import Ended, Inbox, RemoteHost
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.transport.frames import Frame
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.ray_transport import RayTransport, brief
from pdlab.disagg.worker import Worker
from pdlab.requirements import require_number

PATIENCE_S = 30.0
"""How long one `listen` waits for news."""
GROUPS = {"tell": 1, "listen": 1, "deliver": 1}
"""Threads of an actor's calls."""


@dataclass(frozen=True)
class ActorOptions:
    """What Ray sets aside for a worker.

    Raises:
        ValueError: an amount is negative.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of the names that nodes were given: `ray start --resources '{"decode": 1}'`."""

    def __post_init__(self) -> None:
        for name, amount in {"CPU": 0, "GPU": 0, **self.bundle}.items():
            require_number(f"amount of {name}", amount, 0, 1e6)

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray writes it, without what is 0."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


class Home(NamedTuple):
    """Where an actor lives."""

    node_id: str
    node_address: str
    pid: int


# --- in the actor -------------------------------------------------------------------------------


class WorkerActor:
    """A worker, its loop, and the calls by which others talk to it."""

    def __init__(self, spec: WorkerSpec):
        if spec.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec.cores)  # of this thread, and those that it begins
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self._pipe = _Pipe()
        worker = make_worker(_at_home(spec))
        self._transport = worker.transport
        threading.Thread(target=self._serve, args=(worker,), name="engine", daemon=True).start()

    def _serve(self, worker: Worker) -> None:
        reason = "it was stopped"
        try:
            serve(worker, self._pipe)
        except BaseException:
            reason = traceback.format_exc()
        self._pipe.send(Ended(reason))

    @ray.method(concurrency_group="tell")
    def tell(self, number: int, message: Any) -> None:
        """Give the worker a message; those of lower numbers go first."""
        self._pipe.put(number, message)

    @ray.method(concurrency_group="listen")
    def listen(self, patience_s: float) -> list[Any]:
        """What the worker has said, once it has said anything."""
        return self._pipe.take(patience_s)

    @ray.method(concurrency_group="deliver")
    def deliver(
        self, sender: Address, number: int, frame: Frame, payload: np.ndarray | None
    ) -> None:
        assert isinstance(self._transport, RayTransport)
        self._transport.take_delivery(sender, number, frame, payload)

    @ray.method(concurrency_group="deliver")
    def ping(self) -> None: ...

    def home(self) -> Home:
        context = ray.get_runtime_context()
        return Home(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())


class _Pipe:
    """What `serve` has for a pipe: the actor's calls put in and take out.

    What is said is pickled later, by Ray: only it can pickle references to its objects.
    """

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._early: dict[int, Any] = {}
        self._num_put = 0
        self._said: list[Any] = []
        self._change = threading.Condition()
        self.fileno = self._inbox.fileno
        self.receive = self._inbox.receive

    def send(self, message: Any) -> None:
        if isinstance(message, Answer):
            message = deepcopy(message)  # a trace may grow before it is pickled
        with self._change:
            self._said.append(message)
            self._change.notify()

    def drain(self) -> None: ...

    def put(self, number: int, message: Any) -> None:
        self._early[number] = message
        while self._num_put in self._early:
            self._inbox.put(self._early.pop(self._num_put))
            self._num_put += 1

    def take(self, patience_s: float) -> list[Any]:
        with self._change:
            self._change.wait_for(lambda: self._said, patience_s)
            said, self._said = self._said, []
            return said


def _at_home(spec: WorkerSpec) -> WorkerSpec:
    """A worker whose TCP sockets listen on its node's address."""
    told = spec.transport.options
    if told.get("family") != "tcp" or "host" in told:
        return spec
    told = {**told, "host": ray.util.get_node_ip_address()}
    return replace(spec, transport=replace(spec.transport, options=told))


# --- in the driver ------------------------------------------------------------------------------


class RayHost(RemoteHost):
    """A worker in an actor. It begins at once; `hello` waits for it.

    Args:
        options: what Ray sets aside for it.
        place: where it goes, in Ray's words.
        prefix: of its name, which no other actor of Ray may have.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        options: ActorOptions,
        place: Any = None,
        prefix: str = "pdlab",
        *,
        start_timeout_s: float = START_S,
    ):
        remote: Any = ray.remote  # whose types know no concurrency groups
        # Started again, it would be a worker that knows of nothing: the router does better.
        actors = remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(WorkerActor)
        self.actor = actors.options(
            name=f"{prefix}-{spec.name}",
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            resources=dict(options.resources),
            scheduling_strategy=place,
        ).remote(spec)
        self._calls = _Calls(self.actor)
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
        self._calls.was_killed = True
        ray.kill(self.actor, no_restart=True)

    def close(self) -> None:
        """End it in good order, or, if it does not obey, by force."""
        if ray.is_initialized():
            if not self._calls.is_over:
                self._calls.send(Stop())
                self._calls.await_end(CLOSE_S)
            # One that could not be reached for a moment was given up, and may still live.
            ray.kill(self.actor, no_restart=True)
        self._calls.close()


class _Calls:
    """A channel of calls. One `listen` is under way whenever the driver has nothing to read."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._inbox = Inbox()
        self._lock = threading.RLock()  # what was heard is put in before the next call can return
        self._num_sent = 0
        self._is_listening = False
        self.is_over = False
        self.was_killed = False
        self.fileno = self._inbox.fileno
        self.close = self._inbox.close
        self._listen()

    def send(self, message: Any) -> None:
        self._actor.tell.remote(self._num_sent, message)
        self._num_sent += 1

    def receive(self) -> list[Any]:
        with self._lock:
            messages = self._inbox.receive()
            self._listen()
            return messages

    def await_end(self, timeout_s: float) -> None:
        """Hear it out."""
        things: list[Any] = [self]
        end_s = time.monotonic() + timeout_s
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                self.receive()
                wait(things, left_s)
        except EOFError:
            pass

    def _listen(self) -> None:
        if not self._is_listening and not self.is_over:
            self._is_listening = True
            self._actor.listen.remote(PATIENCE_S).future().add_done_callback(self._heard)

    def _heard(self, future: Future) -> None:
        """A call has returned; this is a thread of Ray's."""
        error = future.exception()
        messages = [] if error is not None else future.result()
        reason = None if error is None else brief(error)
        if messages and isinstance(messages[-1], Ended):
            reason = messages.pop().reason
        with self._lock:
            self.is_over = reason is not None
            self._is_listening = False
            self._inbox.put(*messages)
            if reason is not None:
                self._inbox.end("it was killed" if self.was_killed else reason)
