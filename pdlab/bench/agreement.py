"""Whether the simulator says what the engine then does: the same requests and knobs on both.

A machine's pace changes within seconds: a decode of one request may take 70 ms now and 110 a moment
later. So the steps that the simulator's clock is fitted to are measured *between* the steps of the
served run, a few at a time, and both sides see the same fast and slow moments. Meanwhile the served
run's clock stands still; and where it has nothing to do, it leaps to the next arrival. All else is
`pdlab.workload.replay`. The fit itself never sees a time of the run that it is compared with.

A turn serves all workloads once; a further turn serves other requests, drawn from another seed.
The requests of all turns are counted together.

What is left of the machine's moods is shown by simulating once more at the run's own *pace*: with
the same step times, all multiplied by the one number that lets the steps of the served run take as
long, in all, as they did. Where many requests are near a limit, a pace that is 5% off changes
goodput by 15%.

Goodput tells something only under limits that some requests keep and others miss. Unless they are
given, the limits of a workload are where the simulation says that 90% of its requests keep each
one: so 80 to 90% keep both there, and what the engine did has no part in the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from pdlab.costmodel import LinearStepTimes, fit_step_times
from pdlab.engine import Engine, EngineConfig
from pdlab.machine import processor_name
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int, require_number
from pdlab.workload import WORKLOADS, OpenLoop, TraceRequest
from pdlab.workload.replay import Progress, replay
from pdlab.workload.serving import SLO, ServingRun
from pdlab.workload.simulation import simulate
from pdlab.workload.step_calibration import Calibration
from pdlab.workload.step_shapes import Sample, samples_of

METRICS = ("ttft_s", "tpot_s", "goodput_per_s")
TOLERANCES = {"ttft_s": 0.15, "tpot_s": 0.15, "goodput_per_s": 0.10}
"""How far off the simulator may be."""
WITHIN_LIMIT = 0.9
"""Share of the simulated requests that keep each limit, where none is given."""
CALIBRATION_SHARE = 1.0
"""Seconds of measured steps for each second of the served run's steps."""


class Latencies(NamedTuple):
    """Of a served workload: for each request, in order of arrival."""

    ttft_s: list[float | None]
    """None where it was refused."""
    tpot_s: list[float | None]
    """None also where it has but one token."""
    duration_s: float
    """Of the whole."""

    @classmethod
    def of(cls, run: ServingRun) -> Latencies:
        metrics = [request.metrics for request in run.requests]
        return cls([m.ttft_s for m in metrics], [m.tpot_s for m in metrics], run.duration_s)

    def num_good(self, slo: SLO) -> int:
        """Requests within both limits; with one token only the first counts."""
        return sum(
            ttft_s is not None and ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)
            for ttft_s, tpot_s in zip(self.ttft_s, self.tpot_s, strict=True)
        )


def _quantile(runs: Sequence[Latencies], metric: str, share: float) -> float:
    """Over the requests of all runs together; 0 where there are none."""
    known = [value for run in runs for value in getattr(run, metric) if value is not None]
    return float(np.quantile(known, share)) if known else 0.0


def telling_slo(runs: Sequence[Latencies]) -> SLO:
    """Limits that `WITHIN_LIMIT` of the requests keep, each for itself."""
    return SLO(*(_quantile(runs, metric, WITHIN_LIMIT) for metric in SLO._fields))


class Numbers(NamedTuple):
    """A workload in three numbers, over the requests of all its turns."""

    ttft_s: float
    """Median."""
    tpot_s: float
    goodput_per_s: float
    """Requests a second within the SLO."""
    attainment: float
    """Share of the requests that are."""

    @classmethod
    def of(cls, runs: Sequence[Latencies], slo: SLO) -> Numbers:
        good, duration_s = sum(r.num_good(slo) for r in runs), sum(r.duration_s for r in runs)
        ttft_s, tpot_s = (_quantile(runs, metric, 0.5) for metric in SLO._fields)
        goodput_per_s = good / duration_s if duration_s else 0.0
        return cls(ttft_s, tpot_s, goodput_per_s, good / sum(len(run.ttft_s) for run in runs))


@dataclass(frozen=True)
class Turn:
    """A workload, served once and simulated."""

    seed: int
    measured: Latencies
    simulated: Latencies
    paced: Latencies
    """Simulated at the served run's own pace: with `step_times` over `step_ratio`."""
    step_times: LinearStepTimes
    """What it was simulated with: measured between the steps of the served run."""
    step_ratio: float
    """Seconds that these give all steps of the served run, over those that they took."""
    processor_share: float
    """As of `ProcessorShare`, meanwhile: 1 where nothing else ran."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Turn:
        """The inverse of `dataclasses.asdict`, read from JSON."""
        rest: dict[str, Any] = {"step_times": LinearStepTimes.from_dict(values["step_times"])}
        for name in ("measured", "simulated", "paced"):
            rest[name] = Latencies(*values[name])
        return cls(**values | rest)


@dataclass(frozen=True)
class Agreement:
    """One workload, served and simulated."""

    workload: str
    rate_rps: float
    given_slo: SLO | None
    """None where the simulation sets the limits."""
    turns: list[Turn]

    @property
    def num_requests(self) -> int:
        """Of all turns together."""
        return sum(len(turn.measured.ttft_s) for turn in self.turns)

    @property
    def slo(self) -> SLO:
        return self.given_slo or telling_slo([turn.simulated for turn in self.turns])

    @property
    def measured(self) -> Numbers:
        return Numbers.of([turn.measured for turn in self.turns], self.slo)

    @property
    def simulated(self) -> Numbers:
        return Numbers.of([turn.simulated for turn in self.turns], self.slo)

    @property
    def paced(self) -> Numbers:
        return Numbers.of([turn.paced for turn in self.turns], self.slo)

    def ratio(self, metric: str) -> float | None:
        """Simulated over served; None where the served one is 0: of nothing, nothing is told."""
        return _ratio(self.simulated, self.measured, metric)

    def paced_ratio(self, metric: str) -> float | None:
        """As `ratio`, at the served run's own pace."""
        return _ratio(self.paced, self.measured, metric)

    @property
    def agrees(self) -> bool:
        """Whether all three are within their tolerance."""
        return all(self.is_within(metric) for metric in METRICS)

    def is_within(self, metric: str) -> bool:
        """Whether one is within its tolerance."""
        ratio = self.ratio(metric)
        return ratio is not None and abs(ratio - 1) <= TOLERANCES[metric]

    def with_turns_of(self, earlier: Agreement) -> Agreement:
        """Also turns measured earlier, of other seeds; none where rate or limits were others."""
        if replace(earlier, turns=[]) != replace(self, turns=[]):
            return self
        turns = {turn.seed: turn for turn in (*earlier.turns, *self.turns)}
        return replace(self, turns=[turns[seed] for seed in sorted(turns)])

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Agreement:
        """The inverse of `dataclasses.asdict`, read from JSON."""
        slo = values["given_slo"]
        turns = [Turn.from_dict(turn) for turn in values["turns"]]
        return cls(**values | {"given_slo": slo and SLO(*slo), "turns": turns})


def _ratio(simulated: Numbers, served: Numbers, metric: str) -> float | None:
    of_served: float = getattr(served, metric)
    return getattr(simulated, metric) / of_served if of_served else None


def measure_agreement(
    model: Model,
    config: EngineConfig | None = None,
    *,
    workloads: Sequence[str] = tuple(WORKLOADS),
    num_requests: int = 24,
    repeats: int = 2,
    slo: SLO | None = None,
    seed: int = 0,
    rate: float = 1.0,
    progress: bool = False,
) -> list[Agreement]:
    """Serve and simulate workloads.

    Args:
        workloads: names of `WORKLOADS`.
        num_requests: of a workload, each turn.
        repeats: turns.
        slo: limits for all workloads; None for those of `telling_slo`, for each its own.
        seed: of the first turn; each further one has the next.
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
    turns: dict[str, list[Turn]] = {name: [] for name in workloads}
    with tqdm(total=repeats * len(turns), disable=not progress) as bar:
        for turn in range(repeats):
            for name in _from(turn, list(turns)):
                workload = WORKLOADS[name]
                requests = workload(num_requests, workload.rate_rps * rate, seed + turn)
                turns[name].append(_turn(model, config, requests, seed + turn))
                bar.update()
    return [
        Agreement(name, WORKLOADS[name].rate_rps * rate, slo, found)
        for name, found in turns.items()
    ]


def _from(turn: int, names: list[str]) -> list[str]:
    """All names, each turn beginning with another."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]


def _turn(model: Model, config: EngineConfig, requests: Sequence[TraceRequest], seed: int) -> Turn:
    served = _serve(model, config, requests, seed)
    times, step_ratio = served.step_times, _step_ratio(served.step_times, served.samples)

    def simulated(times: LinearStepTimes) -> Latencies:
        most = model.config.max_model_len
        return Latencies.of(simulate(requests, config, times, max_model_len=most))

    return Turn(
        seed=seed,
        measured=Latencies.of(served.run),
        simulated=simulated(times),
        paced=simulated(times.times(1 / step_ratio)),
        step_times=times,
        step_ratio=step_ratio,
        processor_share=served.processor_share,
    )


def _step_ratio(times: LinearStepTimes, samples: Sequence[Sample]) -> float:
    predicted_s = sum(times.step_s(shape) for shape, _ in samples)
    return predicted_s / sum(seconds for _, seconds in samples)


# --- serving, and measuring steps between the steps ----------------------------------------------


class _Served(NamedTuple):
    """A served workload, and what was measured meanwhile."""

    run: ServingRun
    samples: list[Sample]
    """Its steps."""
    step_times: LinearStepTimes
    processor_share: float


class _Clockwork(Engine):
    """An engine whose clock can stand still, and leap."""

    away_s = 0.0

    def now_s(self) -> float:
        return super().now_s() - self.away_s

    def leap(self, seconds: float) -> None:
        """It is so much later, at once."""
        self.away_s -= seconds

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside the `with` block no time passes."""
        start_s = self.now_s()
        try:
            yield
        finally:
            self.away_s += self.now_s() - start_s


def _serve(
    model: Model, config: EngineConfig, requests: Sequence[TraceRequest], seed: int
) -> _Served:
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    calibration = Calibration(model, config, longest=longest * 5 // 4, seed=seed)
    with _Clockwork(model, config) as engine, calibration:
        assert isinstance(engine, _Clockwork)
        arrivals, stepped_s = OpenLoop(requests), 0.0

        def between_steps(progress: Progress) -> None:
            nonlocal stepped_s
            if progress.step is None:
                if arrivals.next_s is not None:
                    engine.leap(max(0.0, arrivals.next_s - progress.now_s))
                return
            stepped_s += progress.step.wall_s
            with engine.standing_still():
                while calibration.spent_s < CALIBRATION_SHARE * stepped_s:
                    calibration.play_next()
                    calibration.share.test()

        run = replay(engine, arrivals, on_step=between_steps)
        basis = f"measured on {processor_name()}, between the steps of a served run: {model.name}"
        return _Served(
            run,
            samples_of(engine.trace),
            fit_step_times(calibration.samples(mean), basis),
            calibration.share(),
        )
