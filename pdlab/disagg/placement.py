"""Which worker a request goes to: by what it has to do, what it has cached, and how fast it is.

The router does not ask: it keeps account of what it has sent where, as SGLang's and Dynamo's
cache-aware routers do. What a worker has evicted meanwhile it learns too late, and then a prompt is
computed once more than was thought.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.disagg.jobs import Job, Peer, Stage
from pdlab.disagg.messages import Load
from pdlab.disagg.router_config import RouterConfig
from pdlab.engine.moving import RequestState
from pdlab.kvcache.prefix import chain_hash

SMOOTHING = 0.2
"""Weight of the newest step in a worker's measured speed."""
MOST_CHAINS = 4096
"""Prompts whose blocks are kept at hand, as they are asked for again and again."""


class Plan(NamedTuple):
    """Where a request goes."""

    here: Peer | None
    """Who computes its prompt for the other; None if that one serves it from beginning to end."""
    there: Peer

    @property
    def first(self) -> Peer:
        """Who has its prompt to compute."""
        return self.here or self.there


class Placement:
    """Chooses among workers; knows nothing of what follows."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[int, None]] = {}
        """Full blocks that a worker has computed or received, the oldest first: hashes, for two
        that are equal by chance only spoil an estimate."""
        self._chains: OrderedDict[tuple[int, int], tuple[list[int], list[int]]] = OrderedDict()
        self._tokens_per_s: dict[str, float] = {}
        """Prompt tokens that a worker computes, by its steps that held nothing else."""

    # --- choosing -------------------------------------------------------------------------------

    def plan(self, able: Sequence[Peer], state: RequestState, config: RouterConfig) -> Plan:
        """Where a request goes, of at least one worker that is able to serve it."""
        if config.mode == "aggregated":
            return Plan(None, self.least_loaded(able, state))
        decodes = [peer for peer in able if peer.role != "prefill"]
        prefills = [peer for peer in able if peer.role != "decode" and not peer.takes]
        free = [peer for peer in decodes if not peer.gives]
        if not prefills or not free:
            return Plan(None, self.least_loaded(decodes or able, state))
        there = self.for_decode(free, state)
        if self.num_uncached(there, state) <= config.local_prefill_tokens:
            return Plan(None, there)
        here = self.for_prefill(prefills, state)
        return Plan(None if here is there else here, there)

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

    def is_full(self, peer: Peer, config: RouterConfig) -> bool:
        """Whether so many prompts wait at a worker that others have to wait elsewhere."""
        backlog = self.backlog_tokens(peer)
        return backlog > 0 and backlog >= config.max_backlog_tokens

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
        for block in self._blocks_of(peer, state):
            if block not in known:
                break
            cached += peer.hello.layout.block_size
        return state.num_tokens - cached

    def note(self, peer: Peer, state: RequestState) -> None:
        """A worker has K and V of these tokens now."""
        if not peer.hello.has_prefix_cache or not state.params.prefix_cache:
            return
        known = self._known.setdefault(peer.name, OrderedDict())
        for block in self._blocks_of(peer, state):
            known[block] = None
            known.move_to_end(block)
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

    def _blocks_of(self, peer: Peer, state: RequestState) -> list[int]:
        """Hashes of a state's full blocks, each with all that stands before it."""
        size, prompt_ids = peer.hello.layout.block_size, state.prompt_ids
        key = id(prompt_ids), size  # of a list that is kept, so that no other can have its id
        if key not in self._chains:
            self._chains[key] = prompt_ids, _chain([], prompt_ids, size)
            if len(self._chains) > MOST_CHAINS:
                self._chains.popitem(last=False)
        _, chain = self._chains[key]
        return _chain(chain, state.token_ids, size) if state.output_ids else chain


def _chain(begun: list[int], tokens: list[int], size: int) -> list[int]:
    """The blocks of these tokens, of which the first are given."""
    chain, last = list(begun), begun[-1] if begun else hash(None)
    for start in range(len(begun) * size, len(tokens) - size + 1, size):
        last = chain_hash(last, tuple(tokens[start : start + size]))
        chain.append(last)
    return chain


def _growth(job: Job) -> int:
    """Tokens that a request may come to have."""
    return len(job.state.prompt_ids) + job.state.params.max_tokens


def _slots(peer: Peer) -> int:
    return peer.hello.num_blocks * peer.hello.layout.block_size
