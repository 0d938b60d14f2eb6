"""Small synthetic traces with the statistics of the public ones: the files in `data/traces`.

From the public traces only quantiles are kept, and a few means. A length is drawn by inverting the
piecewise linear distribution through these quantiles; prompt and output are drawn independently
(in all three traces their correlation is below 0.12). Sources:

- Azure LLM inference 2023, conversation and code (Patel et al. 2024, "Splitwise"; CC-BY 4.0,
  github.com/Azure/AzurePublicDataset)
- Mooncake FAST'25, conversation (Qin et al. 2025, "Mooncake"; Apache-2.0,
  github.com/kvcache-ai/Mooncake)

What is not kept: how load and lengths drift in the course of the hour, and which prompt length goes
with which user.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, pairwise
from pathlib import Path
from random import Random

from pdlab.workload.traces import (
    AZURE_HEADER,
    MOONCAKE_BLOCK_SIZE,
    MOONCAKE_FIELDS,
    TraceRequest,
)

PERCENTILES = (
    0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 98, 99,
    99.5, 99.9, 100,
)  # fmt: skip
"""Where the quantiles of `TrafficStatistics` are taken."""


@dataclass(frozen=True)
class TrafficStatistics:
    """Quantiles of a trace at `PERCENTILES`, in tokens and milliseconds.

    `gap_ms` is the time between two arrivals. The piecewise linear fit overstates its long tail, so
    it is scaled to `mean_gap_ms`. Empty where arrivals are drawn in another way.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    gap_ms: tuple[float, ...] = ()
    mean_gap_ms: float = 0


AZURE_CONVERSATION = TrafficStatistics(
    prompt_tokens=(
        2, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130,
        1189, 1315, 1876, 2734, 4083, 4098, 4142, 4831, 6179, 14050,
    ),
    output_tokens=(
        7, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411,
        424, 451, 540, 601, 643, 954, 1000,
    ),
    gap_ms=(
        0, 0.5, 1.4, 6.3, 16.1, 26.4, 36.5, 48.3, 60.7, 73.5, 87.3, 101.9, 118.4, 137.6, 158.7,
        183.2, 213.6, 246.7, 288.8, 345.9, 420.7, 565.2, 749.3, 889.7, 1034.2, 1411.2, 4314.6,
    ),
    mean_gap_ms=180.8,
)  # fmt: skip
"""Of 19,366 requests in 58 minutes."""

AZURE_CODE = TrafficStatistics(
    prompt_tokens=(
        3, 17, 35, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164, 2433,
        2744, 3192, 3920, 5188, 7303, 7436, 7436, 7436, 7437, 7437,
    ),
    output_tokens=(
        6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 171, 251,
        359, 825, 1899,
    ),
    gap_ms=(
        0, 0, 0, 0.1, 0.2, 0.9, 1.2, 2.1, 3.3, 5.3, 15.1, 38.2, 63.8, 89.6, 95, 97.9, 100.1,
        104, 160.1, 198.8, 272.9, 400.8, 798.7, 2205.1, 9978.3, 79232.5, 217169,
    ),
    mean_gap_ms=389.7,
)  # fmt: skip
"""Of 8,819 requests in 57 minutes; they come in bursts."""

MOONCAKE_CONVERSATION = TrafficStatistics(
    prompt_tokens=(
        891, 894, 896, 901, 964, 1261, 1662, 2306, 3263, 4251, 4993, 5870, 6909, 8187, 9570,
        11238, 13196, 15367, 17869, 21464, 27367, 39550, 66449, 85400, 100810, 121301, 126195,
    ),
    output_tokens=(
        1, 3, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504,
        543, 597, 698, 892, 1119, 1568, 2000, 2000,
    ),
)  # fmt: skip
"""Of 12,031 requests in 59 minutes, in bins of 3 s."""

TURN_GAP_S = 30
"""Least time between two turns of a conversation: in the trace 1 in 20 is shorter."""
FOLLOW_UP_SHARE = 0.55
NUM_CANDIDATES = 8
"""Set so that 400 requests hit about as many blocks as the 12,031 real ones (36.6%): a request
continues a conversation with this chance, and the longest of so many that fit."""


def azure_like(
    statistics: TrafficStatistics, num_requests: int, seed: int = 0
) -> list[TraceRequest]:
    """Requests with independent prompt length, output length and gap; no shared prefixes."""
    random = Random(seed)
    scale = statistics.mean_gap_ms / mean(statistics.gap_ms)
    requests, now_ms = [], 0.0
    for _ in range(num_requests):
        prompt = round(draw(random, statistics.prompt_tokens))
        output = round(draw(random, statistics.output_tokens))
        requests.append(TraceRequest(round(now_ms) / 1000, prompt, output))
        now_ms += scale * draw(random, statistics.gap_ms)
    return requests


def mooncake_like(
    statistics: TrafficStatistics, num_requests: int, duration_s: float, seed: int = 0
) -> list[TraceRequest]:
    """Conversations whose turns share a prefix, all behind one common block (the system prompt).

    A prompt's length is drawn first, so lengths keep their distribution. Then a request either
    begins a conversation or continues one that is not longer: it repeats the full blocks of the
    turn before and adds its own. Arrivals are uniform over `duration_s` in bins of 3 s, as in the
    trace; this thins an hour of traffic out, and conversations take longer between turns.
    """
    random = Random(seed)
    new_ids = count()
    shared = [next(new_ids)]
    arrivals = sorted(int(random.random() * duration_s / 3) * 3 for _ in range(num_requests))
    turns: list[TraceRequest] = []  # the last turn of each conversation
    requests = []
    for arrival_s in arrivals:
        prompt = round(draw(random, statistics.prompt_tokens))
        output = round(draw(random, statistics.output_tokens))
        before = _conversation(random, turns, arrival_s, prompt)
        known = shared
        if before is not None:
            turns.remove(before)
            known = list(before.prefix_ids[: before.num_prompt_tokens // MOONCAKE_BLOCK_SIZE])
        missing = -(-prompt // MOONCAKE_BLOCK_SIZE) - len(known)
        ids = (*known, *(next(new_ids) for _ in range(missing)))
        turns.append(TraceRequest(arrival_s, prompt, output, ids, MOONCAKE_BLOCK_SIZE))
        requests.append(turns[-1])
    return requests


def _conversation(
    random: Random, turns: list[TraceRequest], arrival_s: float, prompt_tokens: int
) -> TraceRequest | None:
    """A conversation to continue: one that has paused and is not longer than this prompt."""
    if random.random() >= FOLLOW_UP_SHARE:
        return None
    fitting = [
        turn
        for turn in turns
        if MOONCAKE_BLOCK_SIZE <= turn.num_prompt_tokens <= prompt_tokens
        and turn.arrival_s <= arrival_s - TURN_GAP_S
    ]
    if not fitting:
        return None
    chosen = [fitting[int(random.random() * len(fitting))] for _ in range(NUM_CANDIDATES)]
    return max(chosen, key=lambda turn: turn.num_prompt_tokens)


def draw(random: Random, quantiles: Sequence[float]) -> float:
    """A number from the piecewise linear distribution through `quantiles` at `PERCENTILES`."""
    percentile = 100 * random.random()
    i = bisect_right(PERCENTILES, percentile) - 1
    part = (percentile - PERCENTILES[i]) / (PERCENTILES[i + 1] - PERCENTILES[i])
    return quantiles[i] + part * (quantiles[i + 1] - quantiles[i])


def mean(quantiles: Sequence[float]) -> float:
    """Mean of the piecewise linear distribution."""
    steps = zip(pairwise(PERCENTILES), pairwise(quantiles), strict=True)
    return sum((q1 - q0) / 100 * (low + high) / 2 for (q0, q1), (low, high) in steps)


# --- files ---------------------------------------------------------------------------------------


def azure_csv(requests: Sequence[TraceRequest]) -> str:
    """The requests in the Azure format, from noon of an arbitrary day on."""
    start = datetime(2023, 11, 16, 12)
    lines = [",".join(AZURE_HEADER)]
    for request in requests:
        time = start + timedelta(seconds=request.arrival_s)
        stamp = time.isoformat(sep=" ", timespec="milliseconds")
        lines.append(f"{stamp},{request.num_prompt_tokens},{request.num_output_tokens}")
    return "\n".join(lines) + "\n"


def mooncake_jsonl(requests: Sequence[TraceRequest]) -> str:
    """The requests in the Mooncake format."""
    lines = []
    for request in requests:
        values = (
            round(1000 * request.arrival_s),
            request.num_prompt_tokens,
            request.num_output_tokens,
            list(request.prefix_ids),
        )
        fields = dict(zip(MOONCAKE_FIELDS, values, strict=True))
        lines.append(json.dumps(fields, separators=(",", ":")))
    return "\n".join(lines) + "\n"


SHIPPED: dict[str, Callable[[], str]] = {
    "azure-conv-like.csv": lambda: azure_csv(azure_like(AZURE_CONVERSATION, 800, seed=2)),
    "azure-code-like.csv": lambda: azure_csv(azure_like(AZURE_CODE, 800, seed=2)),
    "mooncake-conv-like.jsonl": lambda: mooncake_jsonl(
        mooncake_like(MOONCAKE_CONVERSATION, 400, duration_s=3537, seed=3)
    ),
}
"""The files in `data/traces` and how each is made."""


def write_shipped(folder: Path) -> None:
    """Write the shipped traces anew: `python -m pdlab.workload.synthetic data/traces`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in SHIPPED.items():
        (folder / name).write_text(text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    import sys

    write_shipped(Path(sys.argv[1]))
