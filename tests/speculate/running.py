"""Runs of an engine, with all that must be the same whoever drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdlab import Engine, EngineConfig, Model, RequestOutput, SamplingParams, Trace


@dataclass
class Seen:
    """What an engine computed for one request."""

    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """The row that each token of the output was drawn from."""
    kv: Tensor | None = None
    """K and V of all tokens but the newest, after the last step."""

    def is_same(self, other: Seen) -> bool:
        """Bit for bit."""
        assert self.kv is not None
        assert other.kv is not None
        return (
            self.token_ids == other.token_ids
            and torch.equal(torch.stack(self.logits), torch.stack(other.logits))
            and torch.equal(self.kv, other.kv)
        )


@dataclass
class Ran:
    """A run that has ended."""

    seen: list[Seen]
    """By prompt."""
    outputs: list[RequestOutput]
    trace: Trace
    leftovers: int
    """Blocks that a drafter with memory of its own still held when all had finished."""

    @property
    def tokens(self) -> list[list[int]]:
        return [output.token_ids for output in self.outputs]

    @property
    def num_accepted(self) -> int:
        return sum(output.metrics.num_accepted_tokens for output in self.outputs)

    @property
    def num_drafted(self) -> int:
        return sum(output.metrics.num_draft_tokens for output in self.outputs)


def run(
    model: Model,
    config: EngineConfig,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
) -> Ran:
    """Serve prompts together, and keep what the engine computed."""
    seen: dict[str, Seen] = {}
    with Engine(model, config) as engine:
        compute = engine.runner.run

        def watched(batch, clock, step):
            output = compute(batch, clock, step)
            rows = iter(() if output.logits is None else output.logits)
            for part in batch.scheduled:
                name = part.sequence.sequence_id
                own = [next(rows).clone() for _ in range(part.samples + len(part.draft))]
                drawn = output.sampled.get(name, [])
                mine = seen.setdefault(name, Seen())
                mine.token_ids += [each.token_id for each in drawn]
                mine.logits += own[: len(drawn)]
                end = part.start + len(drawn) if part.draft else part.end
                mine.kv = engine.kv_cache.read(part.sequence.block_table, end)
            return output

        engine.runner.run = watched  # type: ignore[method-assign]
        outputs = engine.generate(prompts, params)
        assert engine.pool.num_free == engine.config.num_blocks
        memory = getattr(engine.drafter, "memory", None)
        leftovers = 0
        if memory is not None:
            pool = memory.manager.pool
            leftovers = pool.num_blocks - pool.num_free
    return Ran([seen[o.request_id] for o in outputs], outputs, engine.trace, leftovers)
