"""Measure what this machine can do: peak FLOP/s of a matrix product, and memory bandwidth.

Both are ceilings, used as denominators of MFU and MBU, so each is the best this machine showed
over several shapes or operations. Of repeated runs the fastest counts, as in STREAM (McCalpin
1995): another process can only make a run slower, and a denominator that was reached once can
be reached. A matrix-vector product is timed too and kept beside it: on a CPU it may reach only
half of the bandwidth that a plain sum over the same memory gets, and that gap is the kernel's.

On a busy machine even the fastest run is slow, and a ceiling that is too low makes an MBU above 1.
So the share of the processor that the fastest runs got is kept too. Below 80%, the next calls
measure again, up to three times in all, and keep the higher of the ceilings.

The numbers go to the user's cache directory, one file for each processor, number of threads, torch
version, device and dtype. Nothing here imports torch until it measures.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.costmodel.hardware import Hardware
from pdlab.machine import processor_name
from pdlab.models.cache import cache_dir, cache_text

TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
CACHE_FORMAT = 1
"""Raised when a measurement changes its meaning, so that older files are not read."""

FIRST_SIZE, LAST_SIZE = 128, 8192
"""Side of the square matrices multiplied, doubling from the first to the last."""
LONGEST_RUN_S = 0.25
"""A product expected to take longer is not tried."""
STREAM_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}
"""Bytes read for the bandwidth: several times the last-level cache."""
REPEAT_S, LEAST_REPEATS = 0.3, 3
"""An operation is repeated for this long, and at least so often."""
LAUNCHES = 200
GEMV_COLUMNS = 8192
LEAST_SHARE, MOST_ATTEMPTS = 0.8, 3
"""Below this share of the processor, measure again; after so many attempts, believe it."""


class Run(NamedTuple):
    """One timed run."""

    seconds: float
    processor_share: float
    """Processor time it got, over its seconds times the threads; 1 where nothing else ran."""


def calibrate(device: str = "cpu", dtype: str = "fp32", *, refresh: bool = False) -> Hardware:
    """The measured ceilings of this machine; a few seconds the first time, then from the cache.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: `fp32`, `fp16` or `bf16`, the dtype of the matrix product. A processor without
            instructions for it is slow in it, and the number says so.
        refresh: measure again and replace the cached numbers.

    Returns:
        A `Hardware` with `measured=True`. Its bandwidth is the fastest read; `details` holds
        `read_bytes_s`, `copy_bytes_s` (bytes read plus bytes written) and `gemv_bytes_s`, and
        `processor_share` (1 where nothing else ran; always 1 on a GPU).

    Raises:
        ValueError: for another device or dtype, and for `cuda` where torch finds none.
    """
    key = _key(device, dtype)
    path = _cache_path(key)
    earlier, attempts = (None, 0) if refresh else _load(path, key)
    if earlier is not None and (_was_idle(earlier) or attempts >= MOST_ATTEMPTS):
        return earlier
    hardware = _measure(key)
    if earlier is not None:
        hardware = _higher(earlier, hardware)
    _save(path, key, hardware, attempts + 1)
    return hardware


def _was_idle(hardware: Hardware) -> bool:
    return hardware.details.get("processor_share", 1) >= LEAST_SHARE


def _higher(earlier: Hardware, later: Hardware) -> Hardware:
    """The higher of each ceiling: both were reached."""
    return replace(
        later,
        peak_flops={
            dtype: max(flops, earlier.peak_flops[dtype])
            for dtype, flops in later.peak_flops.items()
        },
        bandwidth_bytes_s=max(earlier.bandwidth_bytes_s, later.bandwidth_bytes_s),
        launch_s=min(earlier.launch_s, later.launch_s),
        details={
            name: max(value, earlier.details.get(name, value))
            for name, value in later.details.items()
        },
    )


def _key(device: str, dtype: str) -> dict[str, Any]:
    """What a measurement depends on."""
    import torch

    if dtype not in TORCH_NAMES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(TORCH_NAMES)}")
    on_gpu = device.split(":")[0] == "cuda"
    if device != "cpu" and not on_gpu:
        raise ValueError(f"device={device!r} is not one of cpu, cuda, cuda:N")
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch finds no CUDA GPU")
    return {
        "format": CACHE_FORMAT,
        "processor": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "num_threads": 0 if on_gpu else torch.get_num_threads(),
        "torch": str(torch.__version__),
        "device": device,
        "dtype": dtype,
    }


# --- measuring -----------------------------------------------------------------------------------


def measure(device: str = "cpu", dtype: str = "fp32") -> Hardware:
    """As `calibrate`, of this very moment: the cache is neither read nor written."""
    return _measure(_key(device, dtype))


def _measure(key: dict[str, Any]) -> Hardware:
    import torch

    device, on_gpu = key["device"], key["device"] != "cpu"
    dtype = getattr(torch, TORCH_NAMES[key["dtype"]])
    with torch.inference_mode():
        peak_flops, processor_share = _fastest_product(device, dtype)
        details = _bandwidths(device, dtype)
        launch_s = _launch_s(device)
    details["processor_share"] = processor_share
    count = key["num_threads"]
    threads = "" if on_gpu else f", {count} thread{'s' * (count > 1)}"
    return Hardware(
        name=key["processor"] + threads,
        kind="gpu" if on_gpu else "cpu",
        peak_flops={key["dtype"]: peak_flops},
        bandwidth_bytes_s=max(details["read_bytes_s"], details["gemv_bytes_s"]),
        memory_bytes=_memory_bytes(device),
        source=f"pdlab.costmodel.calibrate, {date.today().isoformat()}, torch {key['torch']}: "
        "fastest square matrix product; fastest read of a large buffer",
        measured=True,
        launch_s=launch_s,
        details=details,
    )


def _fastest_product(device: str, dtype: Any) -> tuple[float, float]:
    """FLOP/s of the fastest square product, 2 n^3 over its time; n doubles while runs are short.

    Also the share of the processor that the largest one got: only that surely uses all threads.
    """
    import torch

    best, size, run = 0.0, FIRST_SIZE, Run(0.0, 0.0)
    while (
        size <= LAST_SIZE and 8 * run.seconds <= LONGEST_RUN_S
    ):  # twice the side, 8 times the work
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        run = _fastest(partial(torch.mm, left, right, out=torch.empty_like(left)), device)
        best = max(best, 2 * size**3 / run.seconds)
        size *= 2
    return best, run.processor_share


def _bandwidths(device: str, dtype: Any) -> dict[str, float]:
    """Bytes a second of reading, copying and a product with a vector.

    Reading is the fastest of three reductions, because none is the fastest on every processor.
    """
    import torch

    source = torch.ones(STREAM_BYTES[device.split(":")[0]] // 4, device=device)
    num_bytes = source.nbytes
    reads = (source.sum, partial(torch.dot, source, source), source.view(torch.int32).amax)
    read = min(_fastest(function, device) for function in reads)
    copy = _fastest(partial(torch.empty_like(source).copy_, source), device)
    matrix = source.view(dtype).view(-1, GEMV_COLUMNS)
    vector = torch.ones(GEMV_COLUMNS, device=device, dtype=dtype)
    gemv = _fastest(partial(torch.mv, matrix, vector), device)
    return {
        "read_bytes_s": num_bytes / read.seconds,
        "copy_bytes_s": 2 * num_bytes / copy.seconds,
        "gemv_bytes_s": num_bytes / gemv.seconds,
    }


def _launch_s(device: str) -> float:
    """Seconds to start one operation: many on a single element, one after the other."""
    import torch

    element = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            element.add_(1)

    return _fastest(many, device).seconds / LAUNCHES


def _fastest(function: Callable[[], object], device: str) -> Run:
    """The fastest of several runs, after one to warm up."""
    timed = _cpu_run if device == "cpu" else partial(_gpu_run, device)
    function()
    runs: list[Run] = []
    until = time.perf_counter() + REPEAT_S
    while len(runs) < LEAST_REPEATS or time.perf_counter() < until:
        runs.append(timed(function))
    return min(runs)


def _cpu_run(function: Callable[[], object]) -> Run:
    import torch

    start_s, start_processor_s = time.perf_counter(), time.process_time()
    function()
    processor_s = time.process_time() - start_processor_s
    seconds = time.perf_counter() - start_s
    return Run(seconds, min(1.0, processor_s / (seconds * torch.get_num_threads())))


def _gpu_run(device: str, function: Callable[[], object]) -> Run:
    """Timed on the GPU's own clock, between two events around the work."""
    import torch

    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
    return Run(start.elapsed_time(end) / 1e3, 1.0)


def _memory_bytes(device: str) -> int:
    """Size of the memory behind the bandwidth; 0 where the system does not tell."""
    import torch

    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


# --- the cache -----------------------------------------------------------------------------------


def _cache_path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "calibration" / f"{digest[:16]}.json"


def _load(path: Path, key: dict[str, Any]) -> tuple[Hardware | None, int]:
    """The cached measurement and how often it was taken; None where none can be trusted."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return None, 0
        hardware, attempts = Hardware.from_dict(stored["hardware"]), int(stored["attempts"])
        hardware.peak(key["dtype"])
        _was_idle(hardware)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, 0
    return (hardware, attempts) if hardware.measured else (None, 0)


def _save(path: Path, key: dict[str, Any], hardware: Hardware, attempts: int) -> None:
    """Write the measurement for the next call."""
    text = json.dumps({"key": key, "attempts": attempts, "hardware": hardware.to_dict()}, indent=2)
    cache_text(path, text)
