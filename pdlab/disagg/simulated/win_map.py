"""Which way of serving wins at each pair of limits: TTFT across, pace down.

Each candidate is simulated once at each rate; every pair of limits is read off the same runs, and
so are both measures of pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.search import LEAST_S, SHARE, Candidate, counted, simulate_at
from pdlab.engine import RequestMetrics
from pdlab.requirements import require_choice, require_int, require_number
from pdlab.workload.report import FINISHED
from pdlab.workload.traces import TraceRequest

Floats = NDArray[np.float64]

PACES = ("tpot", "itl")
"""Measures of a request's pace after its first token. `tpot`: the mean gap between its tokens;
`itl`: its p99 gap, so that 99 of 100 gaps are within the limit. A mean hides stalls: one of 1 s in
200 tokens adds 5 ms."""
GAP_SHARE = 0.99


@dataclass(frozen=True)
class WinMap:
    """Goodput per device by mode and limits. Simulated."""

    ttfts_s: list[float]
    tpots_s: list[float]
    """Limits on the pace, however it is measured."""
    modes: list[str]
    candidates: list[Candidate]
    by_pace: Floats
    """Requests a second and device: [num_paces, num_candidates, num_tpots, num_ttfts]."""
    rates_rps: list[float]
    """Requests a second and device that were to be simulated; no goodput is above the last."""
    pace: str = "tpot"
    """The measure that is looked at: one of `PACES`."""
    num_runs: int = 0

    def by(self, pace: str) -> WinMap:
        """The same by another measure of pace.

        Raises:
            ValueError: it is none of `PACES`.
        """
        require_choice("pace", pace, PACES)
        return replace(self, pace=pace)

    @property
    def by_candidate(self) -> Floats:
        """Requests a second and device: [num_candidates, num_tpots, num_ttfts]."""
        return self.by_pace[PACES.index(self.pace)]

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
        lines = [f"{self.pace.upper():>8}   {'TTFT':{width}}{head}"]
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
    num_processes: int = 1,
    on_run: Callable[[int, int, Candidate, float], None] | None = None,
) -> WinMap:
    """Goodput per device of each mode at each pair of limits.

    The goodput lies between two rates: the last of those at which, and below which, enough requests
    meet both limits, and the next one; between them attainment is taken to fall evenly with the
    logarithm of the rate. A cluster that misses the widest limits misses all of them, so it is
    spared higher rates.

    Args:
        tried: clusters; of a mode with several, the best at each pair counts.
        rates_rps: requests a second and device, to be simulated.
        share: of the requests that must meet both limits.
        least_s: for how long requests come, at least.
        num_processes: that simulate, side by side. More than 1 are spawned, as by
            `multiprocessing`: a script's main module must be safe to import.
        on_run: called after each run with how many are done or spared, how many there are, whose it
            was, and the rate. What it raises ends the map.

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
    require_int("num_processes", num_processes, 1)
    meet = partial(
        _meet, requests=requests, ttfts_s=list(ttfts_s), tpots_s=list(tpots_s), least_s=least_s
    )
    met: list[list[Floats]] = [[] for _ in tried]
    done, of = 0, len(tried) * len(rates_rps)
    with closing(_runs(meet, tried, rates_rps, share, num_processes)) as runs:
        for place, found in runs:
            met[place].append(found)
            num_rates = len(met[place])
            done += 1 if _meets_any(found, share) else 1 + len(rates_rps) - num_rates
            if on_run:
                on_run(done, of, tried[place], rates_rps[num_rates - 1])
    maps = [_goodputs(np.stack(each), np.array(rates_rps), share) for each in met]
    modes = list(dict.fromkeys(candidate.mode for candidate in tried))
    by_pace, num_runs = np.stack(maps, axis=1), sum(len(each) for each in met)
    return WinMap(list(ttfts_s), list(tpots_s), modes, tried, by_pace, rates_rps, num_runs=num_runs)


Meet = Callable[[Candidate, float], Floats]
"""Attainments of a cluster at a rate: [num_paces, num_tpots, num_ttfts]."""


def _meet(
    candidate: Candidate,
    rate_rps: float,
    *,
    requests: Sequence[TraceRequest],
    ttfts_s: Sequence[float],
    tpots_s: Sequence[float],
    least_s: float,
) -> Floats:
    run = simulate_at(candidate, requests, rate_rps * candidate.num_devices, least_s)
    return attainments(run, ttfts_s, tpots_s)


def _meets_any(met: Floats, share: float) -> bool:
    return bool(met.max() >= share)


def _runs(
    meet: Meet, tried: list[Candidate], rates_rps: list[float], share: float, num_processes: int
) -> Generator[tuple[int, Floats]]:
    """Each candidate at one rate after the other while it meets any limits: whose, and what."""
    if num_processes > 1:
        yield from _runs_beside(meet, tried, rates_rps, share, num_processes)
        return
    for place, candidate in enumerate(tried):
        for rate_rps in rates_rps:
            met = meet(candidate, rate_rps)
            yield place, met
            if not _meets_any(met, share):
                break


def _runs_beside(
    meet: Meet, tried: list[Candidate], rates_rps: list[float], share: float, num_processes: int
) -> Generator[tuple[int, Floats]]:
    """The same in processes: of each candidate one run at a time."""
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
    under_way: dict[Future[Floats], tuple[int, int]] = {}

    def begin(place: int, rate: int) -> None:
        under_way[pool.submit(meet, tried[place], rates_rps[rate])] = place, rate

    try:
        for place in range(len(tried)):
            begin(place, 0)
        while under_way:
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                place, rate = under_way.pop(future)
                met = future.result()
                if _meets_any(met, share) and rate + 1 < len(rates_rps):
                    begin(place, rate + 1)
                yield place, met
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def attainments(run: ClusterRun, ttfts_s: Sequence[float], tpots_s: Sequence[float]) -> Floats:
    """Share of the requests after the warm-up that meet both limits.

    Returns:
        [num_paces, num_tpots, num_ttfts], in the order of `PACES`.
    """
    requests = counted(run)
    served = [r.metrics for r in requests if r.finish_reason in FINISHED]
    in_time = np.array([m.ttft_s for m in served], float)[:, None] <= np.array(ttfts_s)
    paces = np.array([[m.tpot_s or 0.0, p99_gap_s(m)] for m in served]).reshape(-1, len(PACES))
    in_pace = paces.T[:, :, None] <= np.array(tpots_s)
    met: Floats = in_pace.transpose(0, 2, 1).astype(float) @ in_time.astype(float) / len(requests)
    return met


def p99_gap_s(metrics: RequestMetrics) -> float:
    """What 99 of 100 gaps between a request's tokens do not exceed; 0 where it has no gap.

    With fewer than 100 gaps it is the longest.
    """
    gaps_s = sorted(metrics.itl_s)
    return gaps_s[math.ceil(GAP_SHARE * len(gaps_s) - 1e-9) - 1] if gaps_s else 0.0


def _goodputs(shares: Floats, rates_rps: Floats, share: float) -> Floats:
    """Where attainment falls below `share`: [...] of [num_rates, ...]; the last rates may lack."""
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
