"""What it brings, and what it costs, to prefill and decode in two processes: measured here.

The same processors and the same workload under several plans, in turns, so that a machine that
slows down for a while slows all of them. The plans are what the same two cores can be used for:

    one engine          one process with all cores; steps hold whole prompts beside decodes
    one engine, chunks  the same with prompts cut into chunks (Sarathi-Serve)
    two engines         a process on each core that serves whole requests
    disaggregated       a process on one core for prompts, one on another for outputs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from pdlab.bench.cluster_agreement import (
    ENGINE,
    ClusterAgreement,
    StartCluster,
    measure_cluster_agreement,
)
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.processes import process_cluster
from pdlab.disagg.hosts.spec import WorkerSpec, local_specs
from pdlab.disagg.replay import replay_on_cluster
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.engine import EngineConfig, SamplingParams
from pdlab.link import Link
from pdlab.machine import describe_machine, physical_cores
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int
from pdlab.workload.traces import TraceRequest

CHUNK = 64
"""Prompt tokens of a step, where they are cut."""
Plan = tuple[list[WorkerSpec], RouterConfig]


def plans(model: str, config: EngineConfig = ENGINE) -> dict[str, Plan]:
    """What the cores of this machine can be used for, by name; the first half prefills."""
    chunks = replace(config, max_num_batched_tokens=CHUNK + config.max_num_seqs, chunk_size=CHUNK)
    alone, apart = RouterConfig(mode="aggregated"), RouterConfig()
    half = max(1, len(physical_cores()) // 2)
    return {
        "one engine": (local_specs(0, 1, model=model, config=config, role="both"), alone),
        "one engine, chunks": (local_specs(0, 1, model=model, config=chunks, role="both"), alone),
        "two engines": (local_specs(0, 2, model=model, config=config, role="both"), alone),
        "disaggregated": (local_specs(half, half, model=model, config=config), apart),
    }


# --- workloads -----------------------------------------------------------------------------------


def interrupted_chats() -> list[TraceRequest]:
    """Four chats that are being written, and a long document now and then of which little is."""
    chats = [TraceRequest(0.1 * i, 24, 64) for i in range(4)]
    documents = [TraceRequest(1.0 + 2.0 * i, 512, 2) for i in range(5)]
    return chats + documents


def many_answers() -> list[TraceRequest]:
    """Sixteen short questions at once, with long answers: next to nothing to prefill."""
    return [TraceRequest(0.0, 16, 64) for _ in range(16)]


WORKLOADS: dict[str, Callable[[], list[TraceRequest]]] = {
    "interrupted chats": interrupted_chats,
    "many answers": many_answers,
}
CHAT_TOKENS = 16
"""Outputs of at least so many tokens count for ITL."""


@dataclass(frozen=True)
class PlanFigures:
    """One plan under one workload: medians of the turns, with the lowest and the highest."""

    plan: str
    workload: str
    itl_p50_s: tuple[float, float, float]
    """Of the long outputs."""
    itl_p99_s: tuple[float, float, float]
    ttft_p50_s: tuple[float, float, float]
    """Of all requests."""
    tokens_per_s: tuple[float, float, float]
    """Output tokens over the time from the first arrival to the end."""


def measure_plans(
    model: Model,
    *,
    names: Sequence[str] = (),
    workloads: Sequence[str] = tuple(WORKLOADS),
    repeats: int = 3,
    config: EngineConfig = ENGINE,
    start: StartCluster = process_cluster,
    progress: bool = False,
) -> list[PlanFigures]:
    """Serve each workload under each plan, in turns.

    Args:
        names: of the plans; none for all.
        start: starts the workers.

    Raises:
        ValueError: there is no such plan or workload, or `repeats` is out of range.
    """
    require_int("repeats", repeats, least=1, most=1000)
    known = plans(model.name, config)
    for name in names:
        require_choice("plan", name, tuple(known))
    for name in workloads:
        require_choice("workload", name, tuple(WORKLOADS))
    chosen = {name: known[name] for name in names or known}
    runs: dict[tuple[str, str], list[ClusterRun]] = {}
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(start(model, specs, router, seed=0))
            for name, (specs, router) in chosen.items()
        }
        for cluster in clusters.values():
            warm_up(cluster)
        rounds = enumerate([*workloads] * repeats)
        turns = [(seed, workload, name) for seed, workload in rounds for name in clusters]
        for seed, workload, name in tqdm(turns, unit="run", disable=not progress):
            # other prompts each time: those of the times before are cached
            run = replay_on_cluster(clusters[name], WORKLOADS[workload](), seed=seed)
            runs.setdefault((name, workload), []).append(run)
    return [_figures(*key, of_plan) for key, of_plan in runs.items()]


def warm_up(cluster: Cluster) -> None:
    """The first steps of a process are slower."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    cluster.generate([[1] * 40, [2] * 80], params)


def _figures(plan: str, workload: str, runs: Sequence[ClusterRun]) -> PlanFigures:
    gaps = [_gaps(run) for run in runs]
    first = [[r.metrics.ttft_s or 0.0 for r in run.requests] for run in runs]
    tokens = [sum(r.metrics.num_output_tokens for r in run.requests) for run in runs]
    rates = [n / run.serving.duration_s for n, run in zip(tokens, runs, strict=True)]
    return PlanFigures(
        plan,
        workload,
        _spread([float(np.quantile(each, 0.5)) for each in gaps]),
        _spread([float(np.quantile(each, 0.99)) for each in gaps]),
        _spread([median(each) for each in first]),
        _spread(rates),
    )


def _gaps(run: ClusterRun) -> np.ndarray:
    long = [r for r in run.requests if r.metrics.num_output_tokens >= CHAT_TOKENS]
    return np.concatenate([r.metrics.itl_s for r in long])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


# --- overlap -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """How long the decode worker waits for K and V once the prompt is computed."""

    link: str
    """Simulated."""
    num_tokens: int
    num_bytes: int
    link_s: float
    """That the link takes for so many bytes, by its bandwidth."""
    push_wait_s: tuple[float, float, float]
    """From the first token to the decode worker going on: the whole prompt, once it is there."""
    stream_wait_s: tuple[float, float, float]
    """The same, layer by layer."""

    @property
    def hidden(self) -> float:
        """Part of the wait that layer by layer is spared, by the medians."""
        return 1 - self.stream_wait_s[0] / self.push_wait_s[0]


def measure_overlap(
    model: Model,
    *,
    link: Link,
    num_tokens: int = 512,
    repeats: int = 5,
    config: EngineConfig = ENGINE,
    start: StartCluster = process_cluster,
) -> Overlap:
    """The same prompt's K and V over a slow link, as a whole and layer by layer, in turns.

    Raises:
        ValueError: a number is out of range.
    """
    require_int("num_tokens", num_tokens, least=1, most=config.max_model_len or 2048)
    require_int("repeats", repeats, least=1, most=1000)
    config = replace(config, enable_prefix_cache=False)
    waits: Mapping[str, list[float]] = {"push": [], "stream": []}
    num_bytes = 0
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with ExitStack() as stack:
        clusters = {}
        for transfer in waits:
            specs = local_specs(1, 1, model=model.name, config=config, link=link)
            router = RouterConfig(transfer=transfer)
            clusters[transfer] = stack.enter_context(start(model, specs, router, seed=0))
            warm_up(clusters[transfer])
        for _ in range(repeats):
            for transfer, cluster in clusters.items():
                [output] = cluster.generate([[7] * num_tokens], params)
                moved = cluster.transfers[-1]
                waits[transfer].append(moved.ready_s - output.metrics.token_times_s[0])
                num_bytes = moved.num_bytes
    return Overlap(
        link.name,
        num_tokens,
        num_bytes,
        link.transfer_s(num_bytes),
        _spread(waits["push"]),
        _spread(waits["stream"]),
    )


# --- all together --------------------------------------------------------------------------------

SECTIONS = ("plans", "overlap", "agreement")
COMPARED = ("short chat", "mixed")
"""Workloads on which the simulated cluster is compared with the real one."""


@dataclass(frozen=True)
class DisaggregationBench:
    """What was measured, and what on; parts that were not asked for are empty."""

    model: str
    machine: dict[str, Any]
    repeats: int
    plans: list[PlanFigures]
    overlaps: list[Overlap]
    agreements: list[ClusterAgreement]

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def measure_disaggregation(
    model: Model,
    *,
    sections: Sequence[str] = SECTIONS,
    repeats: int = 3,
    links: Sequence[str] = ("1GbE",),
    progress: bool = False,
) -> DisaggregationBench:
    """What is asked for.

    Raises:
        ValueError: there is no such section or link, or `repeats` is out of range.
    """
    for name in sections:
        require_choice("sections", name, SECTIONS)
    return DisaggregationBench(
        model=model.name,
        machine=describe_machine(),
        repeats=repeats,
        plans=measure_plans(model, repeats=repeats, progress=progress)
        if "plans" in sections
        else [],
        overlaps=[
            measure_overlap(model, link=Link.named(name), repeats=2 * repeats - 1)
            for name in links
            if "overlap" in sections
        ],
        agreements=[
            measure_cluster_agreement(model, workload=name, repeats=repeats, progress=progress)
            for name in COMPARED
            if "agreement" in sections
        ],
    )
