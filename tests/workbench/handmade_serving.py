"""A served workload made by hand, and workloads served in simulated time, for the pictures of runs.

The made-up step times are round: 10 ms a step, 1 ms a prompt token, 2 ms a decode.
"""

from __future__ import annotations

from random import Random

from pdlab import EngineConfig
from pdlab.costmodel.step_times import LinearStepTimes
from pdlab.engine.metrics import RequestMetrics
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan
from pdlab.workload.simulation import simulate
from pdlab.workload.traces import TraceRequest

ROUND = LinearStepTimes("round numbers, made for a test", 0.01, 0, 0, 0.001, 0, 0.002, 0, 0)
SLO_OF_TESTS = SLO(2.5, 1.5)
"""Met by b of `story`, missed by a."""


def request(
    name: str,
    arrival_s: float,
    begun_s: float | None,
    tokens_s: tuple[float, ...],
    finish_reason: str | None = "length",
    **counts: int,
) -> ServedRequest:
    metrics = RequestMetrics(arrival_s, begun_s, list(tokens_s), **counts)
    error = "too long" if finish_reason == "error" else ""
    return ServedRequest(name, metrics, finish_reason, error=error)


def story() -> ServingRun:
    """Twelve seconds with every kind of span.

    a: prompt in two chunks, stalls from 3 to 4 while b's prompt runs, is preempted at 6, recomputed
    b: comes at 1, waits until 3; its last three tokens come in one span of three steps
    c: refused; d: aborted after its prompt; e: comes at 11 and waits still
    """
    requests = [
        request("a", 0, 1, (3, 5, 6, 10, 11), num_prompt_tokens=6, num_preemptions=1),
        request("b", 1, 3, (4, 5, 6, 7, 8, 9), num_prompt_tokens=4, num_cached_tokens=2),
        request("c", 2, None, (), "error"),
        request("d", 9.5, 10, (11,), "abort", num_prompt_tokens=5),
        request("e", 11, None, (), None),
    ]
    steps = [
        StepSpan(1, 1, [], {"a": 4}, 0, 1, 1),
        StepSpan(2, 1, [], {"a": 2}, 1, 1, 2),
        StepSpan(3, 1, [], {"b": 2}, 0, 2, 3),
        StepSpan(4, 1, ["a", "b"], {}, 0, 2, 3),
        StepSpan(5, 1, ["a", "b"], {}, 0, 2, 4),
        StepSpan(6, 3, ["b"], {}, 1, 1, 2, ["a"], 3),
        StepSpan(9, 1, [], {"a": 9}, 0, 1, 3),
        StepSpan(10, 1, ["a"], {"d": 5}, 0, 2, 4),
        StepSpan(11, 1, [], {}, 1, 0, 0),
    ]
    config = {"batching": "mixed", "max_num_batched_tokens": 9}
    return ServingRun("measured", "a made-up machine", config, requests, steps, 8)


def nothing() -> ServingRun:
    return ServingRun("simulated", "nothing", {}, [], [], 8)


def traffic(count: int, seed: int = 0, rate: float = 20.0) -> list[TraceRequest]:
    """Requests at random times, of 1 to 60 prompt tokens and 1 to 30 output tokens."""
    random, now_s, found = Random(seed), 0.0, []
    for _ in range(count):
        now_s += random.expovariate(rate)
        found.append(TraceRequest(now_s, random.randint(1, 60), random.randint(1, 30)))
    return found


def served(batching: str = "mixed", count: int = 30, seed: int = 0, **knobs: int) -> ServingRun:
    """A workload in simulated time, with so few blocks that somebody is preempted."""
    knobs = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8} | knobs
    config = EngineConfig(batching=batching, max_num_batched_tokens=32, chunk_size=16, **knobs)
    return simulate(traffic(count, seed), config, ROUND)
