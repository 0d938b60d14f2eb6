"""Writes down what each step did, as plain data."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pdlab.costmodel import Chunk as CostChunk
from pdlab.costmodel import StepCost, step_cost
from pdlab.engine.config import EngineConfig
from pdlab.engine.request import Request
from pdlab.engine.runner import StepOutput
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence
from pdlab.kvcache import PagedKVCache
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.trace import RequestRecord, Resident, SequenceRecord, StepRecord, Trace


class Recorder:
    """Makes StepRecords, and keeps them in a Trace if asked to."""

    def __init__(self, model: Model, kv_cache: PagedKVCache, config: EngineConfig):
        self._model = model
        self._config = config
        self._slot_bytes = kv_cache.bytes_per_token
        self._element_bytes = kv_cache.element_bytes
        self.trace = Trace(
            machine=describe_machine()
            | {
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "device": _device_name(model.decoder.device),
            },
            model={
                "name": model.name,
                "dtype": str(model.decoder.dtype).removeprefix("torch."),
                "weight_bytes": model.decoder.weight_bytes,
                "config": model.config.to_dict(),
            },
            engine=config.to_dict() | {"kv_bytes_per_token": self._slot_bytes},
        )

    def add_request(self, request: Request) -> None:
        sequence = request.sequence
        if not self._config.record_trace:
            return
        self._name_tokens(sequence.prompt_ids)
        self.trace.requests[sequence.request_id] = RequestRecord(
            request_id=sequence.request_id,
            prompt=request.prompt,
            prompt_ids=list(sequence.prompt_ids),
            params=sequence.params.to_dict() | {"seed": sequence.seed},
            arrival_s=request.metrics.arrival_s,
        )

    def add_abort(self, request_id: str, time_s: float) -> None:
        if self._config.record_trace:
            self.trace.aborted[request_id] = time_s

    def residents(self, scheduler: Scheduler) -> list[Resident]:
        """Who holds blocks right now."""
        return [
            Resident(s.request_id, list(s.block_table), s.num_computed_tokens)
            for s in scheduler.running
        ]

    def record(
        self,
        *,
        step: int,
        start_s: float,
        wall_s: float,
        stage_s: dict[str, float],
        batch: ScheduledBatch,
        output: StepOutput,
        texts: list[str],
        residents: list[Resident],
        waiting: Iterable[Sequence],
        blocks_freed: list[int],
        num_free_blocks: int,
    ) -> StepRecord:
        """The record of one step; the KV figures follow from `residents`."""
        used = sum(r.num_computed_tokens for r in residents)
        taken = sum(len(r.block_table) for r in residents) * self._config.block_size
        cost = step_cost(
            self._model.config,
            [CostChunk(part.start, part.num_tokens) for part in batch.scheduled],
            num_sampled=sum(part.samples for part in batch.scheduled),
            weight_element_bytes=self._model.decoder.dtype.itemsize,
            kv_element_bytes=self._element_bytes,
        )
        record = StepRecord(
            step=step,
            start_s=start_s,
            wall_s=wall_s,
            stage_s=stage_s,
            sequences=_sequence_records(batch, output, texts),
            residents=residents,
            waiting=[s.request_id for s in waiting],
            preempted=[s.request_id for s in batch.preempted],
            blocks_freed=blocks_freed,
            num_free_blocks=num_free_blocks,
            kv_used_bytes=used * self._slot_bytes,
            kv_wasted_bytes=(taken - used) * self._slot_bytes,
            flops=cost.flops,
            bytes_moved=cost.bytes,
        )
        if self._config.record_trace:
            self.trace.steps.append(record)
            self.trace.captures += output.captures
            for sampled in output.sampled:
                if sampled:
                    self._name_tokens([sampled.token_id, *(c.token_id for c in sampled.top)])
        return record

    def _name_tokens(self, token_ids: Iterable[int]) -> None:
        tokenizer = self._model.tokenizer
        for token_id in token_ids:
            if token_id not in self.trace.tokens:
                name = tokenizer.token_text(token_id) if tokenizer else str(token_id)
                self.trace.tokens[token_id] = name


def _sequence_records(
    batch: ScheduledBatch, output: StepOutput, texts: list[str]
) -> list[SequenceRecord]:
    records = []
    for part, sampled, text in zip(batch.scheduled, output.sampled, texts, strict=True):
        sequence = part.sequence
        records.append(
            SequenceRecord(
                request_id=sequence.request_id,
                phase=part.phase,
                start=part.start,
                token_ids=sequence.token_ids[part.start : part.end],
                blocks_taken=part.blocks_taken,
                sampled=sampled.token_id if sampled else None,
                probability=sampled.probability if sampled else None,
                top=sampled.top if sampled else [],
                text=text,
                finish_reason=sequence.finish_reason,
            )
        )
    return records


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cost_of(record: StepRecord) -> StepCost:
    """The work a recorded step did, in the cost model's terms."""
    return StepCost(dict(record.flops), dict(record.bytes_moved))
