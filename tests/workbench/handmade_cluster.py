"""Runs of two workers, made by hand, recorded and simulated, for the pictures of clusters."""

from __future__ import annotations

from pdlab import EngineConfig, SamplingParams
from pdlab.costmodel.step_times import LinearStepTimes
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun, WorkerRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.engine.metrics import RequestMetrics
from pdlab.link import Link
from pdlab.trace import ClusterTrace, FailureRecord, ParcelRecord, TransferRecord
from pdlab.workload.serving import ServedRequest, StepSpan
from pdlab.workload.traces import TraceRequest
from tests.disagg.clusters import local_cluster
from tests.helpers import random_model, random_prompt

TIMES = LinearStepTimes("round numbers, made for a test", 0.01, 0, 0, 0.001, 0, 0.002, 0, 0)


def parcels(kind: str) -> list[ParcelRecord]:
    """Of 20 tokens and 2 layers: layer by layer in two chunks, or at once after the prompt."""
    if kind == "stream":
        times = (
            (0, 0, 16, 1.4, 1.6),
            (1, 0, 16, 1.9, 2.1),
            (0, 16, 20, 2.4, 2.6),
            (1, 16, 20, 3, 3.2),
        )
        return [ParcelRecord(n, n + 1, a, b, 10 * (b - a), s, t) for n, a, b, s, t in times]
    return [ParcelRecord(0, 2, 0, 20, 400, 3.1, 4.5)]


def story(kind: str = "stream", cached: int = 0) -> ClusterRun:
    """A prompt of 20 tokens from 1 to 3 s in two steps on p0, its output on d0.

    d0 decodes another request meanwhile; d9 is lost at 2 s, and what it had goes on on d0.
    """
    ready_s = 3.25 if kind == "stream" else 4.5
    moved = parcels(kind) if cached < 20 else []
    record = TransferRecord("r1", "p0", "d0", kind, "socket", "fp32", 20 - cached, cached, moved,
                            ready_s, link="1GbE")  # fmt: skip
    prompt = [StepSpan(0, 1, [], {"r0": 8}, 1, 1, 2), StepSpan(1, 1, [], {"r1": 16}, 0, 1, 2),
              StepSpan(2, 1, [], {"r1": 4}, 0, 1, 3)]  # fmt: skip
    output = [StepSpan(0.5, 1, ["r0"], {}, 0, 1, 1), StepSpan(2.5, 0.5, ["r0"], {}, 0, 1, 1),
              StepSpan(ready_s, 0.5, ["r0", "r1"], {}, 0, 2, 3)]  # fmt: skip
    tokens = {"r0": [1.0, 1.5, 3.0, ready_s + 0.5], "r1": [3.0, ready_s + 0.5]}
    requests = [
        ServedRequest(name, RequestMetrics(0.0, 0.0, times, num_prompt_tokens=8), "length")
        for name, times in tokens.items()
    ]
    return ClusterRun(
        "measured", "a made-up machine", {}, requests,
        {"p0": WorkerRun("prefill", {"block_size": 8}, 8, prompt),
         "d0": WorkerRun("decode", {"block_size": 16}, 8, output)},
        [record],
        [FailureRecord(2.0, "d9", "killed", ["r0"], {"r0": 3.0})],
    )  # fmt: skip


def simulated(
    transfer: str = "stream", count: int = 12, num_decode: int = 1, **options
) -> ClusterRun:
    """Requests on one worker for prompts and some for outputs, in simulated time."""
    config = EngineConfig(block_size=16, num_blocks=200, max_num_batched_tokens=64, chunk_size=64)
    roles = {"p0": "prefill"} | {f"d{i}": "decode" for i in range(num_decode)}
    link = Link(1e6, 1e-3, "a slow one")
    workers = {
        name: SimulatedSpec(role, config, TIMES, kv_bytes_per_token=800, num_layers=8, link=link)
        for name, role in roles.items()
    }
    traffic = [TraceRequest(0.05 * i, 30 + 17 * (i % 5), 20) for i in range(count)]
    return simulate_cluster(traffic, workers, RouterConfig(transfer=transfer), **options)


def recorded(transfer: str = "stream", block_sizes: tuple[int, int] = (8, 16)) -> ClusterTrace:
    """Three short requests, really computed by two workers of this process."""
    configs = [EngineConfig(block_size=n, num_blocks=32, max_model_len=64) for n in block_sizes]
    workers = {"p0": ("prefill", configs[0]), "d0": ("decode", configs[1])}
    with local_cluster(random_model(), workers, RouterConfig(transfer=transfer)) as cluster:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        cluster.generate([random_prompt(n) for n in (33, 8, 17)], params)
        return cluster.trace()
