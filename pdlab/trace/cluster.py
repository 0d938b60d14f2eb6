"""A recorded run of several engines: a trace of each, and what passed between them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from pdlab.trace.files import read_json, write_json
from pdlab.trace.records import FailureRecord, ParcelRecord, RoleSwitch, TransferRecord
from pdlab.trace.trace import Trace

CLUSTER_TRACE_VERSION = 1


@dataclass
class WorkerTrace:
    """What one worker's engine recorded."""

    role: str
    """`prefill`, `decode` or `both`, when the trace was taken."""
    epoch_s: float
    """When its engine's clock began, on the cluster's: what to add to its times."""
    trace: Trace


@dataclass
class ClusterTrace:
    """Everything a cluster recorded. All times but those in a worker's trace are on its clock.

    What a worker had recorded that was lost is lost with it.
    """

    router: dict[str, Any] = field(default_factory=dict)
    """The fields of RouterConfig."""
    workers: dict[str, WorkerTrace] = field(default_factory=dict)
    transfers: list[TransferRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    switches: list[RoleSwitch] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON, compressed when the name ends in .gz."""
        raw = {
            "cluster_version": CLUSTER_TRACE_VERSION,
            "router": self.router,
            "workers": {
                name: {"role": w.role, "epoch_s": w.epoch_s, "trace": w.trace.to_json()}
                for name, w in self.workers.items()
            },
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "failures": [asdict(failure) for failure in self.failures],
            "switches": [asdict(switch) for switch in self.switches],
        }
        write_json(path, raw)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ClusterTrace:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no cluster trace, is damaged, or has a version this code cannot
                read.
        """
        raw = read_json(path, "pdlab cluster trace")
        version = raw.get("cluster_version") if isinstance(raw, dict) else None
        if version != CLUSTER_TRACE_VERSION:
            raise ValueError(
                f"{path} has cluster trace version {version}; this reads {CLUSTER_TRACE_VERSION}"
            )
        try:
            return cls(
                router=raw["router"],
                workers={
                    name: WorkerTrace(w["role"], w["epoch_s"], Trace.from_json(w["trace"]))
                    for name, w in raw["workers"].items()
                },
                transfers=[_transfer(each) for each in raw["transfers"]],
                failures=[FailureRecord(**each) for each in raw["failures"]],
                switches=[RoleSwitch(**each) for each in raw["switches"]],
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is a damaged pdlab cluster trace: {error!r}") from error


def _transfer(raw: dict[str, Any]) -> TransferRecord:
    return TransferRecord(**raw | {"parcels": [ParcelRecord(*each) for each in raw["parcels"]]})
