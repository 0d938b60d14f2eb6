"""One prompt under one KV format: errors, bytes, perplexity, and the text that comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.forced import ForcedRun
from pdlab.kvcache import KVFormat, blocks_for
from pdlab.models import Model
from pdlab.workbench.kv_costs import open_block_bytes
from pdlab.workbench.kv_errors import Errors, KVErrors


@dataclass(frozen=True)
class Trial:
    """What a format did to a prompt.

    The arrays by channel are [2, num_layers, num_kv_heads, head_dim], K first.
    """

    kv_format: str
    bytes_per_token: float
    nll: float
    """Mean negative log-likelihood of the prompt's own tokens after the first, in nats."""
    k_error: Errors
    v_error: Errors
    attended_error: Errors
    sizes: NDArray[np.float32]
    """Mean absolute value of each channel, as it was written."""
    channel_errors: NDArray[np.float32]
    """Relative L2 error of each channel, over all tokens that are still cached."""
    token_ids: list[int]
    """The greedy continuation."""
    num_open: int
    """Tokens of the prompt that are still in full precision, because their block is not full."""
    open_bytes: int
    """Bytes of a block while it fills, beside the others; 0 for token-wise formats."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


def run_trial(
    model: Model,
    prompt_ids: list[int],
    kv_format: str,
    *,
    max_tokens: int = 24,
    block_size: int = 16,
) -> Trial:
    """Read a prompt of at least 2 tokens through a cache of this format, then go on greedily.

    Raises:
        ValueError: the format does not fit, or the prompt is too long.
    """
    num_blocks = blocks_for(len(prompt_ids) + max_tokens, block_size)
    config = EngineConfig(kv_format=kv_format, block_size=block_size, num_blocks=num_blocks)
    run = ForcedRun(model, config, longest=len(prompt_ids), chunk_size=len(prompt_ids))
    errors = KVErrors(model.config)
    [logits] = run.logits(prompt_ids, [errors])
    targets = torch.tensor(prompt_ids[1:], device=logits.device)
    nll = torch.nn.functional.cross_entropy(logits[:-1], targets)
    written, stored = errors.written(), run.read_kv().float()
    errors.end_text(run.read_kv)
    kept = ~stored[0, 0, :, 0, 0].isnan()  # a model's own window may have dropped the others
    stored, right = stored[:, :, kept], written[:, :, kept]
    params = SamplingParams(max_tokens=max_tokens)
    with Engine(model, config) as engine:
        [output] = engine.generate([prompt_ids], params)
    if output.error:
        raise output.error
    blockwise = run.memory.cache.open_blocks is not None
    return Trial(
        kv_format=kv_format,
        bytes_per_token=run.memory.cache.bytes_per_token,
        nll=float(nll),
        k_error=errors.relative("k"),
        v_error=errors.relative("v"),
        attended_error=errors.relative("attended"),
        sizes=written.abs().mean(2).cpu().numpy(),
        channel_errors=_relative(stored, right).cpu().numpy(),
        token_ids=output.token_ids,
        num_open=len(prompt_ids) % block_size if blockwise else 0,
        open_bytes=open_block_bytes(model.config, kv_format, block_size),
    )


def _relative(stored: Tensor, right: Tensor) -> Tensor:
    """Relative L2 error over the tokens of [2, num_layers, num_tokens, num_kv_heads, head_dim]."""
    return (stored - right).norm(dim=2) / right.norm(dim=2).clamp(min=1e-30)


@dataclass(frozen=True)
class Outlier:
    """The channel of K that stands out the most from its head."""

    layer: int
    head: int
    channel: int
    ratio: float
    """Its size over that of the head's median channel."""


def largest_outlier(sizes: NDArray[np.float32]) -> Outlier:
    """Find it in the K half of `Trial.sizes`."""
    ratios = sizes[0] / np.maximum(np.median(sizes[0], axis=-1, keepdims=True), 1e-30)
    layer, head, channel = (int(i) for i in np.unravel_index(ratios.argmax(), ratios.shape))
    return Outlier(layer, head, channel, float(ratios[layer, head, channel]))


def explain(
    k_format: KVFormat, v_format: KVFormat, outlier: Outlier, num_open: int
) -> list[tuple[str, str]]:
    """What the formats do with what stands side by side: (of what, the sentence)."""
    lines = [("K", _of_k(k_format, outlier)), ("V", _of_v(v_format))]
    if num_open:
        lines.append(
            (
                "",
                f"The last {num_open} tokens of the prompt are still in full precision: the scales "
                "of a block are known when it is full.",
            )
        )
    return lines


def _of_k(fmt: KVFormat, outlier: Outlier) -> str:
    name = f"channel {outlier.channel} of layer {outlier.layer}, head {outlier.head}"
    if fmt.scales is None:
        return _FLOATS[fmt.name]
    if fmt.scales == "channel":
        return (
            f"per channel: each channel has a scale of its own, so {name}, {outlier.ratio:.0f} "
            "times as large as the median, no longer coarsens its neighbours."
        )
    if fmt.name == "fp8":
        return (
            f"in fp8: the steps grow with the value, so {name} ({outlier.ratio:.0f} times the "
            "median) hardly coarsens its smaller neighbours."
        )
    shared = {
        "token": f"{fmt.group or 'all'} channels of a token share a scale",
        "head": "all channels and tokens of a block share a scale",
    }[fmt.scales]
    return (
        f"per {fmt.scales}: {shared}, so {name}, {outlier.ratio:.0f} times as large as the median, "
        "sets the step for its neighbours too."
    )


def _of_v(fmt: KVFormat) -> str:
    if fmt.scales is None:
        return _FLOATS[fmt.name]
    if fmt.scales == "channel":
        return "per channel: a scale reaches over the tokens of a block, and the largest sets it."
    if fmt.scales == "head":
        return "per head: one scale for a whole block, and its largest value sets the step."
    shared = f"{fmt.group} channels" if fmt.group else "all channels"
    return f"per token: {shared} of one token share a scale; no other token matters."


_FLOATS = {
    "fp32": "in fp32: kept as it was computed.",
    "fp16": "in fp16: 11 significant bits, each value rounded on its own.",
    "bf16": "in bf16: 8 significant bits, each value rounded on its own.",
}
