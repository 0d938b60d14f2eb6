"""A learner's Triton kernel, tried in Triton's interpreter, in a process of its own.

Triton decides when a kernel is decorated whether it is interpreted, and its own library is
decorated when it is imported; so a notebook that has imported it before could not. A kernel without
a mask writes where it should not, and one with an endless loop never ends: in a process of its own
neither harms the notebook.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TIMEOUT_S = 120
HAS_TRITON = importlib.util.find_spec("triton") is not None
RUN = Path(__file__).with_name("triton_trial_run.py")


class KernelError(AssertionError):
    """What is wrong with a kernel, in words for its author."""


def triton_language() -> Any:
    """`triton.language`, to write a kernel with; where there is no Triton, what stands for it."""
    if HAS_TRITON:
        return importlib.import_module("triton.language")
    return SimpleNamespace(constexpr=int)


def try_silu_mul(kernel: Callable[..., Any]) -> list[str]:
    """Run a kernel `(out_ptr, x_ptr, x_stride, SIZE, BLOCK)` on rows of several sizes.

    Args:
        kernel: not decorated; its source is what is run.

    Returns:
        what was tried, a line each; empty where there is no Triton.

    Raises:
        KernelError: it does not compute silu(gate) * up, or writes where it should not.
    """
    if not HAS_TRITON:
        return []
    source = textwrap.dedent(inspect.getsource(kernel))
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def "))
    source = "\n".join(lines[first:])  # without decorators: we bring our own
    program = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n" + source + "\n"
        f"KERNEL = {kernel.__name__}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(program, encoding="utf-8")
        answer = _run(file)
    if "problem" in answer:
        raise KernelError(answer["problem"])
    return list(answer["tried"])


def _run(file: Path) -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RUN), str(file)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"it had not ended after {TIMEOUT_S} s: is there an endless loop?"}
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0 and last:
        found: dict[str, Any] = json.loads(last[0])
        return found
    if done.returncode < 0:
        return {
            "problem": f"its process died of signal {-done.returncode}: it read or wrote far from "
            "its tensors. Is every load and every store masked, and the row times x_stride?"
        }
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return {"problem": f"Triton refuses it: {reason}"}
