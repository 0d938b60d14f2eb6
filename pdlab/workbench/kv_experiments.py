"""Experiments on KV memory that a lesson runs: growth, block sizes, sharing, pressure, savings.

Those on the engine return what was measured; those on a request trace are simulated, no model runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import linear_regression, median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.kvcache import PagedKVCache, blocks_for, copy_blocks
from pdlab.models import Model, ModelConfig
from pdlab.trace import Trace
from pdlab.workbench.experiments import BLOCK_SIZE, median_ttft_s, prefill_sweep, random_prompt
from pdlab.workbench.lesson import progress
from pdlab.workload.cache_replay import replay_cache
from pdlab.workload.traces import TraceRequest

T = TypeVar("T")


def under_bar(label: str, job: Callable[[], T]) -> T:
    """Do one long job that has no loop to watch, with a progress bar while it lasts."""
    [result] = [job() for _ in progress([label], label)]
    return result


# --- what grows how ------------------------------------------------------------------------------


class MemoryPoint(NamedTuple):
    """Bytes of one prompt's prefill. `peak_bytes` of activations exist at once, `total_bytes` in
    all: most are given back, and their memory used again, before the step ends."""

    backend: str
    num_tokens: int
    kv_bytes: int
    peak_bytes: int
    total_bytes: int
    trace: Trace


def memory_by_length(
    model: Model, lengths: Sequence[int], backends: Sequence[str] = ("torch", "reference")
) -> list[MemoryPoint]:
    """Prefill random prompts of these lengths with each attention backend and count bytes.

    `torch` is fused: it never holds the scores of all pairs of tokens. `reference` writes them out.
    """
    jobs = [(backend, length) for backend in backends for length in lengths]
    return [_memory_point(model, *job) for job in progress(jobs, "prefill")]


def _memory_point(model: Model, backend: str, length: int) -> MemoryPoint:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=blocks_for(length, BLOCK_SIZE),
        max_num_batched_tokens=max(length, 32),
        attention_backend=backend,
    )
    with Engine(model, config) as engine, engine.measure_activations():
        engine.generate(random_prompt(model, length), SamplingParams(max_tokens=1))
        [step] = engine.trace.steps
        assert step.activation_peak_bytes is not None
        assert step.activation_total_bytes is not None
        peak, total = step.activation_peak_bytes, step.activation_total_bytes
        return MemoryPoint(backend, length, step.kv_used_bytes, peak, total, engine.trace)


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """p of the best fit `value = c * size**p`: 1 is linear, 2 quadratic.

    Raises:
        ValueError: fewer than two sizes, or a number that is not above 0.
    """
    if len(sizes) < 2 or min(*sizes, *values) <= 0:
        raise ValueError(f"sizes={sizes}, values={values} must be two or more numbers above 0")
    logs = [torch.tensor(x, dtype=torch.float64).log().tolist() for x in (sizes, values)]
    return linear_regression(*logs).slope


# --- block sizes ---------------------------------------------------------------------------------


class WastePoint(NamedTuple):
    """Simulated: mean share of the taken slots that hold no token, and tokens of a request."""

    block_size: int
    waste: float
    tokens_held: float


def waste_by_block_size(
    requests: Sequence[TraceRequest], block_sizes: Iterable[int]
) -> list[WastePoint]:
    """Replay a trace through paged memory without limit, with blocks of each size."""
    points = []
    for size in progress(list(block_sizes), "replay"):
        [paged] = replay_cache(requests, num_blocks=None, block_size=size, baselines=False)
        points.append(WastePoint(size, paged.waste, paged.used_slots / paged.mean_running))
    return points


def difference_by_layer(first: Tensor, second: Tensor) -> list[float]:
    """Relative L2 distance of two K or V, [num_layers, num_tokens, num_kv_heads, head_dim].

    0.0 means equal bit for bit.
    """
    pairs = zip(first.double(), second.double(), strict=True)
    return [0.0 if torch.equal(a, b) else ((a - b).norm() / a.norm()).item() for a, b in pairs]


# --- a pool that is too small --------------------------------------------------------------------


@dataclass(frozen=True)
class PressureRun:
    """What became of some requests in one pool.

    Attributes:
        token_ids: the answer of each request.
        kv: for each, the K and V it had when last seen running.
        wall_s: of all steps together.
    """

    trace: Trace
    token_ids: list[list[int]]
    kv: list[Tensor]
    num_preemptions: int
    num_swaps: int

    @property
    def wall_s(self) -> float:
        return sum(step.wall_s for step in self.trace.steps)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that prefill computed beyond the prompts' own; for runs without prefix cache."""
        parts = [part for step in self.trace.steps for part in step.sequences]
        prefilled = sum(part.num_tokens for part in parts if part.phase == "prefill")
        return prefilled - sum(len(r.prompt_ids) for r in self.trace.requests.values())

    @property
    def swapped_bytes(self) -> int:
        """Bytes copied to host memory and back."""
        moves = [m for step in self.trace.steps for m in step.moves if m.kind != "copy"]
        engine = self.trace.engine
        return round(len(moves) * engine["block_size"] * engine["kv_bytes_per_token"])

    def equals(self, other: PressureRun) -> bool:
        """Whether all tokens, and all K and V that both runs showed, are equal bit for bit."""
        return self.token_ids == other.token_ids and all(
            torch.equal(*(kv[:, :, : min(a.shape[2], b.shape[2])] for kv in (a, b)))
            for a, b in zip(self.kv, other.kv, strict=True)
        )


def run_under_pressure(
    model: Model,
    prompts: Sequence[str | list[int]],
    config: EngineConfig,
    max_tokens: int,
    *,
    measure_activations: bool = False,
) -> PressureRun:
    """Run all prompts together, greedily, and look at their K and V after every step.

    The prefix cache is off: a preempted request would find some of its own blocks again, and what
    recomputing costs could not be seen.
    """
    kv: dict[str, Tensor] = {}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with Engine(model, replace(config, enable_prefix_cache=False)) as engine:
        ids = [engine.submit(prompt, params) for prompt in prompts]
        with engine.measure_activations() if measure_activations else nullcontext():
            while record := engine.step():
                for name in (resident.sequence_id for resident in record.residents):
                    if not engine.requests[name].finished:
                        kv[name] = engine.read_kv(name)
        outputs = [engine.collect(request_id) for request_id in ids]
        return PressureRun(
            trace=engine.trace,
            token_ids=[output.token_ids for output in outputs],
            kv=[kv[request_id] for request_id in ids],
            num_preemptions=sum(output.metrics.num_preemptions for output in outputs),
            num_swaps=sum(output.metrics.num_swaps for output in outputs),
        )


class BringBack(NamedTuple):
    """Measured seconds until a preempted sequence of `num_tokens` has its K and V again."""

    num_tokens: int
    recompute_s: float
    swap_s: float


def bring_back(model: Model, lengths: Sequence[int], repeats: int = 3) -> list[BringBack]:
    """Time both ways: a prefill of so many tokens; their blocks copied to another cache and back.

    Medians of `repeats`.
    """
    sweep = prefill_sweep(model, lengths, repeats=repeats)
    return [
        BringBack(n, median_ttft_s(sweep, n), _swap_s(model, n, repeats))
        for n in progress(lengths, "swap")
    ]


def _swap_s(model: Model, num_tokens: int, repeats: int) -> float:
    blocks = list(range(blocks_for(num_tokens, BLOCK_SIZE)))
    device = model.decoder.device
    pool, host = (
        PagedKVCache(model.config, len(blocks), BLOCK_SIZE, model.dtype_name, place)
        for place in (device, "cpu")
    )

    def there_and_back() -> None:
        copy_blocks(pool, blocks, host, blocks)
        copy_blocks(host, blocks, pool, blocks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    there_and_back()  # the first time, the system hands out the memory
    return median(_seconds(there_and_back) for _ in range(repeats))


def _seconds(job: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    job()
    return time.perf_counter() - start_s


# --- traffic -------------------------------------------------------------------------------------


def hit_rate_points(
    requests: Sequence[TraceRequest], num_blocks: Iterable[int | None]
) -> list[tuple[int | None, float]]:
    """Share of the prompts' blocks found in a prefix cache of each size; None never evicts.

    Pools that are too small for some request of the trace are left out: they would refuse it, and
    so answer another question.
    """
    points: list[tuple[int | None, float]] = []
    for count in progress(list(num_blocks), "replay"):
        [paged] = replay_cache(requests, num_blocks=count, baselines=False)
        if not paged.num_refused:
            points.append((count, paged.block_hit_rate))
    return points


def turn_gaps_s(requests: Sequence[TraceRequest]) -> list[float]:
    """Seconds since the last use of the longest prefix a request repeats, for those that do.

    The first block is no repeated turn: behind a system prompt, all requests have it in common.
    """
    last_s: dict[int, float] = {}
    gaps = []
    for request in requests:
        known = [prefix for prefix in request.prefix_ids[1:] if prefix in last_s]
        if known:
            gaps.append(request.arrival_s - last_s[known[-1]])
        last_s |= dict.fromkeys(request.prefix_ids, request.arrival_s)
    return gaps


class Saving(NamedTuple):
    """Bytes of KV memory that requests take, with one more knob turned than the one before.

    `num_bytes` is the mean over time, `needed_bytes` the memory that would have been enough.
    """

    label: str
    num_bytes: float
    needed_bytes: float


def savings(
    requests: Sequence[TraceRequest],
    config: ModelConfig,
    *,
    block_size: int = BLOCK_SIZE,
    kv_formats: Sequence[str] = ("bf16", "int8"),
) -> list[Saving]:
    """What the requests of a trace take: in one piece, paged, and paged in a smaller format.

    Slots are simulated; bytes of a slot are read off real tensors, scales included.
    """
    replays = under_bar(
        "replay", lambda: replay_cache(requests, num_blocks=None, block_size=block_size)
    )
    results = {result.policy: result for result in replays}
    first, *others = (
        PagedKVCache(config, 1, block_size, name, max_open_blocks=1).bytes_per_token
        for name in kv_formats
    )
    knobs = [
        ("reserve the longest", "max", first),
        ("next power of two", "power_of_two", first),
        ("paged", "paged", first),
        *((f"paged, {name}", "paged", n) for name, n in zip(kv_formats[1:], others, strict=True)),
    ]
    return [
        Saving(label, results[policy].taken_slots * n, results[policy].needed_slots * n)
        for label, policy, n in knobs
    ]


class AskedSet(set[Any]):
    """A set that a solution may look into only so often: one that never ends is told why."""

    def __init__(self, items: Iterable[Any], limit: int, hint: str):
        super().__init__(items)
        self._left, self._hint = limit, hint

    def __contains__(self, item: object) -> bool:
        self._left -= 1
        assert self._left >= 0, self._hint
        return super().__contains__(item)
