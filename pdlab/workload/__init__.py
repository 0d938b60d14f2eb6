"""Traffic, real and synthetic; serving it, for real or simulated; and what came of it."""

from pdlab.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from pdlab.workload.cache_replay import CacheReplay, replay_cache
from pdlab.workload.lengths import Between, Empirical, Fixed, Lengths, LogNormal
from pdlab.workload.replay import replay
from pdlab.workload.report import Summary, summarize
from pdlab.workload.scaling import fit_to, offered_load, scaled
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan
from pdlab.workload.simulation import simulate
from pdlab.workload.traces import TraceRequest, find_trace, read_trace, shipped_traces
from pdlab.workload.traffic import (
    WORKLOADS,
    Gaps,
    Workload,
    evenly,
    gamma,
    make_traffic,
    mix,
    poisson,
)

__all__ = [
    "SLO",
    "WORKLOADS",
    "Arrivals",
    "Between",
    "CacheReplay",
    "ClosedLoop",
    "Empirical",
    "Fixed",
    "Gaps",
    "Lengths",
    "LogNormal",
    "OpenLoop",
    "ServedRequest",
    "ServingRun",
    "StepSpan",
    "Summary",
    "TraceRequest",
    "Workload",
    "evenly",
    "find_trace",
    "fit_to",
    "gamma",
    "make_traffic",
    "mix",
    "offered_load",
    "poisson",
    "read_trace",
    "replay",
    "replay_cache",
    "scaled",
    "shipped_traces",
    "simulate",
    "summarize",
]
