"""pdlab: a workbench for learning how LLM inference works, on a real engine.

model = pdlab.load("smollm2-135m")
with pdlab.Engine(model) as engine:
    print(engine.generate("The capital of France is")[0].text)
"""

from pdlab.engine import (
    Engine,
    EngineConfig,
    NaiveGenerator,
    RequestOutput,
    SamplingParams,
)
from pdlab.models import Model, ModelConfig, load
from pdlab.trace import StepRecord, Trace

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "Model",
    "ModelConfig",
    "NaiveGenerator",
    "RequestOutput",
    "SamplingParams",
    "StepRecord",
    "Trace",
    "load",
]
