"""What can only be seen on a GPU: that the kernels are right in bf16, and how near the floor.

    python -m pdlab_kernels.triton.gpu_check [--out FILE] [--seconds 420]

1. Every kernel against its fp32 reference, ragged, in every KV format.
2. The card's own limits: bandwidth of a large copy, FLOP/s of a large bf16 matrix product.
3. Every kernel at the shapes of Llama 3.2 1B and 3.1 8B: median time, plainly launched and from a
   CUDA graph, beside the floor (bytes / bandwidth or FLOPs / peak, whichever is longer), and beside
   torch's own operator where there is one.

Timings go round over several sets of inputs, so that none finds its inputs in the cache. Results
are JSON. It stops timing when its seconds are over, and names what it did not reach.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention, elementwise, linear, reference, rotary, sampling, work
from .work import Work

KV_FORMATS = ("bf16", "fp8", "int8", "int4")
ROUNDS = 20
CACHE_BYTES = 200e6
"""Inputs that are gone round are at least this much together: more than any card's L2 cache."""
LARGEST_ERROR = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Of ||out - reference|| / ||reference||, by the dtype it is computed in."""


class NoDevice(RuntimeError):
    """There is no CUDA device to measure."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


LLAMA_1B = Shape("1B", 2048, 8192, 32, 8, 64, 128256)
LLAMA_8B = Shape("8B", 4096, 14336, 32, 8, 128, 128256)
TINY = Shape("tiny", 64, 96, 3, 1, 64, 300)


class Draw:
    """Random inputs on a device, in a dtype."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def codes(self, *shape: int, signed: bool) -> Tensor:
        low, high, dtype = (-127, 128, torch.int8) if signed else (0, 256, torch.uint8)
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def half(self, *shape: int, scale: float) -> Tensor:
        return (torch.rand(*shape, device=self.device) * scale).half()

    def numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def kv(self, kv_format: str, blocks: int, block_size: int, s: Shape) -> tuple[Tensor, ...]:
        """Stored K or V with values of about 1. int4 in groups of 32."""
        shape = (blocks, block_size, s.kv_heads)
        if kv_format == "int8":
            codes = self.codes(*shape, s.head_dim, signed=True)
            return codes, self.half(*shape, 1, 1, scale=0.03)
        if kv_format == "fp8":
            codes = self.floats(*shape, s.head_dim, dtype=torch.float32).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8), self.half(*shape, 1, 1, scale=2.0)
        if kv_format == "int4":
            groups = (*shape, s.head_dim // 32, 1)
            codes = self.codes(*shape, s.head_dim // 2, signed=False)
            return codes, self.half(*groups, scale=0.3), -self.half(*groups, scale=3.0)
        return (self.floats(*shape, s.head_dim),)

    def paged(
        self, kv_format: str, lens: list[int], s: Shape, block_size: int = 16
    ) -> dict[str, Any]:
        """k_parts, v_parts, block_tables and context_lens; blocks in random order."""
        width = max(1, max(-(-n // block_size) for n in lens))
        blocks = width * len(lens)
        order = torch.randperm(blocks, device=self.device).int()
        return {
            "k_parts": self.kv(kv_format, blocks, block_size, s),
            "v_parts": self.kv(kv_format, blocks, block_size, s),
            "block_tables": order.view(len(lens), width),
            "context_lens": self.numbers(lens),
        }

    def rope(self, kv_format: str, tokens: int, s: Shape) -> dict[str, Any]:
        """Arguments of `rope_and_write_kv`, q, k and v as views of a fused projection."""
        qkv = self.floats(tokens, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        angles = torch.rand(max(tokens, 64), s.head_dim // 2, device=self.device) * 6
        blocks = -(-tokens // 16) + 1
        positions = torch.arange(tokens, device=self.device)
        slots = torch.randperm(blocks * 16, device=self.device)[:tokens]
        return {
            "q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin(),
            "positions": positions, "slots": slots,
            "k_parts": self.kv(kv_format, blocks, 16, s),
            "v_parts": self.kv(kv_format, blocks, 16, s),
        }  # fmt: skip

    def int8_weight(self, size_out: int, size_in: int) -> tuple[Tensor, ...]:
        codes = self.codes(size_out, size_in, signed=True)
        return codes, self.half(size_out, scale=0.02)

    def int4_weight(self, size_out: int, size_in: int) -> tuple[Tensor, ...]:
        codes = self.codes(size_out, size_in // 2, signed=False)
        groups = (size_out, size_in // 32)
        return codes, self.half(*groups, scale=0.2), -self.half(*groups, scale=1.5)

    def sampling(self, rows: int, vocab: int, chance: str) -> dict[str, Any]:
        """Arguments of `sample`; every fourth row is greedy."""
        temperature = torch.full((rows,), 0.8, device=self.device)
        temperature[::4] = 0.0
        chances = {
            "uniforms": torch.rand(rows, device=self.device, dtype=torch.float64),
            "seeds": torch.randint(1 << 40, (rows,), device=self.device),
        }
        return {
            "logits": 3 * self.floats(rows, vocab, dtype=torch.float32),
            "temperature": temperature,
            "top_k": torch.full((rows,), 50, device=self.device, dtype=torch.int32),
            "top_p": torch.full((rows,), 0.9, device=self.device),
            chance: chances[chance],
        }


# --- correctness ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How far a kernel is from its reference."""

    name: str
    error: float
    """Relative, of the outputs as a whole; of stored codes the greatest difference; of tokens the
    share that differs."""
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # not for NaN


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||, in float64."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def verdicts(
    device: str,
    dtype: torch.dtype,
    s: Shape,
    lens: tuple[int, ...] = (1, 16, 17, 130, 75),
    chunks: tuple[int, ...] = (1, 3, 17, 70, 0),
    rows: tuple[int, ...] = (1, 5, 40),
) -> Iterator[Verdict]:
    """Every kernel against its reference, at lengths that do not fit any tile.

    Args:
        lens, chunks: of the sequences' contexts, and how many of them are queries of a prefill.
        rows: of the matrix products; the last also of sampling.
    """
    draw, limit = Draw(device, dtype), LARGEST_ERROR[dtype]
    starts = draw.numbers([0, *chunks]).cumsum(0, dtype=torch.int32)
    windows: tuple[dict[str, int], ...] = ({}, {"window": 24, "sinks": 4})
    for kv_format in KV_FORMATS:
        for window in windows:
            kv = draw.paged(kv_format, list(lens), s)
            name = f"{kv_format}-d{s.head_dim}" + ("-window" if window else "")
            args = {"q": draw.floats(len(lens), s.heads, s.head_dim), **kv, **window}
            got = attention.decode_attention(**args, num_splits=4)
            error = relative_error(got, reference.decode_attention(**args))
            yield Verdict(f"decode-{name}", error, limit)
            args["q"] = draw.floats(sum(chunks), s.heads, s.head_dim)
            got = attention.prefill_attention(**args, query_starts=starts)
            expected = reference.prefill_attention(**args, query_starts=starts)
            yield Verdict(f"prefill-{name}", relative_error(got, expected), limit)
        yield _rope_verdict(draw, kv_format, s)
    x, residual, weight = draw.floats(5, s.hidden), draw.floats(5, s.hidden), draw.floats(s.hidden)
    for part, got, expected in zip(
        ("norm", "sum"),
        elementwise.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        yield Verdict(f"add-rms-norm-{part}", relative_error(got, expected), limit)
    gate_up = draw.floats(5, 2 * s.inner)
    error = relative_error(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up))
    yield Verdict("silu-mul", error, limit)
    for m in rows:
        x, bias = draw.floats(m, s.inner), draw.floats(s.hidden)
        int8, int4 = draw.int8_weight(s.hidden, s.inner), draw.int4_weight(s.hidden, s.inner)
        for splits in (1, 3):
            got = linear.int8_linear(x, *int8, bias, num_splits=splits)
            error = relative_error(got, reference.int8_linear(x, *int8, bias))
            yield Verdict(f"int8-linear-m{m}-s{splits}", error, limit)
            got = linear.int4_linear(x, *int4, bias, num_splits=splits)
            error = relative_error(got, reference.int4_linear(x, *int4, bias))
            yield Verdict(f"int4-linear-m{m}-s{splits}", error, limit)
    for chance in ("uniforms", "seeds"):
        args = draw.sampling(rows[-1], s.vocab, chance)
        wrong = sampling.sample(**args) != reference.sample(**args)
        # Noise is computed by another logarithm: near ties may fall the other way.
        yield Verdict(f"sample-{chance}", float(wrong.float().mean()), 0.05)


def _rope_verdict(draw: Draw, kv_format: str, s: Shape) -> Verdict:
    """The rotated q and the stored values; codes may be one off, for torch divides otherwise."""
    args = draw.rope(kv_format, 37, s)
    copies = {name: tuple(part.clone() for part in args[name]) for name in ("k_parts", "v_parts")}
    got = rotary.rope_and_write_kv(**args)
    expected = reference.rope_and_write_kv(**(args | copies))
    errors = [relative_error(got, expected)]
    for name, copy in copies.items():
        errors.append(
            relative_error(
                reference.decode_parts(args[name], s.head_dim),
                reference.decode_parts(copy, s.head_dim),
            )
        )
    return Verdict(f"rope-{kv_format}-d{s.head_dim}", max(errors), LARGEST_ERROR[draw.dtype])


# --- time ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kernel to be timed, at one shape."""

    name: str
    work: Work
    runs: list[Callable[[], Any]]
    """One for each set of inputs."""
    peers: list[Callable[[], Any]]
    """What torch itself offers, likewise; empty if nothing."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch, medians over rounds."""

    name: str
    bytes: int
    flops: int
    floor_us: float
    plain_us: float
    graph_us: float
    peer_us: float | None
    """torch's own operator, from a graph."""

    @property
    def share_of_floor(self) -> float:
        """1 would be the limit of the card."""
        return self.floor_us / self.graph_us


def sets_for(work_done: Work) -> int:
    """How many sets of inputs are more than the cache."""
    return max(2, min(64, int(CACHE_BYTES // max(1, work_done.bytes)) + 1))


def cases(s: Shape) -> Iterator[Callable[[], Case]]:
    """What is timed at a model's shape; each is made when its turn comes, for their memory."""
    draw = Draw("cuda", torch.bfloat16)
    for batch, context in ((1, 8192), (32, 4096)):
        for kv_format in KV_FORMATS:
            yield lambda b=batch, c=context, f=kv_format: _decode_case(draw, s, b, c, f)  # type: ignore[misc]
    yield lambda: _decode_case(draw, s, 32, 4096, "bf16", window=1024, sinks=4)
    for kv_format in ("bf16", "int4"):
        yield lambda f=kv_format: _prefill_case(draw, s, [2048], [2048], f)  # type: ignore[misc]
        yield lambda f=kv_format: _prefill_case(draw, s, [512] * 4, [4096, 512, 2000, 8192], f)  # type: ignore[misc]
    for tokens in (1, 32, 2048):
        yield lambda t=tokens: _rope_case(draw, s, t, "bf16")  # type: ignore[misc]
        yield lambda t=tokens: _norm_case(draw, s, t)  # type: ignore[misc]
        yield lambda t=tokens: _silu_case(draw, s, t)  # type: ignore[misc]
    yield lambda: _rope_case(draw, s, 2048, "int4")
    qkv = s.head_dim * (s.heads + 2 * s.kv_heads)
    for size_out, size_in in ((qkv, s.hidden), (2 * s.inner, s.hidden), (s.hidden, s.inner)):
        for rows in (1, 16, 64):
            for bits in (8, 4):
                yield lambda m=rows, n=size_out, k=size_in, b=bits: _linear_case(draw, m, n, k, b)  # type: ignore[misc]
    for rows in (1, 32):
        yield lambda r=rows: _sample_case(draw, s, r)  # type: ignore[misc]


def _decode_case(
    draw: Draw, s: Shape, batch: int, context: int, kv_format: str, **window: int
) -> Case:
    def inputs() -> dict[str, Any]:
        kv = draw.paged(kv_format, [context] * batch, s)
        return {"q": draw.floats(batch, s.heads, s.head_dim), **kv, **window}

    first = inputs()
    done = work.decode_attention(**first)
    sets = [first, *(inputs() for _ in range(min(8, sets_for(done)) - 1))]
    runs = [lambda a=a: attention.decode_attention(**a) for a in sets]  # type: ignore[misc]
    name = f"decode-{s.name}-b{batch}-c{context}-{kv_format}" + ("-window" if window else "")
    return Case(name, done, runs, [])


def _prefill_case(draw: Draw, s: Shape, chunks: list[int], lens: list[int], kv_format: str) -> Case:
    args = draw.paged(kv_format, lens, s)
    args["query_starts"] = draw.numbers([0, *chunks]).cumsum(0, dtype=torch.int32)
    args["q"] = draw.floats(sum(chunks), s.heads, s.head_dim)
    done = work.prefill_attention(**args)
    peers: list[Callable[[], Any]] = []
    if len(chunks) == 1 and chunks == lens:
        q, k, v = (draw.floats(1, heads, chunks[0], s.head_dim)
                   for heads in (s.heads, s.kv_heads, s.kv_heads))  # fmt: skip
        peers = [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]
    name = f"prefill-{s.name}-{'+'.join(map(str, chunks))}-of-{'+'.join(map(str, lens))}"
    return Case(f"{name}-{kv_format}", done, [lambda: attention.prefill_attention(**args)], peers)


def _rope_case(draw: Draw, s: Shape, tokens: int, kv_format: str) -> Case:
    first = draw.rope(kv_format, tokens, s)
    done = work.rope_and_write_kv(*(first[name] for name in ("q", "k", "v", "k_parts", "v_parts")))
    sets = [first, *(draw.rope(kv_format, tokens, s) for _ in range(sets_for(done) - 1))]
    runs = [lambda a=a: rotary.rope_and_write_kv(**a) for a in sets]  # type: ignore[misc]
    return Case(f"rope-{s.name}-t{tokens}-{kv_format}", done, runs, [])


def _norm_case(draw: Draw, s: Shape, tokens: int) -> Case:
    weight = draw.floats(s.hidden)
    shape = (tokens, s.hidden)
    done = work.add_rms_norm(draw.floats(*shape), draw.floats(*shape))
    sets = [(draw.floats(*shape), draw.floats(*shape)) for _ in range(sets_for(done))]
    runs = [lambda x=x, r=r: elementwise.add_rms_norm(x, r, weight, 1e-5) for x, r in sets]  # type: ignore[misc]
    peers = [lambda x=x, r=r: F.rms_norm(x + r, weight.shape, weight, 1e-5) for x, r in sets]  # type: ignore[misc]
    return Case(f"add-rms-norm-{s.name}-t{tokens}", done, runs, peers)


def _silu_case(draw: Draw, s: Shape, tokens: int) -> Case:
    done = work.silu_mul(draw.floats(tokens, 2 * s.inner))
    sets = [draw.floats(tokens, 2 * s.inner) for _ in range(sets_for(done))]
    runs = [lambda x=x: elementwise.silu_mul(x) for x in sets]  # type: ignore[misc]
    peers = [lambda x=x: F.silu(x[:, : s.inner]) * x[:, s.inner :] for x in sets]  # type: ignore[misc]
    return Case(f"silu-mul-{s.name}-t{tokens}", done, runs, peers)


def _linear_case(draw: Draw, rows: int, size_out: int, size_in: int, bits: int) -> Case:
    make = draw.int8_weight if bits == 8 else draw.int4_weight
    kernel: Callable[..., Tensor] = linear.int8_linear if bits == 8 else linear.int4_linear
    x, first = draw.floats(rows, size_in), make(size_out, size_in)
    done = work.linear(x, *first)
    sets = [first, *(make(size_out, size_in) for _ in range(sets_for(done) - 1))]
    runs = [lambda w=w: kernel(x, *w) for w in sets]  # type: ignore[misc]
    wide = [draw.floats(size_out, size_in) for _ in range(max(2, len(sets) * bits // 16))]
    peers = [lambda w=w: F.linear(x, w) for w in wide]  # type: ignore[misc]
    return Case(f"int{bits}-linear-{size_out}x{size_in}-m{rows}", done, runs, peers)


def _sample_case(draw: Draw, s: Shape, rows: int) -> Case:
    args = draw.sampling(rows, s.vocab, "seeds")
    run = [lambda: sampling.sample(**args)]
    return Case(f"sample-{s.name}-r{rows}", work.sample(args["logits"]), run, [])


def time_plain(runs: list[Callable[[], Any]], repeats: int) -> float:
    """Microseconds a launch, launched one by one from Python."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(ROUNDS):
        start.record()
        for _ in range(repeats):
            for run in runs:
                run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (repeats * len(runs)))
    return statistics.median(times)


def time_graph(runs: list[Callable[[], Any]], repeats: int) -> float:
    """Microseconds a launch, all of them in one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    graph.replay()
    return time_plain([graph.replay], 1) / (repeats * len(runs))


def time_case(case: Case, bandwidth: float, peak: float) -> Timing:
    """Launch it plainly and from a graph, and torch's own beside it."""
    for run in [*case.runs, *case.peers]:  # compiles, and takes what memory it needs
        run()
    torch.cuda.synchronize()
    floor = case.work.floor(bandwidth, peak) * 1e6
    repeats = max(1, min(20, int(1000 / max(floor * len(case.runs), 10))))
    return Timing(
        case.name, case.work.bytes, case.work.flops, floor,
        plain_us=time_plain(case.runs, repeats),
        graph_us=time_graph(case.runs, repeats),
        peer_us=time_graph(case.peers, repeats) if case.peers else None,
    )  # fmt: skip


def measure_bandwidth() -> float:
    """Bytes a second, read and written, of a copy within the card's memory."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_plain([lambda: target.copy_(source)], 2) * 1e-6)


def measure_peak() -> float:
    """FLOPs a second of a matrix product in bf16."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    seconds = time_plain([lambda: torch.mm(a, b, out=out)], 2) * 1e-6
    return 2 * 8192**3 / seconds


def check(seconds: float = 420.0) -> dict[str, Any]:
    """All of it.

    Returns:
        device, limits, "correct" (verdicts), "timings", "failed" (names of wrong or broken ones),
        "not_reached".

    Raises:
        NoDevice: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NoDevice("no CUDA device: nothing was measured")
    started = time.perf_counter()
    torch.manual_seed(0)
    judged = [
        verdict
        for shape in (LLAMA_1B, LLAMA_8B)
        for verdict in verdicts("cuda", torch.bfloat16, shape)
    ]
    bandwidth, peak = measure_bandwidth(), measure_peak()
    timings, not_reached, failed = [], 0, [v.name for v in judged if not v.holds]
    for make in (make for shape in (LLAMA_8B, LLAMA_1B) for make in cases(shape)):
        if time.perf_counter() - started > seconds:
            not_reached += 1
            continue
        try:
            timings.append(time_case(make(), bandwidth, peak))
        except (RuntimeError, ValueError) as error:  # one broken kernel does not hide the others
            failed.append(f"{len(timings)}: {error}"[:300])
    return {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "bandwidth_gb_s": bandwidth / 1e9,
        "peak_tflop_s": peak / 1e12,
        "correct": [asdict(v) | {"holds": v.holds} for v in judged],
        "timings": [asdict(t) | {"share_of_floor": t.share_of_floor} for t in timings],
        "failed": failed,
        "not_reached": not_reached,
        "seconds": time.perf_counter() - started,
    }


def report(results: dict[str, Any]) -> str:
    """The results as lines to read."""
    lines = [
        f"{results['device']}: {results['bandwidth_gb_s']:.0f} GB/s, "
        f"{results['peak_tflop_s']:.0f} TFLOP/s in bf16; {len(results['correct'])} checks, "
        f"failed: {results['failed'] or 'none'}; not reached: {results['not_reached']}",
        f"{'kernel':44} {'floor':>9} {'graph':>9} {'plain':>9} {'torch':>9}  us; share of floor",
    ]
    for t in results["timings"]:
        peer = f"{t['peer_us']:9.1f}" if t["peer_us"] is not None else " " * 9
        lines.append(
            f"{t['name']:44} {t['floor_us']:9.1f} {t['graph_us']:9.1f} {t['plain_us']:9.1f} "
            f"{peer}  {t['share_of_floor']:.0%}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    parser.add_argument("--seconds", type=float, default=420.0, help="stop timing after these")
    options = parser.parse_args()
    try:
        results = check(options.seconds)
    except NoDevice as error:
        print(error, file=sys.stderr)
        return 2
    if options.out:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(report(results))
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
