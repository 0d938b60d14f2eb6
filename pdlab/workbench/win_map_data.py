"""What the WinMap computes, and a map as plain data: for the page, and as a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdlab.disagg.ratio import need_of
from pdlab.disagg.simulated.search import LEAST_S, MODES, SHARE, Candidate, Machine, candidates
from pdlab.disagg.simulated.win_map import PACES, win_map
from pdlab.disagg.simulated.win_map import WinMap as Map
from pdlab.link import LINKS
from pdlab.requirements import require_choice, require_int
from pdlab.shipped import shipped
from pdlab.workbench.pd_lab_settings import LINK_NAMES, NO_LINK
from pdlab.workload.scaling import scaled
from pdlab.workload.synthetic import AZURE_CODE, AZURE_CONVERSATION, azure_like
from pdlab.workload.traces import TraceRequest
from pdlab.workload.traffic import WORKLOADS

SHIPPED = "simulated/win_map.json"
"""In `data`: the map of the settings that a WinMap begins with, as `compute(MapSettings())` has it
(ten minutes on two cores)."""
MACHINES = {"a100-opt-13b": "A100, OPT-13B", "4xa100-llama2-70b": "4 x A100, Llama-2-70B"}
AZURE = {"Azure conversation": AZURE_CONVERSATION, "Azure code": AZURE_CODE}
DESCRIPTIONS = {
    "Azure conversation": "Chats: prompts of some 1,000 tokens, outputs of some 200.",
    "Azure code": "Completions: prompts of some 2,000 tokens, outputs of some 30.",
    **{name: workload.description for name, workload in WORKLOADS.items()},
}
NUM_REQUESTS = 600
"""Different ones; they come again until the time is over."""
SHORT_S = 60.0
"""How long requests come at least where somebody waits for the map."""
MOST_WORKERS = 8
SEATS, BUDGET = 128, 2048
CHUNK_SIZES = (128, 256, 512, 1024, 2048)
TRANSFERS = ("stream", "push")
"""`stream`: a first token once there is room for the output, K and V while the prompt is computed;
`push`: the first token at once, as in DistServe, but then the second may have to wait for room."""
TTFTS_S = (0.15, 0.25, 0.3, 0.4, 0.6, 1.0, 2.5, 5.0)
TPOTS_S = (0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.4)
"""Limits on the pace: the lower half tells modes apart by the mean, the upper by the p99 gap."""
LOADS = (
    0.15, 0.2, 0.27, 0.35, 0.45, 0.55, 0.65, 0.75, 0.87, 1.0, 1.15, 1.23, 1.32, 1.52, 1.63,
    1.75, 2.0, 2.5, 3.2, 4.0,
)  # fmt: skip
"""Rates to simulate, as multiples of what a device bears by the cost model with 16 outputs at once:
more outputs at once bear more, so it goes on to 4. A cluster is tried until it misses all limits;
where many do, steps are small: attainment falls steeply there."""
UNIT = "requests/s and device"
TIE = 0.08
"""Modes whose goodputs differ by less are tied. On the shipped map other requests of the same kind
(`seed=1`, 120 s) move the ratio of two modes by 4% at the median and by 8% at the third quartile;
then of 61 tiles with one winner 4 have a tie, and none another winner."""


@dataclass(frozen=True)
class MapSettings:
    """What a map is computed for."""

    workload: str = "Azure conversation"
    num_workers: int = 4
    """Of each cluster; a worker may have several devices."""
    link: str = "100GbE"
    """Of each worker, simulated."""
    machine: str = "a100-opt-13b"
    """A name of `MACHINES`."""
    seed: int = 0

    def checked(self) -> MapSettings:
        """Itself.

        Raises:
            ValueError: a name is unknown, or a number out of its range.
        """
        require_choice("workload", self.workload, tuple(DESCRIPTIONS))
        require_int("num_workers", self.num_workers, 2)
        if self.num_workers > MOST_WORKERS:
            raise ValueError(f"num_workers={self.num_workers} must be at most {MOST_WORKERS}")
        require_choice("link", self.link, LINK_NAMES)
        require_choice("machine", self.machine, tuple(MACHINES))
        require_int("seed", self.seed, 0)
        return self

    @property
    def line(self) -> str:
        """In words."""
        link = "K and V take no time" if self.link == NO_LINK else f"links {self.link}"
        return f"{self.workload} on {self.num_workers} x {MACHINES[self.machine]}, {link}"

    def full_line(self, least_s: float) -> str:
        """Also what was made of the workload."""
        cut = ""
        if share := self.cut_share():
            cut = f"; {share:.0%} of the prompts cut to {self._max_len():,} tokens with the output"
        return f"{self.line}; {least_s:g} s of traffic{cut}"

    def cut_share(self) -> float:
        """Share of the prompts that lost their end, since the model takes no more tokens."""
        pairs = zip(_drawn(self.workload, self.seed), self.requests(), strict=True)
        return sum(a.num_prompt_tokens > b.num_prompt_tokens for a, b in pairs) / NUM_REQUESTS

    def worker(self) -> Machine:
        """What the clusters are made of."""
        knobs = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET}
        return Machine.published(self.machine, link=LINKS.get(self.link), **knobs)

    def requests(self) -> tuple[TraceRequest, ...]:
        """The workload, as long as the model takes."""
        return _requests(self.workload, self.seed, self._max_len())

    def _max_len(self) -> int:
        return self.worker().spec.config.max_model_len or BUDGET

    def tried(self) -> list[Candidate]:
        """The clusters that are compared."""
        worker = self.worker()
        num_devices = self.num_workers * worker.spec.num_devices
        found = candidates([worker], num_devices, chunk_sizes=CHUNK_SIZES, transfers=TRANSFERS)
        return list(found)

    def rates_rps(self) -> list[float]:
        """Requests a second and device."""
        spec = self.worker().spec
        need = need_of(self.requests(), spec.step_times, spec.step_times)
        most = 1 / (need.prefill_s + need.decode_s) / spec.num_devices
        return [float(f"{load * most:.3g}") for load in LOADS]


@lru_cache(maxsize=16)
def _requests(workload: str, seed: int, max_len: int) -> tuple[TraceRequest, ...]:
    return tuple(scaled(_drawn(workload, seed), max_len=max_len))


def _drawn(workload: str, seed: int) -> Sequence[TraceRequest]:
    if workload in AZURE:
        return azure_like(AZURE[workload], NUM_REQUESTS, seed)
    return WORKLOADS[workload](NUM_REQUESTS, 1.0, seed)


def compute(
    settings: MapSettings,
    *,
    ttfts_s: Sequence[float] = TTFTS_S,
    tpots_s: Sequence[float] = TPOTS_S,
    least_s: float = LEAST_S,
    num_processes: int = 1,
    on_run: Callable[[int, int, Candidate, float], None] | None = None,
) -> dict[str, Any]:
    """The map of these settings, by both measures of pace; some hundred simulated runs.

    Args:
        least_s, num_processes, on_run: as of `pdlab.disagg.simulated.win_map.win_map`.

    Raises:
        ValueError: as `MapSettings.checked`.
    """
    settings.checked()
    found = win_map(
        settings.tried(),
        settings.requests(),
        ttfts_s,
        tpots_s,
        settings.rates_rps(),
        least_s=least_s,
        num_processes=num_processes,
        on_run=on_run,
    )
    basis = settings.worker().spec.step_times.basis
    return plain(found, settings.full_line(least_s), basis) | {
        "settings": asdict(settings),
        "least_s": least_s,
    }


def plain(found: Map, line: str, basis: str) -> dict[str, Any]:
    """A map as JSON knows it, by each measure of pace; that of `found` is the one to show.

    `by_pace` has of each measure: `goodput` [mode][pace limit][TTFT limit], `best_modes` the places
    of those that win or are tied, `best` the place in `names` of each mode's best cluster.
    """
    data = {
        "line": line,
        "basis": f"simulated: {basis}",
        "ttfts_s": list(found.ttfts_s),
        "tpots_s": list(found.tpots_s),
        "modes": list(found.modes),
        "names": [str(candidate) for candidate in found.candidates],
        "by_pace": {pace: _tiles(found.by(pace)) for pace in PACES},
        "most_rps": found.rates_rps[-1],
        "num_runs": found.num_runs,
        "share": SHARE,
        "settings": {},
    }
    return by_pace(data, found.pace)


def by_pace(data: Mapping[str, Any], pace: str) -> dict[str, Any]:
    """A map with the tiles of one measure of pace to show.

    Raises:
        ValueError: it is none of `PACES`.
    """
    require_choice("pace", pace, PACES)
    return {**data, "pace": pace, **data["by_pace"][pace]} if data else {}


def _tiles(found: Map) -> dict[str, Any]:
    goodput = found.goodput
    places = range(len(found.tpots_s)), range(len(found.ttfts_s))
    names = [str(candidate) for candidate in found.candidates]
    best = [
        [[names.index(str(found.best(mode, y, x))) for x in places[1]] for y in places[0]]
        for mode in found.modes
    ]
    return {
        "goodput": [[[float(f"{v:.4g}") for v in row] for row in grid] for grid in goodput],
        "best_modes": [[_best_modes(goodput[:, y, x]) for x in places[1]] for y in places[0]],
        "best": best,
    }


def _best_modes(goodput: Any) -> list[int]:
    """Places of the modes with the most goodput, all that are tied, the best first; or none."""
    order = [int(place) for place in (-goodput).argsort(kind="stable")]
    most = goodput[order[0]]
    return [place for place in order if most and goodput[place] > (1 - TIE) * most]


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON; what is shown is left to who reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = ("pace", *next(iter(data["by_pace"].values())))
    kept = {name: value for name, value in data.items() if name not in shown}
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")


def load_shipped(pace: str = PACES[0]) -> dict[str, Any]:
    """The map that comes with pdlab; empty where there is none.

    Args:
        pace: the measure to show.

    Raises:
        ValueError: it is damaged, or there is no such measure.
    """
    path = shipped("data") / SHIPPED
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not set(data["modes"]) <= set(MODES):
        raise ValueError(f"{path} is no map")
    return by_pace(data, pace)
