"""How many workers of each kind: by the cost model, by measurement, and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from pdlab.costmodel import LinearStepTimes, StepShape, StepTimes, causal_pairs
from pdlab.disagg.control import RoleController
from pdlab.disagg.ratio import Need, Split, batch_of, corrected, need_of, splits
from pdlab.disagg.router import Router, RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.disagg.worker import Role
from pdlab.kvcache import KVLayout
from pdlab.trace import RoleSwitch
from pdlab.workbench.disagg_experiments.chats import Outcome
from pdlab.workbench.disagg_experiments.processes import APART, ENGINE, Plans
from pdlab.workbench.scheduling_experiments import RECORDED, all_at_once
from pdlab.workload import SLO, WORKLOADS, Fixed, TraceRequest, make_traffic, mix, poisson

POOL = replace(ENGINE, num_blocks=1024, max_num_seqs=16)
"""Of simulated workers: memory that no process of a lesson should take."""


@dataclass(frozen=True)
class Twin:
    """1P1D on this machine as numbers: what `simulate_cluster` takes."""

    times: dict[str, LinearStepTimes]
    specs: dict[str, SimulatedSpec]
    hop_s: float

    @classmethod
    def of(cls, plans: Plans) -> Twin:
        """Of the pair that serves the plan `disaggregated`."""
        times = plans.times()
        specs = {
            host.name: SimulatedSpec(
                host.spec.role, plans.config, times[host.name], layout=host.hello.layout
            )
            for host in plans.groups[APART]
        }
        return cls(times, specs, plans.hop_s())

    @classmethod
    def recorded(cls) -> Twin:
        """Of a recorded machine, the same everywhere; messages take no time."""
        layout = KVLayout(30, 3, 64, ENGINE.block_size)
        roles: dict[str, Role] = {"p0": "prefill", "d0": "decode"}
        specs = {
            name: SimulatedSpec(role, ENGINE, RECORDED, layout=layout)
            for name, role in roles.items()
        }
        return cls(dict.fromkeys(specs, RECORDED), specs, 0.0)

    def run(self, requests: Sequence[TraceRequest]) -> ClusterRun:
        """The same requests, in simulated time."""
        return simulate_cluster(requests, self.specs, hop_s=self.hop_s)

    def pool(self, num_prefill: int, num_decode: int) -> dict[str, SimulatedSpec]:
        """More workers of both kinds than there are, and with more memory each."""
        p, d = (replace(spec, config=POOL) for spec in self.specs.values())
        return {f"p{i}": p for i in range(num_prefill)} | {f"d{i}": d for i in range(num_decode)}


class Pair(NamedTuple):
    """A number measured and simulated."""

    name: str
    measured_s: float
    simulated_s: float

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.measured_s


def compared(measured: ClusterRun, simulated: ClusterRun) -> list[Pair]:
    """Medians over all requests, and what the scene is about."""
    pairs = []
    for name, key in (("TTFT, median", "ttft_s"), ("TPOT, median", "tpot_s")):
        values = [
            median(getattr(r.metrics, key) for r in run.requests if getattr(r.metrics, key))
            for run in (measured, simulated)
        ]
        pairs.append(Pair(name, *values))
    one, other = Outcome.of(measured), Outcome.of(simulated)
    if one.document_ttft_s and other.document_ttft_s:
        pairs.append(Pair("TTFT of the document", one.document_ttft_s, other.document_ttft_s))
    pairs.append(Pair("longest gap of a chat", one.chat_gap_s, other.chat_gap_s))
    return pairs


# --- how many of each -----------------------------------------------------------------------------


class Planned(NamedTuple):
    """What a workload needs of each side, and what the divisions of some workers carry."""

    need: Need
    options: list[Split]
    batch: int
    """Outputs that are written in one step."""

    @property
    def best(self) -> Split:
        return max(self.options, key=lambda each: (each.capacity_rps, each.num_decode))


def planned(
    twin: Twin,
    requests: Sequence[TraceRequest],
    num_workers: int,
    *,
    run: ClusterRun | None = None,
) -> Planned:
    """By the cost model; corrected by how long the steps of a measured run took, if there is one.

    How many outputs share a step depends on the division, and the division on that: so it is
    planned with full steps first, simulated, and planned again with the steps of the simulation.

    Args:
        run: of workers that prefill and workers that decode.
    """
    p, d = twin.times.values()
    batch = batch_of(requests, POOL)
    for is_last in (False, True):
        need = need_of(requests, p, d, batch=batch)
        if run is not None:
            need = corrected(need, run, p, d)
        found = Planned(need, splits(need, num_workers), batch)
        if not is_last:
            batch = _mean_batch(_at_once(twin, requests, found.best))
    return found


def _at_once(twin: Twin, requests: Sequence[TraceRequest], split: Split) -> ClusterRun:
    """All are there from the beginning."""
    workers = twin.pool(split.num_prefill, split.num_decode)
    return simulate_cluster(all_at_once(requests), workers, hop_s=twin.hop_s)


def _mean_batch(run: ClusterRun) -> int:
    steps = [step for worker in run.workers.values() for step in worker.steps if step.decodes]
    num_steps = sum(step.num_steps for step in steps)
    return max(1, round(sum(len(s.decodes) * s.num_steps for s in steps) / num_steps))


def decode_step_s(times: StepTimes, batch: int, context_len: int = 160) -> float:
    """A step of so many outputs, each with so many tokens before it."""
    return times.step_s(StepShape(0, 0, 0, batch, batch * context_len, context_len))


def simulated_capacity(
    twin: Twin, requests: Sequence[TraceRequest], options: Sequence[Split]
) -> list[float]:
    """Requests a second of each division, when all are there from the beginning."""
    runs = [_at_once(twin, requests, each) for each in options]
    return [len(requests) / run.serving.duration_s for run in runs]


def tide(twin: Twin, num_workers: int = 4, each_s: float = 60.0) -> list[TraceRequest]:
    """First documents of which little is written, then questions with long answers.

    Each half is 0.7 of what all workers but one can bear on the busier side.
    """
    p, d = twin.times["p0"], twin.times["d0"]
    reading = (Fixed(500), Fixed(8))
    writing = (Fixed(20), Fixed(60))
    parts = []
    for i, (prompts, outputs) in enumerate((reading, writing)):
        example = [TraceRequest(0.0, prompts.num_tokens, outputs.num_tokens)]
        need = need_of(example, p, d, batch=8)
        busier_s = max(need.prefill_s, need.decode_s)
        rate = 0.7 * (num_workers - 1) / busier_s
        part = make_traffic(poisson(rate), prompts, outputs, seed=i, duration_s=each_s)
        parts.append([replace(r, arrival_s=r.arrival_s + i * each_s) for r in part])
    return mix(parts)


class Conditional(NamedTuple):
    """Short prompts computed where they are written; simulated."""

    most_tokens: int
    """Prompts with no more are computed there."""
    num_moved: int
    num_requests: int
    chat_ttft_s: float
    """Median."""
    document_ttft_s: float
    gap_p99_s: float
    """Of all gaps between tokens."""


def conditional(
    twin: Twin, thresholds: Sequence[int], num_requests: int = 240, load: float = 0.7
) -> list[Conditional]:
    """The workload `mixed` on 1P1D, at a part of what it could bear without any such rule.

    Args:
        load: that part.
    """
    p, d = (twin.times[name] for name in ("p0", "d0"))
    mixed = WORKLOADS["mixed"]
    need = need_of(mixed(num_requests), p, d, batch=8)
    requests = mixed(num_requests, load / max(need.prefill_s, need.decode_s))
    is_document = np.array([request.priority > 0 for request in requests])
    found = []
    for most in thresholds:
        workers = twin.pool(1, 1)
        router = RouterConfig(local_prefill_tokens=most)
        run = simulate_cluster(requests, workers, router, hop_s=twin.hop_s)
        ttfts_s = np.array([request.metrics.ttft_s for request in run.requests])
        chat_s, document_s = (float(np.median(ttfts_s[is_document == each])) for each in (0, 1))
        gaps = np.concatenate([r.metrics.itl_s for r in run.requests])
        p99_s = float(np.percentile(gaps, 99))
        found.append(
            Conditional(most, len(run.transfers), len(requests), chat_s, document_s, p99_s)
        )
    return found


CONTROL = {"most_wait_s": 2.0, "most_fill": 0.6, "cool_down_s": 3.0}
"""Knobs of the `RoleController` that follows the tide."""


def tide_slo(twin: Twin) -> SLO:
    """Limits that suit the machine: thrice a document alone, thrice a step of eight who write."""
    p, d = twin.times["p0"], twin.times["d0"]
    document_s = p.step_s(StepShape(1, 500, causal_pairs(0, 500), 0, 0))
    step_s = d.step_s(StepShape(0, 0, 0, 8, 8 * 60, 60))
    return SLO(*(float(f"{3 * seconds:.2g}") for seconds in (document_s, step_s)))


class Followed(NamedTuple):
    """A workload on a fixed division, or on roles that follow the load."""

    run: ClusterRun
    switches: list[RoleSwitch]

    def in_time(self, slo: SLO) -> float:
        """Share of the requests that meet both limits."""
        return sum(r.meets(slo) for r in self.run.requests) / len(self.run.requests)


def follow(
    twin: Twin,
    requests: Sequence[TraceRequest],
    num_prefill: int,
    num_decode: int,
    control: Mapping[str, float] | None = None,
) -> Followed:
    """Serve it, with roles that follow the load if `control` tells how.

    Args:
        control: knobs of `RoleController`.
    """
    made: list[RoleController] = []

    def make(router: Router) -> RoleController:
        made.append(RoleController(router, **(control or {})))
        return made[-1]

    run = simulate_cluster(
        requests,
        twin.pool(num_prefill, num_decode),
        hop_s=twin.hop_s,
        control=None if control is None else make,
        look_s=0.25,
    )
    return Followed(run, made[0].switches if made else [])


def whole_engines(
    twin: Twin, requests: Sequence[TraceRequest], num_workers: int, chunk_size: int
) -> Followed:
    """The same requests on engines that serve them from beginning to end, in chunks."""
    budget = chunk_size + POOL.max_num_seqs
    config = replace(POOL, chunk_size=chunk_size, max_num_batched_tokens=budget)
    spec = replace(twin.specs["p0"], role="both", config=config)
    workers = {f"w{i}": spec for i in range(num_workers)}
    router = RouterConfig(mode="aggregated")
    return Followed(simulate_cluster(requests, workers, router, hop_s=twin.hop_s), [])
