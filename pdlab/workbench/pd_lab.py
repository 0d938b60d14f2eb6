"""The PDLab widget: prefill first, chunked and xPyD beside each other, on the same devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import traitlets

from pdlab.costmodel import StepTimes
from pdlab.disagg.router import TRANSFERS
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.search import MODES
from pdlab.engine import EngineConfig
from pdlab.machine import physical_cores
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int
from pdlab.workbench.background import Background, Report
from pdlab.workbench.lab import NOTHING, Lab, refuse_unknown
from pdlab.workbench.pd_lab_data import MIX_NAMES
from pdlab.workbench.pd_lab_machines import CHUNKS, THERE, devices_of
from pdlab.workbench.pd_lab_run import RealClusterRun, RealSide
from pdlab.workbench.pd_lab_settings import (
    DISAGGREGATED,
    LINK_NAMES,
    MODE_HINTS,
    SETTABLE,
    Settings,
    first_settings,
    moved,
    usual_rate,
)
from pdlab.workbench.pd_lab_simulations import Simulations, about
from pdlab.workbench.pd_lab_waits import STAGES, seconds
from pdlab.workbench.pd_lab_workloads import DESCRIPTIONS, describe
from pdlab.workbench.policy_lab_data import (
    MOST_REQUESTS,
    in_words,
    refused_for_real,
)
from pdlab.workload.serving import SLO
from pdlab.workload.traces import TraceRequest

BEGINNING, WHOLE, MEASURED = "beginning", "whole run", "measured"
VIEWS = (BEGINNING, WHOLE, MEASURED)
NUM_DEVICES = (2, 3, 4, 6, 8)
LOCAL_TOKENS = (0, 32, 64, 128, 256, 512)
MOST_REAL = 100


class PDLab(Lab):
    """Every change of a control simulates the same workload three ways, and draws them.

    `prefill first`: each device serves whole requests, whole prompts first. `chunked`: each serves
    whole requests, prompts in chunks beside outputs. `disaggregated`: x devices for prompts and y
    for outputs (xPyD), K and V travel between them. Router and schedulers are the real ones; what
    is simulated is how long steps and links take. What a control does not touch is not simulated
    again, and each way is drawn as soon as it is there.

    "Run it for real" serves the first requests with real processes on this machine, one for each
    worker, and draws what it measured beside the simulation of exactly these requests. The kernel
    stays usable meanwhile, and the run can be stopped.

        wb.PDLab(model)
        lab = wb.PDLab(workload="long documents", num_devices=8)
        lab.choose(num_prefill=3, prefill_chunk=512, link="10GbE")

    Every control is a trait of the same name and can be set from Python.

    Args:
        model: for step times of this machine, and to run for real; loaded by a name, so that
            processes can load it too. Without one, only the published machine is there, unless
            `step_times` are given.
        workload: a name of `pd_lab_workloads.DESCRIPTIONS`, or a trace: one that comes with pdlab
            (`pdlab.workload.shipped_traces`), or a file in the form of Azure's or Mooncake's.
        num_requests: simulated each time.
        step_times: of one core of this machine and the model; None measures them the first time (a
            minute, with a progress bar) and takes them from the user's cache from then on.
        slo: limits; None for what suits the machine.
        config: the knobs of this machine's engines that have no control.
        num_real: requests that are run for real.
        chosen: the way that is run for real: one of `pdlab.disagg.simulated.search.MODES`.
        settings: what the controls begin with, for example `num_devices=8`.

    Raises:
        ValueError: a setting or a number is out of range.
    """

    name = "pd_lab"
    settable = SETTABLE
    _settings: Settings

    header = traitlets.Dict().tag(sync=True)
    """Constants: choices and labels."""
    num_devices = traitlets.Int().tag(sync=True)
    num_prefill = traitlets.Int().tag(sync=True)
    prefill_chunk = traitlets.Int(None, allow_none=True).tag(sync=True)
    decode_chunk = traitlets.Int().tag(sync=True)
    local_prefill_tokens = traitlets.Int().tag(sync=True)
    transfer = traitlets.Unicode().tag(sync=True)
    link = traitlets.Unicode().tag(sync=True)
    rate_rps = traitlets.Float().tag(sync=True)
    workload = traitlets.Unicode().tag(sync=True)
    workloads = traitlets.Dict().tag(sync=True)
    """Those that can be chosen, and what they are: also traces that were named."""
    seed = traitlets.Int().tag(sync=True)
    machine = traitlets.Unicode().tag(sync=True)
    ttft_slo_s = traitlets.Float().tag(sync=True)
    tpot_slo_s = traitlets.Float().tag(sync=True)
    chosen = traitlets.Unicode(DISAGGREGATED).tag(sync=True)
    """The way that is run for real."""
    view = traitlets.Unicode(BEGINNING).tag(sync=True)
    """What is drawn: until the first requests have come, the whole run, or the run for real."""
    results = traitlets.Dict().tag(sync=True)
    """By mode what is drawn; see `pd_lab_data.picture_of`."""
    about = traitlets.Dict().tag(sync=True)
    """What holds for all modes: the machine's line, the cost model's advice."""
    progress = traitlets.Dict().tag(sync=True)
    """While simulating: how many modes are done, of how many, and which are still to come."""
    real = traitlets.Dict({"state": NOTHING}).tag(sync=True)
    """The run for real: its state, and how far it is."""
    reals = traitlets.List().tag(sync=True)
    """What runs for real measured, with these settings, the newest last."""

    measured: ClusterRun | None = None
    """The last run for real."""
    simulated: ClusterRun | None = None
    """The simulation of the same requests."""
    _real: RealSide | None = None  # also for `close` of a widget that was refused

    def __init__(
        self,
        model: Model | None = None,
        workload: str = "mixed",
        num_requests: int = 160,
        *,
        step_times: StepTimes | None = None,
        slo: SLO | None = None,
        config: EngineConfig | None = None,
        num_real: int = 12,
        chosen: str = DISAGGREGATED,
        **settings: Any,
    ) -> None:
        require_int("num_requests", num_requests, 2, MOST_REQUESTS)
        require_int("num_real", num_real, 1, min(MOST_REAL, num_requests))
        require_choice("chosen", chosen, MODES)
        refuse_unknown(settings, SETTABLE)
        if model is not None and not isinstance(model, Model):
            raise ValueError(f"model={model!r:.60} must be a model that pdlab.load gave, or None")
        workloads = DESCRIPTIONS | {workload: describe(workload)}
        self._model, self._num_real = model, num_real
        self._num_cores = len(physical_cores())
        self._slo = None if slo is None else slo.checked()
        self._devices = devices_of(model, step_times, config)
        self._simulations = Simulations()
        super().__init__(header=self._header(), workloads=workloads, chosen=chosen)
        name = settings.get("machine", next(iter(self._devices)))
        require_choice("machine", name, tuple(self._devices))
        count = settings.get("num_devices", 4 if name == THERE else max(2, min(4, self._num_cores)))
        given = settings | {"workload": workload, "num_requests": num_requests}
        self._show(first_settings(self._devices[name], count, self._slo, given))
        self._listen()

    @property
    def settings(self) -> Settings:
        """What is shown now."""
        return self._settings

    @property
    def requests(self) -> tuple[TraceRequest, ...]:
        """What is served."""
        return self._settings.requests(self._devices[self._settings.machine])

    @property
    def runs(self) -> dict[str, ClusterRun]:
        """The simulated runs that are shown now, by mode."""
        settings, device = self._settings, self._devices[self._settings.machine]
        return {mode: self._simulations.run(settings, mode, device) for mode in MODES}

    @property
    def numbers(self) -> dict[str, dict[str, Any]]:
        """Their numbers, by mode; latencies are the 50th, 90th and 99th percentile in seconds."""
        return {mode: dict(self.results[mode]["numbers"]) for mode in MODES}

    # --- what one can do ----------------------------------------------------------------------

    def take_advice(self) -> None:
        """Choose the ratio that the cost model advises."""
        self._say(self._take_advice)

    def _take_advice(self) -> None:
        self._set({"num_prefill": self.about["advice"]})

    def summary(self) -> str:
        settings = self._settings
        parts = []
        for mode in MODES:
            n = self.results[mode]["numbers"]
            parts.append(
                f"{settings.name_of(mode)}: {n['attainment']:.0%} within the limits, "
                f"{n['goodput']:.3g} requests/s and device, TTFT p99 {_p99(n['ttft'])}, "
                f"ITL p99 {_p99(n['itl'])}"
            )
        return (
            f"PDLab: {settings.workload} at {settings.rate_rps:g}/s on {settings.num_devices} "
            f"devices, limits TTFT {settings.ttft_slo_s:g} s and TPOT {settings.tpot_slo_s:g} s. "
            f"{'; '.join(parts)}. Simulated {self.about['provenance']}"
        )

    # --- for real -----------------------------------------------------------------------------

    def run_for_real(self, mode: str | None = None) -> None:
        """Serve the first requests with real processes; returns at once, `wait` waits for it.

        What goes wrong is said in `message`.

        Args:
            mode: of those compared; None for the one that is chosen.
        """
        if mode is not None:
            self.chosen = mode
        self._say(self._begin)

    def stop(self) -> None:
        """End what runs for real; without, do nothing."""
        if self._real:
            self.real = self.real | {"stage": "stopping"}
        super().stop()

    def _under_way(self) -> Background | None:
        return self._real.work if self._real else None

    def _begin(self) -> None:
        settings, mode = self._settings, self.chosen
        if self._model is None:
            raise ValueError("there is no model to run: make the lab with PDLab(model)")
        if settings.machine == THERE:
            raise ValueError(f"machine={settings.machine!r} is not here: choose another one")
        if settings.num_devices > self._num_cores:
            raise ValueError(
                f"num_devices={settings.num_devices} is more than the {self._num_cores} cores that "
                "there are: the processes would share them"
            )
        if self._real is not None:
            raise ValueError("a run is under way: wait for its end, or stop it")
        device = self._devices[settings.machine]
        requests = settings.requests(device)[: self._num_real]
        simulated = settings.run(mode, device, self._num_real)
        work = RealClusterRun(self._model, settings.plan(mode, device), requests, self._on_report)
        self._real = RealSide(mode, settings, device, simulated, work, self._simulations.num_made)
        self.real = self._real.state("running")
        work.start()

    def _on_report(self, report: Report) -> None:
        real = self._real
        if real is None:
            return
        told = {"finished": report.num_finished, "now_s": report.now_s, "stage": report.stage}
        if not report.over:
            self.real = real.state("running", **told)
            return
        self._real = None
        if report.error is not None:
            self.real = real.state("failed", error=in_words(report.error))
        elif report.run is None:
            self.real = real.state("stopped", finished=report.num_finished)
        elif why := refused_for_real(report.run.serving, real.simulated.serving):
            self.real = real.state("failed", error=why)
        else:
            self._keep_real(real, report.run)
            self.real = real.state("done", finished=len(report.run.requests))

    def _keep_real(self, real: RealSide, run: ClusterRun) -> None:
        """Beside those of other ways, if all else is the same."""
        self.measured, self.simulated = run, real.simulated
        entry = real.entry(run, self._simulations.num_made)
        same = [each for each in self.reals if each["key"] == entry["key"]]
        with self.hold_sync():
            self.reals = [*(each for each in same if each["mode"] != entry["mode"]), entry]
            self.chosen, self.view = real.mode, MEASURED

    # --- traits -------------------------------------------------------------------------------

    _tried = traitlets.validate(*SETTABLE)(Lab.tried)

    @traitlets.validate("view")
    def _check_view(self, proposal: Any) -> str:
        require_choice("view", proposal["value"], VIEWS)
        if proposal["value"] == MEASURED and not self.reals:
            raise ValueError(f"view={MEASURED!r} has nothing to show: run it for real before")
        return str(proposal["value"])

    @traitlets.validate("chosen")
    def _check_chosen(self, proposal: Any) -> str:
        require_choice("chosen", proposal["value"], MODES)
        return str(proposal["value"])

    @traitlets.observe("view")
    def _on_view(self, _change: Any) -> None:
        if not self._following:
            self.results = {mode: self._picture(self._settings, mode) for mode in MODES}

    def _set(self, values: Mapping[str, Any]) -> None:
        refuse_unknown(values, SETTABLE)
        follows = moved(self._settings, self._devices, self._slo, values)
        settings = replace(self._settings, **follows | dict(values))
        self._show(settings)
        if settings.workload not in self.workloads:
            self.workloads = self.workloads | {settings.workload: describe(settings.workload)}
        if self.view == MEASURED:
            self.view = BEGINNING

    # --- simulating ---------------------------------------------------------------------------

    def _show(self, settings: Settings) -> None:
        """Simulate what has changed, and make it what the page shows."""
        require_choice("machine", settings.machine, tuple(self._devices))
        settings.checked()
        device = self._devices[settings.machine]
        for mode in MODES:
            settings.plan(mode, device)  # refuses what does not go together, before it takes time
        before = self.results
        try:
            self._simulate(settings)
        except BaseException:
            self.results = before
            raise
        finally:
            self.progress = {}
        self._follow(settings, about=about(settings, device), message="")

    def _simulate(self, settings: Settings) -> None:
        """One mode after the other, those that are known first; each is shown when it is there."""
        ready = [mode for mode in MODES if settings.key(mode) in self._simulations]
        left = [mode for mode in MODES if mode not in ready]
        pictures = {mode: self._picture(settings, mode) for mode in ready}
        count = len(left)
        while left:
            with self.hold_sync():
                self.results = self.results | pictures
                self.progress = {"done": count - len(left), "of": count, "left": left}
            pictures = {left[0]: self._picture(settings, left[0])}
            left = left[1:]
        self.results = self.results | pictures

    def _picture(self, settings: Settings, mode: str) -> dict[str, Any]:
        device = self._devices[settings.machine]
        return self._simulations.picture(
            settings, mode, device, whole=self.view == WHOLE, num_real=self._num_real
        )

    def _header(self) -> dict[str, Any]:
        devices = self._devices.items()
        return {
            "modes": [[mode, MODE_HINTS[mode]] for mode in MODES],
            "mixes": MIX_NAMES,
            "stages": [list(stage) for stage in STAGES],
            "machines": list(self._devices),
            "here": [n for n in self._devices if n != THERE and self._model is not None],
            "num_cores": self._num_cores,
            "views": list(VIEWS),
            "num_devices": list(NUM_DEVICES),
            "prefill_chunks": [*CHUNKS, None],
            "decode_chunks": {name: device.decode_chunks for name, device in devices},
            "local_tokens": list(LOCAL_TOKENS),
            "transfers": list(TRANSFERS),
            "links": list(LINK_NAMES),
            "num_real": self._num_real,
            "usual_rates": {name: usual_rate(device, "mixed") for name, device in devices},
        }

    def _actions(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        return {
            "view": lambda: setattr(self, "view", content["view"]),
            "chosen": lambda: setattr(self, "chosen", content["chosen"]),
            "advice": self._take_advice,
            "run": self._begin,
        }


def _p99(values: list[float] | None) -> str:
    return "–" if values is None else seconds(values[2])
