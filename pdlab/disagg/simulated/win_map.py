"""Which way of serving wins at each pair of limits: TTFT across, TPOT down.

Each candidate is simulated once at each rate; every pair of limits is read off the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.search import LEAST_S, SHARE, Candidate, simulate_at
from pdlab.requirements import require_number
from pdlab.workload.report import FINISHED
from pdlab.workload.traces import TraceRequest

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WinMap:
    """Goodput per device by mode and limits. Simulated."""

    ttfts_s: list[float]
    tpots_s: list[float]
    modes: list[str]
    candidates: list[Candidate]
    by_candidate: Floats
    """Requests a second and device: [num_candidates, num_tpots, num_ttfts]."""
    rates_rps: list[float]
    """Requests a second and device that were simulated; no goodput is above the last."""

    @property
    def goodput(self) -> Floats:
        """Of each mode's best candidate: [num_modes, num_tpots, num_ttfts]."""
        return np.stack([self.by_candidate[self._of(mode)].max(axis=0) for mode in self.modes])

    @property
    def winner(self) -> NDArray[np.int_]:
        """Place in `modes` of the best, -1 where none has any goodput: [num_tpots, num_ttfts]."""
        goodput = self.goodput
        return np.where(goodput.max(axis=0) > 0, goodput.argmax(axis=0), -1)

    def best(self, mode: str, tpot: int, ttft: int) -> Candidate:
        """A mode's best candidate at a pair of limits, by their places."""
        places = self._of(mode)
        return self.candidates[places[int(self.by_candidate[places, tpot, ttft].argmax())]]

    def _of(self, mode: str) -> list[int]:
        return [i for i, each in enumerate(self.candidates) if each.mode == mode]

    def __str__(self) -> str:
        """A table of goodputs per device, the best of each pair marked."""
        width = max(len(mode) for mode in self.modes)
        head = "".join(f"{ttft_s:>9.3g} s" for ttft_s in self.ttfts_s)
        lines = [f"{'TPOT':>8}   {'TTFT':{width}}{head}"]
        goodput, winner = self.goodput, self.winner
        for i, tpot_s in enumerate(self.tpots_s):
            for m, mode in enumerate(self.modes):
                row = zip(goodput[m, i], winner[i] == m, strict=True)
                cells = "".join(f"{rate:>10.3f}{'*' if wins else ' '}" for rate, wins in row)
                first = f"{tpot_s:>6.3g} s" if m == 0 else " " * 8
                lines.append(f"{first}   {mode:{width}}{cells}".rstrip())
        return "\n".join(lines)


def win_map(
    tried: Iterable[Candidate],
    requests: Sequence[TraceRequest],
    ttfts_s: Sequence[float],
    tpots_s: Sequence[float],
    rates_rps: Sequence[float],
    *,
    share: float = SHARE,
    least_s: float = LEAST_S,
    on_run: Callable[[int, int, Candidate, float], None] | None = None,
) -> WinMap:
    """Goodput per device of each mode at each pair of limits.

    The goodput lies between two rates: the last of those at which, and below which, enough requests
    meet both limits, and the next one; between them attainment is taken to fall evenly with the
    logarithm of the rate.

    Args:
        tried: clusters; of a mode with several, the best at each pair counts.
        rates_rps: requests a second and device, to be simulated.
        share: of the requests that must meet both limits.
        least_s: for how long requests come, at least.
        on_run: called after each run with how many are done, how many there are, whose it was, and
            the rate.

    Raises:
        ValueError: a list is empty, or a number is out of range.
    """
    tried, rates_rps = list(tried), sorted(rates_rps)
    for name, values in {"tried": tried, "ttfts_s": ttfts_s, "tpots_s": tpots_s}.items():
        if not values:
            raise ValueError(f"{name} is empty: at least 1 is needed")
    if not rates_rps:
        raise ValueError("rates_rps is empty: at least 1 is needed")
    require_number("share", share, 0.01, 1)
    runs, maps = 0, []
    for candidate in tried:
        shares = []
        for rate_rps in rates_rps:
            run = simulate_at(candidate, requests, rate_rps * candidate.num_devices, least_s)
            shares.append(attainments(run, ttfts_s, tpots_s))
            runs += 1
            if on_run:
                on_run(runs, len(tried) * len(rates_rps), candidate, rate_rps)
        maps.append(_goodputs(np.stack(shares), np.array(rates_rps), share))
    modes = list(dict.fromkeys(candidate.mode for candidate in tried))
    return WinMap(list(ttfts_s), list(tpots_s), modes, tried, np.stack(maps), rates_rps)


def attainments(run: ClusterRun, ttfts_s: Sequence[float], tpots_s: Sequence[float]) -> Floats:
    """Share of all requests that meet both limits: [num_tpots, num_ttfts]."""
    served = [r.metrics for r in run.requests if r.finish_reason in FINISHED]
    in_time = np.array([m.ttft_s for m in served], float)[:, None] <= np.array(ttfts_s)
    in_pace = np.array([m.tpot_s or 0.0 for m in served])[:, None] <= np.array(tpots_s)
    met: Floats = in_pace.T.astype(float) @ in_time.astype(float) / len(run.requests)
    return met


def _goodputs(shares: Floats, rates_rps: Floats, share: float) -> Floats:
    """Where attainment falls below `share`: [num_tpots, num_ttfts] of [num_rates, ...]."""
    goodput = np.zeros(shares.shape[1:])
    for place in np.ndindex(goodput.shape):
        met = shares[(slice(None), *place)]
        below = np.flatnonzero(met < share)
        if not below.size:
            goodput[place] = rates_rps[-1]
        elif below[0]:
            high = int(below[0])
            part = (met[high - 1] - share) / (met[high - 1] - met[high])
            ratio = rates_rps[high] / rates_rps[high - 1]
            goodput[place] = rates_rps[high - 1] * ratio**part
    return goodput
