"""What the Chat widget shows of a conversation, as plain data."""

from __future__ import annotations

from typing import Any

from pdlab.engine.conversation import Conversation, Turn
from pdlab.engine.history import spell
from pdlab.models import Tokenizer


def turn_data(turn: Turn) -> dict[str, Any]:
    """One exchange, for JavaScript. Numbers that are not known yet are None."""
    return {
        "user": turn.text,
        "answer": turn.answer,
        "stats": stats_data(turn),
    }


def stats_data(turn: Turn) -> dict[str, Any]:
    """What a turn has taken so far; small, because it is sent while the answer streams."""
    begun = bool(turn.token_ids)
    return {
        "prompt": turn.prompt_tokens,
        "cached": turn.cached_tokens if begun else None,
        "answer_tokens": len(turn.token_ids),
        "ttft_s": turn.ttft_s,
        "tokens_per_s": turn.tokens_per_s,
        "blocks": block_counts(turn),
        "kept_blocks": turn.kept_blocks,
        "forgotten": turn.forgotten,
        "reason": turn.finish_reason,
    }


def block_counts(turn: Turn) -> list[int]:
    """KV blocks in use: from the prefix cache, begun in prefill, begun in decode."""
    total = turn.cached_blocks + turn.own_blocks
    prompt = min(total, -(-turn.prompt_tokens // turn.block_size))
    return [turn.cached_blocks, max(0, prompt - turn.cached_blocks), total - prompt]


def num_forgotten(conversation: Conversation) -> int:
    """Exchanges, of all there were, that the model no longer sees; they are the oldest."""
    seen = sum(message["role"] == "user" for message in conversation.messages)
    return len(conversation.turns) + conversation.answering - seen


def cached_to(conversation: Conversation) -> tuple[int, int] | None:
    """Where the cached part of the present prompt ends: message and character in it.

    The system message counts as message -1, whether or not there is one; the others as in
    `conversation.messages`. None before the engine has looked it up.
    """
    turn = conversation.turn
    if turn is None or not turn.token_ids:
        return None
    contents = [conversation.system or "", *(m["content"] for m in conversation.messages)]
    prompt_ids = conversation.token_ids[: turn.prompt_tokens]
    tokenizer = conversation.engine.model.tokenizer
    assert tokenizer is not None
    message, characters = edge_in_messages(tokenizer, prompt_ids, turn.cached_tokens, contents)
    return message - 1, characters


def edge_in_messages(
    tokenizer: Tokenizer, prompt_ids: list[int], num_tokens: int, contents: list[str]
) -> tuple[int, int]:
    """The message in which the first `num_tokens` tokens end, and how many of its characters.

    Between two messages, in what the template writes, it is the beginning of the second.
    """
    text, edge = spell(tokenizer, prompt_ids), len(spell(tokenizer, prompt_ids[:num_tokens]))
    end = 0
    for index, content in enumerate(contents):
        start = text.find(content, end)
        if start < 0:  # the template has left it out
            continue
        end = start + len(content)
        if edge < end:
            return index, max(0, edge - start)
    return len(contents), 0
