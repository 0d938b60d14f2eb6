"""Small random models, and ways to watch what an engine computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import pdlab
from pdlab import Engine, EngineConfig, Model, ModelConfig, NaiveGenerator, SamplingParams
from pdlab.attention import ExactAttention, narrower
from pdlab.engine import Prompt
from pdlab.engine.runner import EXACT_ROW_TILE, StepOutput
from pdlab.engine.scheduler import ScheduledSequence
from pdlab.engine.sequence import Sequence
from pdlab.models.decoder import Decoder
from pdlab.models.random_weights import random_weights

ROOT = Path(pdlab.__file__).parents[1]

TINY = ModelConfig(
    family="llama",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=128,
)
SHAPES: dict[str, ModelConfig] = {
    "group-of-1": replace(TINY, num_kv_heads=4),
    "group-of-2": TINY,
    "9-over-3": replace(TINY, num_heads=9, num_kv_heads=3),
    "windowed": replace(TINY, family="mistral", layer_windows=(5, 17)),
}
"""Shapes that differ in how attention reads the KV cache."""

_models: dict[tuple[str, int], Model] = {}


def random_model(config: ModelConfig = TINY, seed: int = 0) -> Model:
    """A model of this shape with seeded random weights, on the CPU, in float32, speechless."""
    key = (repr(config), seed)
    if key not in _models:
        device, dtype = torch.device("cpu"), torch.float32
        decoder = Decoder(config, dtype, device)
        decoder.load_weights(random_weights(config, dtype, device, seed))
        _models[key] = Model("random", config, decoder, None, device, dtype, "a test", "none")
    return _models[key]


def random_prompt(length: int, vocab_size: int = TINY.vocab_size, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def load_prompts() -> dict[str, Prompt]:
    """The prompts that the project ships, by name: text or chat messages."""
    entries = json.loads((ROOT / "data" / "prompts.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry["prompt"] for entry in entries}


@dataclass
class Seen:
    """What an engine computed for one sequence."""

    logits: list[Tensor] = field(default_factory=list)
    """The row that each token was sampled from."""
    kv: list[Tensor] = field(default_factory=list)
    """K and V of all its tokens so far, after each step that ran any of them."""


def watch(engine: Engine, *, kv: bool = True) -> dict[str, Seen]:
    """Keep the logits, and the KV bytes, of every sequence from now on, by its id."""
    seen: dict[str, Seen] = {}
    run = engine.runner.run

    def watched(batch, clock, step):
        output = run(batch, clock, step)
        rows = iter(() if output.logits is None else output.logits)
        for part in batch.scheduled:
            mine = seen.setdefault(part.sequence.sequence_id, Seen())
            for drawer, own in rows_of(part, rows, output):
                seen.setdefault(drawer.sequence_id, Seen()).logits += own
            if kv:
                end = end_of(part, output)
                mine.kv.append(engine.kv_cache.read(part.sequence.block_table, end))
        return output

    engine.runner.run = watched  # type: ignore[method-assign]
    return seen


def rows_of(
    part: ScheduledSequence, rows: Iterator[Tensor], output: StepOutput
) -> list[tuple[Sequence, list[Tensor]]]:
    """The rows that each of those who draw from a part drew a token from."""
    own = [next(rows).clone() for _ in range(part.samples + len(part.draft))]
    return [(each, own[: len(output.sampled[each.sequence_id])]) for each in part.drawers]


def end_of(part: ScheduledSequence, output: StepOutput) -> int:
    """Tokens whose K and V stand when a part has been computed: not those of a wrong draft."""
    taken = output.sampled.get(part.sequence.sequence_id, [])
    return part.start + len(taken) if part.draft else part.end


def run_watched(
    model: Model,
    config: EngineConfig,
    prompts: list,
    params: SamplingParams | list[SamplingParams],
    *,
    kv: bool = True,
) -> tuple[list[list[int]], list[Seen], Engine]:
    """Tokens of each prompt, what was seen of it, and the (closed) engine."""
    with Engine(model, config) as engine:
        seen = watch(engine, kv=kv)
        outputs = engine.generate(prompts, params)
    return [o.token_ids for o in outputs], [seen[o.request_id] for o in outputs], engine


def plain_kv(model: Model, token_ids: list[int]) -> Tensor:
    """K and V of a text in exact mode, without engine, blocks or cache.

    Returns [2, num_layers, num_tokens, num_kv_heads, head_dim].
    """
    layers = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers.append(torch.stack((k, v)))
        return ExactAttention().dense(q, k, v, narrower(None, model.config.window(layer)))

    positions = torch.arange(len(token_ids))
    model.decoder(torch.tensor(token_ids), positions, attend, row_tile=EXACT_ROW_TILE)
    return torch.stack(layers, dim=1)


def tie_gaps(model: Model, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
    """How far each token's logit lies below the best one, after the same tokens before it.

    0 for a greedy token. The naive generator in exact mode is the judge.
    """
    logits = NaiveGenerator(model, exact=True).logits(prompt_ids + token_ids[:-1])
    return gaps_below_best(logits[len(prompt_ids) - 1 :], token_ids)


def gaps_below_best(logits: Tensor, token_ids: list[int]) -> list[float]:
    """logits: [len(token_ids), vocab_size], the row before each token."""
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return (logits.amax(dim=-1) - chosen).tolist()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
