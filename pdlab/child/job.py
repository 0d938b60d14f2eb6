"""The ranks of a torch.distributed job: where they meet, and the line between rank 0 and another.

Each line is a gloo group of two, which breaks when either of them dies and touches nobody else. No
collectives: a rank that has died would block them all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlab.child.gloo import FOREVER, break_off, gloo_group, reason_of
from pdlab.child.inbox import Ended, Inbox
from pdlab.child.process import CLOSE_S

MEET_S = 300.0
"""How long ranks wait for each other: each imports torch first."""
TELL_S = 0.5
"""How long a message may take to leave before its sender ends."""
GOODBYE_S = 1.0
HEAD, PAYLOAD = 0, 1
"""Tags of the messages."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a job meet, and which of them this process is.

    Args:
        host: the address whose interface this rank uses.
    """

    store: dist.Store
    rank: int
    world_size: int
    host: str

    @classmethod
    def join(cls) -> Meeting:
        """That of the environment: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            ValueError: one of them is missing, or there is only one rank.
            RuntimeError: the other ranks did not come in time.
        """
        rank, world_size = place_in_job()
        if world_size < 2:
            raise ValueError(f"WORLD_SIZE={world_size}: a job needs at least 2 ranks")
        timeout = timedelta(seconds=MEET_S)
        store, *_ = next(iter(dist.rendezvous("env://", timeout=timeout)))
        return cls(store, rank, world_size, _own_host(os.environ["MASTER_ADDR"]))

    def scope(self, name: str) -> dist.Store:
        """A part of the store."""
        return dist.PrefixStore(f"pdlab/{name}", self.store)

    def announce(self) -> None:
        """Tell on which machine this rank is."""
        self.store.set(f"pdlab/machine/{self.rank}", _machine())

    def shares_machine_with(self, rank: int) -> bool:
        there: bytes = self.store.get(f"pdlab/machine/{rank}")
        return there.decode() == _machine()


def place_in_job() -> tuple[int, int]:
    """This process's rank, and how many there are, as the environment has it.

    Raises:
        ValueError: it has not.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set: this is no rank of a torch.distributed job, such as "
            "torchrun starts"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _own_host(master: str) -> str:
    """The address of this machine on the way to the master's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(master), 9))  # sends nothing
        host: str = probe.getsockname()[0]
        return host


def _machine() -> str:
    """What only processes of one machine have in common."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class _Die:
    """End as a crash would."""


class RankChannel:
    """Messages between rank 0 and another, pickled. The ranks of a job trust each other.

    Args:
        other: that is not rank 0; its own number, where this is it. Waits for the other end.
    """

    def __init__(self, meeting: Meeting, other: int):
        me = int(meeting.rank != 0)
        self._there = 1 - me
        self._rank_there = 0 if me else other
        self._group: Any = gloo_group(
            meeting.scope(f"commands/{other}"), me, 2, meeting.host, timedelta(seconds=MEET_S)
        )
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self._inbox = Inbox()
        self.fileno = self._inbox.fileno
        self.receive = self._inbox.receive
        self.has_ended = threading.Event()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=work, name=f"line to rank {self._rank_there}", daemon=True)
            for work in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Queue a message. If nobody is there any more, `receive` says so."""
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def drain(self) -> None:
        """Nothing: a thread sends."""

    def kill(self) -> None:
        """Have the other end's process end itself with SIGKILL, whatever it is at."""
        self.send(_Die())

    def close(self) -> None:
        """Tell the other end, and end all threads. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._outbox.put(b"")
        self._threads[0].join(GOODBYE_S)
        break_off(self._group, self._there)
        for thread in self._threads:
            thread.join()
        self._inbox.close()
        del self._group

    def _send_all(self) -> None:
        try:
            while data := self._outbox.get():
                self._put(data)
            self._put(b"")
        except RuntimeError as error:
            self._lose(reason_of(error))
            break_off(self._group, self._there)  # nothing is to be heard any more, either

    def _put(self, data: bytes) -> None:
        head = torch.tensor([len(data)])
        self._group.send([head], self._there, HEAD).wait(FOREVER)
        if data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._group.send([payload], self._there, PAYLOAD).wait(FOREVER)

    def _receive_all(self) -> None:
        reason = "it closed"
        try:
            while len(data := self._take()):
                self._hear(pickle.loads(data.numpy().data))
        except Exception as error:  # whatever it is: the other end is lost
            reason = reason_of(error)
        self._lose(reason)
        self._outbox.put(b"")  # the other thread ends, too

    def _take(self) -> Tensor:
        head = torch.empty(1, dtype=torch.int64)
        self._group.recv([head], self._there, HEAD).wait(FOREVER)
        payload = torch.empty(int(head), dtype=torch.uint8)
        if len(payload):
            self._group.recv([payload], self._there, PAYLOAD).wait(FOREVER)
        return payload

    def _hear(self, message: Any) -> None:
        match message:
            case _Die():
                os.kill(os.getpid(), signal.SIGKILL)
            case Ended(reason):
                self._end(reason)
            case _:
                self._inbox.put(message)

    def _lose(self, reason: str) -> None:
        self._end(f"rank {self._rank_there}: {reason}")

    def _end(self, reason: str) -> None:
        self._inbox.end(reason)
        self.has_ended.set()


@contextmanager
def line_to_first(meeting: Meeting) -> Iterator[RankChannel]:
    """On any other rank: the line to rank 0. What is raised meanwhile is told there.

    This process ends soon after the line does, even if it still waits for another rank then.
    """
    channel = RankChannel(meeting, meeting.rank)
    is_done = threading.Event()
    threading.Thread(target=_follow, args=(channel, is_done), daemon=True).start()
    try:
        yield channel
    except BaseException:
        channel.send(Ended(f"rank {meeting.rank}: {traceback.format_exc()}"))
        time.sleep(TELL_S)
        raise
    finally:
        is_done.set()
        channel.close()


def _follow(channel: RankChannel, is_done: threading.Event) -> None:
    channel.has_ended.wait()
    if not is_done.wait(CLOSE_S):
        os._exit(1)
