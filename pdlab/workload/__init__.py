"""Traffic: request traces, real and synthetic, and what they do to KV memory."""

from pdlab.workload.cache_replay import CacheReplay, replay_cache
from pdlab.workload.traces import TraceRequest, find_trace, read_trace, shipped_traces

__all__ = [
    "CacheReplay",
    "TraceRequest",
    "find_trace",
    "read_trace",
    "replay_cache",
    "shipped_traces",
]
