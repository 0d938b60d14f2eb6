"""What an engine lets in: configurations that fit the model, prompts that fit the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from pdlab.attention import Window
from pdlab.engine import compiled, triton_forward
from pdlab.engine.config import EngineConfig
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.output import Completion, RequestOutput
from pdlab.kvcache import KVMemory, PagedKVCache, Retention, parse_kv_format
from pdlab.models import Model
from pdlab.models.config import ModelConfig
from pdlab.models.shard_plan import ShardPlan
from pdlab.requirements import require_int
from pdlab.sampling import SamplingParams

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
    _check_ranks(model, config)
    if model.config.num_kv_heads % config.kv_head_groups:
        raise ValueError(
            f"kv_head_groups={config.kv_head_groups} does not divide the "
            f"{model.config.num_kv_heads} KV heads of {model.name}"
        )
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than {model.name} was made for: {limit}"
        )
    if config.exact and dtype is not torch.float32:
        raise ValueError(f"exact=True needs a model in fp32, not {dtype}")
    attention, kv_format = config.attention_backend, config.kv_format
    if attention == "auto":
        attention = "exact" if config.exact else "torch"
    if kv_format == "auto":
        kv_format = model.dtype_name
    parse_kv_format(kv_format, model.config.head_dim)  # refuses groups that do not fit
    longest_len = config.max_model_len or limit
    return replace(
        config,
        window=None if config.window is None else min(config.window, longest_len),
        sink_tokens=min(config.sink_tokens, longest_len),
        heavy_tokens=min(config.heavy_tokens, longest_len),
        kv_format=kv_format,
        backend=_backend(model, replace(config, kv_format=kv_format)),
        attention_backend=attention,
        max_model_len=longest_len,
        micro_batches=1 if config.num_ranks > 1 and config.is_blockwise else config.micro_batches,
    )


def _check_ranks(model: Model, config: EngineConfig) -> None:
    """That the model can be cut over the ranks; that there are weights, where this is the one."""
    ShardPlan(model.config, config.tensor_parallel, config.pipeline_parallel)
    if config.num_ranks > 1 and model.packed:
        raise ValueError(
            f"weights={model.weights!r} are computed with on one rank only, and these are "
            f"tensor_parallel={config.tensor_parallel}, "
            f"pipeline_parallel={config.pipeline_parallel}"
        )
    if config.num_ranks == 1 and not model.has_weights:
        raise ValueError(f"model {model.name!r} has no weights here: load it, or use several ranks")


def _backend(model: Model, config: EngineConfig) -> str:
    """Which one `auto` is; or that which was asked for, if it can be had."""
    asked = config.backend
    if asked == "auto":
        on_gpu = model.device.type == "cuda"
        asked = "triton" if on_gpu else "cpu" if model.packed else "torch"
    if asked == "torch":
        return asked
    why_not = triton_forward.why_not if asked == "triton" else compiled.why_not
    reason = why_not(model, config)
    if reason and config.backend == asked:
        raise ValueError(f"backend={asked!r} cannot be had: {reason}")
    return "torch" if reason else asked


def retention(model: Model, config: EngineConfig) -> Retention:
    """Which tokens stay in the cache: what no layer will look at again may go.

    Block tables serve all layers, so one layer with full attention keeps every token.
    """
    windows = [
        w if config.window is None else min(w or config.window, config.window)
        for w in model.config.windows
    ]
    window = None if None in windows else max(w for w in windows if w)
    return Retention(window, config.sink_tokens, config.heavy_tokens)


def attention_window(config: EngineConfig) -> Window | None:
    """What every layer looks back on, at most.

    None also where the heaviest tokens stay: then the cache holds what may be seen, and no mask.
    """
    if config.window is None or config.heavy_tokens:
        return None
    return Window(config.window, config.sink_tokens)


def as_windows(shape: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model's shape with each layer's window as the engine narrows it, for counting.

    A query that sees `window` tokens and `sinks` before them sees as many as with one window of
    both lengths. With heavy tokens it sees about as many: they stay in whole blocks.
    """
    if config.window is None:
        return shape
    seen = config.window + config.sink_tokens + config.heavy_tokens
    windows = tuple(seen if w is None or w > config.window else w for w in shape.windows)
    return replace(shape, layer_windows=windows)


DECIDE_KV = (
    "block_size",
    "num_blocks",
    "num_swap_blocks",
    "kv_format",
    "kv_head_groups",
    "exact",
    "backend",
    "attention_backend",
    "window",
    "sink_tokens",
    "heavy_tokens",
)
"""Knobs that decide what K and V are, and where: the same in all engines that share a memory."""


def kind_of_memory(model: Model, config: EngineConfig) -> dict[str, object]:
    """What must be equal in all engines on one KV memory; `config` is resolved."""
    return {"model": model} | {name: getattr(config, name) for name in DECIDE_KV}


def make_memory(
    model: Model,
    config: EngineConfig,
    num_engines: int = 1,
    *,
    device: torch.device | str | None = None,
    cache_class: type[PagedKVCache] = PagedKVCache,
) -> KVMemory:
    """KV memory for engines with a resolved configuration; on the model's device unless told."""
    return KVMemory(
        model.config,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        kv_format=config.kv_format,
        device=model.decoder.device if device is None else device,
        num_swap_blocks=config.num_swap_blocks,
        head_groups=config.kv_head_groups,
        max_num_seqs=config.max_num_seqs * num_engines,
        retention=retention(model, config),
        cache_class=cache_class,
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


def check_token_ids(model: Model, params: SamplingParams) -> None:
    """Raise a ValueError for a parameter that names a token which the model does not have."""
    vocab_size = model.config.vocab_size
    bad_words = [i for word in params.bad_words if isinstance(word, tuple) for i in word]
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
        "bad_words": bad_words,
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise ValueError(f"{name} has token id {token_id}, vocab_size is {vocab_size}")
    if params.stop and model.tokenizer is None:
        raise ValueError(f"stop={params.stop[0]!r:.60}: the model has no tokenizer for texts")


def check_stream(params: SamplingParams | None, max_unread: int) -> None:
    """Raise a ValueError for what a stream cannot do."""
    require_int("max_unread", max_unread, least=1)
    if params and params.prompt_logprobs is not None:
        raise ValueError(
            f"prompt_logprobs={params.prompt_logprobs}: a stream has no place for them, use "
            "generate, or submit and collect"
        )


def check_vocabulary(model: Model, token_ids: list[int]) -> None:
    """Raise a ValueError for a token id that the model has no embedding for."""
    vocab_size = model.config.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt has token id {token_id}, vocab_size is {vocab_size}")


def check_fits(
    config: EngineConfig, kept: Retention, prompt_ids: list[int], params: SamplingParams
) -> None:
    """Refuse what can never be served, whatever else runs.

    Args:
        config: resolved.
        kept: which of its tokens stay in the cache.

    Raises:
        ValueError: the prompt is empty or too long, or would need more KV blocks than there are.
    """
    if not prompt_ids:
        raise ValueError("prompt is empty: it needs at least 1 token")
    num_prompt, limit = len(prompt_ids), longest(config)
    if num_prompt > limit:
        raise ValueError(f"prompt has {num_prompt} tokens, max_model_len is {limit}")
    most = min(params.max_tokens, max(1, limit - num_prompt))
    if params.n > config.max_num_seqs:
        raise ValueError(f"n={params.n} samples, max_num_seqs is {config.max_num_seqs}")
    slots = num_prompt + most - 1  # the last token is never fed back
    needed = kept.peak_blocks(slots, config.largest_chunk, config.block_size)
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
        completions=[Completion(0, [], "", "error", RequestMetrics(arrival_s=0.0), error=error)],
    )


def serve_all(
    prompts: Prompt | PromptList,
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    submit: Callable[[Prompt, SamplingParams | None], str],
    finish: Callable[[list[str]], None],
    discard: Callable[[str], None],
    collect: Callable[[str], RequestOutput],
) -> list[RequestOutput]:
    """Outputs of prompts in their order, on whatever serves them; see `Engine.generate`.

    Args:
        finish: runs these requests to their end.
        discard: ends a request and forgets it; called for all if anything raises.
    """
    batch, alone = as_prompts(prompts)
    all_params = params if isinstance(params, list | tuple) else [params] * len(batch)
    if len(all_params) != len(batch):
        raise ValueError(f"params has {len(all_params)} entries for {len(batch)} prompts")
    ids: list[str | RequestOutput] = []
    try:
        for prompt, each in zip(batch, all_params, strict=True):
            try:
                ids.append(submit(prompt, each))
            except ValueError as error:
                if alone:
                    raise
                ids.append(refused(prompt, error))
        finish([i for i in ids if isinstance(i, str)])
    except BaseException:
        for request_id in ids:
            if isinstance(request_id, str):
                discard(request_id)
        raise
    outputs = [collect(i) if isinstance(i, str) else i for i in ids]
    if alone and (failure := outputs[0].error):
        raise failure
    return outputs


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
