"""The workers that a router has, what they have, and what is to be said to them."""

from __future__ import annotations

import math
from collections import defaultdict

from pdlab.disagg.jobs import Job, Peer, Stage
from pdlab.disagg.messages import Abort, Command, Hello, Load, Meet, Release, Renew
from pdlab.disagg.worker import ROLES, Role
from pdlab.requirements import require_choice


class Crew:
    """Keeps account of who has what, and queues commands."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        """By name, those that were lost too."""
        self.now_s = 0.0
        """Set by the router, whenever it is told."""
        self._commands: defaultdict[str, list[Command]] = defaultdict(list)
        self._renew_at_s = -math.inf

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.is_alive]

    def find(self, name: str) -> Peer:
        """A worker, perhaps one that was lost.

        Raises:
            ValueError: there never was one of this name.
        """
        if name not in self.peers:
            raise ValueError(f"name={name!r} is no worker: {', '.join(self.peers) or 'none'}")
        return self.peers[name]

    def add(self, hello: Hello, role: Role, clock_offset_s: float) -> None:
        """Another worker, which meets the others.

        Raises:
            ValueError: there is one of this name, or no such role.
        """
        require_choice("role", role, ROLES)
        if hello.name in self.peers and self.peers[hello.name].is_alive:
            raise ValueError(f"name={hello.name!r} is the name of another worker")
        for peer in self.alive:
            self.post(peer.name, Meet(hello.name, hello.layout))
            self.post(hello.name, Meet(peer.name, peer.hello.layout))
        self._renew_at_s = -math.inf  # its lease may be shorter than those of others
        load = Load(0, 0, 0, 0, hello.num_blocks)
        self.peers[hello.name] = Peer(hello, role, load, clock_offset_s=clock_offset_s)

    def lose(self, name: str) -> list[Job]:
        """A worker is gone; the unfinished requests that it had, which have nothing there now."""
        peer = self.peers[name]
        peer.is_alive = False
        self._commands.pop(name, None)
        jobs = [job for job in peer.jobs.values() if job.stage is not Stage.DONE]
        for job in list(peer.jobs.values()):
            self.drop(job, peer)
        return jobs

    # --- who has what ---------------------------------------------------------------------------

    def assign(self, job: Job, peer: Peer) -> None:
        """A request goes to a worker."""
        if not peer.jobs:
            peer.heard_s = self.now_s
        peer.jobs[job.name] = job

    def drop(self, job: Job, peer: Peer) -> None:
        """A worker has nothing of a request any more."""
        peer.jobs.pop(job.name, None)
        if job.decode_on == peer.name:
            job.decode_on = job.num_cached_tokens = None
        if job.prefill_on == peer.name:
            job.prefill_on, job.is_held = None, False

    def release(self, job: Job) -> None:
        """The prompt's worker may forget it."""
        if job.prefill_on is not None:
            self.post(job.prefill_on, Release(job.name))
            self.drop(job, self.peers[job.prefill_on])

    def abort(self, job: Job) -> None:
        """Have all workers forget a request."""
        for name in job.workers:
            if job.name in self.peers[name].jobs:
                self.post(name, Abort(job.name))
            self.drop(job, self.peers[name])

    # --- what is said ---------------------------------------------------------------------------

    def post(self, name: str, command: Command) -> None:
        self._commands[name].append(command)

    def renew(self, lease_s: float, patience_s: float) -> dict[str, float]:
        """Keep the leases of all that is wanted, in a third of the shortest one or of `lease_s`.

        Returns:
            who has requests and has said nothing for longer than `patience_s`: for how long.
        """
        if self.now_s < self._renew_at_s:
            return {}
        shortest_s = min([lease_s, *(peer.hello.lease_s for peer in self.alive)])
        self._renew_at_s = self.now_s + shortest_s / 3
        silent = {}
        for peer in self.alive:
            if peer.jobs and self.now_s - peer.heard_s > patience_s:
                silent[peer.name] = self.now_s - peer.heard_s
            elif peer.jobs:
                self.post(peer.name, Renew(list(peer.jobs)))
        return silent

    def take_commands(self) -> dict[str, list[Command]]:
        """All that is to be said since the last call, by worker, in order."""
        commands, self._commands = self._commands, defaultdict(list)
        return commands
