"""One rank: its share of the model and of the KV cache, and what it does when told."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pdlab.engine import admission
from pdlab.engine.batch import BatchInputs
from pdlab.engine.config import EngineConfig
from pdlab.engine.exactness import check_rows_are_alike
from pdlab.engine.runner import EXACT_ROW_TILE, ModelRunner
from pdlab.engine.timing import StageClock
from pdlab.kvcache import KVWriter, PagedKVCache
from pdlab.models import Model
from pdlab.models.shard_plan import Shard, ShardPlan
from pdlab.models.sharded import ShardedDecoder, shard_weights
from pdlab.parallel.collectives import Communicator
from pdlab.parallel.commands import (
    CarryOut,
    Command,
    Commit,
    Logits,
    OpenWriter,
    PackKV,
    Ran,
    ReadCache,
    Ready,
    Run,
    WriteKV,
)
from pdlab.parallel.wires import SlowWires, Wires
from pdlab.trace import RankSpan


class Rank:
    """Obeys commands, one after the other. What is sent in between goes over the wires.

    Args:
        plan: of the whole model.
        model: whose name, dtype and device the share has; its weights are not looked at.
        weights: all of the whole model's.
        config: the engine's, resolved.

    Raises:
        ValueError: exact mode cannot be kept with a share of this size, or memory is short.
    """

    def __init__(
        self,
        plan: ShardPlan,
        number: int,
        model: Model,
        weights: Iterable[tuple[str, Tensor]],
        config: EngineConfig,
        wires: Wires,
    ):
        self.shard: Shard = plan.shards[number]
        self.wires = SlowWires(wires, config.rank_link) if config.rank_link else wires
        self._communicator = Communicator(plan, self.shard, self.wires)
        combine = self._communicator.all_reduce if plan.tensor_parallel > 1 else None
        decoder = ShardedDecoder(plan.config, self.shard, combine, model.dtype, model.device)
        decoder.load_weights(shard_weights(plan.config, self.shard, weights))
        self.model = replace(model, config=decoder.config, decoder=decoder, tokenizer=None)
        if config.exact:
            check_rows_are_alike(self.model, EXACT_ROW_TILE)
        alone = replace(config, tensor_parallel=1, pipeline_parallel=1, **NO_RANKS)
        self.memory = admission.make_memory(self.model, alone)
        self._runner = ModelRunner.of(self.model, self.memory, alone)
        self._hidden: list[Tensor] = []
        self._writers: dict[int, KVWriter] = {}
        self._gathers = plan.tensor_parallel > 1

    @property
    def ready(self) -> Ready:
        decoder = self.model.decoder
        prints = fingerprints_of(decoder.named_weights().values())
        return Ready(decoder.weight_bytes, self.memory.nbytes, prints)

    def obey(self, command: Command) -> Any:
        """Do it; the answer, if there is one."""
        match command:
            case Run(micro_batches):
                return self._run(micro_batches)
            case Commit():
                self._runner.commit()
            case CarryOut(orders):
                self._runner.carry_out(orders)
            case Logits(rows):
                return self._logits(rows)
            case ReadCache(table, num_tokens, on_host, is_raw):
                cache = self._cache(on_host)
                if is_raw:
                    return cache.raw(table, num_tokens)
                return [cache.read(table, num_tokens)]
            case PackKV(table, layers, tokens, wire):
                return self._runner.read_kv(table, layers, tokens, wire)
            case OpenWriter(writer, table, wire):
                self._writers = {writer: self._runner.kv_writer(table, wire)} | self._writers
            case WriteKV(writer, layers, tokens, payload):
                self._writers[writer].write(layers, tokens, payload)
        return None

    def _cache(self, on_host: bool) -> PagedKVCache:
        if not on_host:
            return self.memory.cache
        assert self.memory.host is not None
        return self.memory.host

    @torch.inference_mode()
    def _run(self, micro_batches: list[BatchInputs]) -> Ran:
        """Compute a step. Where `commit` has blocks to quantize, it is one micro-batch."""
        communicator, clock = self._communicator, StageClock(self.model.device)
        communicator.begin()
        self._hidden, logits, spans = [], [], []
        for number, inputs in enumerate(micro_batches):
            communicator.micro_batch = number
            x = None
            if self.shard.stage:
                num_tokens = len(inputs.token_ids)
                x = communicator.receive_on(num_tokens, self.model.dtype, self.model.device)
                clock.lap("communicate")
            start_s = time.perf_counter()
            ours = inputs if self.shard.has_head else replace(inputs, sample_rows=[])
            computed = self._runner.compute(ours, clock, x=x)
            if self.shard.has_head:
                self._hidden.append(computed.hidden)
                logits.append(self._whole(computed.logits) if ours.sample_rows else None)
            wall_s = time.perf_counter() - start_s
            spans.append(RankSpan(self.shard.rank, number, len(inputs.token_ids), start_s, wall_s))
            if not self.shard.has_head:
                communicator.send_on(computed.hidden)
        communicator.flush()
        clock.lap("communicate")
        found = [each for each in logits if each is not None]
        return Ran(
            torch.cat(found).cpu() if found else None,
            communicator.records,
            spans,
            self._apart(clock.stage_s),
        )

    def _apart(self, stage_s: dict[str, float]) -> dict[str, float]:
        """Stage times, with what the sums took counted as communication and not as theirs."""
        apart = dict(stage_s)
        for record in self._communicator.records:
            if record.kind == "all_reduce":
                apart[record.part] -= record.wall_s
                apart["communicate"] += record.wall_s
        return apart

    def _logits(self, rows: list[int]) -> Ran:
        self._communicator.begin()
        logits = None
        if self.shard.has_head:
            logits = self._whole(self._runner.logits(torch.cat(self._hidden), rows))
        records = self._communicator.records
        return Ran(None if logits is None else logits.cpu(), records, [], {})

    def _whole(self, logits: Tensor) -> Tensor | None:
        """The logits of all the vocabulary, on the stage's first rank."""
        return self._communicator.gather("logits", logits) if self._gathers else logits

    def close(self) -> None:
        self.wires.close()


NO_RANKS: dict[str, Any] = {"micro_batches": None, "rank_threads": None, "rank_link": None}
"""The knobs that a rank's own engine configuration must not have."""


def fingerprints_of(weights: Iterable[Tensor]) -> list[int]:
    """The bits of each weight, added up: whether two shares come of the same weights."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [
        int(weight.contiguous().view(whole[weight.element_size()]).sum(dtype=torch.int64))
        for weight in weights
    ]
