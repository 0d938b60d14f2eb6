"""Workers as Ray actors: on this machine, or wherever a Ray cluster has room for them.

The router stays in the driver. In each actor a thread of its own runs the engine, so a decode step
never waits for the driver. Two calls join them:

    driver  tell(commands) ---->  actor       returns at once
            listen() ---------->              returns when there is news; the next one follows

Calls that end with an error are how the driver learns of an actor's or a node's death. K and V go
from actor to actor by Ray's object store, by sockets or by NIXL: as the specs say.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.util.placement_group import (
    VALID_PLACEMENT_GROUP_STRATEGIES,
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.loop import CLOSE_S, START_S, Stop, serve
from pdlab.disagg.hosts.remote_host import Ended, Inbox, RemoteHost
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.transport.frames import Frame
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.ray_transport import RayTransport, brief
from pdlab.disagg.worker import Worker
from pdlab.models import Model
from pdlab.requirements import require_choice, require_number

STRATEGIES = tuple(sorted(VALID_PLACEMENT_GROUP_STRATEGIES))
PATIENCE_S = 30.0
"""How long one `listen` waits for news."""
OBJECT_STORE_BYTES = 2**30
"""Of a Ray that is started here. Memory is taken as it is used."""


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


def ray_cluster(
    model: Model,
    specs: Sequence[WorkerSpec],
    router: RouterConfig | None = None,
    *,
    address: str | None = None,
    options: ActorOptions | Mapping[str, ActorOptions] | None = None,
    strategy: str = "PACK",
    seed: int | None = None,
    start_timeout_s: float = START_S,
) -> RayCluster:
    """Start a worker in an actor for each spec, and a cluster that serves with them.

    Leaving the cluster ends the actors, and this process's Ray if it was begun here.

    Args:
        model: for the router, which needs no weights (`pdlab.models.load_outline`); the actors load
            their own, by the specs' name for it, where they are.
        address: of a Ray cluster, "auto" for the one of this machine; None starts a Ray here, for
            this process alone. A Ray that this process uses already is used in any case.
        options: what each actor is given, for all or by worker; one CPU if nothing is said.
        strategy: how the actors are spread over nodes: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD.
        seed: as for `Cluster`.
        start_timeout_s: for Ray to find room, and for a worker to begin.

    Raises:
        ValueError: Ray has no room for the actors, or an argument is out of range.
        ConnectionError: there is no Ray cluster at that address.
        RuntimeError: Ray does not start here.
        WorkerDied: one did not begin; the others are ended.
    """
    require_choice("strategy", strategy, STRATEGIES)
    shares = _shares(specs, options)
    own = None if ray.is_initialized() else _Ray(address, shares)
    group: PlacementGroup | None = None
    hosts: list[RayHost] = []
    try:
        group = _placed(shares, strategy, start_timeout_s)
        prefix = f"pdlab-{secrets.token_hex(4)}"
        has_others = sum(node["Alive"] for node in ray.nodes()) > 1
        for index, (spec, share) in enumerate(zip(specs, shares, strict=True)):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            spec = _reachable(spec, has_others)
            hosts.append(RayHost(spec, share, place, prefix, start_timeout_s=start_timeout_s))
        pairs = [(host, spec.role) for host, spec in zip(hosts, specs, strict=True)]
        return RayCluster(model, pairs, router, group=group, own_ray=own, seed=seed)
    except BaseException:
        for host in hosts:
            host.close()
        _leave_ray(group, own)
        raise


class RayCluster(Cluster):
    """A cluster of actors. See `ray_cluster`.

    Args:
        group: what the actors were placed with; removed at the end.
        own_ray: what is ended with it.
    """

    def __init__(self, *args: Any, group: PlacementGroup, own_ray: _Ray | None, **others: Any):
        super().__init__(*args, **others)
        self._group: PlacementGroup | None = group
        self._own_ray = own_ray

    def close(self) -> None:
        super().close()
        group, self._group = self._group, None
        if group is not None:
            _leave_ray(group, self._own_ray)


# --- Ray itself ---------------------------------------------------------------------------------


class _Ray:
    """This process's Ray, begun here: a cluster that is joined, or one of its own.

    Args:
        shares: what a Ray of its own must have room for.

    Raises:
        ConnectionError: there is no Ray cluster at that address.
        RuntimeError: Ray's processes did not begin in time.
    """

    def __init__(self, address: str | None, shares: Sequence[ActorOptions]):
        self._aside: tempfile.TemporaryDirectory | None = None
        handler = signal.getsignal(signal.SIGTERM)
        if address is None:
            self._begin(shares)
        else:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it for itself

    def _begin(self, shares: Sequence[ActorOptions]) -> None:
        self._aside = _aside()
        own = {name: os.environ.get(name) for name in _environment(self._aside.name)}
        os.environ.update(_environment(self._aside.name))
        try:
            for is_last_try in (False, True):
                try:
                    ray.init("local", **_own_cluster(shares))
                    return
                except Exception as error:  # Ray has no class of its own for this
                    ray.shutdown()
                    if is_last_try:
                        self.end()
                        raise RuntimeError(f"Ray did not start on this machine: {error}") from error
                # The first time, its processes may have to compile what they import.
        finally:
            for name, value in own.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def end(self) -> None:
        ray.shutdown()
        if self._aside is not None:
            self._aside.cleanup()


def _own_cluster(shares: Sequence[ActorOptions]) -> dict[str, Any]:
    """What `ray.init` is told of a Ray that has room for these."""
    totals: dict[str, float] = {}
    for share in shares:
        for name, amount in share.bundle.items():
            totals[name] = totals.get(name, 0) + amount
    totals.pop("GPU", None)  # Ray finds those that are there
    return {
        "num_cpus": max(os.cpu_count() or 1, math.ceil(totals.pop("CPU", 0))),
        "resources": totals,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }


def _environment(aside: str) -> dict[str, str]:
    """For Ray's own processes, which the actors descend from."""
    paths = [aside, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_MODE": "disabled",  # otherwise it leaves a token in the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _aside() -> tempfile.TemporaryDirectory:
    """A directory for the path of Ray's processes, that hides a package from them.

    Each of the ten imports jsonschema, and that, where it is installed (JupyterLab brings it),
    `rfc3987_syntax`, which takes seconds to build a grammar of web addresses. Ray's daemons die if
    they have not begun after 15 s.
    """
    directory = tempfile.TemporaryDirectory(prefix="pdlab-ray-")
    hidden = Path(directory.name, "rfc3987_syntax.py")
    hidden.write_text('raise ImportError("hidden from the processes of Ray")\n')
    return directory


def _leave_ray(group: PlacementGroup | None, own: _Ray | None) -> None:
    if group is not None and ray.is_initialized():
        remove_placement_group(group)
    if own is not None:
        own.end()


def _shares(
    specs: Sequence[WorkerSpec], options: ActorOptions | Mapping[str, ActorOptions] | None
) -> list[ActorOptions]:
    """What each worker is given, in the specs' order."""
    names = [spec.name for spec in specs]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"specs={names} must be at least one worker, each with another name")
    for spec in specs:
        if spec.transport.kind not in ("ray", "socket", "nixl"):
            kind = spec.transport.kind
            raise ValueError(f"transport of {spec.name}: kind {kind!r} does not join Ray's actors")
    if isinstance(options, Mapping):
        if unknown := set(options) - set(names):
            raise ValueError(f"options names {', '.join(sorted(unknown))}; there are {names}")
        return [options.get(name, ActorOptions()) for name in names]
    return [options or ActorOptions()] * len(names)


def _placed(shares: Sequence[ActorOptions], strategy: str, timeout_s: float) -> PlacementGroup:
    """Room for all actors at once.

    Raises:
        ValueError: there is none.
    """
    bundles = [share.bundle or {"memory": 1} for share in shares]  # Ray wants something of each
    group = placement_group(bundles, strategy=strategy)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        known = {"CPU", "GPU", *(name for bundle in bundles for name in bundle)}
        free = {name: ray.available_resources().get(name, 0) for name in sorted(known)}
        raise ValueError(
            f"options: Ray found no room for {bundles} ({strategy}) within {timeout_s:g} s; "
            f"it has {free}"
        )
    return group


def _reachable(spec: WorkerSpec, has_others: bool) -> WorkerSpec:
    """A worker whose sockets can be reached from other nodes, if there are any."""
    if spec.transport.kind == "ray" or not has_others or "family" in spec.transport.options:
        return spec
    told = {**spec.transport.options, "family": "tcp"}
    return replace(spec, transport=replace(spec.transport, options=told))


# --- in the actor -------------------------------------------------------------------------------


class _WorkerActor:
    """A worker, its loop, and the calls by which others talk to it."""

    def __init__(self, spec: WorkerSpec):
        if spec.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, spec.cores)  # of this thread, and those that it begins
        if threads := spec.num_threads or len(spec.cores or ()):
            torch.set_num_threads(threads)
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


GROUPS = {"tell": 1, "listen": 1, "deliver": 1}


class _Pipe:
    """What `serve` has for a pipe: the actor's calls put in and take out."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._early: dict[int, Any] = {}
        self._num_put = 0
        self._said: list[Any] = []
        self._change = threading.Condition()
        self.fileno = self._inbox.fileno
        self.receive = self._inbox.receive

    def send(self, message: Any) -> None:
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
        actors = remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(_WorkerActor)
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
        self.is_over = reason is not None
        self._is_listening = False
        self._inbox.put(*messages)
        if reason is not None:
            self._inbox.end("it was killed" if self.was_killed else reason)
