"""What `pdlab replay` was asked for, and the requests that this means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdlab.requirements import LARGEST_SEED, require_int, require_number, shown
from pdlab.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from pdlab.workload.scaling import FACTORS, leaves_whole, scaled, scaled_block
from pdlab.workload.serving import SLO
from pdlab.workload.traces import TraceRequest, find_trace, read_trace
from pdlab.workload.traffic import MOST_REQUESTS, WORKLOADS

NUM_REQUESTS = 40
MEAN_PROMPT = 300
MEAN_OUTPUT = 50
REQUESTS_PER_S = 0.4
"""What smollm2-135m serves on two cores in about two minutes: a prompt token takes it 2 to 4 ms, a
decode step 60 to 240 ms."""
LARGEST_SLO_MS = 1e9


@dataclass(frozen=True)
class ServingReplay:
    """What was asked for on the command line; None where nothing was."""

    trace: str
    num_requests: int | None = None
    rate: float | None = None
    prompt_scale: float | None = None
    output_scale: float | None = None
    clients: int | None = None
    think_s: float = 0.0
    batching: str = "mixed"
    policy: str = "fcfs"
    max_num_seqs: int | None = None
    max_overtakes: int | None = None
    budget: int = 2048
    chunk_size: int | None = None
    blocks: str | None = None
    block_size: int | None = None
    model: str = "smollm2-135m"
    weights: str = "auto"
    device: str = "cpu"
    speculate: str | None = None
    ttft_slo_ms: float = 2000
    tpot_slo_ms: float = 250
    seed: int = 0
    simulate: bool = False
    hardware: str | None = None
    save: Path | None = None
    json: Path | None = None
    prometheus: Path | None = None

    def check_traffic(self) -> None:
        """Refuse what no workload can be.

        Raises:
            ValueError: names the option and its limits.
        """
        if self.num_requests is not None and self.num_requests > MOST_REQUESTS:
            raise ValueError(
                f"--requests={shown(self.num_requests)} must be at most {MOST_REQUESTS:,}"
            )
        require_int("seed", self.seed, 0, LARGEST_SEED)
        for name in ("rate", "prompt_scale", "output_scale"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), *FACTORS)

    @property
    def slo(self) -> SLO:
        for name in ("ttft_slo_ms", "tpot_slo_ms"):
            require_number(name, getattr(self, name), 0, LARGEST_SLO_MS)
        return SLO(self.ttft_slo_ms / 1000, self.tpot_slo_ms / 1000)


@dataclass(frozen=True)
class Traffic:
    """Requests, and what was done to those of the trace."""

    name: str
    requests: Sequence[TraceRequest]
    num_available: int
    rate: float = 1.0
    prompt: float = 1.0
    output: float = 1.0
    trimmed: bool = False
    """Whether any of it was our choice."""
    num_cut: int = 0
    """Requests that were longer than can be served."""

    @classmethod
    def of(cls, asked: ServingReplay) -> Traffic:
        """The requests of a trace or a named workload, scaled as asked for.

        What was not said is chosen for a laptop, unless the workload is a named one, which is made
        for it, or other hardware is simulated.
        """
        asked.check_traffic()
        available = _available(asked)
        fits = _workload_name(asked.trace) is not None or asked.hardware is not None
        first = available[: asked.num_requests or (None if fits else NUM_REQUESTS)]
        rate, prompt, output = asked.rate, asked.prompt_scale, asked.output_scale
        trimmed = not fits and None in (asked.num_requests, rate, prompt, output)
        if not fits:
            rate = _rate(first) if rate is None else rate
            prompt = _prompt_scale(first) if prompt is None else prompt
            output = _output_scale(first) if output is None else output
        rate, prompt, output = (1.0 if f is None else f for f in (rate, prompt, output))
        _check_blocks(first, prompt)
        requests = scaled(first, rate=rate, prompt=prompt, output=output)
        return cls(asked.trace, requests, len(available), rate, prompt, output, trimmed)

    def cut(self, max_len: int) -> Traffic:
        """No request longer than this many tokens."""
        num_cut = sum(request.num_tokens > max_len for request in self.requests)
        return replace(self, requests=scaled(self.requests, max_len=max_len), num_cut=num_cut)

    def arrivals(self, asked: ServingReplay) -> Arrivals:
        if asked.clients is None:
            return OpenLoop(self.requests)
        return ClosedLoop(self.requests, asked.clients, asked.think_s)


def _available(asked: ServingReplay) -> list[TraceRequest]:
    """All requests that there are; of a named workload as many as are asked for."""
    name = _workload_name(asked.trace)
    if name is not None:
        return WORKLOADS[name](asked.num_requests or NUM_REQUESTS, seed=asked.seed)
    try:
        path = find_trace(asked.trace)
    except ValueError as error:
        names = ", ".join(name.replace(" ", "-") for name in WORKLOADS)
        raise ValueError(f"{error}; made by seed: {names}") from error
    return read_trace(path)


def _workload_name(name: str) -> str | None:
    """The name of a workload, also when written with a dash."""
    spaced = name.replace("-", " ")
    return spaced if spaced in WORKLOADS else None


def _rate(requests: Sequence[TraceRequest]) -> float:
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    factor = REQUESTS_PER_S * span_s / max(1, len(requests) - 1)
    return min(max(factor, FACTORS[0]), FACTORS[1]) if span_s else 1.0


def _prompt_scale(requests: Sequence[TraceRequest]) -> float:
    """A factor that leaves whole tokens in the blocks that prompts share."""
    mean = sum(request.num_prompt_tokens for request in requests) / len(requests)
    factor, size = min(1.0, MEAN_PROMPT / mean), requests[0].prefix_block_size
    return max(1, int(factor * size)) / size if size else factor


def _check_blocks(requests: Sequence[TraceRequest], prompt: float) -> None:
    """Refuse a factor that cuts the blocks that prompts share into parts of tokens."""
    for size in {request.prefix_block_size for request in requests} - {None}:
        assert size is not None
        if not leaves_whole(size, prompt):
            nearest = scaled_block(size, prompt) / size
            raise ValueError(
                f"--prompt-scale={prompt:g}: blocks of {size} tokens, which prompts of this trace "
                f"share, would have {size * prompt:g}; the nearest that leaves them whole is "
                f"{nearest!r}"
            )


def _output_scale(requests: Sequence[TraceRequest]) -> float:
    mean = sum(request.num_output_tokens for request in requests) / len(requests)
    return min(1.0, MEAN_OUTPUT / mean)
