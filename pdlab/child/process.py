"""A fresh interpreter of this machine, and a channel to it.

It lives in a session of its own: it imports no `__main__`, needs no guard in a script, and the
Ctrl-C of a terminal or notebook does not reach it. When one of the two processes is gone, the other
hears of it, after all that was sent before.
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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

from pdlab.child.socket_channel import SocketChannel

CLOSE_S = 5.0
"""How long it may take to end in good order, once asked."""
MOST_REASON_CHARS = 4000
"""Of what it wrote before it died: the last of it is kept."""
BOOT = """
import os, sys
from importlib import import_module
cores, descriptor, module = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
sys.path[:] = sys.argv[4:]
import_module(module).main(descriptor)
"""
"""What its interpreter runs. The cores are set before torch counts them."""


# --- in the new process -------------------------------------------------------------------------


def be_child(descriptor: int, work: Callable[[SocketChannel, list[Any]], None]) -> NoReturn:
    """A child's process, from its beginning to its end; what its module's `main` does.

    Args:
        descriptor: of the socket to the process that started it.
        work: is given the channel, and the first messages that came on it.
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
        work(channel, messages)
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

    threading.Thread(target=watch, name="follows its parent", daemon=True).start()


# --- in the process that starts it --------------------------------------------------------------


class Child:
    """A process that runs `main` of a module, which calls `be_child`.

    Args:
        name: what errors call it.
        told: its first message.
        cores: that it is to run on; None for those of this process.
        environment: variables that differ from this process's.
        descriptors: that it inherits, under the same numbers.

    Raises:
        ValueError: a core is not ours to use, or it is told what cannot be pickled.
    """

    def __init__(
        self,
        name: str,
        module: str,
        told: Any,
        *,
        cores: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ):
        self.name = name
        self._was_killed = False
        kept_to = _kept_to(name, cores)
        here, there = socket.socketpair()
        self.channel = SocketChannel(here)
        try:
            self.channel.send(told)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"the spec of {name} cannot leave this process: {error}") from error
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        command = [sys.executable, "-X", "faulthandler", "-c", BOOT, kept_to]
        with there:
            self.process = subprocess.Popen(
                [*command, str(there.fileno()), module, *map(os.path.abspath, sys.path)],
                pass_fds=[there.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=self._written,
                stderr=self._written,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )

    @property
    def is_closed(self) -> bool:
        return self._written.closed

    def kill(self) -> None:
        """End it with SIGKILL. What it said before is still heard."""
        self._was_killed = True
        self.process.kill()

    def close(self) -> None:
        """See it end, after it was asked to, or, if it does not obey, by force."""
        if self.is_closed:
            return
        self.channel.close()
        for force in (lambda: None, self.process.terminate, self.process.kill):
            force()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_S)
                break
        self._written.close()

    def reason(self) -> str:
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


def _kept_to(name: str, cores: Sequence[int] | None) -> str:
    """The cores as its interpreter is told of them."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return ""
    if missing := set(cores) - os.sched_getaffinity(0):
        raise ValueError(f"cores={cores} of {name}: this process may not use {sorted(missing)}")
    return ",".join(map(str, cores))
