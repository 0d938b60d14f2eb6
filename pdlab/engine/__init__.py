"""The engine: sequences, scheduler, runner, sampler, and the loop around them."""

from pdlab.engine.admission import Prompt
from pdlab.engine.config import EngineConfig
from pdlab.engine.engine import Engine
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.naive import NaiveGenerator, NaiveOutput
from pdlab.engine.output import Chunk, RequestOutput
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.sampling import SamplingParams

__all__ = [
    "Chunk",
    "Engine",
    "EngineConfig",
    "NaiveGenerator",
    "NaiveOutput",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "SequenceState",
]
