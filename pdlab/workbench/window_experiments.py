"""What a model loses when it may look back on less, and where its attention goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdlab.attention import AttentionBackend, FusedAttention, Window, narrower, visible
from pdlab.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from pdlab.engine.admission import Prompt
from pdlab.engine.runner import ModelRunner
from pdlab.models import Model
from pdlab.trace import DROPPED, StepRecord, Trace
from pdlab.workbench.lesson import progress

Windows = tuple[Window | None, Window | None]
"""What prefill looks back on, and what decode does; None for everything."""


@dataclass(frozen=True)
class WindowLoss:
    """How well a model foretells a text under a pair of windows."""

    prefill: Window | None
    decode: Window | None
    num_tokens: int
    """Tokens of the text that were foretold in decode."""
    perplexity: float
    agreement: float
    """Share of positions whose most probable next token is that of full attention."""


def window_losses(
    model: Model, token_ids: list[int], settings: Mapping[str, Windows], *, num_prefill: int
) -> dict[str, WindowLoss]:
    """Prefill the first `num_prefill` tokens of a text, decode the others, look at each logit.

    The text itself is fed in, whatever the model would have said (teacher forcing); so all tokens
    go through the model together, each behind its own mask.

    Returns:
        A loss for each setting, after that of full attention in both phases, "full".
    """
    ids = torch.tensor(token_ids, device=model.decoder.device)
    settings = {"full": (None, None), **settings}
    losses: dict[str, WindowLoss] = {}
    likeliest: Tensor | None = None
    for name, (prefill, decode) in progress(list(settings.items()), "windows"):
        logits = forced_decode_logits(model, ids, num_prefill, prefill, decode)
        best = logits.argmax(-1)
        likeliest = best if likeliest is None else likeliest
        surprise = torch.nn.functional.cross_entropy(logits, ids[num_prefill + 1 :])
        losses[name] = WindowLoss(
            prefill=prefill,
            decode=decode,
            num_tokens=len(best),
            perplexity=math.exp(surprise.item()),
            agreement=(best == likeliest).float().mean().item(),
        )
    return losses


@torch.no_grad()
def forced_decode_logits(
    model: Model, ids: Tensor, num_prefill: int, prefill: Window | None, decode: Window | None
) -> Tensor:
    """Logits of every decode step but the last, float32 [len(ids) - num_prefill - 1, vocab_size].

    Positions below `num_prefill` look back through one window, the others through the other, over
    the K and V that the former left.

    Raises:
        ValueError: `num_prefill` leaves less than two tokens to decode, or nothing to prefill.
    """
    if not 1 <= num_prefill <= len(ids) - 2:
        raise ValueError(f"num_prefill={num_prefill} is not within 1 to {len(ids) - 2}")
    attention: AttentionBackend = FusedAttention()
    early, late = (layer_windows(model, window) for window in (prefill, decode))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = num_prefill
        first = attention.dense(q[:n], k[:n], v[:n], early[layer])
        return torch.cat([first, attention.dense(q[n:], k, v, late[layer])])

    hidden = model.decoder(ids, torch.arange(len(ids), device=ids.device), attend)
    return model.decoder.logits(hidden[num_prefill:-1])


def generate_switched(
    model: Model,
    prompt: Prompt,
    *,
    prefill: Window | None = None,
    decode: Window | None = None,
    max_tokens: int = 32,
) -> RequestOutput:
    """Generate greedily with one window in prefill and another in decode.

    No block is given back: only what is looked at differs.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with Engine(model, EngineConfig(enable_prefix_cache=False)) as engine:
        assert isinstance(engine.runner, ModelRunner)
        request_id = engine.submit(prompt, params)
        engine.runner.windows = layer_windows(model, prefill)
        while record := engine.step():
            if record.sequences[0].sampled is not None:
                engine.runner.windows = layer_windows(model, decode)
        return engine.collect(request_id)


class Recall(NamedTuple):
    """What is left of a fact in a story when a question at its end is answered."""

    text: str
    """The answer."""
    knows: bool
    """Whether the fact is in it."""
    fact_blocks: list[int]
    """Logical blocks that the fact stands in."""
    kept: list[int]
    """Logical blocks that were left in the last step."""
    num_visible: int
    """Keys that the last query saw, its own among them."""


def recall(
    model: Model,
    story: str,
    fact: str,
    *,
    window: int | None = None,
    sink_tokens: int = 0,
    heavy_tokens: int = 0,
    block_size: int = 8,
    max_tokens: int = 6,
) -> Recall:
    """Go on greedily after a story, and see whether its fact comes back.

    Window, sinks and heavy tokens are as in `EngineConfig`.

    Raises:
        ValueError: the fact is not in the story, or a knob does not fit.
    """
    before, found, _ = story.partition(fact)
    if not found or model.tokenizer is None:
        raise ValueError(f"fact={fact!r} is not in the story, or the model has no tokenizer")
    first = len(model.tokenizer.encode(before))
    last = len(model.tokenizer.encode(before + fact)) - 1
    config = EngineConfig(
        block_size=block_size,
        chunk_size=16,
        enable_prefix_cache=False,
        window=window,
        sink_tokens=sink_tokens,
        heavy_tokens=heavy_tokens,
    )
    with Engine(model, config) as engine:
        [output] = engine.generate(story, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    if output.error:
        raise output.error
    kept = [
        i for i, b in enumerate(engine.trace.steps[-1].residents[0].block_table) if b != DROPPED
    ]
    position = len(output.prompt_ids) + max_tokens - 2  # of the last query
    seen = torch.cat([torch.arange(i * block_size, (i + 1) * block_size) for i in kept])
    limit = None
    if window is not None and not heavy_tokens:  # heavy tokens stay, and are seen, in whole blocks
        limit = Window(window, sink_tokens)
    mask = visible(torch.tensor([position]), seen, limit)
    return Recall(
        text=output.text,
        knows=fact in output.text,
        fact_blocks=list(range(first // block_size, last // block_size + 1)),
        kept=kept,
        num_visible=int(mask.sum()),
    )


def layer_windows(model: Model, window: Window | None) -> list[Window | None]:
    """A window on every layer; those that were trained with a narrower one keep it."""
    return [narrower(window, own) for own in model.config.windows]


def sink_shares(trace: Trace, num_sinks: int, *, after: int = 0) -> dict[int, float]:
    """Share of the attention that goes to the first `num_sinks` tokens, by captured layer.

    Mean over heads and over the queries from position `after` on.

    Raises:
        ValueError: no attention weights were captured of such queries.
    """
    shares: dict[int, list[np.ndarray]] = {}
    for capture in trace.captures:
        first = max(0, after - capture.start)
        if capture.name == "attention" and first < capture.array.shape[1]:
            share = capture.array[:, first:, :num_sinks].sum(-1)
            shares.setdefault(capture.layer, []).append(share.ravel())
    if not shares:
        raise ValueError(f"after={after}: no attention was captured of a query there")
    return {layer: float(np.concatenate(parts).mean()) for layer, parts in shares.items()}


def blocks_held(step: StepRecord) -> int:
    """Blocks that the sequences of a step hold, those shared counted once."""
    return len({b for r in step.residents for b in r.block_table} - {DROPPED})
