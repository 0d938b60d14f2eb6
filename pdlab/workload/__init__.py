"""Traffic: request traces, real and synthetic, when they arrive, and what they do to KV memory."""

from pdlab.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from pdlab.workload.cache_replay import CacheReplay, replay_cache
from pdlab.workload.lengths import Between, Empirical, Fixed, Lengths, LogNormal
from pdlab.workload.scaling import fit_to, offered_load, scaled
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
    "replay_cache",
    "scaled",
    "shipped_traces",
]
