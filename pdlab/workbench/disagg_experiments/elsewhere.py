"""Prompts on one device, outputs on a cheaper one; and what the exercises check against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pdlab.costmodel import RooflineStepTimes, StepShape, StepTimes, causal_pairs, load_hardware
from pdlab.costmodel.memory import weight_bytes
from pdlab.disagg.ratio import Need, splits
from pdlab.disagg.simulated.break_even import BreakEven, break_even
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.link import Link
from pdlab.models.catalog import SHAPES
from pdlab.requirements import require_int
from pdlab.workbench.disagg_experiments.links import waited_s
from pdlab.workbench.disagg_experiments.processes import ENGINE
from pdlab.workbench.scheduling_experiments import RECORDED
from pdlab.workload import WORKLOADS, TraceRequest

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256
"""The example that articles on the subject use."""
DTYPES = ("bf16", "fp16")
USABLE = 0.9
"""Part of a device's memory for weights and K and V."""
BANDWIDTHS_BYTES_S = tuple(10 ** (7 + i / 8) for i in range(33))


def devices(fast: str, slow: str, shape: str = "qwen3-8b") -> tuple[StepTimes, StepTimes]:
    """Rooflines of two machines of the hardware table for one model, with 16-bit weights.

    A machine without 16-bit products computes in fp32 what it reads in 16 bits.
    """
    return _times(fast, shape), _times(slow, shape)


def _times(name: str, shape: str) -> RooflineStepTimes:
    hardware = load_hardware()[name]
    peaks = hardware.peak_flops
    dtype = next((d for d in DTYPES if d in peaks), DTYPES[0])
    if dtype not in peaks:
        hardware = replace(hardware, peak_flops={**peaks, dtype: peaks["fp32"]})
    return RooflineStepTimes(SHAPES[shape], hardware, dtype)


def price_when_full(fast: str, slow: str, shape: str = "qwen3-8b") -> float:
    """How many times a second of the fast machine must cost one of the slow one, if both are full.

    As many requests decode at once as memory holds beside the weights.
    """
    seconds = []
    for name in (fast, slow):
        hardware, times = load_hardware()[name], _times(name, shape)
        room = USABLE * hardware.memory_bytes - weight_bytes(SHAPES[shape], 2)
        longest = PROMPT_TOKENS + OUTPUT_TOKENS
        batch = int(room / (longest * SHAPES[shape].kv_bytes_per_token(2)))
        mean = PROMPT_TOKENS + OUTPUT_TOKENS // 2
        seconds.append(times.step_s(StepShape(0, 0, 0, batch, batch * mean, longest)) / batch)
    return seconds[1] / seconds[0]


def decode_elsewhere(
    fast: str,
    slow: str,
    kv_bytes_per_token: Sequence[int],
    bandwidths_bytes_s: Sequence[float] = BANDWIDTHS_BYTES_S,
) -> BreakEven:
    """Qwen3-8B: prompts on the fast machine, outputs on the slow one; predicted by rooflines."""
    return break_even(
        *devices(fast, slow),
        num_prompt_tokens=PROMPT_TOKENS,
        num_output_tokens=OUTPUT_TOKENS,
        num_layers=SHAPES["qwen3-8b"].num_layers,
        kv_bytes_per_token=list(kv_bytes_per_token),
        bandwidths_bytes_s=list(bandwidths_bytes_s),
    )


def nearest(values: Mapping[str, float], actual: float) -> str:
    """The name of the value that is off by the smallest factor."""
    return min(values, key=lambda name: abs(np.log(values[name] / actual)))


# --- exercises ------------------------------------------------------------------------------------


def best_split(prefill_s: float, decode_s: float, num_workers: int) -> int:
    """Workers that prefill, in the division that carries the most."""
    require_int("num_workers", num_workers, least=2)
    found = splits(Need(prefill_s, decode_s), num_workers)
    return max(found, key=lambda each: (each.capacity_rps, each.num_decode)).num_prefill


def recorded_prefill_s(num_tokens: int) -> float:
    """A prompt alone on the recorded machine."""
    return RECORDED.step_s(StepShape(1, num_tokens, causal_pairs(0, num_tokens), 0, 0))


def recorded_wait_s(num_tokens: int, link: Link, num_layers: int, bytes_per_token: int) -> float:
    """What one prompt waits for its K and V on the recorded machine, simulated layer by layer."""
    spec = SimulatedSpec(
        "prefill",
        ENGINE,
        RECORDED,
        kv_bytes_per_token=bytes_per_token,
        num_layers=num_layers,
        link=link,
    )
    workers = {"p0": spec, "d0": replace(spec, role="decode")}
    run = simulate_cluster([TraceRequest(0.0, num_tokens, 2)], workers)
    return waited_s(run)


def mean_lengths(requests: Sequence[TraceRequest]) -> tuple[float, float]:
    """Of prompts, and of outputs."""
    lengths = [(r.num_prompt_tokens, r.num_output_tokens) for r in requests]
    prompt, output = np.mean(lengths, axis=0).tolist()
    return prompt, output


def mixed_requests(num_requests: int = 100) -> list[TraceRequest]:
    """Four of five are short chat, one is a document of several hundred tokens."""
    return WORKLOADS["mixed"](num_requests)
