"""Measurements of KV costs as they are kept in `data/measured/`, and what they compare.

Made by `pdlab.workbench.measure`, which takes half an hour; lessons show them as recorded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pdlab.engine import EngineConfig
from pdlab.shipped import shipped
from pdlab.workbench.kv_costs import KVCost

FORMATS = (
    "fp32",
    "bf16",
    "fp16",
    "fp8",
    "int8",
    "int8:head",
    "int8:channel",
    "int8/int4:token:32",
    "int4",
    "int4:token",
    "int4:channel/int4:token:32",
    "int4:channel/int4:token",
    "int4:token:32/int4:channel",
)
"""The last one is KIVI's the wrong way round."""
WINDOWS = (64, 128, 256, 512, 1024)
SINKS = 4
ERRORS = ("k_error", "v_error", "attended_error")
DIGITS = 4
"""Significant digits of the errors that are kept."""


@dataclass(frozen=True)
class Study:
    """Costs, and what they were measured on."""

    costs: list[KVCost]
    text: str
    segment_len: int
    chunk_size: int
    reference: str
    model: str
    machine: dict[str, str | int]
    command: str

    @property
    def source(self) -> str:
        """One line for the subtitle of a figure."""
        m = self.machine
        return (
            f"recorded: {self.model}, {self.costs[0].num_tokens:,} tokens of {self.text}, on "
            f"{m['processor']}, {str(m['date'])[:10]}"
        )

    def save(self, path: Path) -> None:
        data = asdict(self)
        for cost in data["costs"]:
            for name in ERRORS:
                rounded = [[float(f"{x:.{DIGITS}g}") for x in row] for row in cost[name]]
                cost[name] = rounded
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_compact(data), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Study:
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**data | {"costs": [_cost(c) for c in data["costs"]]})


def recorded_study(name: str) -> Study:
    """A study that comes with pdlab: `kv_formats` or `windows`.

    Raises:
        ValueError: there is none of this name.
    """
    path = shipped("data") / "measured" / f"{name}.json"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.json"))
        raise ValueError(f"name={name!r} is not one of {', '.join(known)}")
    return Study.load(path)


def format_configs(formats: tuple[str, ...] = FORMATS) -> dict[str, EngineConfig]:
    """A configuration for each KV format, labelled with it."""
    return {text: EngineConfig(kv_format=text) for text in formats}


def window_configs(
    windows: tuple[int, ...] = WINDOWS, sinks: int = SINKS
) -> dict[str, EngineConfig]:
    """Full attention, and each window without and with sinks."""
    configs = {"full": EngineConfig()}
    for size in windows:
        configs[f"window {size}"] = EngineConfig(window=size)
        configs[f"window {size} + {sinks} sinks"] = EngineConfig(window=size, sink_tokens=sinks)
    return configs


def _cost(data: dict[str, Any]) -> KVCost:
    arrays = {name: np.array(data[name]) for name in ERRORS}
    names = {f.name for f in fields(EngineConfig)}
    config = EngineConfig(**{k: v for k, v in data["config"].items() if k in names})
    return KVCost(**data | arrays | {"config": config})


def _compact(data: dict[str, Any]) -> str:
    """JSON with one line for each entry of a cost: small, and readable in a diff."""
    costs = []
    for cost in data["costs"]:
        lines = (f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in cost.items())
        costs.append("  {\n" + ",\n".join(lines) + "\n  }")
    rest = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items() if k != "costs")
    return "{\n" + ",\n".join(rest) + ',\n "costs": [\n' + ",\n".join(costs) + "\n ]\n}\n"
