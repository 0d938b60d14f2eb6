"""Seconds of a step from what it computes: what the simulator runs on instead of a model."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StepShape(NamedTuple):
    """What decides how long a step takes."""

    num_prompts: int
    """Sequences of which a chunk of known tokens is computed."""
    num_prompt_tokens: int
    """Tokens of all these chunks."""
    num_prompt_pairs: int
    """Query-key pairs of the chunks under the causal mask, in one layer and head."""
    num_decodes: int
    num_context_tokens: int
    """Tokens that the decodes read, each its own included, summed over the decodes."""


class StepTimes(Protocol):
    """A machine and a model, as far as time goes."""

    basis: str
    """Where the times come from, and whether they were measured, published or predicted."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
