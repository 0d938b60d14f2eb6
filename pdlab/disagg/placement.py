"""Which worker a request goes to: by what it has to do, what it has cached, and how fast it is.

The router does not ask: it keeps account of what it has sent where, as SGLang's and Dynamo's
cache-aware routers do. What a worker has evicted meanwhile it learns too late, and then a prompt is
computed once more than was thought.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from pdlab.disagg.jobs import Job, Peer, Stage
from pdlab.disagg.messages import Load
from pdlab.engine.moving import RequestState
from pdlab.kvcache.prefix import Prefix

SMOOTHING = 0.2
"""Weight of the newest step in a worker's measured speed."""


class Placement:
    """Chooses among workers; knows nothing of what follows."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[Prefix, None]] = {}
        """Full blocks that a worker has computed or received, the oldest first."""
        self._tokens_per_s: dict[str, float] = {}
        """Prompt tokens that a worker computes, by its steps that held nothing else."""

    # --- choosing -------------------------------------------------------------------------------

    def for_prefill(self, peers: Sequence[Peer], state: RequestState) -> Peer:
        """Who would have this prompt computed first."""
        fastest = max((self._tokens_per_s.get(p.name, 0.0) for p in peers), default=0.0)

        def seconds(peer: Peer) -> tuple[float, int]:
            tokens = self.backlog_tokens(peer) + self.num_uncached(peer, state)
            speed = self._tokens_per_s.get(peer.name) or fastest or 1.0
            return tokens / speed, len(peer.jobs)

        return min(peers, key=seconds)

    def for_decode(self, peers: Sequence[Peer], state: RequestState) -> Peer:
        """Who has the most room for it: tokens that stand or will stand in its blocks, by size."""

        def fill(peer: Peer) -> tuple[float, int]:
            own = self.num_uncached(peer, state)
            expected = sum(_growth(job) for job in peer.jobs.values()) + own
            return expected / _slots(peer), len(peer.jobs)

        return min(peers, key=fill)

    def least_loaded(self, peers: Sequence[Peer], state: RequestState) -> Peer:
        """Who serves a whole request best."""

        def load(peer: Peer) -> tuple[float, float]:
            tokens = self.backlog_tokens(peer) + self.num_uncached(peer, state)
            return len(peer.jobs) / peer.hello.max_num_seqs + tokens / _slots(peer), tokens

        return min(peers, key=load)

    def backlog_tokens(self, peer: Peer) -> int:
        """Tokens of prompts that are still to be computed on a worker, cached ones too."""
        return sum(
            job.num_sent
            for job in peer.jobs.values()
            if (job.prefill_on == peer.name and not job.is_held)
            or (job.stage is Stage.SERVING and job.metrics.first_scheduled_s is None)
        )

    # --- what is known --------------------------------------------------------------------------

    def num_uncached(self, peer: Peer, state: RequestState) -> int:
        """Tokens that a worker would have to compute, or to be sent."""
        known = self._known.get(peer.name)
        if not known or not state.params.prefix_cache:
            return state.num_tokens
        cached = 0
        for prefix in _blocks_of(peer, state):
            if prefix not in known:
                break
            cached += peer.hello.layout.block_size
        return state.num_tokens - cached

    def note(self, peer: Peer, state: RequestState) -> None:
        """A worker has K and V of these tokens now."""
        known = self._known.setdefault(peer.name, OrderedDict())
        for prefix in _blocks_of(peer, state):
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > peer.hello.num_blocks:
            known.popitem(last=False)

    def learn(self, peer: Peer, load: Load) -> None:
        """A worker tells how long a step took."""
        if load.step_s and load.num_prompt_tokens and not load.num_decodes:
            speed = load.num_prompt_tokens / load.step_s
            before = self._tokens_per_s.get(peer.name, speed)
            self._tokens_per_s[peer.name] = before + SMOOTHING * (speed - before)

    def forget(self, name: str) -> None:
        """A worker is gone, and one of its name would begin anew."""
        self._known.pop(name, None)
        self._tokens_per_s.pop(name, None)


def _blocks_of(peer: Peer, state: RequestState) -> Iterator[Prefix]:
    size, tokens = peer.hello.layout.block_size, state.token_ids
    prefix: Prefix | None = None
    for start in range(0, len(tokens) - size + 1, size):
        prefix = Prefix(prefix, tuple(tokens[start : start + size]))
        yield prefix


def _growth(job: Job) -> int:
    """Tokens that a request may come to have."""
    return len(job.state.prompt_ids) + job.state.params.max_tokens


def _slots(peer: Peer) -> int:
    return peer.hello.num_blocks * peer.hello.layout.block_size
