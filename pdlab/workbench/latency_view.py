"""The LatencyView widget: latencies of runs as curves, and what stays within movable limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from pdlab.requirements import require_choice, require_number
from pdlab.workbench.gantt_data import named_runs
from pdlab.workbench.latency_data import (
    MAX_PAIRS,
    METRICS,
    NAMES,
    is_wide,
    latency_data,
    sensible_slo,
)
from pdlab.workbench.widget import TraceWidget
from pdlab.workload.report import latency_samples, summarize
from pdlab.workload.serving import SLO, ServingRun

LONGEST_S = 1e6
"""Eleven days: more than any limit."""


class LatencyView(TraceWidget):
    """Which part of the requests is served how fast, by run; the limits move, and the goodput with
    them.

    A curve shows for every latency the part of the requests (for ITL: of the gaps) that took no
    longer. Attainment is the part of all requests, unfinished and refused ones too, that met both
    limits; goodput is their number a second.

    Args:
        runs: a served workload, measured or simulated, or several by name (at most 8).
        slo: limits to begin with; by default what 90% of the best run's requests stay within.
        metric: `ttft`, `tpot`, `itl` or `e2e`.

    Raises:
        ValueError: there is no run, no such metric, or a limit is negative.
    """

    name = "latency_view"

    runs = traitlets.List().tag(sync=True)
    """`latency_data` of each run."""
    names = traitlets.Dict(dict(NAMES)).tag(sync=True)
    wide = traitlets.Dict().tag(sync=True)
    """By metric, whether it begins with a logarithmic axis."""
    metric = traitlets.Unicode("ttft").tag(sync=True)
    scale = traitlets.Unicode("auto").tag(sync=True)
    """Of the time axis: `linear`, `log`, or `auto` by the spread of the values."""
    ttft_slo_s = traitlets.Float().tag(sync=True)
    tpot_slo_s = traitlets.Float().tag(sync=True)

    def __init__(
        self,
        runs: ServingRun | Mapping[str, ServingRun],
        *,
        slo: SLO | None = None,
        metric: str = "ttft",
    ) -> None:
        self._runs = named_runs(runs)
        require_choice("metric", metric, METRICS)
        samples = {name: latency_samples(run.requests) for name, run in self._runs.items()}
        every = list(samples.values())
        limits = slo.checked() if slo else sensible_slo(every)
        share = MAX_PAIRS // len(every)
        super().__init__(
            runs=[latency_data(r, name, share, samples[name]) for name, r in self._runs.items()],
            wide={m: is_wide(every, m) for m in METRICS},
            metric=metric,
            ttft_slo_s=limits.ttft_s,
            tpot_slo_s=limits.tpot_s,
        )

    @property
    def slo(self) -> SLO:
        """The limits as they stand now."""
        return SLO(self.ttft_slo_s, self.tpot_slo_s)

    def attainment(self) -> dict[str, float | None]:
        """By run, the part of all requests that met both limits; exact, over every request."""
        return {name: summarize(run, self.slo).attainment for name, run in self._runs.items()}

    def goodput(self) -> dict[str, float | None]:
        """By run, requests a second that met both limits; exact, over every request."""
        return {name: summarize(run, self.slo).goodput_per_s for name, run in self._runs.items()}

    def summary(self) -> str:
        met = ", ".join(
            f"{name} {'–' if part is None else f'{part:.0%}'}"
            for name, part in self.attainment().items()
        )
        lines = "; ".join(dict.fromkeys(data["line"] for data in self.runs))
        return (
            f"Latencies; within TTFT {self.ttft_slo_s:.3g} s and TPOT {self.tpot_slo_s:.3g} s: "
            f"{met}; {lines}"
        )

    @traitlets.validate("metric")
    def _check_metric(self, proposal: Any) -> str:
        require_choice("metric", proposal["value"], METRICS)
        return str(proposal["value"])

    @traitlets.validate("scale")
    def _check_scale(self, proposal: Any) -> str:
        require_choice("scale", proposal["value"], ("auto", "linear", "log"))
        return str(proposal["value"])

    @traitlets.validate("ttft_slo_s", "tpot_slo_s")
    def _check_limit(self, proposal: Any) -> float:
        require_number(proposal["trait"].name, proposal["value"], 0, LONGEST_S)
        return float(proposal["value"])
