"""Measure what this machine can do: peak FLOP/s of a matrix product, and memory bandwidth.

Both are ceilings, used as denominators of MFU and MBU, so each is the best this machine showed
over several shapes or operations. Of repeated runs the fastest counts, as in STREAM (McCalpin
1995): another process can only make a run slower, and a denominator that was reached once can
be reached. A matrix-vector product is timed too and kept beside it: on a CPU it may reach only
half of the bandwidth that a plain sum over the same memory gets, and that gap is the kernel's.

On a busy machine every run is slow and the ceilings come out too low: `details` tells the share of
the processor this process got, and a measurement below 80% is returned but not kept.

The numbers go to the user's cache directory, one file for each processor, number of threads, torch
version, device and dtype. Nothing here imports torch until it measures.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from pdlab.costmodel.hardware import Hardware

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
SHARE_SIZE, LEAST_SHARE = 512, 0.8
"""Side of a product that keeps all threads at work; below this share the machine was busy."""


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
        on a CPU `processor_share` (1 where nothing else ran).

    Raises:
        ValueError: for another device or dtype, and for `cuda` where torch finds none.
    """
    key = _key(device, dtype)
    path = _cache_path(key)
    cached = None if refresh else _load(path, key)
    if cached is not None:
        return cached
    hardware = _measure(key)
    if hardware.details.get("processor_share", 1) >= LEAST_SHARE:
        _save(path, key, hardware)
    return hardware


def _key(device: str, dtype: str) -> dict[str, Any]:
    """What a measurement depends on."""
    import torch

    if dtype not in TORCH_NAMES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(TORCH_NAMES)}")
    family = device.split(":")[0]
    if family not in STREAM_BYTES:
        raise ValueError(f"device={device!r} is not one of {', '.join(STREAM_BYTES)}")
    if family == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch finds no CUDA GPU")
    on_gpu = family == "cuda"
    return {
        "format": CACHE_FORMAT,
        "processor": torch.cuda.get_device_name(device) if on_gpu else _processor_name(),
        "num_threads": 0 if on_gpu else torch.get_num_threads(),
        "torch": str(torch.__version__),
        "device": device,
        "dtype": dtype,
    }


def _processor_name() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- measuring -----------------------------------------------------------------------------------


def _measure(key: dict[str, Any]) -> Hardware:
    import torch

    device, on_gpu = key["device"], key["device"] != "cpu"
    dtype = getattr(torch, TORCH_NAMES[key["dtype"]])
    with torch.inference_mode():
        peak_flops = _peak_flops(device, dtype)
        details = _bandwidths(device, dtype)
        launch_s = _launch_s(device)
        if not on_gpu:
            details["processor_share"] = _processor_share()
    threads = "" if on_gpu else f", {key['num_threads']} threads"
    return Hardware(
        name=f"{key['processor']}{threads}",
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


def _peak_flops(device: str, dtype: Any) -> float:
    """FLOP/s of the fastest square product, 2 n^3 over its time; n doubles while runs are short."""
    import torch

    best, size, seconds = 0.0, FIRST_SIZE, 0.0
    while size <= LAST_SIZE and 8 * seconds <= LONGEST_RUN_S:  # twice the side, 8 times the work
        left = torch.randn(size, size, device=device).to(dtype)
        right = torch.randn(size, size, device=device).to(dtype)
        seconds = _fastest_s(partial(torch.mm, left, right, out=torch.empty_like(left)), device)
        best = max(best, 2 * size**3 / seconds)
        size *= 2
    return best


def _bandwidths(device: str, dtype: Any) -> dict[str, float]:
    """Bytes a second of reading, of copying and of a matrix-vector product in `dtype`.

    Reading is the fastest of three reductions, because none is the fastest on every processor.
    """
    import torch

    source = torch.ones(STREAM_BYTES[device.split(":")[0]] // 4, device=device)
    num_bytes = source.nbytes
    reads = (source.sum, partial(torch.dot, source, source), source.view(torch.int32).amax)
    read_s = min(_fastest_s(read, device) for read in reads)
    copy_s = _fastest_s(partial(torch.empty_like(source).copy_, source), device)
    matrix = source.view(dtype).view(-1, GEMV_COLUMNS)
    vector = torch.ones(GEMV_COLUMNS, device=device, dtype=dtype)
    gemv_s = _fastest_s(partial(torch.mv, matrix, vector), device)
    return {
        "read_bytes_s": num_bytes / read_s,
        "copy_bytes_s": 2 * num_bytes / copy_s,
        "gemv_bytes_s": num_bytes / gemv_s,
    }


def _launch_s(device: str) -> float:
    """Seconds to start one operation: many on a single element, one after the other."""
    import torch

    element = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            element.add_(1)

    return _fastest_s(many, device) / LAUNCHES


def _processor_share() -> float:
    """Processor time this process gets while all its threads work, over what it could get."""
    import torch

    factor = torch.ones(SHARE_SIZE, SHARE_SIZE)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - start_s < REPEAT_S:
        torch.mm(factor, factor)
    cpu_s, wall_s = time.process_time() - start_cpu_s, time.perf_counter() - start_s
    return min(1.0, cpu_s / (wall_s * torch.get_num_threads()))


def _fastest_s(function: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    timer = _wall_s if device == "cpu" else partial(_event_s, device)
    function()
    times: list[float] = []
    while len(times) < LEAST_REPEATS or sum(times) < REPEAT_S:
        times.append(timer(function))
    return min(times)


def _wall_s(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _event_s(device: str, function: Callable[[], object]) -> float:
    """Seconds on the GPU's own clock, between two events around the work."""
    import torch

    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3


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
    from platformdirs import user_cache_dir

    root = Path(os.environ.get("PDLAB_CACHE") or user_cache_dir("pdlab"))
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return root / "calibration" / f"{digest[:16]}.json"


def _load(path: Path, key: dict[str, Any]) -> Hardware | None:
    """The cached measurement, or None where there is none that can be trusted."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return None
        hardware = Hardware.from_dict(stored["hardware"])
        hardware.peak(key["dtype"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return hardware if hardware.measured else None


def _save(path: Path, key: dict[str, Any], hardware: Hardware) -> None:
    """Write the measurement in one move, so that no reader sees half of it.

    A cache that cannot be written costs only time, at the next call.
    """
    text = json.dumps({"key": key, "hardware": hardware.to_dict()}, indent=2)
    unfinished = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
