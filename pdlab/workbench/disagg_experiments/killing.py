"""One of three worker processes is killed while answers are being read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.spec import local_specs
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from pdlab.models import Model
from pdlab.trace import FailureRecord
from pdlab.workbench.disagg_experiments.processes import Processes
from pdlab.workbench.transfer_data import Story
from pdlab.workload.serving import ServedRequest

EXACT = EngineConfig(exact=True, num_blocks=48, max_num_seqs=8, max_num_batched_tokens=512, seed=0)
KILL_TOKENS, KILL_AFTER = 20, 6
"""Tokens of each answer, and after how many of each the worker is killed."""
KILL_PROMPTS = (
    "Once upon a time, in a small village by the sea,",
    "The three most important things about bread are",
    "A cluster of computers is",
    "Dear diary, today I",
)


def kill_params() -> list[SamplingParams]:
    """Two that take the best token, two that draw with a seed."""
    return [
        SamplingParams(max_tokens=KILL_TOKENS, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(KILL_PROMPTS))
    ]


def undisturbed(model: Model) -> list[RequestOutput]:
    """The answers of one engine in this process, in exact mode."""
    with Engine(model, EXACT) as engine:
        return engine.generate(list(KILL_PROMPTS), kill_params())


class Reader:
    """Takes the pieces of an answer as they come, as a browser would, and never gives one back."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.mark = 0
        """Characters that were there when the worker was killed."""
        self._num_taken = 0

    @property
    def text_with_mark(self) -> str:
        return f"{self.text[: self.mark]}‖{self.text[self.mark :]}"

    def look(self, chunks: Sequence[Any]) -> None:
        """Take what is new: `chunks` are all pieces so far."""
        for chunk in chunks[self._num_taken :]:
            self.token_ids += chunk.token_ids
            self.text += chunk.text
        self._num_taken = len(chunks)


class Killed(NamedTuple):
    """A run in which a worker was killed."""

    run: ClusterRun
    readers: list[Reader]
    killed_s: float
    """When the worker was killed."""
    where: list[str | None]
    """The worker that each answer was written on then."""

    @property
    def failure(self) -> FailureRecord:
        return self.run.failures[0]

    @property
    def noticed_s(self) -> float:
        """How long the router took to notice."""
        return self.failure.time_s - self.killed_s

    def recovery_s(self) -> list[float]:
        """From the moment the loss was noticed to the next token, of each that went on."""
        return [at_s - self.failure.time_s for at_s in self.failure.recovered_s.values()]


def kill_one(model: Model, victim: str = "d0") -> Killed:
    """Four answers on 1P2D; when each has some tokens, one decode worker is killed with -9."""
    specs = local_specs(1, 2, model=model.name, config=EXACT)
    with Processes(model, {"three": specs}) as processes:
        warm_up = SamplingParams(max_tokens=2, ignore_eos=True)
        processes.cluster("three", RouterConfig()).generate([[1] * 20, [2] * 20], warm_up)
        return _killed(processes.cluster("three", RouterConfig()), victim)


def _killed(cluster: Cluster, victim: str) -> Killed:
    ids = [
        cluster.submit(prompt, params)
        for prompt, params in zip(KILL_PROMPTS, kill_params(), strict=True)
    ]
    jobs = [cluster.router.jobs[i] for i in ids]
    readers = [Reader() for _ in ids]
    where: list[str | None] = []
    killed_s = 0.0
    while not all(cluster.is_finished(i) for i in ids):
        cluster.step()
        for reader, job in zip(readers, jobs, strict=True):
            reader.look(job.chunks)
        if not where and all(len(reader.token_ids) >= KILL_AFTER for reader in readers):
            where = [job.decode_on for job in jobs]
            for reader in readers:
                reader.mark = len(reader.text)
            killed_s = cluster.now_s()
            cluster.kill(victim)
    cluster.step(0)
    run = _run_of(cluster, [cluster.collect(i) for i in ids])
    return Killed(run, readers, killed_s, where)


def _run_of(cluster: Cluster, outputs: Sequence[RequestOutput]) -> ClusterRun:
    """What was served since the cluster was made, as a replay would tell it."""
    story = Story.of(cluster.trace())
    return ClusterRun(
        provenance="measured",
        basis=f"{cluster.model.name}, exact mode, {story.basis}",
        router=asdict(cluster.router.config),
        requests=[ServedRequest(o.request_id, o.metrics, o.finish_reason) for o in outputs],
        workers={
            name: replace(worker, steps=[step for step in worker.steps if step.start_s > 0])
            for name, worker in story.workers.items()
        },
        transfers=story.transfers,
        failures=story.failures,
    )
