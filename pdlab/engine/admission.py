"""What an engine lets in: configurations that fit the model, prompts that fit the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from pdlab.engine.config import EngineConfig, SamplingParams
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.output import RequestOutput
from pdlab.kvcache import blocks_for
from pdlab.models import Model

Prompt = str | list[int] | list[dict[str, str]]
"""Text, token ids, or chat messages (`[{"role": "user", "content": "..."}]`)."""
PromptList = Sequence[str] | Sequence[list[int]] | Sequence[Prompt]


def resolve(model: Model, config: EngineConfig) -> EngineConfig:
    """The configuration with every `auto` and None replaced by what it means for this model.

    Raises:
        ValueError: exact mode is asked of a model that is not fp32, or the length is more than the
            model was made for.
    """
    limit, dtype = model.config.max_model_len, model.decoder.dtype
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than {model.name} was made for: {limit}"
        )
    if config.exact and dtype is not torch.float32:
        raise ValueError(f"exact=True needs a model in fp32, not {dtype}")
    backend, kv_format = config.attention_backend, config.kv_format
    if backend == "auto":
        backend = "exact" if config.exact else "torch"
    return replace(
        config,
        kv_format=model.dtype_name if kv_format == "auto" else kv_format,
        attention_backend=backend,
        max_model_len=config.max_model_len or limit,
    )


def longest(config: EngineConfig) -> int:
    """`max_model_len` of a resolved configuration, in tokens."""
    assert config.max_model_len is not None
    return config.max_model_len


def tokenize(model: Model, prompt: Prompt) -> tuple[str, list[int]]:
    """The prompt as text (for people) and as token ids (for the model).

    Raises:
        ValueError: it is neither text, token ids nor chat, the model has no tokenizer for it, or no
            embedding for a token.
    """
    tokenizer = model.tokenizer
    if isinstance(prompt, list) and all(_is_int(t) for t in prompt):
        ids = cast(list[int], list(prompt))
        check_vocabulary(model, ids)
        return (tokenizer.decode(ids) if tokenizer else ""), ids
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt)
    if not is_chat and not isinstance(prompt, str):
        raise ValueError(f"prompt={prompt!r:.60} is neither text, token ids nor chat messages")
    if tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer: give token ids")
    text = (
        tokenizer.render_chat(cast(list[dict[str, str]], prompt)) if is_chat else cast(str, prompt)
    )
    ids = tokenizer.encode(text)
    check_vocabulary(model, ids)
    return text, ids


def check_vocabulary(model: Model, token_ids: list[int]) -> None:
    """Raise a ValueError for a token id that the model has no embedding for."""
    vocab_size = model.config.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt has token id {token_id}, vocab_size is {vocab_size}")


def check_fits(config: EngineConfig, prompt_ids: list[int], params: SamplingParams) -> None:
    """Refuse what can never be served, whatever else runs.

    Args:
        config: resolved.

    Raises:
        ValueError: the prompt is empty or too long, or would need more KV blocks than there are.
    """
    if not prompt_ids:
        raise ValueError("prompt is empty: it needs at least 1 token")
    num_prompt, limit = len(prompt_ids), longest(config)
    if num_prompt > limit:
        raise ValueError(f"prompt has {num_prompt} tokens, max_model_len is {limit}")
    most = min(params.max_tokens, max(1, limit - num_prompt))
    slots = num_prompt + most - 1  # the last token is never fed back
    needed = blocks_for(slots, config.block_size)
    if needed > config.num_blocks:
        raise ValueError(
            f"a prompt of {num_prompt} tokens with max_tokens={params.max_tokens} needs {needed} "
            f"KV blocks of {config.block_size} tokens, num_blocks is {config.num_blocks}"
        )


def as_prompts(prompts: object) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether it was one alone: text, token ids, or one conversation.

    Raises:
        ValueError: it is none of these, and no list of them.
    """
    if isinstance(prompts, tuple):
        prompts = list(prompts)
    if not isinstance(prompts, str | list):
        raise ValueError(
            "prompts must be text, a list of token ids, a list of chat messages, or a list of "
            f"these, not {type(prompts).__name__}"
        )
    alone = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | dict))
    return cast(list[Prompt], [prompts] if alone else list(prompts)), alone


def refused(prompt: Prompt, error: ValueError) -> RequestOutput:
    """The output of a request that was not let in."""
    return RequestOutput(
        request_id="",
        prompt=prompt if isinstance(prompt, str) else "",
        prompt_ids=[],
        token_ids=[],
        text="",
        finish_reason="error",
        metrics=RequestMetrics(arrival_s=0.0),
        error=error,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
