"""The engine: sequences, scheduler, runner, sampler, and the loop around them."""

from pdlab.engine.admission import Prompt
from pdlab.engine.beam import BeamSearch, beam_search
from pdlab.engine.beam_records import BeamNode, BeamOutput, BeamStep, Hypothesis
from pdlab.engine.config import EngineConfig
from pdlab.engine.conversation import Conversation, Turn
from pdlab.engine.engine import Engine
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.naive import NaiveGenerator, NaiveOutput
from pdlab.engine.output import Chunk, Completion, RequestOutput
from pdlab.engine.policies import (
    FCFS,
    Deadline,
    LongestPrefix,
    Policy,
    PolicyError,
    Priority,
    ShortestJob,
)
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.sampling import SamplingParams

__all__ = [
    "FCFS",
    "BeamNode",
    "BeamOutput",
    "BeamSearch",
    "BeamStep",
    "Chunk",
    "Completion",
    "Conversation",
    "Deadline",
    "Engine",
    "EngineConfig",
    "Hypothesis",
    "LongestPrefix",
    "NaiveGenerator",
    "NaiveOutput",
    "Policy",
    "PolicyError",
    "Priority",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "SequenceState",
    "ShortestJob",
    "Turn",
    "beam_search",
]
