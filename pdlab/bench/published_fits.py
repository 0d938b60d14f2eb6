"""How well the simulator meets what was published: OPT-13B by DistServe, Llama-2-70B by Splitwise.

Of OPT-13B a fit is published, and the simulator runs on this very fit. So its errors say that steps
are put together as they should be, and nothing of hardware. Of Llama-2-70B there are measurements:
each configuration counts once, and the errors are on those that the fit has not seen.

The published files are not part of pdlab: a folder holds `distserve_sim` and `splitwise_sim`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdlab.costmodel import (
    RooflineStepTimes,
    fit_overheads,
    load_hardware,
    published,
    read_splitwise,
    relative_errors,
)
from pdlab.costmodel.published import LLAMA2_70B, OPT_13B
from pdlab.costmodel.roofline_times import FITTED, MeasuredStep, distinct_steps
from pdlab.engine import EngineConfig
from pdlab.workload import TraceRequest
from pdlab.workload.simulation import simulate

PROFILES = {"DistServe": "profiler-a100-80g.distserve.json", "vLLM": "profiler-a100-80g.vllm.json"}
OPT_MODEL = "facebook/opt-13b"
BATCHES = ((1, 16), (1, 2000), (8, 200), (30, 512), (100, 100))
"""Prompts that start together, and the tokens of each."""
NUM_OUTPUT_TOKENS = 20
NUM_SPLITS = 100
WITHIN = 0.2


@dataclass(frozen=True)
class FitErrors:
    """Relative errors of a fit, without their signs."""

    name: str
    phase: str
    """prefill or decode"""
    num_steps: int
    """Tested, those of all splits together."""
    median: float
    worst: float
    within: float
    """Share of steps with an error of at most `WITHIN`."""

    @classmethod
    def of(cls, name: str, phase: str, errors: Iterable[float]) -> FitErrors:
        sizes = np.abs(list(errors))
        within = float(np.mean(sizes <= WITHIN))
        return cls(name, phase, len(sizes), float(np.median(sizes)), float(sizes.max()), within)


def measure_published(folder: Path) -> list[FitErrors]:
    """Errors against the published files in `folder`.

    Raises:
        ValueError: a file is not what it should be.
        OSError: it cannot be read.
    """
    return [
        *_opt_13b(folder / "distserve_sim"),
        *_llama2_70b(folder / "splitwise_sim" / "perf_model_a100.csv"),
    ]


def _opt_13b(folder: Path) -> Iterator[FitErrors]:
    """Simulated requests against the formulas, evaluated here from the lengths alone."""
    profiles = {
        server: json.loads((folder / name).read_text(encoding="utf-8"))
        for server, name in PROFILES.items()
    }
    for name, fit in OPT_13B.items():
        terms = profiles[fit.server][OPT_MODEL][str(fit.num_devices)]
        errors: dict[str, list[float]] = {"prefill": [], "decode": []}
        for batch, length in BATCHES:
            first_s, gaps_s = _serve_together(name, batch, length)
            expected_ms = _sum(terms["prefill"], batch * length, batch * length**2)
            errors["prefill"].append(first_s / (expected_ms / 1e3) - 1)
            is_large = batch >= terms["decoding_large_small_bs_threshold"]
            decoding = terms["decoding_largebs" if is_large else "decoding_smallbs"]
            for i, gap_s in enumerate(gaps_s, 1):
                expected_ms = _sum(decoding, batch * (length + i), batch)
                errors["decode"].append(gap_s / (expected_ms / 1e3) - 1)
        for phase, found in errors.items():
            yield FitErrors.of(f"{name}, simulated", phase, found)


def _sum(terms: list[float], linear: float, other: float) -> float:
    a, b, c = terms
    return a + b * linear + c * other


def _serve_together(name: str, batch: int, length: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and between tokens, of prompts that start together."""
    times, knobs = published(name)
    tokens = max(batch * length, batch)
    config = EngineConfig(**knobs, max_num_seqs=batch, max_num_batched_tokens=tokens)
    run = simulate([TraceRequest(0.0, length, NUM_OUTPUT_TOKENS)] * batch, config, times)
    token_times_s = run.requests[-1].metrics.token_times_s
    return token_times_s[0], np.diff(token_times_s).tolist()


def _llama2_70b(path: Path) -> Iterator[FitErrors]:
    """Fits to half of the configurations, tested on the other half; several splits together."""
    steps = distinct_steps(read_splitwise(path))
    for fitted, what in (((), "overhead a step alone"), (FITTED, "all overheads")):
        errors: dict[str, list[float]] = {"prefill": [], "decode": []}
        for seed in range(NUM_SPLITS):
            for phase, found in other_half(steps, seed, fitted).items():
                errors[phase] += found
        for phase, found in errors.items():
            yield FitErrors.of(f"llama2-70b, {what}", phase, found)


def halves(
    steps: Iterable[MeasuredStep], seed: int
) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Each different prefill, and each different decode, is in one half alone."""
    draw = random.Random(seed)
    ours, others = [], []
    phases: dict[str, list[MeasuredStep]] = {}
    for step in steps:
        phases.setdefault(step.phase, []).append(step)
    for same in phases.values():
        shuffled = draw.sample(same, len(same))
        ours += shuffled[: len(same) // 2]
        others += shuffled[len(same) // 2 :]
    return ours, others


def other_half(
    steps: Iterable[MeasuredStep], seed: int, fitted: tuple[str, ...]
) -> dict[str, list[float]]:
    """Signed errors on the steps that the overheads were not fitted to."""
    ours, others = halves(steps, seed)
    hardware = load_hardware()["a100-80gb"]
    times = {
        count: RooflineStepTimes(LLAMA2_70B, hardware, "fp16", count, overheads)
        for count, overheads in fit_overheads(ours, LLAMA2_70B, hardware, fitted=fitted).items()
    }
    return relative_errors([step for step in others if step.num_devices in times], times)
