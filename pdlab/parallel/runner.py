"""The runner of a parallel engine: it has the ranks compute, and draws the tokens itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdlab.attention import BACKENDS
from pdlab.engine import admission
from pdlab.engine.batch import BatchInputs
from pdlab.engine.compiled import Computed
from pdlab.engine.config import EngineConfig
from pdlab.engine.probe import LayerObserver
from pdlab.engine.runner import ModelRunner, StepOutput
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.kvcache import KVLayout, KVMemory, KVWriter, PagedKVCache, Release, Wire
from pdlab.models import Model
from pdlab.models.shard_plan import Shard, ShardPlan
from pdlab.models.sharded import shard_weights
from pdlab.parallel.cache import ShardedKVCache
from pdlab.parallel.commands import (
    CarryOut,
    Commit,
    Logits,
    OpenWriter,
    PackKV,
    Ran,
    Run,
    WriteKV,
)
from pdlab.parallel.group import Line, RankGroup
from pdlab.parallel.micro_batches import cut_batch
from pdlab.parallel.rank import fingerprints_of
from pdlab.sampling import Sampler
from pdlab.trace import BlockMove


class ParallelRunner(ModelRunner):
    """Runs batches on the ranks of one model. Begins them; `close` ends them.

    Args:
        memory: from `sharded_memory`: bookkeeping alone, the ranks have the bytes.
        config: resolved.

    Attributes:
        micro_batches: most pieces of a step; may be changed between two steps.

    Raises:
        RankLost: a rank did not begin.
        ValueError: a rank cannot do what it is to do.
    """

    def __init__(self, model: Model, memory: KVMemory, config: EngineConfig):
        attention = BACKENDS[config.attention_backend]()  # which only the ranks make use of
        super().__init__(model, memory, attention, Sampler(config.top_k_recorded))
        self.plan = ShardPlan(model.config, config.tensor_parallel, config.pipeline_parallel)
        self.micro_batches = config.micro_batches or config.pipeline_parallel
        self._ran: list[Ran] = []
        self._num_writers = 0
        self.ranks = RankGroup(lines_of(model, config))
        try:
            self.ranks.begin()
            self._check_weights()
        except BaseException:
            self.ranks.close()
            raise
        for cache in (memory.cache, memory.host):
            if cache:
                assert isinstance(cache, ShardedKVCache)
                cache.attach(self.ranks, self.plan, on_host=cache is memory.host)

    def _check_weights(self) -> None:
        """That the ranks hold the weights that are here, if any are."""
        if not self.model.has_weights:
            return
        whole = self.model.decoder.named_weights()
        for shard, ready in zip(self.plan.shards, self.ranks.ready, strict=True):
            ours = dict(shard_weights(self.plan.config, shard, whole.items()))
            if sorted(fingerprints_of(ours.values())) != sorted(ready.fingerprints):
                raise ValueError(
                    f"model {self.model.name!r} was changed after it was loaded, and rank "
                    f"{shard.rank} loaded it anew: use rank_host='thread'"
                )

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        if listed := list(orders):
            self.ranks.tell(CarryOut(listed))

    def commit(self) -> None:
        self.ranks.tell(Commit())

    def close(self) -> None:
        self.ranks.close()

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        output = super().run(batch, clock, step)
        output.collectives = [record for ran in self._ran for record in ran.collectives]
        output.rank_spans = [span for ran in self._ran for span in ran.spans]
        return output

    def compute(
        self,
        inputs: BatchInputs,
        clock: StageClock,
        observers: Sequence[LayerObserver] = (),
        batch: ScheduledBatch | None = None,
        x: Tensor | None = None,
    ) -> Computed:
        """Have the ranks compute a batch. Its hidden states stay with them: none are returned."""
        assert not observers, "nobody can look into a rank"
        self._ran = self.ranks.ask(Run(cut_batch(inputs, self.micro_batches)))
        last = self._ran[self._first_of_last_stage]
        clock.split(last.stage_s, "dispatch")
        if self.on_layer and batch:
            for layer in range(self.model.config.num_layers):
                self.on_layer(batch, layer)
            clock.lap("transfer")
        nothing = torch.empty(0, self.model.config.vocab_size)
        return Computed(nothing, nothing if last.logits is None else last.logits)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Of some rows of the last step, float32 [num_rows, vocab_size]."""
        answers = self.ranks.ask(Logits(rows))
        self._ran += answers
        logits: Tensor = answers[self._first_of_last_stage].logits
        return logits

    @property
    def _first_of_last_stage(self) -> int:
        return self.plan.num_ranks - self.plan.tensor_parallel

    # --- K and V that leave and come ------------------------------------------------------------

    def read_kv(self, block_table: list[int], layers: range, tokens: range, wire: Wire) -> Tensor:
        commands = []
        for shard in self.plan.shards:
            theirs = _within(layers, shard.layers)
            own = local_wire(wire, shard)
            commands.append(PackKV(list(block_table), theirs, tokens, own) if theirs else None)
        answers = self.ranks.ask_each(commands)
        payload = torch.empty(wire.num_bytes(len(tokens), len(layers)), dtype=torch.uint8)
        for shard, answer in zip(self.plan.shards, answers, strict=True):
            if answer is not None:
                for whole, part in _parts(wire, shard, layers, tokens, payload, answer):
                    whole.copy_(part)
        return payload

    def kv_writer(self, block_table: list[int], wire: Wire) -> KVWriter:
        self._num_writers += 1
        number = self._num_writers
        self.ranks.ask_each(
            [
                OpenWriter(number, list(block_table), local_wire(wire, shard))
                for shard in self.plan.shards
            ]
        )
        return _Writer(self, number, wire)


class _Writer:
    """Deals payloads out to the ranks' own writers."""

    def __init__(self, runner: ParallelRunner, number: int, wire: Wire):
        self._runner = runner
        self._number = number
        self._wire = wire

    def write(self, layers: range, tokens: range, payload: Tensor) -> None:
        commands: list[WriteKV | None] = []
        for shard in self._runner.plan.shards:
            theirs = _within(layers, shard.layers)
            if not theirs:
                commands.append(None)
                continue
            own = local_wire(self._wire, shard)
            part = torch.empty(own.num_bytes(len(tokens), len(theirs)), dtype=torch.uint8)
            for whole, mine in _parts(self._wire, shard, layers, tokens, payload, part):
                mine.copy_(whole)
            commands.append(WriteKV(self._number, theirs, tokens, part))
        self._runner.ranks.ask_each(commands)


def local_wire(wire: Wire, shard: Shard) -> Wire:
    """How the K and V of one rank's layers and heads travel."""

    def ours(layout: KVLayout) -> KVLayout:
        return replace(
            layout,
            num_layers=len(shard.layers),
            num_kv_heads=len(shard.kv_heads),
            head_groups=1,
        )

    return Wire(ours(wire.sender), ours(wire.receiver))


def _within(layers: range, of_rank: range) -> range:
    """Those of the rank's layers that are meant, numbered as the rank does."""
    start = max(layers.start, of_rank.start)
    return range(start - of_rank.start, max(start, min(layers.stop, of_rank.stop)) - of_rank.start)


def _parts(
    wire: Wire, shard: Shard, layers: range, tokens: range, payload: Tensor, own: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the whole payload and of a rank's own that hold the same: layers and heads of it."""
    theirs = _within(layers, shard.layers)
    first = theirs.start + shard.layers.start - layers.start
    heads = slice(shard.kv_heads.start, shard.kv_heads.stop)
    num_tokens = len(tokens)
    for whole, local in zip(
        wire.views(payload, num_tokens), local_wire(wire, shard).views(own, num_tokens), strict=True
    ):
        for ours, mine in zip(whole, local, strict=True):
            yield ours[first : first + len(theirs), :, heads], mine


def sharded_memory(model: Model, config: EngineConfig) -> KVMemory:
    """The bookkeeping of a parallel engine's KV memory; the bytes are taken by its ranks.

    Raises:
        ValueError: all ranks are on this machine, which has not so much memory.
    """
    if model.device.type == "cpu" and config.rank_host in ("process", "thread"):
        _check_memory(model, config)
    return admission.make_memory(model, config, device="meta", cache_class=ShardedKVCache)


def _check_memory(model: Model, config: EngineConfig) -> None:
    """Before the bookkeeping of more blocks than there could be takes all of it."""
    one = PagedKVCache(model.config, 1, config.block_size, config.kv_format, "meta")
    needed = one.block_bytes * (config.num_blocks + config.num_swap_blocks)
    try:
        torch.empty(needed, dtype=torch.uint8)
    except RuntimeError as error:
        raise ValueError(
            f"num_blocks={config.num_blocks} and num_swap_blocks={config.num_swap_blocks} of "
            f"block_size={config.block_size} tokens need {needed / 2**30:,.1f} GiB of KV memory, "
            "which this machine does not have"
        ) from error


def lines_of(model: Model, config: EngineConfig) -> Sequence[Line]:
    """The ranks that a resolved configuration asks for, begun."""
    match config.rank_host:
        case "thread":
            from pdlab.parallel.hosts.threads import thread_lines

            return thread_lines(model, config)
        case "process":
            from pdlab.parallel.hosts.processes import process_lines

            return process_lines(model, config)
        case "torchrun":
            from pdlab.parallel.hosts.torchrun import torchrun_lines

            return torchrun_lines(model, config)
        case "ray":
            from pdlab.parallel.hosts.ray_actors import ray_lines

            return ray_lines(model, config)
    raise AssertionError(config.rank_host)
