"""What the readers of a LiveCluster ask, and the documents that are pasted."""

from __future__ import annotations

import random

from pdlab.engine import Prompt
from pdlab.models import Model

PROMPTS: tuple[str, ...] = (
    "Once upon a time, by the sea,",
    "The secret of good bread is",
    "A cluster of computers is",
    "When a star runs out of fuel,",
    "The history of the bicycle begins",
    "To learn a language, one should",
)
SENTENCES = (
    "The harbour was quiet, and the boats lay on the sand.",
    "A letter came with the morning train, and nobody opened it.",
    "Bread needs flour, water, salt and a night of patience.",
    "The museum keeps forty clocks, and no two of them agree.",
    "In winter the road to the village is closed for weeks.",
    "She counted the stars again and found one more than before.",
    "The engineer drew the bridge three times and built it once.",
    "Rain fell on the market, and the oranges shone.",
)


def usual_prompts(model: Model) -> list[Prompt]:
    """Beginnings to go on from; drawn tokens for a model without a tokenizer."""
    if model.tokenizer is not None:
        return list(PROMPTS)
    drawn = random.Random(0)
    return [drawn.choices(range(model.config.vocab_size), k=12) for _ in PROMPTS]


def document_ids(model: Model, num_tokens: int, seed: int) -> list[int]:
    """A text that nobody has cached, exactly so many tokens long.

    Sentences in a drawn order; drawn tokens for a model without a tokenizer.
    """
    drawn = random.Random(seed)
    if model.tokenizer is None:
        return drawn.choices(range(model.config.vocab_size), k=num_tokens)
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += model.tokenizer.encode(f"{drawn.randrange(100, 1000)}. {drawn.choice(SENTENCES)} ")
    return ids[:num_tokens]
