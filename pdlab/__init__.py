"""pdlab: a workbench for learning how LLM inference works, on a real engine.

    model = pdlab.load("smollm2-135m")
    with pdlab.Engine(model) as engine:
        print(engine.generate("The capital of France is")[0].text)

The names below are imported when first used, so that a command that needs no tensors (`pdlab
--help`, `pdlab models`) does not wait for torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.engine import (
        Engine,
        EngineConfig,
        NaiveGenerator,
        Policy,
        RequestOutput,
        SamplingParams,
        beam_search,
    )
    from pdlab.models import Model, ModelConfig, load
    from pdlab.speculate import DraftModel, EarlyExit, PromptLookup, SelfDraft
    from pdlab.trace import StepRecord, Trace

__version__ = "0.1.0"

# On Linux torch's threads wait for each other in a loop before they sleep. Where another program
# wants the processor, that loop eats the time slice of the very thread it waits for: beside one
# busy program a decode step took three times as long. So let them sleep soon, which costs nothing
# measurable on an idle machine. Read once, when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__all__ = [
    "DraftModel",
    "EarlyExit",
    "Engine",
    "EngineConfig",
    "Model",
    "ModelConfig",
    "NaiveGenerator",
    "Policy",
    "PromptLookup",
    "RequestOutput",
    "SamplingParams",
    "SelfDraft",
    "StepRecord",
    "Trace",
    "beam_search",
    "load",
]

_ROOMS = ("pdlab.speculate", "pdlab.engine", "pdlab.models", "pdlab.trace")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in map(import_module, reversed(_ROOMS)):
            if name in room.__all__:
                return getattr(room, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
