"""Which cluster serves the most requests per device within limits of latency.

Goodput is the highest rate at which 90% of the requests meet both limits of an SLO; per device,
clusters of different sizes can be compared (Zhong et al. 2024, DistServe, section 2 and 4). The
rate is found by bisection on simulated runs: the same requests, closer together or further apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pdlab.costmodel.published import published
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.engine import EngineConfig
from pdlab.link import Link
from pdlab.requirements import require_choice, require_int, require_number
from pdlab.workload.serving import SLO, ServedRequest
from pdlab.workload.traces import TraceRequest

MODES = ("prefill first", "chunked", "disaggregated")
"""`prefill first`: whole requests on each worker, whole prompts before decodes, as vLLM did at
first; `chunked`: whole requests, chunks of prompts beside decodes; `disaggregated`: prompts on some
workers and outputs on others."""
SHARE = 0.9
ALONE_RPS = 1e-3
"""So slow that each request is alone: what is not met now never is."""
LARGEST_RPS = 1e5
LEAST_S = 300.0
"""A queue that grows by a tenth of what comes takes minutes to show."""
WARM_UP = 0.2
"""Part of the time in which what comes does not count: seats, queues and caches begin empty."""
NUM_BISECTIONS = 6
"""They leave 1/64 of a doubling: 1%."""


@dataclass(frozen=True)
class Machine:
    """A worker's devices, and the model on them.

    Args:
        name: what a table calls it.
        spec: its `role` does nothing.
    """

    name: str
    spec: SimulatedSpec

    @classmethod
    def published(cls, name: str, *, link: Link | None = None, **knobs: Any) -> Machine:
        """One that `pdlab.costmodel.published` knows; OPT-13B and Llama-2-70B in 16 bits.

        Args:
            link: between workers; None for one that takes no time.
            knobs: of its engine.

        Raises:
            ValueError: there is none of this name, or a knob is out of range.
        """
        times, engine = published(name)
        model = next((each for each in KV_SHAPES if name.removesuffix("-vllm").endswith(each)), "")
        num_layers, bytes_per_token = KV_SHAPES[model]
        config = EngineConfig(
            **{"max_num_seqs": 256, "max_num_batched_tokens": 2048, **engine, **knobs}
        )
        count = name.partition("xa100")[0]
        return cls(
            name,
            SimulatedSpec(
                "both",
                config,
                times,
                kv_bytes_per_token=bytes_per_token,
                num_layers=num_layers,
                link=link,
                num_devices=int(count) if count.isdigit() else 1,
            ),
        )


KV_SHAPES = {"opt-13b": (40, 2 * 40 * 5120 * 2), "llama2-70b": (80, 2 * 80 * 8 * 128 * 2)}
"""Layers, and bytes of K and V a token in 16 bits: layers, K and V, channels, bytes."""


@dataclass(frozen=True)
class Candidate:
    """A cluster to try.

    Raises:
        ValueError: a field is out of range, or does not go with the mode.
    """

    mode: str
    machine: Machine
    """Of those that prefill, or do everything."""
    num_workers: int = 1
    """Of these."""
    decode_machine: Machine | None = None
    num_decode: int = 0
    chunk_size: int | None = None
    """Tokens of a prompt in one step: of `chunked`, or of those that prefill."""
    transfer: str = "stream"
    """As of `RouterConfig`; of `disaggregated`."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("transfer", self.transfer, TRANSFERS)
        require_int("num_workers", self.num_workers, least=1)
        require_int("num_decode", self.num_decode, least=self.mode == "disaggregated")
        if self.mode != "disaggregated" and self.num_decode:
            raise ValueError(f"num_decode={self.num_decode} with mode={self.mode!r} must be 0")

    @property
    def workers(self) -> dict[str, SimulatedSpec]:
        """What `simulate_cluster` takes."""
        if self.mode != "disaggregated":
            spec = replace(self.machine.spec, role="both", config=self._config(self.machine))
            return {f"w{i}": spec for i in range(self.num_workers)}
        decoder = self.decode_machine or self.machine
        p = replace(self.machine.spec, role="prefill", config=self._config(self.machine))
        d = replace(decoder.spec, role="decode")
        return {f"p{i}": p for i in range(self.num_workers)} | {
            f"d{i}": d for i in range(self.num_decode)
        }

    def _config(self, machine: Machine) -> EngineConfig:
        config = machine.spec.config
        if self.mode == "prefill first":
            return replace(config, batching="prefill_first", chunk_size=None)
        if self.mode == "chunked" and self.chunk_size is not None:
            # as Sarathi-Serve: the budget of a step holds decodes and prompts, so that a step is
            # never longer than its chunk
            tokens = max(self.chunk_size, config.max_num_seqs)
            return replace(config, batching="mixed", max_num_batched_tokens=tokens)
        return replace(config, batching="mixed", chunk_size=self.chunk_size)

    @property
    def router(self) -> RouterConfig:
        mode = "disaggregated" if self.mode == "disaggregated" else "aggregated"
        return RouterConfig(mode=mode, transfer=self.transfer)

    @property
    def num_devices(self) -> int:
        return sum(spec.num_devices for spec in self.workers.values())

    def __str__(self) -> str:
        chunk = f", chunks of {self.chunk_size}" if self.chunk_size else ""
        if self.mode != "disaggregated":
            return f"{self.num_workers} x {self.machine.name}, {self.mode}{chunk}"
        decoder = self.decode_machine or self.machine
        ratio = f"{self.num_workers}P{self.num_decode}D"
        names = dict.fromkeys((self.machine.name, decoder.name))
        return f"{ratio} of {' and '.join(names)}{chunk}, {self.transfer}"


@dataclass(frozen=True)
class Goodput:
    """What a candidate carries. Simulated."""

    candidate: Candidate
    rate_rps: float
    """The highest at which enough requests meet the SLO; 0 if there is none."""
    per_device_rps: float
    attainment: float
    """At that rate."""
    num_runs: int


# --- one candidate -------------------------------------------------------------------------------


def at_rate(
    requests: Sequence[TraceRequest], rate_rps: float, least_s: float = 0.0
) -> list[TraceRequest]:
    """The same requests, `rate_rps` a second on average, and again if they would be over too soon.

    Args:
        least_s: seconds in which they come, at least. What is repeated shares no prefix with what
            came before.

    Raises:
        ValueError: there are fewer than two, all come at one moment, or a number is out of range.
    """
    require_number("rate_rps", rate_rps, ALONE_RPS, 1e6)
    require_number("least_s", least_s, 0, 1e6)
    if len(requests) < 2:
        raise ValueError(f"requests has {len(requests)}: a rate takes at least 2")
    first, last = requests[0].arrival_s, requests[-1].arrival_s
    if last <= first:
        raise ValueError("requests all arrive at one moment: they have no rate")
    factor = (len(requests) - 1) / (last - first) / rate_rps
    lap_s, ids = len(requests) / rate_rps, 1 + max(max(r.prefix_ids, default=0) for r in requests)
    num_requests = max(len(requests), math.ceil(least_s * rate_rps))
    coming = []
    for number in range(num_requests):
        lap, place = divmod(number, len(requests))
        request = requests[place]
        arrival_s = lap * lap_s + (request.arrival_s - first) * factor
        prefix_ids = tuple(lap * ids + i for i in request.prefix_ids)
        coming.append(replace(request, arrival_s=arrival_s, prefix_ids=prefix_ids))
    return coming


def simulate_at(
    candidate: Candidate, requests: Sequence[TraceRequest], rate_rps: float, least_s: float = 0.0
) -> ClusterRun:
    """A run at a rate; see `at_rate`."""
    coming = at_rate(requests, rate_rps, least_s)
    return simulate_cluster(coming, candidate.workers, candidate.router)


def counted(run: ClusterRun) -> list[ServedRequest]:
    """Requests that came after the warm-up."""
    first, last = (run.requests[i].metrics.arrival_s for i in (0, -1))
    since_s = first + WARM_UP * (last - first)
    return [request for request in run.requests if request.metrics.arrival_s >= since_s]


def attainment(run: ClusterRun, slo: SLO) -> float:
    """Share of the requests after the warm-up that meet both limits."""
    requests = counted(run)
    return sum(request.meets(slo) for request in requests) / len(requests)


def goodput_per_device(
    candidate: Candidate,
    requests: Sequence[TraceRequest],
    slo: SLO,
    *,
    share: float = SHARE,
    start_rps: float | None = None,
    least_s: float = LEAST_S,
    num_bisections: int = NUM_BISECTIONS,
) -> Goodput:
    """The highest rate that a cluster carries within an SLO.

    Doubled or halved from `start_rps` on until it lies between two rates, then bisected (on a
    logarithmic scale). Attainment is taken to fall with the rate, which by chance it may not do.

    Args:
        requests: their distances are stretched.
        share: of the requests that must meet it.
        start_rps: where to begin; None for one a second and device.
        least_s: for how long requests come, at least; too short a time hides a queue that grows,
            and a cache that fills.

    Raises:
        ValueError: a number is out of range, or the requests have no rate.
    """
    slo.checked()
    require_number("share", share, 0.01, 1)
    require_int("num_bisections", num_bisections, least=0, most=60)
    devices = candidate.num_devices
    tried: dict[float, float] = {}

    def meets(rate_rps: float) -> bool:
        tried[rate_rps] = attainment(simulate_at(candidate, requests, rate_rps, least_s), slo)
        return tried[rate_rps] >= share

    low, high = _bracket(meets, start_rps or float(devices))
    for _ in range(num_bisections if 0 < low < high else 0):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return Goodput(candidate, low, low / devices, tried.get(low, 0.0), len(tried))


def _bracket(meets: Callable[[float], bool], rate_rps: float) -> tuple[float, float]:
    """A rate that is met and a higher one that is not; the first is 0 if none is met."""
    if meets(rate_rps):
        while rate_rps < LARGEST_RPS and meets(2 * rate_rps):
            rate_rps *= 2
        return rate_rps, 2 * rate_rps
    if not meets(ALONE_RPS):
        return 0.0, rate_rps
    while not meets(rate_rps / 2) and rate_rps > 4 * ALONE_RPS:
        rate_rps /= 2
    return rate_rps / 2, rate_rps


# --- many ----------------------------------------------------------------------------------------


def candidates(
    machines: Sequence[Machine],
    num_devices: int,
    *,
    chunk_sizes: Sequence[int] = (512,),
    prefill_chunks: Sequence[int | None] = (None,),
    transfers: Sequence[str] = ("stream",),
    modes: Sequence[str] = MODES,
) -> Iterator[Candidate]:
    """Every cluster of exactly `num_devices` of these machines.

    Args:
        chunk_sizes: of `chunked`.
        prefill_chunks: of those that prefill for others; None for whole prompts.
        transfers: of `disaggregated`; some of `TRANSFERS`.
        modes: some of `MODES`.

    Raises:
        ValueError: a mode is unknown, or `num_devices` below 1.
    """
    require_int("num_devices", num_devices, least=1)
    for mode in modes:
        require_choice("mode", mode, MODES)
    for machine in machines:
        count, rest = divmod(num_devices, machine.spec.num_devices)
        if count and not rest:
            if "prefill first" in modes:
                yield Candidate("prefill first", machine, count)
            if "chunked" in modes:
                for size in chunk_sizes:
                    yield Candidate("chunked", machine, count, chunk_size=size)
    if "disaggregated" in modes:
        for p, d, chunk, how in product(machines, machines, prefill_chunks, transfers):
            for count in range(1, num_devices // p.spec.num_devices + 1):
                left = num_devices - count * p.spec.num_devices
                num_decode, rest = divmod(left, d.spec.num_devices)
                if num_decode and not rest:
                    yield Candidate("disaggregated", p, count, d, num_decode, chunk, how)


def search(
    tried: Iterable[Candidate],
    requests: Sequence[TraceRequest],
    slo: SLO,
    *,
    on_result: Callable[[int, int, Goodput], None] | None = None,
    **how: Any,
) -> list[Goodput]:
    """Goodput of each candidate, the best per device first; of two alike the one tried first.

    Args:
        on_result: called with how many are done, how many there are, and the newest.
        how: see `goodput_per_device`.

    Raises:
        ValueError: there is no candidate, or as `goodput_per_device`.
    """
    tried = list(tried)
    if not tried:
        raise ValueError("tried has no candidate")
    found: list[Goodput] = []
    for candidate in tried:
        found.append(goodput_per_device(candidate, requests, slo, **how))
        if on_result:
            on_result(len(found), len(tried), found[-1])
    return sorted(found, key=lambda each: -each.per_device_rps)
