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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from .gpu_cases import Case, Load, cases
from .gpu_correct import PARTS, Trial
from .gpu_inputs import LLAMA_1B, LLAMA_8B, Draw

ROUNDS = 11


class NoDevice(RuntimeError):
    """There is no CUDA device to measure."""


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


def time_plain(runs: Sequence[Callable[[], Any]], repeats: int) -> float:
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


def time_graph(runs: Sequence[Callable[[], Any]], repeats: int) -> float:
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
    repeats = max(1, int(min(64, 20_000 / floor)) // len(case.runs))
    return Timing(
        case.name, case.work.bytes, case.work.flops, floor,
        plain_us=time_plain(case.runs, repeats),
        graph_us=time_graph(case.runs, repeats),
        peer_us=time_graph(case.peers, max(1, 64 // len(case.peers))) if case.peers else None,
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
    draw = Draw("cuda", torch.bfloat16)
    judged, timings, failed, not_reached = [], [], [], 0
    for shape, part in product((LLAMA_1B, LLAMA_8B), PARTS):
        try:
            judged += list(part(Trial(draw, shape)))
        except Exception as error:  # one broken kernel does not hide the others
            failed.append(f"{part.__name__} {shape.name}: {error}"[:500])
    failed += [verdict.name for verdict in judged if not verdict.holds]
    bandwidth, peak = measure_bandwidth(), measure_peak()
    for make in chain(cases(LLAMA_8B, draw, Load()), cases(LLAMA_1B, draw, Load())):
        if time.perf_counter() - started > seconds:
            not_reached += 1
            continue
        try:
            timings.append(time_case(make(), bandwidth, peak))
        except Exception as error:
            failed.append(f"after {timings[-1].name if timings else 'nothing'}: {error}"[:500])
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
