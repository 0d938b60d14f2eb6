"""Executes a scheduled batch: forward pass, KV written and read, next tokens drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pdlab.attention import AttentionBackend
from pdlab.engine.batch import BatchInputs, prepare
from pdlab.engine.probe import Observer, Probe
from pdlab.engine.sampler import Sampled, Sampler
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.kvcache import PagedKVCache
from pdlab.models import Model
from pdlab.trace import Capture

EXACT_ROW_TILE = 16


@dataclass
class StepOutput:
    """What a runner gives back for a batch.

    `sampled` has one entry for each scheduled sequence, None where the prompt goes on.
    `logits` are the rows sampled from, float32 [num_sampled, vocab_size], or None where nothing is
    sampled or no model stands behind the runner.
    """

    sampled: list[Sampled | None]
    logits: Tensor | None = None
    captures: list[Capture] = field(default_factory=list)


class Runner(Protocol):
    """Anything that can execute a batch: the model, or a stand-in that checks the bookkeeping."""

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput: ...


class ModelRunner:
    """Runs batches on a model over a paged KV cache."""

    def __init__(
        self,
        model: Model,
        kv_cache: PagedKVCache,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        exact: bool = False,
    ):
        self.model = model
        self.kv_cache = kv_cache
        self.attention = attention
        self.sampler = sampler
        self.row_tile = EXACT_ROW_TILE if exact else None
        self.probe: Probe | None = None

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        """Compute the batch's tokens and draw a next token for each sequence that is up to date."""
        inputs = prepare(batch, self.kv_cache.block_size)
        observer = self.probe.observe(batch, step) if self.probe else None
        hidden = self._forward(inputs, clock, observer)
        captures = observer.captures if observer else []
        if not inputs.sample_rows:  # prompt chunks only, none of them the last
            return StepOutput([None] * len(batch.scheduled), None, captures)
        rows = torch.tensor(inputs.sample_rows, dtype=torch.long, device=hidden.device)
        logits = self.model.decoder.logits(hidden[rows], row_tile=self.row_tile)
        clock.lap("logits")
        sequences = [part.sequence for part in batch.scheduled if part.samples]
        drawn = iter(self.sampler.sample(logits, sequences))
        sampled = [next(drawn) if part.samples else None for part in batch.scheduled]
        clock.lap("sample")
        return StepOutput(sampled, logits, captures)

    def _forward(self, inputs: BatchInputs, clock: StageClock, observer: Observer | None) -> Tensor:
        """Hidden states of every token of the batch, [num_tokens, hidden_size]."""
        device = self.model.decoder.device
        slots = torch.tensor(inputs.slot_mapping, dtype=torch.long, device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv_cache.write(layer, slots, k, v)
            window = self.model.config.window(layer)
            out = self.attention.paged(layer, q, self.kv_cache, inputs.attention, window)
            if observer:
                clock.lap("attention")
                observer(layer, {"q": q, "k": k, "v": v, "attended": out}, self.kv_cache, window)
                clock.lap("probe")
            return out

        token_ids = torch.tensor(inputs.token_ids, dtype=torch.long, device=device)
        positions = torch.tensor(inputs.positions, dtype=torch.long, device=device)
        clock.lap("prepare")
        return self.model.decoder(
            token_ids, positions, attend, row_tile=self.row_tile, lap=clock.lap
        )
