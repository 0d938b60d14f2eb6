"""Who of those that wait is admitted next.

A policy orders the requests that have never run. Whatever it says, the wait is bounded: the queue
takes the oldest once `max_overtakes` later ones were admitted before it (see `waiting`).

And it orders nothing else. Who was admitted keeps its turn: when blocks run out, the last who was
admitted is preempted, whatever its priority, and comes back before anybody new. So whoever was let
in gets on, which a stream of more urgent ones could prevent otherwise. (vLLM's `priority` also
preempts the least urgent one first, and has no such bound.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from pdlab.engine.sequence import Sequence
from pdlab.kvcache import KVManager
from pdlab.requirements import require_choice, require_number, shown

Rank = float | tuple[float, ...]


class PolicyError(ValueError):
    """A policy has no rank for a sequence; its cause says what it did instead."""


class QueueView(NamedTuple):
    """What a policy may look at beside the sequence."""

    now_s: float
    """On the clock of the sequences' `arrival_s`."""
    kv: KVManager

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of it that the prefix cache holds now."""
        return self.kv.look_up(sequence).num_tokens


class Policy(ABC):
    """Ranks those that wait. To write your own, say how urgent a sequence is:

    class Shortest(pdlab.Policy):
        def rank(self, sequence, view):
            return sequence.num_prompt_tokens + sequence.params.max_tokens

    pdlab.EngineConfig(policy=Shortest())
    """

    changes = True
    """Whether the rank of a sequence may change while it waits. Where it cannot, it is asked for
    once, when the request comes, and a long queue costs nothing."""
    most_ranked: int | None = None
    """How many of those that wait are ranked, the oldest ones; None for all."""

    @abstractmethod
    def rank(self, sequence: Sequence, view: QueueView) -> Rank:
        """The lowest goes first; of equals, the first come. Numbers or tuples of numbers."""

    def __str__(self) -> str:
        """How records and tables call it: its name and its knobs."""
        own = type(self)
        name = next((name for name, kind in POLICIES.items() if kind is own), own.__name__)
        knobs = ", ".join(f"{key}={shown(value)}" for key, value in vars(self).items())
        return f"{name}({knobs})" if knobs else name


class FCFS(Policy):
    """First come, first served."""

    changes = False

    def rank(self, sequence: Sequence, view: QueueView) -> Rank:
        return 0.0


class ShortestJob(Policy):
    """The shortest prompt first: the part of a job's length that is known in advance."""

    changes = False

    def rank(self, sequence: Sequence, view: QueueView) -> Rank:
        return sequence.num_prompt_tokens


class Priority(Policy):
    """The lowest priority number first, with ageing: waiting is worth a level every `ageing_s`.

    All age alike, so who goes first of two is settled when they arrive.
    """

    changes = False

    def __init__(self, ageing_s: float = 10.0):
        require_number("ageing_s", ageing_s, 1e-3, 1e9)
        self.ageing_s = ageing_s

    def rank(self, sequence: Sequence, view: QueueView) -> Rank:
        return sequence.priority + sequence.arrival_s / self.ageing_s


class Deadline(Policy):
    """The earliest deadline first; those whose deadline has passed go last.

    A deadline is the arrival and the request's `ttft_slo_s`, or this policy's own. Liu and Layland
    1973: earliest deadline first meets all deadlines that can be met, if the load allows it; past
    that point it misses nearly all, unless it gives up on those that are lost.
    """

    def __init__(self, ttft_slo_s: float = 1.0):
        require_number("ttft_slo_s", ttft_slo_s, 0, 1e9)
        self.ttft_slo_s = ttft_slo_s

    def rank(self, sequence: Sequence, view: QueueView) -> Rank:
        slo_s = self.ttft_slo_s if sequence.ttft_slo_s is None else sequence.ttft_slo_s
        deadline_s = sequence.arrival_s + slo_s
        return view.now_s > deadline_s, deadline_s


class LongestPrefix(Policy):
    """The one with the most tokens in the prefix cache first, while they are there.

    Zheng et al. 2024, SGLang, section 3: among requests that share prefixes, this order comes close
    to a depth-first walk of their tree, which computes every prefix once. To look all of a long
    queue up in every step would take longer than it spares, so only the oldest are.
    """

    most_ranked = 128

    def rank(self, sequence: Sequence, view: QueueView) -> Rank:
        return -view.num_cached_tokens(sequence)


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "sjf": ShortestJob,
    "priority": Priority,
    "deadline": Deadline,
    "longest_prefix": LongestPrefix,
}


def as_policy(policy: Any) -> Policy:
    """A policy from its name, or as given.

    Raises:
        ValueError: neither; lists the names.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise ValueError(
            f"policy={shown(policy)} must be one of {', '.join(POLICIES)}, or an object of a class "
            "derived from pdlab.Policy"
        )
    require_choice("policy", policy, tuple(POLICIES))
    return POLICIES[policy]()
