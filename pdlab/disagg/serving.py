"""What came of a workload on a cluster: one picture of its requests, one of each worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pdlab.trace import FailureRecord, TransferRecord
from pdlab.workload.serving import ServedRequest, ServingRun, StepSpan


@dataclass
class WorkerRun:
    """One worker's part."""

    role: str
    config: dict[str, Any]
    """Its engine's knobs."""
    num_blocks: int
    steps: list[StepSpan]


@dataclass
class ClusterRun:
    """A workload, served by a cluster. Times in seconds since the workload began."""

    provenance: Literal["measured", "simulated"]
    basis: str
    """What the times rest on."""
    router: dict[str, Any]
    """The router's knobs."""
    requests: list[ServedRequest]
    """In order of arrival."""
    workers: dict[str, WorkerRun]
    transfers: list[TransferRecord] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)

    @property
    def serving(self) -> ServingRun:
        """The same as one run, for tables and charts: all steps, by when they began."""
        steps = [step for worker in self.workers.values() for step in worker.steps]
        return ServingRun(
            provenance=self.provenance,
            basis=self.basis,
            config=self.router,
            requests=self.requests,
            steps=sorted(steps, key=lambda step: step.start_s),
            num_blocks=sum(worker.num_blocks for worker in self.workers.values()),
        )

    def of_worker(self, name: str) -> ServingRun:
        """One worker's steps, with all requests."""
        worker = self.workers[name]
        return ServingRun(
            provenance=self.provenance,
            basis=self.basis,
            config=worker.config,
            requests=self.requests,
            steps=worker.steps,
            num_blocks=worker.num_blocks,
        )
