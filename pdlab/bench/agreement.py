"""Whether the simulator says what the engine then does: the same requests and knobs on both.

The engine serves each workload several times, in turns, with the steps' times measured again before
each turn, so that a machine that slows down for a while slows both sides of the comparison. The
simulator runs on the fit to all of these measurements; it never sees a time of the runs it is
compared with.

Goodput tells something only under limits that some requests keep and others miss. Unless they are
given, the limits of a workload are where the simulation says that 90% of its requests keep each
one: so 80 to 90% keep both there, and what the engine did has no part in the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from pdlab.costmodel import LinearStepTimes, fit_step_times
from pdlab.costmodel.step_times import COSTS
from pdlab.engine import Engine, EngineConfig
from pdlab.machine import processor_name
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int, require_number
from pdlab.workload import WORKLOADS, TraceRequest
from pdlab.workload.replay import replay
from pdlab.workload.report import latency_samples, summarize
from pdlab.workload.serving import SLO, ServingRun
from pdlab.workload.simulation import simulate
from pdlab.workload.step_calibration import measure_steps
from pdlab.workload.step_shapes import Sample, samples_of

METRICS = ("ttft_s", "tpot_s", "goodput_per_s")
TOLERANCES = {"ttft_s": 0.15, "tpot_s": 0.15, "goodput_per_s": 0.10}
"""How far off the simulator may be."""
WITHIN_LIMIT = 0.9
"""Share of the simulated requests that keep each limit, where none is given."""
REHEARSAL, NUM_REHEARSED, HASTE = "mixed", 10, 3.0
"""What is served to calibrate: of which workload, how many requests, how many times as fast."""


@dataclass(frozen=True)
class Numbers:
    """A served workload in three numbers."""

    ttft_s: float
    """Median over the requests."""
    tpot_s: float
    goodput_per_s: float
    """Requests a second within the SLO."""
    attainment: float
    """Share of the requests that are."""

    @classmethod
    def of(cls, run: ServingRun, slo: SLO) -> Numbers:
        summary = summarize(run, slo)
        found = (
            summary.ttft_s.p50,
            summary.tpot_s.p50,
            summary.goodput_per_s,
            summary.attainment,
        )
        return cls(*(0.0 if value is None else value for value in found))


def telling_slo(run: ServingRun) -> SLO:
    """Limits that `WITHIN_LIMIT` of the run's requests keep, each for itself."""
    samples = latency_samples(run.requests)
    ttft_s, tpot_s = (
        float(np.quantile(samples[name], WITHIN_LIMIT)) if samples[name].size else 0.0
        for name in SLO._fields
    )
    return SLO(ttft_s, tpot_s)


@dataclass(frozen=True)
class Agreement:
    """One workload, served and simulated."""

    workload: str
    num_requests: int
    rate_rps: float
    slo: SLO
    measured: list[Numbers]
    """Of each time it was served."""
    simulated: Numbers
    step_ratio: float
    """Seconds that the fit gives all steps of the served runs, over those that they took."""
    refitted: Numbers | None = None
    """Simulated with step times fitted to the served runs: what is left is not the machine's pace.
    None where they have too few different steps."""

    def served(self, metric: str) -> float:
        """Median over the times it was served."""
        return median(getattr(numbers, metric) for numbers in self.measured)

    def ratio(self, metric: str) -> float | None:
        """Simulated over served; None where the served one is 0: of nothing, nothing is told."""
        return _ratio(getattr(self.simulated, metric), self.served(metric))

    def refitted_ratio(self, metric: str) -> float | None:
        """As `ratio`, of `refitted`."""
        if self.refitted is None:
            return None
        return _ratio(getattr(self.refitted, metric), self.served(metric))

    @property
    def agrees(self) -> bool:
        """Whether all three are within their tolerance."""
        return all(self.is_within(metric) for metric in METRICS)

    def is_within(self, metric: str) -> bool:
        """Whether one is within its tolerance."""
        ratio = self.ratio(metric)
        return ratio is not None and abs(ratio - 1) <= TOLERANCES[metric]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Agreement:
        """The inverse of `dataclasses.asdict`."""
        measured = [Numbers(**numbers) for numbers in values["measured"]]
        simulated, refitted = Numbers(**values["simulated"]), values["refitted"]
        refitted = refitted and Numbers(**refitted)
        rest = {"measured": measured, "simulated": simulated, "refitted": refitted}
        rest["slo"] = SLO(*values["slo"])
        return cls(**values | rest)


def _ratio(simulated: float, served: float) -> float | None:
    return simulated / served if served else None


def measure_agreement(
    model: Model,
    config: EngineConfig | None = None,
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    num_requests: int = 20,
    repeats: int = 3,
    slo: SLO | None = None,
    seed: int = 0,
    rate: float = 1.0,
    progress: bool = False,
) -> tuple[list[Agreement], LinearStepTimes]:
    """Serve and simulate workloads; returns what came of each, and the step times of the simulator.

    Real time: a workload at its own rate takes about `num_requests` over its rate, each time.

    Args:
        workloads: names of `WORKLOADS`.
        repeats: how often the engine serves each.
        slo: limits for all workloads; None for those of `telling_slo`, for each its own.
        rate: of arrivals, as a multiple of the workload's own.

    Raises:
        ValueError: a number is out of range, or there is no such workload.
    """
    for name, value in {"num_requests": num_requests, "repeats": repeats}.items():
        require_int(name, value, least=1, most=10_000)
    for name in workloads:
        require_choice("workloads", name, tuple(WORKLOADS))
    require_number("rate", rate, 1e-6, 1e6)
    if slo is not None:
        slo.checked()
    config = config or EngineConfig()
    traffic = {
        name: WORKLOADS[name](num_requests, WORKLOADS[name].rate_rps * rate, seed)
        for name in workloads
    }
    served: dict[str, list[ServingRun]] = {name: [] for name in workloads}
    steps: dict[str, list[Sample]] = {name: [] for name in workloads}
    calibration: list[Sample] = []
    with tqdm(total=repeats * (len(traffic) + 1), disable=not progress) as bar:
        for turn in range(repeats):
            calibration += measure_steps(model, config, rounds=2 if repeats > 1 else None)
            calibration += _rehearse(model, config, seed + 1 + turn, rate)
            bar.update()
            for name in _from(turn, list(traffic)):
                run, samples = _serve(model, config, traffic[name])
                served[name].append(run)
                steps[name] += samples
                bar.update()
    times = fit_step_times(calibration, f"measured on {processor_name()}: {model.name}")

    def simulated(name: str, times: LinearStepTimes) -> ServingRun:
        return simulate(traffic[name], config, times, max_model_len=model.config.max_model_len)

    agreements = []
    for name in traffic:
        run, own = simulated(name, times), _fit_if_enough(steps[name])
        limits = slo or telling_slo(run)
        agreements.append(
            Agreement(
                workload=name,
                num_requests=num_requests,
                rate_rps=WORKLOADS[name].rate_rps * rate,
                slo=limits,
                measured=[Numbers.of(each, limits) for each in served[name]],
                simulated=Numbers.of(run, limits),
                step_ratio=_step_ratio(times, steps[name]),
                refitted=Numbers.of(simulated(name, own), limits) if own else None,
            )
        )
    return agreements, times


def _fit_if_enough(samples: Sequence[Sample]) -> LinearStepTimes | None:
    """A fit to a run's own steps; None where they are too few or too much alike."""
    if len({shape for shape, _ in samples}) < len(COSTS):
        return None
    return fit_step_times(samples, "fitted to the served run")


def _from(turn: int, names: list[str]) -> list[str]:
    """All names, each turn beginning with another."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]


def _rehearse(model: Model, config: EngineConfig, seed: int, rate: float) -> list[Sample]:
    """Steps of other requests, in quick succession: an engine that serves also submits, waits and
    wakes between its steps, which the designed steps of a calibration leave out."""
    workload = WORKLOADS[REHEARSAL]
    requests = workload(NUM_REHEARSED, HASTE * rate * workload.rate_rps, seed)
    return _serve(model, config, requests)[1]


def _serve(
    model: Model, config: EngineConfig, requests: Sequence[TraceRequest]
) -> tuple[ServingRun, list[Sample]]:
    with Engine(model, config) as engine:
        run = replay(engine, requests)
        return run, samples_of(engine.trace)


def _step_ratio(times: LinearStepTimes, samples: Iterable[Sample]) -> float:
    predicted_s = measured_s = 0.0
    for shape, seconds in samples:
        predicted_s += times.step_s(shape)
        measured_s += seconds
    return predicted_s / measured_s if measured_s else 1.0
