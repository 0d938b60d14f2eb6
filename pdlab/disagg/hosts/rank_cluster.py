"""Workers as ranks of a torch.distributed job: rank 0 routes, each other rank is a worker.

Router and worker talk over a gloo group of their own, which breaks when either of them dies and
touches nobody else. K and V travel between the workers point to point, by gloo or, between GPUs, by
NCCL. There are no collectives: one that has died would block them all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import closed_on_error
from pdlab.disagg.hosts.loop import CLOSE_S, START_S, Stop, serve
from pdlab.disagg.hosts.remote_host import Ended, Inbox, RemoteHost
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.router_config import RouterConfig
from pdlab.disagg.transport.carrier import Lost
from pdlab.disagg.transport.frames import Frame
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.torch_distributed import (
    TorchCarrier,
    TorchDistributed,
    address_of_rank,
)
from pdlab.models import Model

MEET_S = 300.0
"""How long ranks wait for each other: each imports torch first."""
TELL_S = 0.5
"""How long a message may take to leave before its sender ends."""


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
            ValueError: one of them is missing, or the job has no rank but the router.
        """
        store, rank, world_size = next(iter(dist.rendezvous("env://")))
        if world_size < 2:
            raise ValueError(
                f"WORLD_SIZE={world_size}: a router and a worker need at least 2 ranks"
            )
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


# --- router and worker --------------------------------------------------------------------------


@dataclass(frozen=True)
class Die:
    """End as a crash would."""


class RankChannel:
    """Messages between the router and one worker, pickled. The ranks of a job trust each other.

    Args:
        worker: its rank.
    """

    def __init__(self, meeting: Meeting, worker: int):
        me = int(meeting.rank != 0)
        self._peer = address_of_rank(1 - me)
        self._other = worker if meeting.rank == 0 else 0
        self._inbox = Inbox()
        self.has_ended = threading.Event()
        self._carrier = TorchCarrier(
            meeting.scope(f"commands/{worker}"),
            me,
            2,
            torch.device("cpu"),
            meeting.host,
            timedelta(seconds=MEET_S),
        )
        self._carrier.start(self._on_frame, self._on_lost)
        self.fileno = self._inbox.fileno
        self.receive = self._inbox.receive

    def send(self, message: Any) -> None:
        data = bytearray(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        payload = torch.frombuffer(data, dtype=torch.uint8)
        self._carrier.post(self._peer, Frame("message", payload=payload))

    def drain(self) -> None:
        """Nothing: a thread sends."""

    def close(self) -> None:
        """Tell the other end, and end all threads."""
        self._carrier.close()
        self._inbox.close()

    def _on_frame(self, peer: Address, frame: Frame) -> None:
        assert frame.payload is not None
        match message := pickle.loads(frame.payload.numpy().tobytes()):
            case Die():
                os.kill(os.getpid(), signal.SIGKILL)
            case Ended(reason):
                self._end(reason)
            case _:
                self._inbox.put(message)

    def _on_lost(self, lost: Lost) -> None:
        said = lost.reason.partition(" This is typically")[0]  # gloo gives advice too
        self._end(f"rank {self._other}: {said}")

    def _end(self, reason: str) -> None:
        self._inbox.end(reason)
        self.has_ended.set()


class RankHost(RemoteHost):
    """A worker on another rank, as the router sees it."""

    def __init__(self, name: str, meeting: Meeting, rank: int, *, start_timeout_s: float = START_S):
        self.rank = rank
        self._line = RankChannel(meeting, rank)
        shares_clock = sys.platform == "linux" and meeting.shares_machine_with(rank)
        super().__init__(
            name, self._line, start_timeout_s=start_timeout_s, shares_clock=shares_clock
        )

    def kill(self) -> None:
        """Have it end itself with SIGKILL, whatever its engine is at."""
        self._line.send(Die())

    def close(self) -> None:
        """End it in good order. One that does not obey ends itself soon after this process."""
        if not self._line.has_ended.is_set():
            self._line.send(Stop())
            self._line.has_ended.wait(CLOSE_S)
        self._line.close()


def rank_cluster(
    model: Model,
    specs: Sequence[WorkerSpec],
    meeting: Meeting,
    router: RouterConfig | None = None,
    *,
    seed: int | None = None,
) -> Cluster:
    """On rank 0: a cluster of the other ranks, which call `serve_rank`, each with its spec.

    Args:
        specs: in the order of their ranks, from 1 on.

    Raises:
        ValueError: there is not one spec for each.
        WorkerDied: one did not begin.
    """
    if len(specs) != meeting.world_size - 1:
        raise ValueError(f"specs has {len(specs)} for {meeting.world_size - 1} ranks of workers")
    meeting.announce()
    hosts: list[RankHost] = []
    with closed_on_error(hosts):
        for rank, spec in enumerate(specs, start=1):
            hosts.append(RankHost(spec.name, meeting, rank))
        members = [(host, spec.role) for host, spec in zip(hosts, specs, strict=True)]
        return Cluster(model, members, router, seed=seed)


def serve_rank(spec: WorkerSpec, meeting: Meeting) -> None:
    """On any other rank: be the worker, until the router says stop or is gone."""
    meeting.announce()
    channel = RankChannel(meeting, meeting.rank)
    is_done = threading.Event()
    threading.Thread(target=_follow, args=(channel, is_done), daemon=True).start()
    try:
        if spec.threads:
            torch.set_num_threads(spec.threads)
        told = spec.transport.options
        transport = TorchDistributed(
            meeting.scope("kv"),
            meeting.rank - 1,
            meeting.world_size - 1,
            device=told.get("device", "cpu"),
            host=meeting.host,
            connect_timeout_s=MEET_S,
            link=spec.transport.link,
        )
        serve(make_worker(spec, transport=transport), channel)
    except BaseException:
        channel.send(Ended(f"rank {meeting.rank}: {traceback.format_exc()}"))
        time.sleep(TELL_S)
        raise
    finally:
        is_done.set()
        channel.close()


def _follow(channel: RankChannel, is_done: threading.Event) -> None:
    """End this process soon after its router, if it still waits for another rank then."""
    channel.has_ended.wait()
    if not is_done.wait(CLOSE_S):
        os._exit(1)
