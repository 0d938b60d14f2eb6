"""Writes down what each step did, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from pdlab.costmodel import StepCost, step_cost
from pdlab.engine import admission
from pdlab.engine.allocations import AllocationMeter
from pdlab.engine.config import EngineConfig
from pdlab.engine.output import StopReason
from pdlab.engine.request import Request
from pdlab.engine.runner import StepOutput
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence, Scheduler
from pdlab.engine.sequence import Sequence
from pdlab.kvcache import KVMemory
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.sampling import Sampled, SamplingParams
from pdlab.trace import (
    DROPPED,
    BlockMove,
    DraftRecord,
    RequestRecord,
    Resident,
    SequenceRecord,
    Span,
    StepRecord,
    Trace,
)


class Spoken(NamedTuple):
    """What became of a sequence's text in a step."""

    released: str
    held: str
    stop_reason: StopReason


class Stock(NamedTuple):
    """How blocks and queues stood when a step was booked, before the next one was planned."""

    residents: list[Resident]
    waiting: list[str]
    swapped: dict[str, list[int]]
    blocks_freed: list[int]
    num_free_blocks: int
    cached_blocks: list[int]
    blocks_of_others: list[int]


class Recorder:
    """Makes StepRecords, and keeps them in a Trace if asked to."""

    def __init__(self, model: Model, memory: KVMemory, config: EngineConfig):
        self._model = model
        self._config = config
        self._pool = memory.manager.pool
        self._seen_by = admission.as_windows(model.config, config)
        self._block_bytes = memory.cache.block_bytes
        self._element_bytes = memory.cache.element_bytes
        self._weight_element_bytes = model.weight_element_bytes
        self._head_element_bytes = model.head_element_bytes
        self.trace = Trace(
            machine=describe_machine()
            | {
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "device": _device_name(model.device),
            },
            model={
                "name": model.name,
                "dtype": str(model.decoder.dtype).removeprefix("torch."),
                "weights": model.weights,
                "weight_bytes": model.weight_bytes,
                "config": model.config.to_dict(),
            },
            engine=config.to_dict()
            | {
                "kv_bytes_per_token": memory.cache.bytes_per_token,
                "kv_open_bytes": memory.cache.open_bytes,
            },
        )

    def add_request(self, request: Request, params: SamplingParams) -> None:
        if not self._config.record_trace:
            return
        first = request.samples[0]
        self._name_tokens(first.sequence.prompt_ids)
        self.trace.requests[request.request_id] = RequestRecord(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_ids=list(first.sequence.prompt_ids),
            params=params.to_dict() | {"seed": first.sequence.seed},
            arrival_s=first.metrics.arrival_s,
            priority=first.sequence.priority,
        )

    def add_abort(self, request_id: str, time_s: float) -> None:
        if self._config.record_trace:
            self.trace.aborted[request_id] = time_s

    def residents(self, scheduler: Scheduler, batch: ScheduledBatch) -> list[Resident]:
        """Who holds blocks while the batch runs, and for how many tokens once it has."""
        ends = {part.sequence.sequence_id: part.kept_end for part in batch.scheduled}
        return [
            Resident(i := s.sequence_id, list(s.block_table), ends.get(i, s.num_computed_tokens))
            for s in scheduler.holders
        ]

    def take_stock(
        self,
        scheduler: Scheduler,
        residents: list[Resident],
        *,
        blocks_freed: list[int],
        shares_memory: bool,
    ) -> Stock:
        """What has to be written down at once; the rest may wait."""
        waiting = scheduler.waiting
        return Stock(
            residents,
            [s.sequence_id for s in waiting],
            {s.sequence_id: list(s.host_table) for s in waiting if s.host_table},
            blocks_freed,
            self._pool.num_free,
            self._pool.cached_blocks,
            self._blocks_of_others(residents) if shares_memory else [],
        )

    def record(
        self,
        *,
        step: int,
        start_s: float,
        wall_s: float,
        stage_s: dict[str, float],
        batch: ScheduledBatch,
        output: StepOutput,
        moves: list[BlockMove],
        spoken: dict[str, Spoken],
        stock: Stock,
        activations: AllocationMeter | None,
        wasted: list[ScheduledSequence],
        spans: list[Span],
        epoch_s: float,
    ) -> StepRecord:
        """The record of one step; the KV figures follow from the stock's residents.

        Args:
            epoch_s: when the engine's clock began, by `time.perf_counter`.
        """
        use = _use_of(stock.residents, self._config.block_size)
        computed = [*batch.scheduled, *wasted]
        cost = step_cost(
            self._seen_by,
            [(part.start, part.num_tokens) for part in computed],
            num_sampled=sum(part.num_logit_rows for part in computed),
            weight_element_bytes=self._weight_element_bytes,
            head_element_bytes=self._head_element_bytes,
            kv_element_bytes=self._element_bytes,
        )
        record = StepRecord(
            step=step,
            start_s=start_s,
            wall_s=wall_s,
            stage_s=stage_s,
            sequences=_sequence_records(batch, output, spoken),
            residents=stock.residents,
            waiting=stock.waiting,
            preempted=[s.sequence_id for s in batch.preempted],
            blocks_freed=stock.blocks_freed,
            num_free_blocks=stock.num_free_blocks,
            kv_used_bytes=self._slot_bytes(use.filled),
            kv_wasted_bytes=use.blocks * self._block_bytes - self._slot_bytes(use.filled),
            flops=cost.flops,
            bytes_moved=cost.bytes,
            moves=moves,
            swapped=stock.swapped,
            cached_blocks=stock.cached_blocks,
            kv_shared_bytes=self._slot_bytes(use.shared),
            kv_swapped_bytes=self._block_bytes
            * sum(block != DROPPED for table in stock.swapped.values() for block in table),
            blocks_of_others=stock.blocks_of_others,
            activation_peak_bytes=activations.peak_bytes if activations else None,
            activation_total_bytes=activations.total_bytes if activations else None,
            spans=spans,
            wasted=[_wasted_record(part) for part in wasted],
            collectives=[c._replace(start_s=c.start_s - epoch_s) for c in output.collectives],
            rank_spans=[s._replace(start_s=s.start_s - epoch_s) for s in output.rank_spans],
        )
        if self._config.record_trace:
            self.trace.steps.append(record)
            self.trace.captures += output.captures
            drawn = [s for several in output.sampled.values() for s in several]
            self._name_tokens([s.token_id for s in drawn])
            self._name_tokens([c.token_id for s in drawn for c in s.top])
            self._name_tokens([token for part in computed for token in part.draft.token_ids])
        return record

    def _blocks_of_others(self, residents: list[Resident]) -> list[int]:
        """Blocks that sequences of other engines hold."""
        own = {block for resident in residents for block in resident.block_table}
        return [b for b in range(self._pool.num_blocks) if self._pool.ref_count(b) and b not in own]

    def _slot_bytes(self, num_slots: int) -> int:
        return num_slots * self._block_bytes // self._config.block_size

    def _name_tokens(self, token_ids: Iterable[int]) -> None:
        tokenizer, names = self._model.tokenizer, self.trace.tokens
        for token_id in token_ids:
            if token_id not in names:
                names[token_id] = tokenizer.token_text(token_id) if tokenizer else str(token_id)


class _Use(NamedTuple):
    """How residents use the pool: distinct blocks, their filled slots, slots saved by sharing."""

    blocks: int
    filled: int
    shared: int


def _use_of(residents: list[Resident], block_size: int) -> _Use:
    tables = [resident.block_table for resident in residents]
    parts = [divmod(resident.num_computed_tokens, block_size) for resident in residents]
    blocks = set[int]().union(*tables)
    full = set[int]().union(*[table[:n] for table, (n, _) in zip(tables, parts, strict=True)])
    uses = sum(resident.num_computed_tokens for resident in residents)
    if DROPPED in blocks:  # only full blocks are dropped
        uses -= block_size * sum(table.count(DROPPED) for table in tables)
        blocks.discard(DROPPED)
        full.discard(DROPPED)
    begun: dict[int, int] = {}
    for table, (num_full, rest) in zip(tables, parts, strict=True):
        if rest:
            block = table[num_full]
            begun[block] = max(rest, begun.get(block, 0))
    filled = len(full) * block_size + sum(n for block, n in begun.items() if block not in full)
    return _Use(len(blocks), filled, uses - filled)


def _sequence_records(
    batch: ScheduledBatch, output: StepOutput, spoken: dict[str, Spoken]
) -> list[SequenceRecord]:
    """One record for each scheduled sequence, followed by those that fork off it."""
    records = []
    for part in batch.scheduled:
        own = part.sequence
        name = own.sequence_id
        drawn = output.sampled.get(name, [])
        record = SequenceRecord(
            name,
            part.phase,
            part.start,
            own.token_ids[part.start : part.kept_end],
            part.blocks_taken,
            part.num_cached_tokens,
            draft=_draft(part, drawn),
        )
        _put_out(record, own, drawn, spoken[name])
        records.append(record)
        for fork in part.forks:
            name = fork.sequence_id
            record = SequenceRecord(name, part.phase, part.end, [], [], forked_from=own.sequence_id)
            _put_out(record, fork, output.sampled.get(name, []), spoken[name])
            records.append(record)
    return records


def _wasted_record(part: ScheduledSequence) -> SequenceRecord:
    """Of a sequence that was gone before its tokens could be drawn."""
    return SequenceRecord(
        sequence_id=part.sequence.sequence_id,
        phase=part.phase,
        start=part.start,
        token_ids=part.token_ids,
        blocks_taken=part.blocks_taken,
        num_cached_tokens=part.num_cached_tokens,
        finish_reason=part.sequence.finish_reason,
    )


def _draft(part: ScheduledSequence, sampled: list[Sampled]) -> DraftRecord | None:
    """What became of a part's draft, by the tokens that were drawn."""
    if not part.draft:
        return None
    proposed = None
    if (q := part.draft.probabilities) is not None:
        token_ids = torch.tensor(part.draft.token_ids, device=q.device)
        proposed = q.gather(1, token_ids[:, None])[:, 0].tolist()
    return DraftRecord(
        token_ids=part.draft.token_ids,
        num_accepted=max(0, len(sampled) - 1),
        proposed=proposed,
        probabilities=[s.proposed for s in sampled if s.proposed is not None],
    )


def _put_out(
    record: SequenceRecord, sequence: Sequence, drawn: list[Sampled], spoken: Spoken
) -> None:
    """Note what a sequence put out in this step."""
    record.text, record.held, record.stop_reason = spoken
    record.finish_reason = sequence.finish_reason
    if drawn:
        last = drawn[-1]
        record.sampled, record.probability = last.token_id, last.probability
        record.top, record.num_allowed = last.top, last.num_allowed


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cost_of(record: StepRecord) -> StepCost:
    """The work a recorded step did, in the cost model's terms."""
    return StepCost(dict(record.flops), dict(record.bytes_moved))
