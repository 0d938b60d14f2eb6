"""Synthetic traffic has the rate, bursts and lengths that were asked for, and follows its seed."""

import math
import statistics
from itertools import pairwise
from random import Random

import pytest

from pdlab.requirements import LARGEST_SEED
from pdlab.workload.lengths import Between, Empirical, Fixed, Lengths, LogNormal
from pdlab.workload.synthetic import AZURE_CODE, AZURE_CONVERSATION, PERCENTILES, azure_like
from pdlab.workload.traces import LONGEST_PROMPT, TraceRequest
from pdlab.workload.traffic import (
    MOST_REQUESTS,
    WORKLOADS,
    Gaps,
    Workload,
    evenly,
    gamma,
    make_traffic,
    mix,
    poisson,
)

SHORT = (Between(10, 50), Between(1, 9))
DRAWS = 20_000


def gaps_of(arrivals: Gaps, num_requests: int = DRAWS, seed: int = 1) -> list[float]:
    requests = make_traffic(arrivals, *SHORT, num_requests, seed)
    return [b - a for a, b in pairwise([0.0, *(request.arrival_s for request in requests)])]


def lengths_of(lengths: Lengths, number: int = DRAWS) -> list[int]:
    random = Random(3)
    return [lengths.draw(random) for _ in range(number)]


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate_rps", [0.2, 3.0])
@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0, 4.0])
def test_gaps_have_the_rate_and_the_variation(rate_rps: float, cv: float) -> None:
    """Within 4 standard errors for the mean (cv / sqrt(n)), and 10% for the variation."""
    gaps = gaps_of(gamma(rate_rps, cv))
    mean = statistics.mean(gaps)
    assert mean * rate_rps == pytest.approx(1, abs=4 * cv / math.sqrt(DRAWS))
    assert statistics.stdev(gaps) / mean == pytest.approx(cv, rel=0.1)


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded in 1 of 1,000 cases."""
    gaps = sorted(gaps_of(poisson(2.0)))
    expected = [1 - math.exp(-2.0 * gap) for gap in gaps]
    assert distance(expected) < 1.95 / math.sqrt(DRAWS)
    bursty = [1 - math.exp(-2.0 * gap) for gap in sorted(gaps_of(gamma(2.0, 1.2)))]
    assert distance(bursty) > 1.95 / math.sqrt(DRAWS)  # the test can tell


def distance(quantiles: list[float]) -> float:
    """The Kolmogorov-Smirnov statistic of numbers that should be uniform in [0, 1], sorted."""
    number = len(quantiles)
    return max(max((i + 1) / number - q, q - i / number) for i, q in enumerate(quantiles))


def test_bursts_show_in_counts_as_well() -> None:
    """Variance over mean of the arrivals a minute tends to cv²: the index of dispersion."""

    def dispersion(cv: float) -> float:
        requests = make_traffic(gamma(1.0, cv), *SHORT, seed=2, duration_s=30_000)
        counts = [0] * 500
        for request in requests:
            counts[int(request.arrival_s / 60)] += 1
        return statistics.variance(counts) / statistics.mean(counts)

    assert dispersion(1.0) == pytest.approx(1, rel=0.25)
    assert dispersion(3.0) == pytest.approx(9, rel=0.25)


@pytest.mark.parametrize("arrivals", [evenly(4.0), gamma(4.0, 0.0), gamma(4.0, 1e-200)])
def test_without_variation_arrivals_are_a_metronome(arrivals: Gaps) -> None:
    requests = make_traffic(arrivals, *SHORT, 4)
    assert [request.arrival_s for request in requests] == [0.25, 0.5, 0.75, 1.0]


def test_extreme_variation_is_still_drawn() -> None:
    assert all(gap >= 0 for gap in gaps_of(gamma(1.0, 20.0), 2000))
    assert gaps_of(gamma(1.0, 1.1e-4), 50) == pytest.approx([1.0] * 50, rel=1e-3)


# --- how long ------------------------------------------------------------------------------------


def test_lengths_are_fixed_or_between() -> None:
    assert set(lengths_of(Fixed(7), 100)) == {7}
    drawn = lengths_of(Between(3, 6))
    for length in (3, 4, 5, 6):
        assert drawn.count(length) / DRAWS == pytest.approx(0.25, abs=0.015)  # 5 deviations
    assert set(drawn) == {3, 4, 5, 6}
    assert set(lengths_of(Between(4, 4), 10)) == {4}


def test_log_normal_has_its_median_its_p90_and_its_end() -> None:
    drawn = lengths_of(LogNormal(400, 800, most=1000))
    for limit, share in ((400, 0.5), (800, 0.9)):
        assert sum(length <= limit for length in drawn) / DRAWS == pytest.approx(share, abs=0.015)
    assert max(drawn) == 1000
    logs = sorted(math.log(length) for length in lengths_of(LogNormal(400, 800)))
    normal = statistics.NormalDist(math.log(400), math.log(2) / 1.2815515655446004)
    assert distance([normal.cdf(value) for value in logs]) < 1.95 / math.sqrt(DRAWS)
    assert min(lengths_of(LogNormal(1, 5))) == 1
    assert set(lengths_of(LogNormal(30, 30), 100)) == {30}


class Edge(Random):
    """A stream of the least, or the greatest, number that `random` may return."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize(
    ("lengths", "least", "most"),
    [
        (Fixed(5), 5, 5),
        (Between(2, 9), 2, 9),
        (LogNormal(10, 20, most=50), 1, 50),
        (Empirical(AZURE_CODE.output_tokens), 6, 1899),
    ],
)
def test_the_ends_of_the_random_stream_are_in_range(
    lengths: Lengths, least: int, most: int
) -> None:
    assert lengths.draw(Edge(0.0)) == least
    assert lengths.draw(Edge(1 - 2**-53)) == most


def test_empirical_lengths_have_the_quantiles_of_a_trace() -> None:
    drawn = sorted(lengths_of(Empirical(AZURE_CONVERSATION.prompt_tokens)))
    for percentile, value in zip(PERCENTILES, AZURE_CONVERSATION.prompt_tokens, strict=True):
        below = sum(length < value for length in drawn) / DRAWS
        at_most = sum(length <= value for length in drawn) / DRAWS
        assert below - 0.015 <= percentile / 100 <= at_most + 0.015


def test_empirical_of_lengths_draws_what_they_were_drawn_from() -> None:
    shape = LogNormal(40, 200)
    again = sorted(lengths_of(Empirical.of(lengths_of(shape, 5000))))
    drawn = sorted(lengths_of(shape))
    for share in (0.1, 0.5, 0.9):
        assert again[int(share * DRAWS)] == pytest.approx(drawn[int(share * DRAWS)], rel=0.06)
    assert set(lengths_of(Empirical.of([17]), 50)) == {17}


# --- requests ------------------------------------------------------------------------------------


def test_a_seed_gives_one_workload() -> None:
    def make(seed: int) -> list[TraceRequest]:
        return make_traffic(gamma(1.0, 2.0), LogNormal(40, 90), Between(2, 9), 50, seed)

    assert make(5) == make(5)
    assert make(5) != make(6)
    assert all(request.priority == 0 for request in make(5))


def test_another_rate_or_burstiness_changes_no_length() -> None:
    """So that what a slider of the rate shows is the rate."""

    def make(arrivals: Gaps) -> list[TraceRequest]:
        return make_traffic(arrivals, *SHORT, 30, seed=4)

    def lengths(requests: list[TraceRequest]) -> list[tuple[int, int]]:
        return [(r.num_prompt_tokens, r.num_output_tokens) for r in requests]

    slow, fast = make(poisson(0.5)), make(poisson(2.0))
    assert lengths(slow) == lengths(fast) == lengths(make(gamma(1.0, 3.0)))
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival_s == pytest.approx(4 * other.arrival_s, abs=1e-5)


def test_more_requests_begin_with_the_same_ones() -> None:
    few, many = (make_traffic(poisson(1.0), *SHORT, n, seed=7) for n in (10, 25))
    assert many[:10] == few
    timed = make_traffic(poisson(1.0), *SHORT, seed=7, duration_s=many[-1].arrival_s)
    assert timed == many[:-1]  # all before that moment


def test_prompts_and_outputs_are_independent() -> None:
    requests = make_traffic(poisson(1.0), Between(1, 1000), Between(1, 1000), 5000)
    correlation = statistics.correlation(
        [r.num_prompt_tokens for r in requests], [r.num_output_tokens for r in requests]
    )
    assert abs(correlation) < 4 / math.sqrt(5000)


def test_a_mix_keeps_times_and_priorities() -> None:
    chat = make_traffic(poisson(2.0), Fixed(10), Fixed(5), 40, seed=1)
    documents = make_traffic(poisson(0.5), Fixed(900), Fixed(5), 10, seed=2, priority=4)
    mixed = mix([chat, documents])
    assert [r.arrival_s for r in mixed] == sorted(r.arrival_s for r in (*chat, *documents))
    assert [r for r in mixed if r.priority == 4] == documents
    assert [r for r in mixed if r.priority == 0] == chat
    assert mix([]) == []


def test_prefixes_of_different_workloads_stay_apart() -> None:
    one = [TraceRequest(0.0, 600, 1, (7, 8), 512), TraceRequest(2.0, 600, 1, (7, 9), 512)]
    other = [TraceRequest(1.0, 600, 1, (7, 8), 512)]
    a, b, c = (request.prefix_ids for request in mix([one, other]))
    assert a[0] == c[0]
    assert len({*a, *b, *c}) == 5
    assert mix([one, []])[0].prefix_block_size == 512


# --- the three workloads -------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_named_workloads_have_their_rate_and_follow_their_seed(workload: Workload) -> None:
    requests = workload(4000)
    assert len(requests) == 4000
    assert 4000 / requests[-1].arrival_s == pytest.approx(workload.rate_rps, rel=0.08)
    assert workload(60, seed=3) == workload(60, seed=3) != workload(60, seed=4)
    assert workload(60, seed=3)[:20] == workload(20, seed=3)
    doubled = workload(60, rate_rps=2 * workload.rate_rps, seed=3)
    for one, other in zip(workload(60, seed=3), doubled, strict=True):
        assert one.arrival_s == pytest.approx(2 * other.arrival_s, abs=1e-5)
        assert one.num_tokens == other.num_tokens


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_named_workloads_fit_a_laptop(workload: Workload) -> None:
    """Busy for 50 to 80% of the time, for steps of 35 ms + 25 ms a decode + 2.5 ms a prompt token.

    Measured on two cores with smollm2-135m; a pure sum of all work would miss that a batch shares
    the 35 ms.
    """
    requests = workload(500, seed=1)
    assert all(r.num_prompt_tokens <= 1000 and r.num_output_tokens <= 60 for r in requests)
    assert 0.5 < busy_share(requests) < 0.8


def busy_share(requests: list[TraceRequest]) -> float:
    """Serve everybody at once, without any limit; returns the share of the time with work."""
    now_s = busy_s = 0.0
    coming, decoding = list(reversed(requests)), []
    while coming or decoding:
        if not decoding:
            now_s = max(now_s, coming[-1].arrival_s)
        new = []
        while coming and coming[-1].arrival_s <= now_s:
            new.append(coming.pop())
        prompt_tokens = sum(r.num_prompt_tokens for r in new)
        step_s = 0.035 + 0.025 * len(decoding) + 0.0025 * prompt_tokens
        now_s, busy_s = now_s + step_s, busy_s + step_s
        left = [n - 1 for n in decoding] + [r.num_output_tokens - 1 for r in new]
        decoding = [n for n in left if n > 0]
    return busy_s / now_s


def test_one_in_five_of_the_mix_is_a_document_and_goes_last() -> None:
    requests = WORKLOADS["mixed"](4000)
    chat = [r.num_prompt_tokens for r in requests if r.priority == 0]
    documents = [r.num_prompt_tokens for r in requests if r.priority == 1]
    assert len(documents) / 4000 == pytest.approx(0.2, abs=0.03)
    assert statistics.median(documents) > 5 * statistics.median(chat)


def test_parts_of_the_mix_have_random_streams_of_their_own() -> None:
    """From one stream, every document would come at four times the arrival of a chat."""
    requests = WORKLOADS["mixed"](500)
    chat, documents = ([r.arrival_s for r in requests if r.priority == p] for p in (0, 1))
    assert documents[0] != pytest.approx(4 * chat[0], rel=1e-3)
    assert documents[9] != pytest.approx(4 * chat[9], rel=1e-3)


def test_a_named_workload_can_come_in_bursts() -> None:
    def variation(cv: float) -> float:
        times = [request.arrival_s for request in WORKLOADS["short chat"](5000, cv=cv)]
        gaps = [b - a for a, b in pairwise(times)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert variation(1.0) == pytest.approx(1, rel=0.1)
    assert variation(3.0) == pytest.approx(3, rel=0.1)


def test_ten_thousand_requests_like_a_public_trace() -> None:
    requests = azure_like(AZURE_CONVERSATION, 10_000)
    assert len(requests) == 10_000
    assert requests[-1].arrival_s / 10_000 == pytest.approx(0.1808, rel=0.05)


# --- bad input -----------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BAD = {
    "no rate": (lambda: poisson(0), "rate_rps=0 must be a number from 1e-06 to 1000000"),
    "negative rate": (lambda: gamma(-1.0, 1.0), r"rate_rps=-1\.0 must be"),
    "endless rate": (lambda: evenly(INF), "rate_rps=inf must be"),
    "rate is text": (lambda: poisson("1"), "rate_rps='1' must be"),
    "negative cv": (lambda: gamma(1.0, -0.5), r"cv=-0\.5 must be a number from 0 to 20"),
    "large cv": (lambda: gamma(1.0, 21), "cv=21 must be"),
    "cv is no number": (lambda: gamma(1.0, NAN), "cv=nan must be"),
    "no token": (lambda: Fixed(0), "num_tokens=0 must be an integer >= 1"),
    "half a token": (lambda: Fixed(1.5), r"num_tokens=1\.5 must be"),
    "too many tokens": (lambda: Fixed(LONGEST_PROMPT + 1), "num_tokens has 6 hex digits"),
    "least": (lambda: Between(0, 5), "least=0 must be an integer >= 1"),
    "most": (lambda: Between(5, 4), "most=4 must be an integer >= 5"),
    "median": (lambda: LogNormal(0.5, 5), r"median=0\.5 must be a number from 1 to"),
    "p90": (lambda: LogNormal(10, 9), "p90=9 must be a number from 10 to"),
    "an end below p90": (lambda: LogNormal(10, 90, 80), "most=80 must be an integer >= 90"),
    "few quantiles": (lambda: Empirical((1, 2)), "quantiles has 2 values, it must have 27"),
    "no length": (lambda: Empirical((0,) * 27), "quantiles=0 must be a number from 1"),
    "falling": (lambda: Empirical((*range(27, 0, -1),)), "quantiles must not fall"),
    "no lengths": (lambda: Empirical.of([]), "lengths is empty"),
    "no end": (lambda: make_traffic(poisson(1), *SHORT), "num_requests and duration_s is needed"),
    "two ends": (
        lambda: make_traffic(poisson(1), *SHORT, 5, duration_s=5.0),
        "num_requests and duration_s is needed, and not both",
    ),
    "no request": (lambda: make_traffic(poisson(1), *SHORT, 0), "num_requests=0 must be an int"),
    "too long": (
        lambda: make_traffic(poisson(1000), *SHORT, duration_s=10_001),
        r"duration_s=10001 must be a number from 0 to 10000\.0",
    ),
    "seed": (lambda: make_traffic(poisson(1), *SHORT, 1, seed=-1), "seed=-1 must be an integer"),
    "rate of a workload": (lambda: WORKLOADS["mixed"](9, rate_rps=2e6), r"rate_rps=2000000\.0 mus"),
    "seed of a workload": (lambda: WORKLOADS["mixed"](9, seed="a"), "seed='a' must be an integer"),
    "size of a workload": (lambda: WORKLOADS["mixed"](0), "num_requests=0 must be an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_and_limit(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_every_seed_of_an_engine_is_one_of_a_workload() -> None:
    for workload in WORKLOADS.values():
        assert workload(3, seed=LARGEST_SEED) != workload(3, seed=LARGEST_SEED - 1)
        with pytest.raises(ValueError, match="seed"):
            workload(3, seed=LARGEST_SEED + 1)
        with pytest.raises(ValueError, match="num_requests"):
            workload(MOST_REQUESTS + 1)
