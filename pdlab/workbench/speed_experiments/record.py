"""Make `data/measured/speed.json` anew, which the lesson shows as recorded.

python -m pdlab.workbench.speed_experiments.record     (a minute or two; needs a C++ compiler)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

import pdlab
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.models.decoder import DecoderLayer
from pdlab.shipped import shipped
from pdlab.workbench.speed_experiments.recorded import CompileTrial
from pdlab.workbench.speed_experiments.timelines import CONTEXT, decoding

KERNELS = ("silu-mul", "add-rms-norm", "rope-bf16-d128", "decode-bf16-d128", "int4-linear-m8",
           "int4-linear-m64")  # fmt: skip
COMPILED = ("project", "add_attended", "mlp")
"""Methods of a layer, all of it but attention."""


def try_compile(model: Model, rounds: int = 6) -> CompileTrial:
    """`torch.compile` all of a layer but attention, and decode in turns with and without it."""
    plain = {name: getattr(DecoderLayer, name) for name in COMPILED}
    compiled = {name: torch.compile(method, dynamic=False) for name, method in plain.items()}
    torch._dynamo.config.recompile_limit = 256
    times: dict[bool, list[float]] = {True: [], False: []}
    warm_up_s = 0.0
    try:
        for turn in range(rounds):
            for fast in (False, True):
                _use(compiled if fast else plain)
                start_s = perf_counter()
                with decoding(model, "torch") as engine:
                    if fast and not turn:
                        warm_up_s = perf_counter() - start_s
                    steps = [engine.step() for _ in range(6)]
                times[fast] += [step.wall_s for step in steps if step]
    finally:
        _use(plain)
    return CompileTrial(
        median(times[False]), median(times[True]), warm_up_s, len(times[True]), torch.__version__
    )


def _use(methods: dict[str, Callable[..., Any]]) -> None:
    for name, method in methods.items():
        setattr(DecoderLayer, name, method)


def main() -> None:
    from pdlab_kernels.triton.resources import table

    warnings.simplefilter("ignore")
    path = Path(shipped("data")) / "measured" / "speed.json"
    with fresh_cache():  # or the warm-up would be that of a second time
        trial = try_compile(pdlab.load(device="cpu", dtype="fp32"))
    rows = table((80, 90), KERNELS)
    data = {
        "machine": describe_machine() | {"threads": torch.get_num_threads()},
        "context": CONTEXT,
        "torch_compile": asdict(trial),
        "triton": [asdict(row) | {"problems": row.problems} for row in rows if row.name in KERNELS],
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
