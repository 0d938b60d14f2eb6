"""Synthetic traffic: when requests come, and three workloads that suit a laptop.

Everything follows from a seed. Times, prompt lengths and output lengths are drawn from streams of
their own, so that another rate moves the same requests together or apart and changes none.

What is not modelled: load that drifts over the day, users who come back, a prompt's influence on
the length of its answer, shared prefixes. `synthetic` and the public traces have some of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from random import Random
from types import MappingProxyType

from pdlab.requirements import LARGEST_SEED, require_int, require_number
from pdlab.workload.lengths import Between, Lengths, LogNormal
from pdlab.workload.traces import TraceRequest

RATES_RPS = (1e-6, 1e6)
MOST_REQUESTS = 10_000_000
SMALLEST_CV = 1e-4
"""Below it every gap is the mean: the shape of the distribution would overflow."""
LARGEST_CV = 20.0
"""With more, thousands of requests would still show nothing of their rate."""


# --- when ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaps:
    """Times between arrivals: independent, Gamma distributed, with a given mean and variation.

    `cv` is the coefficient of variation, standard deviation over mean: 1 is a Poisson process, more
    comes in bursts, less is more regular, 0 is a metronome. AlpaServe (Li et al. 2023, OSDI)
    describes bursty traffic by rate and CV of a Gamma process; vLLM's `bench serve --burstiness` is
    the shape of the same distribution, which is 1 / cv².

    Raises:
        ValueError: `rate_rps` or `cv` is out of range.
    """

    rate_rps: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        require_number("rate_rps", self.rate_rps, *RATES_RPS)
        require_number("cv", self.cv, 0, LARGEST_CV)

    def draw_s(self, random: Random) -> float:
        """Seconds to the next arrival."""
        if self.cv < SMALLEST_CV:
            return 1 / self.rate_rps
        shape = 1 / self.cv**2
        return random.gammavariate(shape, 1 / (shape * self.rate_rps))


def poisson(rate_rps: float) -> Gaps:
    """Arrivals that know nothing of each other, as DistServe and vLLM's benchmark assume."""
    return Gaps(rate_rps, cv=1.0)


def gamma(rate_rps: float, cv: float) -> Gaps:
    """Arrivals in bursts (`cv` above 1) or more regular than by chance (below)."""
    return Gaps(rate_rps, cv)


def evenly(rate_rps: float) -> Gaps:
    """Arrivals at equal distances."""
    return Gaps(rate_rps, cv=0.0)


# --- requests ------------------------------------------------------------------------------------


def make_traffic(
    arrivals: Gaps,
    prompts: Lengths,
    outputs: Lengths,
    num_requests: int | None = None,
    seed: int = 0,
    *,
    duration_s: float | None = None,
    priority: int = 0,
) -> list[TraceRequest]:
    """Requests that come one gap after the other; the first one gap after 0.

    With more requests, or a longer time, the same ones come first.

    Args:
        num_requests: how many; this or `duration_s`.
        duration_s: all that arrive before that.
        priority: of each request.

    Raises:
        ValueError: neither or both of the two are given, or a number is out of range.
    """
    require_int("seed", seed, 0, LARGEST_SEED)
    if (num_requests is None) == (duration_s is None):
        raise ValueError("one of num_requests and duration_s is needed, and not both")
    if num_requests is not None:
        require_int("num_requests", num_requests, 1, MOST_REQUESTS)
    if duration_s is not None:
        require_number("duration_s", duration_s, 0, MOST_REQUESTS / arrivals.rate_rps)
    drawn = _draw(arrivals, prompts, outputs, seed)
    if duration_s is None:
        drawn = islice(drawn, num_requests)
    else:
        drawn = takewhile(lambda request: request.arrival_s < duration_s, drawn)
    return [replace(request, priority=priority) for request in drawn]


def _draw(arrivals: Gaps, prompts: Lengths, outputs: Lengths, seed: int) -> Iterator[TraceRequest]:
    """Requests without end."""
    gaps, of_prompts, of_outputs = (Random(f"{seed} {name}") for name in ("gap", "in", "out"))
    for time_s in _times(arrivals, gaps):
        yield TraceRequest(time_s, prompts.draw(of_prompts), outputs.draw(of_outputs))


def _times(arrivals: Gaps, random: Random) -> Iterator[float]:
    """Arrivals without end, to the microsecond."""
    now_s = 0.0
    while True:
        now_s += arrivals.draw_s(random)
        yield round(now_s, 6)


def mix(workloads: Sequence[Sequence[TraceRequest]]) -> list[TraceRequest]:
    """Several workloads at once, by time of arrival. Each keeps its rate and its priorities.

    Prefix ids are numbered anew, so that those of different workloads never mean the same tokens.
    """
    new_ids = count()
    merged = []
    for workload in workloads:
        ids: defaultdict[int, int] = defaultdict(new_ids.__next__)
        for request in workload:
            merged.append(replace(request, prefix_ids=tuple(ids[i] for i in request.prefix_ids)))
    return sorted(merged, key=lambda request: request.arrival_s)


# --- three workloads -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Requests of one kind, and which share of all requests they are."""

    share: float
    prompts: Lengths
    outputs: Lengths
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """A named kind of traffic; calling it gives requests."""

    name: str
    description: str
    rate_rps: float
    """By default: keeps the machine named in `WORKLOADS` busy for 50 to 80% of the time."""
    parts: tuple[Part, ...]

    def __call__(
        self,
        num_requests: int = 40,
        rate_rps: float | None = None,
        seed: int = 0,
        *,
        cv: float = 1.0,
    ) -> list[TraceRequest]:
        """The first requests of all parts together, each part with gaps of this `cv`.

        Raises:
            ValueError: a number is out of range.
        """
        rate_rps = self.rate_rps if rate_rps is None else rate_rps
        require_int("seed", seed, 0, LARGEST_SEED)
        require_int("num_requests", num_requests, 1, MOST_REQUESTS)
        Gaps(rate_rps, cv)  # refuses the rate as it was given, not a part of it
        parts = []
        for i, part in enumerate(self.parts):
            seeds = len(self.parts) * seed + i  # no two parts of any two seeds share one
            drawn = _draw(Gaps(part.share * rate_rps, cv), part.prompts, part.outputs, seeds)
            chosen = islice(drawn, num_requests)
            parts.append([replace(request, priority=part.priority) for request in chosen])
        return mix(parts)[:num_requests]


CHAT = Part(1.0, LogNormal(45, 120, most=300), LogNormal(20, 45, most=60))
DOCUMENTS = Part(1.0, LogNormal(400, 800, most=1000), Between(5, 30))

WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("short chat", "Short questions, answers of some sentences.", 0.5, (CHAT,)),
            Workload("long documents", "Pages to read, a few words to write.", 0.3, (DOCUMENTS,)),
            Workload(
                "mixed",
                "Four of five are short chat, which goes first where priority counts.",
                0.4,
                (replace(CHAT, share=0.8), replace(DOCUMENTS, share=0.2, priority=1)),
            ),
        )
    }
)
"""For smollm2-135m on two cores of a laptop, where a prompt token takes 2 to 4 ms and a decode step
60 to 240 ms."""
