"""What a run was measured on."""

from __future__ import annotations

import datetime
import os
import platform
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


def describe_machine() -> dict[str, str | int]:
    """Processor, cores, system, Python and the date (UTC), for the head of a trace."""
    return {
        "processor": processor_name(),
        "cores": num_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
