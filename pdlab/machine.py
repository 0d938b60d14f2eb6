"""What a run was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path


def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def physical_cores() -> list[tuple[int, ...]]:
    """The cores that this process may use, each with the processors that it appears as."""
    try:
        cpus = sorted(os.sched_getaffinity(0))
    except AttributeError:  # only Linux tells
        cpus = list(range(os.cpu_count() or 1))
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings = path.read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return [tuple(core) for core in cores.values()]


def deal(num_workers: int, cores: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Cores for each worker; where they are too few, workers share.

    Args:
        cores: each with the processors that it appears as.
    """
    if len(cores) < num_workers:
        return [[cores[i % len(cores)]] for i in range(num_workers)]
    ends = [len(cores) * i // num_workers for i in range(num_workers + 1)]
    return [list(cores[a:b]) for a, b in pairwise(ends)]


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, system, Python and the date (UTC), for the head of a trace."""
    return {
        "processor": processor_name(),
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
