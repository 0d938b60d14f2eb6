"""Which workers prefill and which decode, while they serve: roles that follow the load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdlab.disagg.jobs import Peer, Stage
from pdlab.disagg.router import Router
from pdlab.disagg.worker import Role
from pdlab.requirements import require_number
from pdlab.trace import RoleSwitch


class RoleController:
    """Gives a worker of the idle side to the side that is behind.

    Prefill is behind when prompts wait longer than `most_wait_s`; decode is behind when its seats
    are fuller than `most_fill`. A side is idle when it is below half of its limit. One worker stays
    on each side, and `cool_down_s` pass between two switches, so that the effect of one is seen
    before the next. What a worker has begun, it brings to its end: a role says what it is sent.

    Args:
        most_wait_s: seconds, above 0.
        most_fill: part of the seats, from 0.01 to 1.
        cool_down_s: seconds.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        router: Router,
        *,
        most_wait_s: float = 1.0,
        most_fill: float = 0.8,
        cool_down_s: float = 5.0,
    ):
        require_number("most_wait_s", most_wait_s, 0.001, 1e6)
        require_number("most_fill", most_fill, 0.01, 1)
        require_number("cool_down_s", cool_down_s, 0, 1e6)
        self.router = router
        self.most_wait_s, self.most_fill, self.cool_down_s = most_wait_s, most_fill, cool_down_s
        self.switches: list[RoleSwitch] = []

    def look(self, now_s: float) -> RoleSwitch | None:
        """Switch a role if one side is behind and the other idle. Call it now and then."""
        if self.switches and now_s - self.switches[-1].time_s < self.cool_down_s:
            return None
        alive = [peer for peer in self.router.peers.values() if peer.is_alive]
        prefills = [peer for peer in alive if peer.role == "prefill"]
        decodes = [peer for peer in alive if peer.role == "decode"]
        if not prefills or not decodes:
            return None
        wait_s, fill = prefill_wait_s(self.router, prefills, now_s), decode_fill(decodes)
        if wait_s > self.most_wait_s and fill < self.most_fill / 2 and len(decodes) > 1:
            idlest = min(decodes, key=lambda peer: len(peer.jobs))
            return self._switch(now_s, idlest.name, "prefill", f"prompts wait {wait_s:.2f} s")
        if fill > self.most_fill and wait_s < self.most_wait_s / 2 and len(prefills) > 1:
            idlest = min(prefills, key=lambda peer: len(peer.jobs))
            return self._switch(now_s, idlest.name, "decode", f"{fill:.0%} of the seats are taken")
        return None

    def _switch(self, now_s: float, name: str, role: Role, reason: str) -> RoleSwitch:
        self.router.set_role(name, role)
        self.switches.append(RoleSwitch(now_s, name, role, reason))
        return self.switches[-1]


def prefill_wait_s(router: Router, peers: Iterable[Peer], now_s: float) -> float:
    """How long the longest-waiting prompt has waited for its first step, at the router or on these.

    Not those that wait for room where they will decode, nor those that wait at the router behind
    them.
    """
    names = {peer.name for peer in peers}
    jobs = [job for peer in router.peers.values() for job in peer.jobs.values()]
    if not any(job.stage is Stage.RESERVING for job in jobs):
        jobs += router.queue
    came_s = [
        job.arrival.time_s
        for job in jobs
        if job.metrics.first_scheduled_s is None
        and job.stage is not Stage.RESERVING
        and (job.prefill_on or "") in {*names, ""}
    ]
    return now_s - min(came_s, default=now_s)


def decode_fill(peers: Sequence[Peer]) -> float:
    """Part of these workers' seats that requests have or ask for."""
    seats = sum(peer.hello.max_num_seqs for peer in peers)
    return sum(len(peer.jobs) for peer in peers) / seats if seats else 0.0
