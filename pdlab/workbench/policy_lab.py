"""The PolicyLab widget: batching mode, policy, budget, and at once what they do to a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import traitlets

from pdlab.costmodel import StepTimes, published
from pdlab.engine import EngineConfig
from pdlab.engine.config import BATCHING_MODES
from pdlab.engine.policies import POLICIES, Policy
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int
from pdlab.workbench.background import Background, Report
from pdlab.workbench.lab import NOTHING, Lab, refuse_unknown
from pdlab.workbench.policy_lab_data import (
    DESCRIPTIONS,
    MOST_REQUESTS,
    NUMBERS,
    Machine,
    Settings,
    compared,
    in_words,
    last_token_s,
    named_policies,
    picture_of,
    refused_for_real,
)
from pdlab.workbench.policy_lab_run import RealRun
from pdlab.workload.serving import SLO, ServingRun
from pdlab.workload.simulation import uncollected
from pdlab.workload.step_calibration import measured_step_times

HERE, THERE = "this machine", "A100, OPT-13B (published fit)"
PUBLISHED_NAME = "a100-opt-13b"
MAX_MODEL_LEN = 2048
"""Where no model says it."""
SETTABLE = tuple(field.name for field in fields(Settings) if field.name != "num_requests")
"""The settings that have a control."""
VIEWS = ("requests", "load")
MOST_REAL = 200


@dataclass
class _Real:
    """What runs for real, and what it is compared with."""

    settings: Settings
    simulated: ServingRun
    work: RealRun
    num_simulations: int
    """Made so far when it began: those made beside it slow it."""


class PolicyLab(Lab):
    """Every change of a control simulates the workload with the engine's own scheduler, and draws.

    The numbers stand beside those of a pinned run, at first that of the beginning. "Run it for
    real" serves the first requests of the workload on an engine, in real time, and sets what it
    measured beside the simulation of exactly these requests. The kernel stays usable meanwhile.

        wb.PolicyLab(model)
        lab = wb.PolicyLab(model, workload="long documents", policies=[MyPolicy()])
        lab.choose(batching="static", policy="MyPolicy", rate_rps=0.8)

    Every control is a trait of the same name and can be set from Python. What goes wrong in a
    policy is said in `message` and leaves the last picture.

    Args:
        model: for step times of this machine, and to run for real. Without one, only the
            published machine is there, unless `step_times` are given.
        workload: `short chat`, `long documents`, `mixed` or `short vs. one long`.
        num_requests: simulated each time.
        step_times: of this machine and the model; None measures them the first time (40 seconds,
            with a progress bar) and takes them from the user's cache from then on.
        slo: limits for goodput and for the policy `deadline`; None for what suits the machine.
        policies: objects of classes of your own, shown under the names of their classes, or as
            their own `__str__` calls them.
        config: the engine's knobs that have no control.
        num_real: requests that are run for real.
        settings: what the controls begin with, for example `batching="static"`.

    Raises:
        ValueError: a setting or a number is out of range.
    """

    name = "policy_lab"
    settable = SETTABLE
    _settings: Settings

    header = traitlets.Dict().tag(sync=True)
    """Constants: choices, labels, the range of the rate by machine."""
    policies = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """All names, the built-in ones first."""
    batching = traitlets.Unicode().tag(sync=True)
    policy = traitlets.Unicode().tag(sync=True)
    max_num_batched_tokens = traitlets.Int().tag(sync=True)
    chunk_size = traitlets.Int(None, allow_none=True).tag(sync=True)
    max_num_seqs = traitlets.Int().tag(sync=True)
    rate_rps = traitlets.Float().tag(sync=True)
    workload = traitlets.Unicode().tag(sync=True)
    seed = traitlets.Int().tag(sync=True)
    machine = traitlets.Unicode().tag(sync=True)
    ttft_slo_s = traitlets.Float().tag(sync=True)
    tpot_slo_s = traitlets.Float().tag(sync=True)
    view = traitlets.Unicode("requests").tag(sync=True)
    """What the timeline shows: the first `requests`, or the `load` over the whole run."""
    result = traitlets.Dict().tag(sync=True)
    """What is drawn; see `policy_lab_data.picture_of`."""
    pinned = traitlets.Dict().tag(sync=True)
    """The same of the run that it is compared with; empty without one."""
    real = traitlets.Dict({"state": NOTHING}).tag(sync=True)
    """The run for real: its state, how far it is, its rows."""

    measured: ServingRun | None = None
    """The last run for real."""
    simulated: ServingRun | None = None
    """The simulation of the same requests."""
    _real: _Real | None = None  # also for `close` of a widget that was refused

    def __init__(
        self,
        model: Model | None = None,
        workload: str = "mixed",
        num_requests: int = 200,
        *,
        step_times: StepTimes | None = None,
        slo: SLO | None = None,
        policies: Sequence[Policy] = (),
        config: EngineConfig | None = None,
        num_real: int = 20,
        **settings: Any,
    ) -> None:
        require_int("num_requests", num_requests, 2, MOST_REQUESTS)
        require_int("num_real", num_real, 1, min(MOST_REAL, num_requests))
        require_choice("workload", workload, tuple(DESCRIPTIONS))
        refuse_unknown(settings, SETTABLE)
        self._model, self._num_real = model, num_real
        self._slo = None if slo is None else slo.checked()
        self._own = named_policies(tuple(policies))
        self._machines = _machines(model, step_times, config)
        self._num_simulations = 0
        super().__init__(header=self._header(), policies=[*POLICIES, *self._own])
        name = settings.pop("machine", next(iter(self._machines)))
        require_choice("machine", name, tuple(self._machines))
        machine = self._machines[name]
        limits = self._slo or machine.usual_slo()
        begin: dict[str, Any] = {
            "batching": "mixed",
            "policy": "fcfs",
            "max_num_batched_tokens": 512,
            "chunk_size": None,
            "max_num_seqs": 32,
            "rate_rps": machine.usual_rate(workload),
            "seed": 0,
        }
        begin |= {"ttft_slo_s": limits.ttft_s, "tpot_slo_s": limits.tpot_s} | settings
        self._show(Settings(**begin, workload=workload, num_requests=num_requests, machine=name))
        self.pin()
        self._listen()

    @property
    def settings(self) -> Settings:
        """What is shown now."""
        return self._settings

    @property
    def run(self) -> ServingRun:
        """The simulated run that is shown now."""
        return self._run

    @property
    def numbers(self) -> dict[str, float | None]:
        """Its big numbers, in seconds and per second."""
        return dict(self.result["numbers"])

    # --- what one can do ----------------------------------------------------------------------

    def choose(self, **values: Any) -> None:
        """Set controls; what is wrong with them is said in `message`, and the old ones stay.

        `policy` may also be an object of a class of your own.
        """
        super().choose(**values)

    def register(self, policy: Policy) -> None:
        """Offer a policy under the name of its class; one of the same name is replaced.

        Raises:
            ValueError: it is no Policy object, or has the name of a built-in one.
        """
        self._own |= named_policies((policy,))
        self.policies = [*POLICIES, *self._own]
        if self._settings.policy in named_policies((policy,)):
            self._say(lambda: self._show(self._settings))

    def pin(self) -> None:
        """Compare with what is shown now, from here on."""
        self.pinned = {k: v for k, v in self.result.items() if k != "timeline"}

    def unpin(self) -> None:
        """Compare with nothing."""
        self.pinned = {}

    def summary(self) -> str:
        numbers, settings = self.numbers, self._settings
        within = numbers["attainment"] or 0.0
        return (
            f"PolicyLab: {settings.line}: TTFT p50 {_seconds(numbers['ttft_p50'])}, p99 "
            f"{_seconds(numbers['ttft_p99'])}, {within:.0%} of {settings.num_requests} requests "
            f"within TTFT {settings.ttft_slo_s:g} s and TPOT {settings.tpot_slo_s:g} s; "
            f"simulated {self._machines[settings.machine].line}"
        )

    # --- for real -----------------------------------------------------------------------------

    def run_for_real(self) -> None:
        """Serve the first requests on a real engine; returns at once, `wait` waits for it.

        What goes wrong is said in `message`.
        """
        self._say(self._begin)

    def _under_way(self) -> Background | None:
        return self._real.work if self._real else None

    def _begin(self) -> None:
        settings = self._settings
        if self._model is None:
            raise ValueError("there is no model to run: make the lab with PolicyLab(model)")
        if settings.machine == THERE:
            raise ValueError(f"machine={settings.machine!r} is not here: choose another one")
        if self._real is not None:
            raise ValueError("a run is under way: wait for its end, or stop it")
        machine = self._machines[settings.machine]
        work = RealRun(
            self._model,
            settings.config(machine, self._own),
            settings.requests()[: self._num_real],
            self._on_report,
        )
        simulated = settings.run(machine, self._own, self._num_real)
        self._real = _Real(settings, simulated, work, self._num_simulations)
        self._show_real("running")
        work.start()

    def _on_report(self, report: Report) -> None:
        if self._real is None:
            return
        if not report.over:
            self._show_real("running", finished=report.num_finished, now_s=report.now_s)
            return
        if report.error is not None:
            self._show_real("failed", error=in_words(report.error))
        elif report.run is None:
            self._show_real("stopped", finished=report.num_finished)
        elif refused := refused_for_real(report.run, self._real.simulated):
            self._show_real("failed", error=refused)
        else:
            self._show_real("done", finished=len(report.run.requests), **self._rows(report.run))
        self._real = None

    def _rows(self, run: ServingRun) -> dict[str, Any]:
        real = self._real
        assert real is not None
        self.measured, self.simulated = run, real.simulated
        return {
            "rows": compared(run, real.simulated, real.settings.slo),
            "measured": f"measured on {run.basis}",
            "beside": self._num_simulations - real.num_simulations,
        }

    def _show_real(self, state: str, **values: Any) -> None:
        real = self._real
        assert real is not None
        shown: dict[str, Any] = {
            "state": state,
            "finished": 0,
            "now_s": 0.0,
            "num": len(real.simulated.requests),
            "of": real.settings.num_requests,
            "line": real.settings.line,
            "simulated": f"simulated {self._machines[real.settings.machine].line}",
            "takes_s": real.simulated.duration_s,
        }
        self.real = shown | values

    # --- traits -------------------------------------------------------------------------------

    _tried = traitlets.validate(*SETTABLE)(Lab.tried)

    @traitlets.validate("view")
    def _check_view(self, proposal: Any) -> str:
        require_choice("view", proposal["value"], VIEWS)
        return str(proposal["value"])

    @traitlets.observe("view")
    def _on_view(self, _change: Any) -> None:
        if not self._following:
            self.result = self._picture(self._settings, self._run)

    def _set(self, values: Mapping[str, Any]) -> None:
        values = dict(values)
        refuse_unknown(values, SETTABLE)
        own: dict[str, Policy] = {}
        if "policy" in values and not isinstance(values["policy"], str):
            own = named_policies((values["policy"],))
            values["policy"] = next(iter(own))
        if values.get("machine", self._settings.machine) != self._settings.machine:
            values = {**self._moved(values["machine"]), **values}
        before = self._own
        self._own = before | own
        try:
            self._show(replace(self._settings, **values))
        except BaseException:
            self._own = before
            raise
        self.policies = [*POLICIES, *self._own]

    def _moved(self, name: str) -> dict[str, float]:
        """On another machine: as busy as before, and its own limits."""
        require_choice("machine", name, tuple(self._machines))
        old, new, now = self._machines[self._settings.machine], self._machines[name], self._settings
        busy = now.rate_rps / old.usual_rate(now.workload)
        limits = self._slo or new.usual_slo()
        return {
            "rate_rps": float(f"{busy * new.usual_rate(now.workload):.2g}"),
            "ttft_slo_s": limits.ttft_s,
            "tpot_slo_s": limits.tpot_s,
        }

    # --- simulating ---------------------------------------------------------------------------

    def _show(self, settings: Settings) -> None:
        """Simulate, and make it what the page shows."""
        require_choice("machine", settings.machine, tuple(self._machines))
        with uncollected():
            run = settings.run(self._machines[settings.machine], self._own)
            picture = self._picture(settings, run)
        self._num_simulations += 1
        self._run = run
        self._follow(settings, result=picture, message="")

    def _picture(self, settings: Settings, run: ServingRun) -> dict[str, Any]:
        about: dict[str, Any] = {
            "settings": asdict(settings),
            "line": settings.line,
            "provenance": self._machines[settings.machine].line,
            "real_s": last_token_s(run, self._num_real),
        }
        return about | picture_of(run, settings.slo, self.view)

    def _header(self) -> dict[str, Any]:
        return {
            "batching": list(BATCHING_MODES),
            "workloads": DESCRIPTIONS,
            "machines": list(self._machines),
            "here": [name for name in self._machines if name != THERE and self._model is not None],
            "numbers": [list(number) for number in NUMBERS],
            "num_real": self._num_real,
            "usual_rates": {
                name: machine.usual_rate("mixed") for name, machine in self._machines.items()
            },
        }

    def _actions(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        return {
            "view": lambda: setattr(self, "view", content["view"]),
            "pin": self.pin,
            "unpin": self.unpin,
            "run": self._begin,
        }


def _machines(
    model: Model | None, step_times: StepTimes | None, config: EngineConfig | None
) -> dict[str, Machine]:
    """What can be simulated, this machine first."""
    config = config or EngineConfig(record_trace=False)
    found = {}
    if step_times is None and model is not None:
        step_times = measured_step_times(model, config, progress=True)
    if step_times is not None:
        name = HERE if step_times.basis.startswith("measured on") else "given step times"
        limit = MAX_MODEL_LEN if model is None else model.config.max_model_len
        found[name] = Machine(name, step_times, config, config.max_model_len or limit)
    times, knobs = published(PUBLISHED_NAME)
    there = replace(config, **knobs, num_swap_blocks=0, preemption="recompute")
    found[THERE] = Machine(THERE, times, there, knobs["max_model_len"])
    return found


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} s"
