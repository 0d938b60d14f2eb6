"""What each stage of one request took and cost, from the engine's records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlab.costmodel import Chunk, StepCost, step_cost
from pdlab.engine.recorder import cost_of
from pdlab.models import ModelConfig
from pdlab.trace import StepRecord

FIRST_TOKEN_STAGES = ("logits", "sample", "deliver")
"""The part of the last prefill step that turns its last hidden state into a token."""


@dataclass(frozen=True)
class Stage:
    """One row of the walk: the time is measured, FLOPs and bytes are counted from shapes."""

    name: str
    num_tokens: int
    time_s: float
    cost: StepCost | None = None
    """None for work that is not the model's."""
    kv_bytes: int | None = None
    """Bytes of K and V held when the stage is over."""


@dataclass(frozen=True)
class ElementBytes:
    """Sizes that the count of bytes depends on."""

    weight: float
    kv: float


def prefill_stages(
    records: Sequence[StepRecord], config: ModelConfig, element_bytes: ElementBytes
) -> list[Stage]:
    """A row for each prefill step, and one for the first token, which is part of the last step."""
    *chunks, last = records
    name = "prefill {}/{}" if chunks else "prefill"
    count = len(records)
    stages = [_whole_step(name.format(i, count), r) for i, r in enumerate(chunks, start=1)]
    part = last.sequences[0]
    body = step_cost(
        config,
        [Chunk(part.start, part.num_tokens)],
        num_sampled=0,
        weight_element_bytes=element_bytes.weight,
        kv_element_bytes=element_bytes.kv,
    )
    head_s = sum(last.stage_s.get(stage, 0.0) for stage in FIRST_TOKEN_STAGES)
    return [
        *stages,
        Stage(
            name.format(count, count),
            part.num_tokens,
            last.wall_s - head_s,
            body,
            last.kv_used_bytes,
        ),
        Stage("first token", 1, head_s, _difference(cost_of(last), body), last.kv_used_bytes),
    ]


def decode_stages(records: Sequence[StepRecord]) -> list[Stage]:
    """All decode steps in one row, and the step of median time; nothing if there was none."""
    if not records:
        return []
    total = sum((cost_of(record) for record in records), StepCost.zero())
    time_s = sum(record.wall_s for record in records)
    median = sorted(records, key=lambda record: record.wall_s)[len(records) // 2]
    return [
        Stage("decode", num_put_out(records), time_s, total, records[-1].kv_used_bytes),
        _whole_step("median step", median),
    ]


def num_put_out(records: Sequence[StepRecord]) -> int:
    """Tokens of the output that steps gave; with drafts, a step may give several."""
    return sum(len(part.put_out) for record in records for part in record.sequences)


def _whole_step(name: str, record: StepRecord) -> Stage:
    return Stage(name, record.num_tokens, record.wall_s, cost_of(record), record.kv_used_bytes)


def _difference(whole: StepCost, part: StepCost) -> StepCost:
    return StepCost(
        {name: flops - part.flops[name] for name, flops in whole.flops.items()},
        {name: size - part.bytes[name] for name, size in whole.bytes.items()},
    )
