"""Ranks as Ray actors: on this machine, or wherever a Ray cluster has room for them.

The Ray that this process uses already (`ray.init(...)`) is used; else one is begun for it alone.
What is computed travels by gloo or, between GPUs, by NCCL; what ranks are told and what they answer
travels in Ray's calls.
"""

from __future__ import annotations

import secrets
from functools import partial

import ray
import torch
import torch.distributed as dist

from pdlab.child import CLOSE_S
from pdlab.child.pipe import Pipe
from pdlab.child.ray_actor import GROUPS, ActorCalls, TalkingActor
from pdlab.child.ray_room import ActorOptions, RayRoom
from pdlab.engine.config import EngineConfig
from pdlab.models import Model
from pdlab.parallel.gloo import DistributedWires
from pdlab.parallel.hosts.lines import ChannelLine, RankSpec, Shared, be_rank, specs_of
from pdlab.parallel.rank import Rank

ROOM_S = 60.0
"""How long Ray may take to find room for all ranks."""


# --- in the actor -------------------------------------------------------------------------------


class RankActor(TalkingActor):
    """A rank, in a thread beside the actor's calls.

    Args:
        meeting: host and port of the store where the ranks meet.
    """

    def __init__(self, spec: RankSpec, meeting: tuple[str, int]):
        super().__init__()
        self.begin(partial(_work, self.pipe, spec, meeting))


def _work(pipe: Pipe, spec: RankSpec, meeting: tuple[str, int]) -> None:
    torch.set_num_threads(spec.config.rank_threads or 1)
    be_rank(partial(_make, spec, meeting), pipe, [])


def _make(spec: RankSpec, meeting: tuple[str, int]) -> Rank:
    spec = spec.on_gpu(0)  # Ray lets an actor see its own only
    device = spec.model.device
    wires = DistributedWires(
        dist.TCPStore(*meeting, is_master=False),
        spec.number,
        spec.plan.num_ranks,
        host=ray.util.get_node_ip_address(),
        gpu=device if device.type == "cuda" else None,
    )
    return spec.make(wires)


# --- in the engine's process --------------------------------------------------------------------


class RayLine(ChannelLine):
    """A rank in an actor; see `Line`.

    Args:
        shared: what it lives in, left when it is closed.
    """

    def __init__(self, calls: ActorCalls, shared: Shared):
        self._calls = calls
        self._shared = shared
        self._is_closed = False
        super().__init__(calls)

    def close(self, force: bool) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._calls.close(0.0 if force else CLOSE_S)
            self._shared.leave()


def ray_lines(model: Model, config: EngineConfig) -> list[RayLine]:
    """An actor for each rank of a resolved configuration: a CPU for each thread, one if nothing is
    said, and a GPU if the model is on one.

    Raises:
        ValueError: Ray has no room for them.
        RuntimeError: Ray does not start here.
    """
    specs = specs_of(model, config)
    share = ActorOptions(config.rank_threads or 1, int(model.device.type == "cuda"))
    # A simulated link compares times, which only processes of one machine can.
    strategy = "STRICT_PACK" if config.rank_link else "PACK"
    room = RayRoom([share] * len(specs), strategy=strategy, timeout_s=ROOM_S)
    lines: list[RayLine] = []
    try:
        here = ray.util.get_node_ip_address()
        store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        shared = Shared(partial(_leave, room, store), len(specs))
        prefix = f"pdlab-{secrets.token_hex(4)}"
        for spec in specs:
            name = f"{prefix}-rank-{spec.number}"
            told = (spec, (here, store.port))
            actor = room.begin_actor(spec.number, RankActor, *told, name=name, groups=GROUPS)
            lines.append(RayLine(ActorCalls(actor), shared))
    except BaseException:
        for line in lines:
            line.close(force=True)
        room.leave()
        raise
    return lines


def _leave(room: RayRoom, store: dist.Store) -> None:
    """The store is held until here: it ends with its last reference."""
    room.leave()
