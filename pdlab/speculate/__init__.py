"""Drafts: what a cheap guesser says comes next, for the target to check.

An engine takes them from `EngineConfig.speculation`, which is one of the dataclasses here.
"""

from pdlab.speculate.formula import (
    acceptance_of,
    best_num_tokens,
    expected_tokens,
    expected_tokens_by_position,
    speedup,
)
from pdlab.speculate.length import AdaptiveLength, FixedLength
from pdlab.speculate.model_drafter import ModelDrafter
from pdlab.speculate.models import DraftModel, EarlyExit, SelfDraft, first_layers
from pdlab.speculate.prediction import PredictedGain, predict_gain
from pdlab.speculate.prompt_lookup import LookupDrafter, NgramIndex, PromptLookup

__all__ = [
    "AdaptiveLength",
    "DraftModel",
    "EarlyExit",
    "FixedLength",
    "LookupDrafter",
    "ModelDrafter",
    "NgramIndex",
    "PredictedGain",
    "PromptLookup",
    "SelfDraft",
    "acceptance_of",
    "best_num_tokens",
    "expected_tokens",
    "expected_tokens_by_position",
    "first_layers",
    "predict_gain",
    "speedup",
]
