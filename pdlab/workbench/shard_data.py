"""Which rank holds what of a model, and what the ranks told each other in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pdlab.costmodel import (
    collectives_of,
    rank_kv_bytes_per_token,
    rank_weight_bytes,
    wire_bytes_by,
)
from pdlab.costmodel.predict import ELEMENT_BYTES
from pdlab.engine.runner import EXACT_ROW_TILE as ROW_TILE
from pdlab.models.config import ModelConfig
from pdlab.models.shard_plan import ShardPlan, cut
from pdlab.trace.records import CollectiveRecord, SequenceRecord, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.roofline_data import trace_dtype

PARTS = {
    "embed": "embedding: partial rows, summed up",
    "output": "attention's projection: partial sums, summed up",
    "mlp": "MLP: partial sums, summed up",
    "hidden": "hidden states, to the next stage",
    "logits": "logits: slices of the vocabulary, to one rank",
}
"""What travels, in the order of a forward pass, and why."""


class Exchange(NamedTuple):
    """What travelled in a step for one reason, over all ranks."""

    part: str
    kind: str
    num_calls: int
    """Of the rank with the most."""
    num_bytes: int
    """Of the tensors on this rank."""
    wire_bytes: int
    """That left a rank for another, counted, over all ranks."""
    formula_bytes: int | None
    """The same by the cost model; None where the step's shape is not known."""
    wall_s: float
    """Of the rank that spent most time with it, waiting for others included."""


def plan_of(trace: Trace) -> ShardPlan:
    """The grid of ranks that a run was recorded on: 1 x 1 for one device.

    Raises:
        ValueError: the trace does not say what model it was.
    """
    if "config" not in trace.model:
        raise ValueError("trace.model has no config: the shape of its model is not known")
    return ShardPlan(
        ModelConfig(**trace.model["config"]),
        trace.engine.get("tensor_parallel", 1),
        trace.engine.get("pipeline_parallel", 1),
    )


def exchanges(trace: Trace, record: StepRecord) -> list[Exchange]:
    """What the ranks told each other in a step, by part, in the order of a forward pass."""
    formula = _by_formula(trace, record)
    found = []
    for part in PARTS:
        own = [c for c in record.collectives if c.part == part]
        by_rank: dict[int, list[CollectiveRecord]] = {}
        for each in own:
            by_rank.setdefault(each.rank, []).append(each)
        if not own:
            continue
        most = max(by_rank.values(), key=len)
        found.append(
            Exchange(
                part=part,
                kind=own[0].kind,
                num_calls=len(most),
                num_bytes=sum(c.num_bytes for c in most),
                wire_bytes=sum(c.wire_bytes for c in own),
                formula_bytes=None if formula is None else formula.get(part, 0),
                wall_s=max(sum(c.wall_s for c in calls) for calls in by_rank.values()),
            )
        )
    return found


def micro_batches_of(sequences: Sequence[SequenceRecord], most: int) -> list[tuple[int, int]]:
    """(rows, sampled rows) of each piece: the rows of the step, cut into at most so many."""
    sampled = [row >= s.num_tokens - s.num_drawn for s in sequences for row in range(s.num_tokens)]
    if not sampled:
        return []
    parts = cut(len(sampled), min(most, len(sampled)))
    return [(len(rows), sum(sampled[rows.start : rows.stop])) for rows in parts]


def _by_formula(trace: Trace, record: StepRecord) -> dict[str, int] | None:
    """Bytes on the wire by part, from the shapes alone; None where nobody wrote down how many rows
    had logits: where sequences were computed in vain, or a prompt's logprobs were asked for."""
    requests = {s: r for r in trace.requests.values() for s in r.sequence_ids}
    asked = [requests[s.sequence_id].params for s in record.sequences if s.sequence_id in requests]
    if record.wasted or any(params.get("prompt_logprobs") is not None for params in asked):
        return None
    plan = plan_of(trace)
    pieces = micro_batches_of(
        record.sequences, trace.engine.get("micro_batches") or plan.pipeline_parallel
    )
    told = collectives_of(
        plan.config,
        plan.tensor_parallel,
        plan.pipeline_parallel,
        pieces,
        int(ELEMENT_BYTES[trace_dtype(trace)]),
        ROW_TILE if trace.engine.get("exact") else None,
    )
    return {str(part): num_bytes for part, num_bytes in wire_bytes_by(told, "part").items()}


def holdings(plan: ShardPlan, element_bytes: float) -> list[dict[str, Any]]:
    """What each rank holds, as plain data: ranges as [first, end], bytes from the shapes."""
    weights = rank_weight_bytes(plan, element_bytes)
    kv = rank_kv_bytes_per_token(plan, element_bytes)
    names = ("layers", "kv_heads", "heads", "mlp", "vocabulary")
    return [
        {name: [getattr(s, name).start, getattr(s, name).stop] for name in names}
        | {
            "rank": s.rank,
            "stage": s.stage,
            "place": s.place,
            "has_embedding": s.has_embedding,
            "has_head": s.has_head,
            "weight_bytes": weights[s.rank],
            "kv_share": kv[s.rank] / sum(kv),
        }
        for s in plan.shards
    ]


def uneven(plan: ShardPlan) -> list[str]:
    """What cannot be cut evenly, in words: `3 KV heads on 2 ranks are 2 + 1`."""
    c = plan.config
    things = (
        ("KV heads", c.num_kv_heads, plan.tensor_parallel, "ranks"),
        ("layers", c.num_layers, plan.pipeline_parallel, "stages"),
        ("MLP columns", c.intermediate_size, plan.tensor_parallel, "ranks"),
        ("tokens of the vocabulary", c.vocab_size, plan.tensor_parallel, "ranks"),
    )
    return [
        f"{total:,} {thing} on {parts} {place} are "
        + " + ".join(f"{len(p):,}" for p in cut(total, parts))
        for thing, total, parts, place in things
        if total % parts
    ]
