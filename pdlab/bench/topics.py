"""A text that every Python carries, to measure with."""

from __future__ import annotations

import pydoc_data.topics

from pdlab.models import Model


def topic_tokens(model: Model, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of the help texts in Python's standard library.

    `pydoc_data.topics`, sorted by name: about 120,000 tokens of English prose and tables that every
    Python carries.

    Raises:
        ValueError: the model has no tokenizer, or the texts have fewer tokens.
    """
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer to read a text with")
    topics = pydoc_data.topics.topics
    token_ids: list[int] = []
    for name in sorted(topics):
        token_ids += model.tokenizer.encode(topics[name])
        if len(token_ids) >= num_tokens:
            return token_ids[:num_tokens]
    raise ValueError(
        f"num_tokens={num_tokens} is more than the {len(token_ids)} tokens of the text"
    )
