"""What both halves of a worker have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdlab.disagg.messages import Arrival
from pdlab.disagg.transport.interface import Transport
from pdlab.engine import Engine


@dataclass(eq=False)
class Half:
    """An engine, a transport, and how long what nobody renews is kept."""

    name: str
    """Of the worker."""
    engine: Engine
    transport: Transport
    lease_s: float = field(default=30.0, kw_only=True)
    clock: Callable[[], float] = field(default=time.perf_counter, kw_only=True)
    """Seconds; the same for both halves."""

    def urgency(self, arrival: Arrival) -> dict[str, Any]:
        """What the engine is told of an arrival, its time on the engine's clock."""
        age_s = max(0.0, self.clock() - arrival.time_s)
        return {
            "priority": arrival.priority,
            "ttft_slo_s": arrival.ttft_slo_s,
            "arrival_s": self.engine.now_s() - age_s,
        }
