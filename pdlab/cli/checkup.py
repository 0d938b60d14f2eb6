"""`pdlab doctor`: what this machine has, what it lacks, and the command that mends it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from pdlab.cli.text import counted

OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        mend: what to do if it is missing; empty if all is well.
        required: whether the lessons cannot run without it.
    """

    name: str
    found: str
    mend: str = ""
    required: bool = False

    @property
    def mark(self) -> str:
        if not self.mend:
            return "[green]ok[/]"
        return "[red]missing[/]" if self.required else "[yellow]absent[/]"


def examine() -> bool:
    """Print what was found; True when nothing is missing that the lessons need."""
    findings = list(_findings())
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        mend = f"\n{finding.mend}" if finding.mend else ""
        table.add_row(finding.name, finding.mark, finding.found + mend)
    Console(highlight=False).print(table)
    return not any(finding.mend and finding.required for finding in findings)


def _findings() -> Iterator[Finding]:
    yield _python()
    yield from _torch()
    yield _package("triton", "pip install triton", "GPU kernels; nothing on a CPU needs it")
    yield _model()
    for name in ("jupyterlab", "ipywidgets", "anywidget"):
        yield _package(name, f"pip install {name}", "the lessons need it", required=True)
    yield _browser()


def _python() -> Finding:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    old = sys.version_info < OLDEST_PYTHON
    mend = f"pdlab needs Python {wanted} or newer" if old else ""
    return Finding("python", f"{platform.python_version()}, {sys.executable}", mend, required=True)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield Finding("torch", "not installed", "pip install torch", required=True)
        return
    yield Finding("torch", f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')}")
    if torch.cuda.is_available():
        yield Finding("CUDA", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    else:
        yield Finding("CUDA", "no GPU that torch can use; everything runs on the CPU")


def _package(name: str, command: str, purpose: str, *, required: bool = False) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, f"not installed ({purpose})", command, required)


def _model() -> Finding:
    from pdlab.models import available
    from pdlab.models.cache import cache_dir

    trained = available()[0]
    where = f"{trained.name} in {cache_dir()}"
    if trained.cached:
        return Finding("model", where)
    return Finding("model", f"not fetched yet: {where}", 'fetched once by: pdlab run "Hello"')


def _browser() -> Finding:
    from pdlab.workbench.picture import find_browser

    browser = find_browser()
    if browser:
        return Finding("chromium", browser)
    return Finding(
        "chromium",
        "not found (only browser tests and saved pictures need it)",
        "Debian, Ubuntu: apt-get install --no-install-recommends chromium; elsewhere: install "
        "Chrome or Chromium, and name it in PDLAB_BROWSER if it is not on the PATH",
    )
