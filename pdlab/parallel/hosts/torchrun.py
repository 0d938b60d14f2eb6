"""Ranks that are processes of a torch.distributed job, on one machine or several.

Rank 0's process has the engine, and is rank 0 of the model in a thread beside it:

    with pdlab.Engine(model, EngineConfig(tensor_parallel=2, rank_host="torchrun")) as engine: ...

The other processes of the job call `serve_rank()`, once for each engine that rank 0 makes. What is
computed travels by gloo or, where each rank has a GPU for itself, by NCCL; what ranks are told and
what they answer travels on a gloo group for each, which breaks when its rank dies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait

import torch

from pdlab.child import CLOSE_S
from pdlab.child.job import Meeting, RankChannel, line_to_first, place_in_job
from pdlab.engine.config import EngineConfig
from pdlab.models import Model
from pdlab.parallel.gloo import DistributedWires
from pdlab.parallel.group import Line, RankLost
from pdlab.parallel.hosts.lines import ChannelLine, RankSpec, be_rank, specs_of
from pdlab.parallel.hosts.threads import ThreadLine
from pdlab.parallel.rank import Rank


class _Member:
    """This process's rank: makes it, and ends its waiting for others."""

    def __init__(self, spec: RankSpec, meeting: Meeting):
        self._meeting = meeting
        self._place = int(os.environ.get("LOCAL_RANK", meeting.rank))
        self._spec = spec.on_gpu(self._place)
        self._wires: DistributedWires | None = None

    def make(self) -> Rank:
        if self._spec.config.rank_threads:
            torch.set_num_threads(self._spec.config.rank_threads)
        self._wires = DistributedWires(
            self._meeting.scope("wires"),
            self._meeting.rank,
            self._meeting.world_size,
            host=self._meeting.host,
            gpu=self._gpu(),
        )
        return self._spec.make(self._wires)

    def _gpu(self) -> torch.device | None:
        """Where the rank computes, if nobody else does there: NCCL wants a GPU for each."""
        device = self._spec.model.device
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", self._meeting.world_size))
        is_alone = device.type == "cuda" and num_local <= torch.cuda.device_count()
        return device if is_alone else None

    def hang_up(self) -> None:
        if self._wires:
            self._wires.hang_up()


# --- on rank 0 ----------------------------------------------------------------------------------


class JobLine(ChannelLine):
    """A rank in another process of the job; see `Line`."""

    def __init__(self, meeting: Meeting, rank: int):
        self._line = RankChannel(meeting, rank)
        super().__init__(self._line)

    def close(self, force: bool) -> None:
        """One that does not obey ends itself soon after its line."""
        if not force:
            self._line.has_ended.wait(CLOSE_S)
        self._line.close()


def torchrun_lines(model: Model, config: EngineConfig) -> Sequence[Line]:
    """The ranks of the job that this process is rank 0 of.

    Raises:
        ValueError: it is not, or the job has more or fewer ranks than the engine.
        RankLost: a rank did not come.
    """
    rank, world_size = place_in_job()
    if rank:
        raise ValueError(
            f"rank_host='torchrun': this is rank {rank}, and rank 0 has the engine: call "
            "pdlab.parallel.hosts.torchrun.serve_rank() here"
        )
    if world_size != config.num_ranks:
        raise ValueError(
            f"tensor_parallel={config.tensor_parallel} and pipeline_parallel="
            f"{config.pipeline_parallel} need {config.num_ranks} ranks: the job has {world_size}"
        )
    if config.rank_link and int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:
        raise ValueError(
            f"rank_link={config.rank_link!r:.60} compares times, and the job's machines have a "
            "clock each"
        )
    meeting = _next_meeting()
    first, *others = specs_of(model, config)
    lines: list[JobLine] = []
    try:
        for spec in others:
            lines.append(JobLine(meeting, spec.number))
            lines[-1].send(spec)
    except BaseException as error:
        for line in lines:
            line.close(force=True)
        if isinstance(error, RuntimeError):
            raise RankLost(f"rank {len(lines) + 1} did not come: {error}") from error
        raise
    member = _Member(first, meeting)
    return [ThreadLine(0, member.make, member.hang_up), *lines]


# --- on any other rank --------------------------------------------------------------------------


def serve_rank() -> None:
    """Be a rank of the next engine that rank 0 makes, until that is closed or rank 0 is gone.

    Raises:
        ValueError: this process is no rank of a job, or it is rank 0.
    """
    rank, _ = place_in_job()
    if not rank:
        raise ValueError("this is rank 0: make an engine with rank_host='torchrun' here")
    meeting = _next_meeting()
    with line_to_first(meeting) as channel:
        while not (messages := channel.receive()):
            wait([channel.fileno()])
        spec, *others = messages
        be_rank(_Member(spec, meeting).make, channel, others)


def _next_meeting() -> Meeting:
    """Where the ranks of the next engine meet: all count alike."""
    meeting = Meeting.join()
    count = meeting.store.add(f"pdlab/engines/{meeting.rank}", 1)
    return replace(meeting, store=meeting.scope(f"engine/{count}"))
