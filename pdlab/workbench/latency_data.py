"""Latencies of served requests as curves, and what it takes to count those within any limits.

How latencies are counted says `pdlab.workload.report`, from which the numbers come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdlab.workload.report import FINISHED, latency_samples
from pdlab.workload.serving import SLO, ServingRun

METRICS = ("ttft", "tpot", "itl", "e2e")
NAMES = {
    "ttft": "TTFT: arrival to first token",
    "tpot": "TPOT: mean time between a request's tokens",
    "itl": "ITL: each gap between two tokens",
    "e2e": "E2E: arrival to last token",
}
MARKED = (50, 90, 99)
"""Percentiles that are written out."""
MAX_POINTS = 400
"""Points of a curve; a longer one is drawn through as many quantiles."""
MAX_PAIRS = 8000
"""Requests whose TTFT and TPOT one widget sends to the browser, over all its runs."""
WIDE = 20
"""From this ratio of the largest to the smallest value on, a logarithmic axis shows more."""
UNKNOWN_SLO = SLO(1.0, 0.1)
"""Limits to begin with where no request says what would be sensible, in seconds."""


def provenance_line(run: ServingRun) -> str:
    """`measured on ...` or `simulated: ...`, as it stands below every picture of a run."""
    return f"measured on {run.basis}" if run.provenance == "measured" else f"simulated: {run.basis}"


Samples = Mapping[str, NDArray[np.float64]]
"""Latencies of one run by name, as `latency_samples` gives them."""


def latency_data(
    run: ServingRun, name: str = "", max_pairs: int = MAX_PAIRS, samples: Samples | None = None
) -> dict[str, Any]:
    """A run's curves and its requests' TTFT and TPOT, as plain data of bounded size.

    `pairs` has the finished requests (TPOT None with one token). Of more than `max_pairs`, every
    k-th in order of TTFT stands for k of them, and `num_finished` says how many there are.
    """
    done = [r.metrics for r in run.requests if r.finish_reason in FINISHED]
    done.sort(key=lambda m: m.ttft_s or 0.0)
    every = -(-len(done) // max_pairs) or 1
    samples = samples or latency_samples(run.requests)
    return {
        "name": name,
        "provenance": run.provenance,
        "line": provenance_line(run),
        "num_requests": len(run.requests),
        "num_finished": len(done),
        "duration_s": run.duration_s,
        "curves": {m: _curve(samples[f"{m}_s"]) for m in METRICS},
        "pairs": [[_digits(m.ttft_s), _digits(m.tpot_s)] for m in done[every // 2 :: every]],
    }


def curve(values: ArrayLike) -> tuple[list[float], list[float]]:
    """Seconds, and the part of the values that is not larger, for at most MAX_POINTS points."""
    samples = np.asarray(values, dtype=float)
    count = min(samples.size, MAX_POINTS)
    if not count:
        return [], []
    parts = np.arange(1, count + 1) / count
    return np.quantile(samples, parts, method="inverted_cdf").tolist(), parts.tolist()


def marked(values: ArrayLike) -> list[float | None]:
    """The percentiles in MARKED, as the report has them; None of no values."""
    samples = np.asarray(values, dtype=float)
    return np.percentile(samples, MARKED).tolist() if samples.size else [None] * len(MARKED)


def sensible_slo(runs: Sequence[Samples]) -> SLO:
    """Limits to begin with: what nine of ten requests of the best run stay within."""

    def limit(name: str, otherwise: float) -> float:
        known = [samples[name] for samples in runs if samples[name].size]
        best = min((float(np.percentile(s, 90)) for s in known), default=otherwise)
        return float(f"{best:.2g}")

    return SLO(limit("ttft_s", UNKNOWN_SLO.ttft_s), limit("tpot_s", UNKNOWN_SLO.tpot_s))


def is_wide(runs: Sequence[Samples], metric: str) -> bool:
    """Whether the values of a metric span so much that a logarithmic axis shows more."""
    found = np.concatenate([samples[f"{metric}_s"] for samples in runs])
    found = found[found > 0]
    return bool(found.size) and bool(found.max() > WIDE * found.min())


def _curve(values: ArrayLike) -> dict[str, Any]:
    seconds, _ = curve(values)
    return {
        "n": np.size(values),
        "seconds": [_digits(s) for s in seconds],
        "marked": marked(values),
    }


def _digits(value: float | None) -> float | None:
    """Six significant digits: exact enough beside a limit that a slider sets to three."""
    return None if value is None else float(f"{value:.6g}")
