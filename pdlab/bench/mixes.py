"""The mixes of sampling parameters whose cost is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdlab.sampling import SamplingParams

ITEMS_PER_TOKEN = 4
"""More items of a JSON list than one token can hold, so the list outlasts the run."""


@dataclass(frozen=True)
class Mix:
    """What the rows of a batch ask for: row i takes `params[i % len(params)]`."""

    name: str
    params: tuple[SamplingParams, ...]

    def row(self, index: int) -> SamplingParams:
        """The parameters of one row, with a seed of its own."""
        return replace(self.params[index % len(self.params)], seed=index)


def all_mixes(num_tokens: int) -> list[Mix]:
    """Every mix, for runs of `num_tokens` tokens that nothing ends before.

    Random draws have temperature 0.8; "everything" has all that this module names, at once.
    """
    penalties = {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
    }
    regex = {"regex": "([A-Z][a-z]*[ ,.])+"}
    least = ITEMS_PER_TOKEN * num_tokens
    schema = {"type": "array", "items": {"type": "string"}, "minItems": least}
    nudges = penalties | {"logit_bias": {1: -5.0, 2: 5.0}, "bad_words": ("cat", "dog")}
    shapes = {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95}
    single: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "temperature 0.8": {},
        "top_k 50": {"top_k": 50},
        "top_p 0.9": {"top_p": 0.9},
        "min_p 0.05": {"min_p": 0.05},
        "typical_p 0.95": {"typical_p": 0.95},
        "three penalties": penalties,
        "bad_words": {"bad_words": ("cat", "dog")},
        "logprobs 5": {"logprobs": 5},
        "regex": regex,
        "json_schema": {"json_schema": schema},
        "everything": nudges | shapes | regex | {"logprobs": 5, "min_tokens": num_tokens},
    }
    mixes = [Mix(name, (_params(num_tokens, given),)) for name, given in single.items()]
    return [*mixes, Mix("every row another", tuple(mix.params[0] for mix in mixes))]


def possible(mixes: Sequence[Mix], *, has_text: bool, constraint_backend: str) -> list[Mix]:
    """The mixes that a model can serve; one of several kinds of rows keeps those that it can.

    Args:
        has_text: whether the model has a tokenizer.
    """

    def can(params: SamplingParams) -> bool:
        if params.json_schema and constraint_backend == "pdlab":
            return False
        return has_text or not (params.regex or params.json_schema or params.bad_words)

    kept = [replace(mix, params=tuple(filter(can, mix.params))) for mix in mixes]
    return [mix for mix in kept if mix.params]


def _params(num_tokens: int, given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8} | given, max_tokens=num_tokens, ignore_eos=True)
