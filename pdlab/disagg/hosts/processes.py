"""Workers in processes of their own, on cores of their own.

Router and worker talk over a socket pair. When one is gone, the other hears of it, after all that
was sent before. A router never waits for a worker's step: what a worker has not read yet waits in
the router's buffer.

A worker's process is a fresh interpreter, in a session of its own: it imports no `__main__`, needs
no guard in a script, and the Ctrl-C of a terminal or notebook does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.control import RoleController
from pdlab.disagg.hosts.host import WorkerDied, closed_on_error
from pdlab.disagg.hosts.loop import CLOSE_S, START_S, Stop, serve
from pdlab.disagg.hosts.remote_host import RemoteHost
from pdlab.disagg.hosts.socket_channel import SocketChannel
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.router import Router, RouterConfig
from pdlab.models import Model

MOST_REASON_CHARS = 4000
"""Of what a worker wrote before it died: the last of it is kept."""
BOOT = """
import os, sys
cores, descriptor = sys.argv[1], int(sys.argv[2])
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
sys.path[:] = sys.argv[3:]
from pdlab.disagg.hosts.processes import main
main(descriptor)
"""
"""What a worker's interpreter runs. The cores are set before torch counts them."""


# --- in the worker's process --------------------------------------------------------------------


def main(descriptor: int) -> None:
    """A worker's process, from its beginning to its end.

    Args:
        descriptor: of the socket on which the spec comes.
    """
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 0
    try:
        connected = socket.socket(fileno=descriptor)
        _follow(connected)
        channel = SocketChannel(connected)
        while not (messages := channel.receive()):
            wait([channel.fileno()])
        spec, *others = messages
        if others:  # nobody is told more before it has said hello, except to stop
            os._exit(0)
        if spec.threads:
            import torch

            torch.set_num_threads(spec.threads)
        serve(make_worker(spec), channel)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # whatever threads there still are


def _follow(connected: socket.socket) -> None:
    """End this process soon after the other end's, even if it never gets to look."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connected.fileno(), 0)  # a hang-up is told unasked
        poll.poll()
        time.sleep(CLOSE_S)
        os._exit(1)

    threading.Thread(target=watch, name="follows its router", daemon=True).start()


# --- in the router's process --------------------------------------------------------------------


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
        command = _command(spec)
        here, there = socket.socketpair()
        self._socket_channel = SocketChannel(here)
        try:
            self._socket_channel.send(spec)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"the spec of {spec.name} cannot leave this process: {error}"
            ) from error
        # On Linux all processes of a machine have one clock: CLOCK_MONOTONIC.
        super().__init__(
            spec.name,
            self._socket_channel,
            start_timeout_s=start_timeout_s,
            shares_clock=sys.platform == "linux",
        )
        self.spec = spec
        self._was_killed = False
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        with there:
            self.process = subprocess.Popen(
                [*command, str(there.fileno()), *map(os.path.abspath, sys.path)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                env=_environment(spec),
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it with SIGKILL. What it said before is still heard."""
        self._was_killed = True
        self.process.kill()

    def close(self) -> None:
        """End it in good order, or, if it does not obey, by force. Closing again is nothing."""
        if self._written.closed:
            return
        self.channel.send(Stop())
        self._socket_channel.close()
        for force in (lambda: None, self.process.terminate, self.process.kill):
            force()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_S)
                break
        self._written.close()

    def _listen(self) -> None:
        if self._written.closed:
            raise WorkerDied(self.name, "it was closed")
        try:
            super()._listen()
        except WorkerDied:
            raise WorkerDied(self.name, self._reason()) from None

    def _reason(self) -> str:
        """Why it is gone; it is reaped."""
        try:
            status = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status >= 0:
            how = f"its process ended with status {status}"
        else:
            how = f"its process was ended by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL and not self._was_killed:
                how += ", perhaps for want of memory"
        written = self._last_words()
        return f"{how}:\n{written}" if written else how

    def _last_words(self) -> str:
        self._written.seek(0)
        text = self._written.read().decode(errors="replace").strip()
        return text if len(text) <= MOST_REASON_CHARS else "..." + text[-MOST_REASON_CHARS:]


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


def _command(spec: WorkerSpec) -> list[str]:
    """How a worker's interpreter is called; a descriptor and the search path have to follow."""
    cores = ""
    if spec.cores and hasattr(os, "sched_setaffinity"):
        if missing := set(spec.cores) - os.sched_getaffinity(0):
            raise ValueError(
                f"cores={spec.cores} of {spec.name}: this process may not use {sorted(missing)}"
            )
        cores = ",".join(map(str, spec.cores))
    return [sys.executable, "-X", "faulthandler", "-c", BOOT, cores]


def _environment(spec: WorkerSpec) -> dict[str, str]:
    return os.environ | ({"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {})
