"""Prompts of a given length, the same in every run."""

from __future__ import annotations

import pydoc_data.topics
import random

from pdlab.models import Model

CHARACTERS_PER_TOKEN = 12
"""More than any text of the prompts needs."""


def passages(model: Model, number: int, length: int) -> list[list[int]]:
    """Passages of the help texts in Python's standard library, or random tokens for a model that
    has no tokenizer; `number` prompts of `length` tokens, each with another text."""
    if model.tokenizer is None:
        draw = random.Random(0)
        return [
            [draw.randrange(model.config.vocab_size) for _ in range(length)] for _ in range(number)
        ]
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    wanted = number * length
    ids = model.tokenizer.encode(text[: CHARACTERS_PER_TOKEN * wanted])
    ids *= -(-wanted // len(ids))
    return [ids[i * length : (i + 1) * length] for i in range(number)]
