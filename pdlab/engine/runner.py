"""Executes a scheduled batch: forward pass, KV written and read, next tokens drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pdlab.attention import BACKENDS, AttentionBackend, Window, narrower
from pdlab.engine import admission
from pdlab.engine.attention_mass import AttentionMass
from pdlab.engine.batch import BatchInputs, prepare
from pdlab.engine.compiled import CompiledForward, Computed, compiled_survey
from pdlab.engine.config import EngineConfig
from pdlab.engine.probe import LayerObserver, Probe
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.engine.triton_forward import TritonForward
from pdlab.kvcache import KVMemory, KVWriter, Release, Unpacker, Wire, WritePlan, pack
from pdlab.models import Model
from pdlab.sampling import Sampled, Sampler, TokenLogprobs, logprobs_of, verify
from pdlab.trace import BlockMove, Capture, CollectiveRecord, RankSpan

EXACT_ROW_TILE = 16
PROMPT_LOGIT_ROWS = 128
"""Prompt tokens whose logits exist at once: a row of them is a number for each token there is."""


@dataclass
class StepOutput:
    """What a runner gives back for a batch.

    `sampled` has the new tokens by sequence id: of each scheduled sequence that is up to date, and
    of those that fork off it; behind a draft there may be several. `logits` are the rows sampled
    from, one for each such scheduled sequence and each token of its draft, float32 [num_rows,
    vocab_size]; None where nothing is sampled or no model stands behind the runner. A sequence in
    `failed` could not draw a token, and has none. `block_mass` is the attention that each block of
    a sequence received, by sequence id, where the runner keeps account of it. `prompt_logprobs`
    has, by sequence id and position, how probable the tokens of a prompt were, where a request asks
    for that.
    """

    sampled: dict[str, list[Sampled]]
    failed: dict[str, ValueError] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
    logits: Tensor | None = None
    captures: list[Capture] = field(default_factory=list)
    block_mass: dict[str, list[float]] = field(default_factory=dict)
    collectives: list[CollectiveRecord] = field(default_factory=list)
    """What ranks exchanged; here and in `rank_spans` times are those of `time.perf_counter`."""
    rank_spans: list[RankSpan] = field(default_factory=list)


class RunnerLost(RuntimeError):
    """Something that a runner computes with is gone: it will run no batch any more."""


OnLayer = Callable[[ScheduledBatch, int], None]
"""Told of each layer, by its number, when K and V of the batch's tokens are in the cache."""


class Runner(Protocol):
    """Anything that can execute a batch: the model, or a stand-in that checks the bookkeeping."""

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        """Move blocks, in this order; called before `run`, and done for good."""
        ...

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        """Compute the batch. A run that fails counts for nothing and is made again."""
        ...

    def commit(self) -> None:
        """The last run counts."""
        ...


@runtime_checkable
class KVPort(Protocol):
    """A runner whose K and V can leave it, and come from another one."""

    on_layer: OnLayer | None

    def read_kv(self, block_table: list[int], layers: range, tokens: range, wire: Wire) -> Tensor:
        """K and V of some layers and tokens of a sequence, as bytes, uint8 [num_bytes]."""
        ...

    def kv_writer(self, block_table: list[int], wire: Wire) -> KVWriter:
        """Takes what `read_kv` of another engine gave."""
        ...


class FastForward(Protocol):
    """A forward pass by other means than torch's operators."""

    def takes(self, inputs: BatchInputs) -> bool:
        """Whether it computes such a batch, sooner than torch."""
        ...

    def run(
        self,
        inputs: BatchInputs,
        plan: WritePlan,
        clock: StageClock,
        on_layer: Callable[[int], None] | None,
    ) -> Computed:
        """Compute a batch; `on_layer` is told of each layer whose K and V are written."""
        ...


class ModelRunner:
    """Runs batches on a model over paged KV memory.

    Args:
        window: what all layers look back on; layers that were trained with less keep that.
        weighs: keep account of the attention each block receives.
        fast: given the layers' windows, makes what computes batches instead of torch, which is left
            with what it does not take.
    """

    def __init__(
        self,
        model: Model,
        memory: KVMemory,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        exact: bool = False,
        window: Window | None = None,
        weighs: bool = False,
        fast: Callable[[Sequence[Window | None]], FastForward] | None = None,
    ):
        self.model = model
        self.memory = memory
        self.attention = attention
        self.sampler = sampler
        self.row_tile = EXACT_ROW_TILE if exact else None
        self.windows = [narrower(window, w) for w in model.config.windows]
        self.weighs = weighs
        self.fast = fast and fast(self.windows)
        self.probe: Probe | None = None
        self.on_layer: OnLayer | None = None
        self._plan: WritePlan | None = None

    @classmethod
    def of(cls, model: Model, memory: KVMemory, config: EngineConfig) -> ModelRunner:
        """As a resolved configuration asks for.

        Raises:
            ValueError: it asks for several ranks, which only an `Engine` has.
        """
        if config.num_ranks > 1:
            raise ValueError(
                f"tensor_parallel={config.tensor_parallel}, pipeline_parallel="
                f"{config.pipeline_parallel}: only an Engine computes on several ranks"
            )
        fast: Callable[[Sequence[Window | None]], FastForward] | None = None
        if config.backend == "cpu":
            fast = partial(CompiledForward, model, memory.cache)
        elif config.backend == "triton":
            fast = partial(TritonForward, model, memory.cache, config)
        return cls(
            model,
            memory,
            BACKENDS[config.attention_backend](),
            Sampler(config.top_k_recorded, compiled_survey() if config.backend == "cpu" else None),
            exact=config.exact,
            window=admission.attention_window(config),
            weighs=config.heavy_tokens > 0,
            fast=fast,
        )

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        self.memory.carry_out(orders)

    def commit(self) -> None:
        if self._plan:
            self.memory.cache.commit(self._plan)
            self._plan = None

    def close(self) -> None:
        """Give back what it holds."""

    def read_kv(self, block_table: list[int], layers: range, tokens: range, wire: Wire) -> Tensor:
        return pack(self.memory.cache, block_table, layers, tokens, wire)

    def kv_writer(self, block_table: list[int], wire: Wire) -> KVWriter:
        return Unpacker(self.memory.cache, block_table, wire)

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        """Compute the batch's tokens and draw a next token for each sequence that is up to date."""
        inputs = prepare(batch, self.memory.cache.block_size)
        observers: list[LayerObserver] = []
        if self.probe:
            observers.append(probing := self.probe.observe(batch, step))
        if self.weighs:
            observers.append(mass := AttentionMass(batch, self.memory.cache.block_size))
        hidden, logits = self.compute(inputs, clock, observers, batch)
        output = StepOutput({})
        if self.probe:
            output.captures = probing.captures
        if self.weighs:
            output.block_mass = mass.block_mass
        self._weigh_prompts(batch, inputs, hidden, output)
        if inputs.sample_rows:
            output.logits = logits
            self._sample(batch, logits, output, clock)
        return output

    def _weigh_prompts(
        self, batch: ScheduledBatch, inputs: BatchInputs, hidden: Tensor, output: StepOutput
    ) -> None:
        """How probable the prompts' tokens are; the logits of one at a time would fill memory."""
        for part, first_row in zip(batch.scheduled, inputs.attention.query_starts, strict=False):
            found: dict[int, TokenLogprobs] = {}
            k, positions = part.sequence.params.prompt_logprobs or 0, part.prompt_positions
            for at in range(positions.start, positions.stop, PROMPT_LOGIT_ROWS):
                tile = range(at, min(at + PROMPT_LOGIT_ROWS, positions.stop))
                rows = [first_row + position - part.start for position in tile]
                logits = self.logits(hidden, rows)
                following = part.sequence.token_ids[tile.start + 1 : tile.stop + 1]
                told = logprobs_of(logits, torch.tensor(following, device=logits.device), k)
                found |= dict(zip((position + 1 for position in tile), told, strict=True))
            if found:
                output.prompt_logprobs[part.sequence.sequence_id] = found

    def _sample(
        self, batch: ScheduledBatch, logits: Tensor, output: StepOutput, clock: StageClock
    ) -> None:
        """Draw from logits [rows, vocab_size]; a sequence that forks draws for each sample."""
        parts = [part for part in batch.scheduled if part.samples]
        sequences = [sequence for part in parts for sequence in part.drawers]
        if len(sequences) > len(parts):  # those that fork have no draft, and draw from one row each
            repeats = torch.tensor([len(p.drawers) for p in parts for _ in range(1 + len(p.draft))])
            logits = logits.repeat_interleave(repeats.to(logits.device), dim=0)
        drafts = [part.draft for part in parts for _ in part.drawers]
        for sequence, verdict in zip(
            sequences, verify(self.sampler, logits, sequences, drafts), strict=True
        ):
            output.sampled[sequence.sequence_id] = verdict.sampled
            if verdict.error:
                output.failed[sequence.sequence_id] = verdict.error
        clock.lap("sample")

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Of some rows of what `compute` gave, float32 [num_rows, vocab_size]."""
        return self.model.decoder.logits(hidden[rows], row_tile=self.row_tile)

    def compute(
        self,
        inputs: BatchInputs,
        clock: StageClock,
        observers: Sequence[LayerObserver] = (),
        batch: ScheduledBatch | None = None,
        x: Tensor | None = None,
    ) -> Computed:
        """Run the model on a batch.

        Args:
            observers: are shown what each layer computes, for which torch must compute it.
            batch: what the inputs are of, for `on_layer`.
            x: hidden states of the batch, where the model is a stage behind others.
        """
        plan = self._plan = self.memory.cache.write_plan(inputs.slot_mapping)
        on_layer = None
        if self.on_layer and batch:
            on_layer = partial(self.on_layer, batch)
        if self.fast and not observers and self.fast.takes(inputs):
            return self.fast.run(inputs, plan, clock, on_layer)
        hidden = self._forward(inputs, x, plan, clock, observers, on_layer)
        if not inputs.sample_rows:
            return Computed(hidden, hidden.new_empty(0, self.model.config.vocab_size))
        logits = self.logits(hidden, inputs.sample_rows)
        clock.lap("logits")
        return Computed(hidden, logits)

    def _forward(
        self,
        inputs: BatchInputs,
        x: Tensor | None,
        plan: WritePlan,
        clock: StageClock,
        observers: Sequence[LayerObserver],
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """Hidden states of every token of the batch, by torch, [num_tokens, hidden_size]."""
        device, cache = self.model.decoder.device, self.memory.cache

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, plan, k, v)
            if on_layer:
                clock.lap("attention")
                on_layer(layer)
                clock.lap("transfer")
            window = self.windows[layer]
            out = self.attention.paged(layer, q, cache, inputs.attention, window)
            if observers:
                clock.lap("attention")
                for observer in observers:
                    tensors = {"q": q, "k": k, "v": v, "attended": out}
                    observer(layer, tensors, cache, window)
                clock.lap("probe")
            return out

        if x is None:
            x = torch.tensor(inputs.token_ids, dtype=torch.long, device=device)
        positions = torch.tensor(inputs.positions, dtype=torch.long, device=device)
        clock.lap("prepare")
        return self.model.decoder(x, positions, attend, row_tile=self.row_tile, lap=clock.lap)
