"""The WinMap widget: which way of serving wins at each pair of limits, and by how much."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import traitlets

from pdlab.disagg.simulated.search import Candidate
from pdlab.disagg.simulated.win_map import PACES
from pdlab.disagg.simulated.win_map import WinMap as Map
from pdlab.machine import num_cores
from pdlab.requirements import require_choice
from pdlab.workbench.background import Background, Report
from pdlab.workbench.lab import NOTHING, Lab, refuse_unknown
from pdlab.workbench.pd_lab_settings import LINK_NAMES
from pdlab.workbench.policy_lab_data import in_words
from pdlab.workbench.win_map_data import (
    DESCRIPTIONS,
    MACHINES,
    SHORT_S,
    TIE,
    UNIT,
    MapSettings,
    by_pace,
    compute,
    load_shipped,
    plain,
)

SETTABLE = tuple(field.name for field in fields(MapSettings) if field.name != "seed")
NUM_WORKERS = (2, 3, 4, 6, 8)
PACE_NAMES = {"tpot": "TPOT", "itl": "p99 gap"}
"""What each measure is called, in front of its limit."""
PACE_HINTS = {
    "tpot": "mean gap between a request's tokens: a stall is spread over all of them",
    "itl": "99 of 100 gaps between a request's tokens are within the limit: stalls show",
}
MOST_PROCESSES = 8


class _Work(Background):
    """Computes a map."""

    def __init__(self, settings: MapSettings, report: Callable[[Report], None]) -> None:
        super().__init__(report)
        self.settings = settings
        self.num_runs = len(settings.tried()) * len(settings.rates_rps())
        self._num_done = 0

    def _serve(self) -> dict[str, Any]:
        processes = _num_processes()
        return compute(self.settings, least_s=SHORT_S, num_processes=processes, on_run=self._on_run)

    def _on_run(self, done: int, _of: int, candidate: Candidate, rate_rps: float) -> None:
        newly, self._num_done = done - self._num_done, done
        self._tell(ended=newly, stage=f"{candidate}, {rate_rps:.3g}/s a device")


def _num_processes() -> int:
    """One a core; only one where a script would be run again by each process that it spawns."""
    if getattr(sys.modules["__main__"], "__file__", None):
        return 1
    return min(MOST_PROCESSES, num_cores())


class WinMap(Lab):
    """A tile for each pair of limits: the way of serving with the most goodput per device.

    Pointing at a tile, or going there with the arrow keys, shows the goodput of every way at these
    limits and which cluster of that way has it. Pace is the mean gap between a request's tokens
    (TPOT), or its p99 gap, since a mean hides stalls; both are read off the same runs. "Compute"
    simulates the map of other settings, with progress, while the kernel stays usable; it can be
    stopped.

        wb.WinMap()              # A100s with OPT-13B, as it comes with pdlab
        wb.WinMap(pace="itl")    # with limits on the p99 gap; `lab.pace = "tpot"` goes back
        wb.WinMap(win_map(...))  # one of your own
        lab = wb.WinMap(); lab.compute(workload="Azure code"); lab.wait()

    Args:
        found: a map that `pdlab.disagg.simulated.win_map.win_map` computed, or None.
        line: what it is of, in words.
        pace: the measure to show: one of `pdlab.disagg.simulated.win_map.PACES`; None for that of
            `found`, or the mean.
        settings: what the controls begin with, for example `link="10GbE"`.

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "win_map"
    settable = SETTABLE
    _settings: MapSettings

    header = traitlets.Dict().tag(sync=True)
    shown = traitlets.Dict().tag(sync=True)
    """What is drawn; see `win_map_data.plain`. Empty where nothing was computed yet."""
    pace = traitlets.Unicode("tpot").tag(sync=True)
    """How pace is measured: `tpot` for the mean gap of a request, `itl` for its p99 gap."""
    workload = traitlets.Unicode().tag(sync=True)
    num_workers = traitlets.Int().tag(sync=True)
    link = traitlets.Unicode().tag(sync=True)
    machine = traitlets.Unicode().tag(sync=True)
    cell = traitlets.List(trait=traitlets.Int()).tag(sync=True)
    """The pair of limits that is looked at: places of pace and TTFT."""
    work = traitlets.Dict({"state": NOTHING}).tag(sync=True)
    """What is being computed, and how far it is."""
    _work: _Work | None = None  # also for `close` of a widget that was refused

    def __init__(
        self,
        found: Map | None = None,
        *,
        line: str = "",
        pace: str | None = None,
        **settings: Any,
    ) -> None:
        refuse_unknown(settings, SETTABLE)
        if found is None:
            data = load_shipped(pace or PACES[0])
        else:
            bases = {each.machine.spec.step_times.basis for each in found.candidates}
            found = found.by(pace or found.pace)
            data = plain(found, line or "a map of your own", "; ".join(sorted(bases)))
        begin = {k: v for k, v in data.get("settings", {}).items() if k in SETTABLE}
        first = MapSettings(**begin | settings).checked()
        super().__init__(
            header=_header(),
            shown=data,
            pace=data.get("pace", pace or PACES[0]),
            cell=_first_cell(data),
        )
        self._follow(first)
        self._listen()

    @property
    def settings(self) -> MapSettings:
        """What `compute` would compute."""
        return self._settings

    def summary(self) -> str:
        if not self.shown:
            return "WinMap: nothing was computed yet"
        tiles = [tuple(best) for row in self.shown["best_modes"] for best in row]
        names = self.shown["modes"]
        counts = [f"{name} in {tiles.count((i,))}" for i, name in enumerate(names)]
        counts += [f"tied (within {TIE:.0%}) in {sum(len(best) > 1 for best in tiles)}"]
        return (
            f"WinMap: {self.shown['line']}: of {len(tiles)} pairs of limits on TTFT and "
            f"{PACE_NAMES[self.pace]}, "
            f"most goodput per device has {', '.join(counts)}. {self.shown['basis']}"
        )

    # --- computing ----------------------------------------------------------------------------

    def compute(self, **values: Any) -> None:
        """Compute the map of the settings; returns at once, `wait` waits for it.

        What goes wrong is said in `message`.

        Args:
            values: settings to choose before.
        """

        def action() -> None:
            self._set(values)
            self._begin()

        self._say(action)

    def _under_way(self) -> Background | None:
        return self._work

    def _begin(self) -> None:
        if self._work is not None:
            raise ValueError("a map is being computed: wait for its end, or stop it")
        self._work = _Work(self._settings, self._on_report)
        self._show_work("running")
        self._work.start()

    def _on_report(self, report: Report) -> None:
        if self._work is None:
            return
        told = {"done": report.num_finished, "stage": report.stage}
        if not report.over:
            self._show_work("running", **told)
            return
        if report.error is not None:
            self._show_work("failed", error=in_words(report.error))
        elif report.run is None:
            self._show_work("stopped", **told)
        else:
            with self.hold_sync():
                self.shown = by_pace(report.run, self.pace)
                self.cell = _first_cell(self.shown)
                self._show_work("done", **told)
        self._work = None

    def _show_work(self, state: str, **values: Any) -> None:
        work = self._work
        assert work is not None
        shown: dict[str, Any] = {
            "state": state,
            "of": work.num_runs,
            "line": work.settings.line,
            "done": 0,
            "stage": "",
            "error": "",
        }
        self.work = shown | values

    # --- traits -------------------------------------------------------------------------------

    _tried = traitlets.validate(*SETTABLE)(Lab.tried)

    @traitlets.validate("pace")
    def _check_pace(self, proposal: Any) -> str:
        value: str = proposal["value"]
        require_choice("pace", value, PACES)
        return value

    @traitlets.observe("pace")
    def _show_pace(self, _change: Any) -> None:
        self.shown = by_pace(self.shown, self.pace)

    @traitlets.validate("cell")
    def _check_cell(self, proposal: Any) -> list[int]:
        value = list(proposal["value"])
        if not self.shown and not value:
            return value
        shape = len(self.shown["tpots_s"]), len(self.shown["ttfts_s"])
        if len(value) != 2 or not all(0 <= v < n for v, n in zip(value, shape, strict=True)):
            raise ValueError(f"cell={value} must be a place in a map of {shape}")
        return value

    def _set(self, values: Mapping[str, Any]) -> None:
        refuse_unknown(values, SETTABLE)
        self._follow(replace(self._settings, **values).checked())

    def _actions(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        return {"compute": self._begin}


def _header() -> dict[str, Any]:
    return {
        "workloads": DESCRIPTIONS,
        "machines": MACHINES,
        "num_workers": list(NUM_WORKERS),
        "links": list(LINK_NAMES),
        "pace_names": PACE_NAMES,
        "pace_hints": PACE_HINTS,
        "unit": UNIT,
        "tie": TIE,
        "short_s": SHORT_S,
    }


def _first_cell(data: Mapping[str, Any]) -> list[int]:
    """Where disaggregation leads most; if it never does, the first."""
    if not data:
        return []
    apart = len(data["modes"]) - 1
    leads: dict[tuple[int, int], float] = {
        (y, x): data["goodput"][apart][y][x] / max(data["goodput"][m][y][x] for m in range(apart))
        for y, row in enumerate(data["best_modes"])
        for x, best in enumerate(row)
        if best == [apart] and any(data["goodput"][m][y][x] for m in range(apart))
    }
    place = max(leads, key=leads.__getitem__) if leads else (0, 0)
    return list(place)
