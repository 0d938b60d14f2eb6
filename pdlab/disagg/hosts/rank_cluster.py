"""Workers as ranks of a torch.distributed job: rank 0 routes, each other rank is a worker.

Router and worker talk over a gloo group of their own, which breaks when either of them dies and
touches nobody else. K and V travel between the workers point to point, by gloo or, between GPUs, by
NCCL. There are no collectives: one that has died would block them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from pdlab.child.job import MEET_S, Meeting, RankChannel, line_to_first
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import closed_on_error
from pdlab.disagg.hosts.loop import CLOSE_S, START_S, Stop, serve
from pdlab.disagg.hosts.remote_host import RemoteHost
from pdlab.disagg.hosts.spec import WorkerSpec, make_worker
from pdlab.disagg.router_config import RouterConfig
from pdlab.disagg.transport.torch_distributed import TorchDistributed
from pdlab.models import Model


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
        self._line.kill()

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
    with line_to_first(meeting) as channel:
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
