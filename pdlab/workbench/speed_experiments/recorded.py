"""What the lesson shows as recorded: formats' quality, kernels' registers, torch.compile.

`pdlab bench weights` makes `data/measured/weight_formats.json`, `record` beside this makes
`speed.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pdlab.bench.weights import WeightCosts
from pdlab.shipped import shipped


@dataclass(frozen=True)
class CompileTrial:
    """Decode steps of the torch backend, as it is and with `torch.compile` for what it can take."""

    eager_s: float
    compiled_s: float
    """Median of a step, after the warm-up."""
    warm_up_s: float
    """The first step with what was compiled."""
    num_steps: int
    torch: str


def recorded_weights() -> WeightCosts | None:
    """What weight formats cost, as it comes with pdlab; None where it does not."""
    path = shipped("data") / "measured" / "weight_formats.json"
    return WeightCosts.load(path) if path.exists() else None


def recorded_resources() -> list[dict[str, Any]]:
    """Kernels as `python -m pdlab_kernels.triton.resources --json` told them, some of them."""
    found: list[dict[str, Any]] = _recorded()["triton"]
    return found


def recorded_compile() -> CompileTrial:
    """`torch.compile`, as it was tried once."""
    return CompileTrial(**_recorded()["torch_compile"])


def recorded_line() -> str:
    """On what that was, and when."""
    machine = _recorded()["machine"]
    return f"recorded on {machine['processor']}, {str(machine['date'])[:10]}"


def _recorded() -> dict[str, Any]:
    path = shipped("data") / "measured" / "speed.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
