"""Workers in processes of their own, on cores of their own.

Router and worker talk over a socket pair (see `pdlab.child`). A router never waits for a worker's
step: what a worker has not read yet waits in the router's buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from pdlab.child import Child, SocketChannel, be_child
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.control import RoleController
from pdlab.disagg.hosts.host import WorkerDied, closed_on_error
from pdlab.disagg.hosts.loop import START_S, Stop, serve
from pdlab.disagg.hosts.remote_host import RemoteHost
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.router import Router, RouterConfig
from pdlab.models import Model


def main(descriptor: int) -> NoReturn:
    """A worker's process; the spec is the first thing it hears."""
    be_child(descriptor, _work)


def _work(channel: SocketChannel, messages: list[Any]) -> None:
    spec, *others = messages
    if others:  # nobody is told more before it has said hello, except to stop
        return
    if spec.threads:
        import torch

        torch.set_num_threads(spec.threads)
    serve(make_worker(spec), channel)


class ProcessHost(RemoteHost):
    """A worker in a process of its own, on this machine.

    It begins at once; `hello` waits for it. So make all hosts before asking any, or let
    `start_processes` do it.

    Args:
        start_timeout_s: how long it may take to begin, loading its model included.

    Raises:
        ValueError: the transport works in one process only, a core is not ours to use, or the spec
            holds what cannot be pickled.
    """

    def __init__(self, spec: WorkerSpec, *, start_timeout_s: float = START_S):
        if spec.transport.kind == "in-process":
            raise ValueError(
                f"transport of {spec.name}: kind 'in-process' does not leave a process"
            )
        self._child = Child(
            spec.name,
            __name__,
            spec,
            cores=spec.cores,
            environment={"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else None,
        )
        # On Linux all processes of a machine have one clock: CLOCK_MONOTONIC.
        super().__init__(
            spec.name,
            self._child.channel,
            start_timeout_s=start_timeout_s,
            shares_clock=sys.platform == "linux",
        )
        self.spec = spec
        self.process = self._child.process

    def kill(self) -> None:
        """End it with SIGKILL. What it said before is still heard."""
        self._child.kill()

    def close(self) -> None:
        """End it in good order, or, if it does not obey, by force. Closing again is nothing."""
        if not self._child.is_closed:
            self.channel.send(Stop())
            self._child.close()

    def _listen(self) -> None:
        if self._child.is_closed:
            raise WorkerDied(self.name, "it was closed")
        try:
            super()._listen()
        except WorkerDied:
            raise WorkerDied(self.name, self._child.reason()) from None


def start_processes(
    specs: Iterable[WorkerSpec], *, start_timeout_s: float = START_S
) -> list[ProcessHost]:
    """Start workers, all at the same time, and wait until all have begun.

    Raises:
        WorkerDied: one did not begin; the others are ended.
    """
    hosts: list[ProcessHost] = []
    try:
        for spec in specs:
            hosts.append(ProcessHost(spec, start_timeout_s=start_timeout_s))
        for host in hosts:
            _ = host.hello
    except BaseException:
        for host in hosts:
            host.kill()
            host.close()
        raise
    return hosts


def process_cluster(
    model: Model,
    specs: Iterable[WorkerSpec],
    router: RouterConfig | None = None,
    *,
    control: Callable[[Router], RoleController] | None = None,
    seed: int | None = None,
    start_timeout_s: float = START_S,
) -> Cluster:
    """Start a worker in a process for each spec, and a cluster that serves with them.

    Leaving the cluster ends the processes.

    Args:
        model: for the router, which needs no weights (`pdlab.models.load_outline`); the processes
            load their own, by the specs' name for it.
        control, seed: as for `Cluster`.
        start_timeout_s: how long each worker may take to begin.

    Raises:
        ValueError: two workers have one name, or as `ProcessHost`.
        WorkerDied: one did not begin; the others are ended.
    """
    hosts = start_processes(specs, start_timeout_s=start_timeout_s)
    with closed_on_error(hosts):
        members = [(host, host.spec.role) for host in hosts]
        return Cluster(model, members, router, control=control, seed=seed)
