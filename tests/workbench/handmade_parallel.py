"""A trace of several ranks made by hand: slots of 10 ms, sends of 2, collectives of 1.

What is exchanged follows from the cost model; that real runs exchange the same is tested on them.
"""

from __future__ import annotations

from dataclasses import replace

from pdlab.costmodel import collectives_of
from pdlab.models.catalog import SHAPES
from pdlab.models.shard_plan import ShardPlan
from pdlab.trace.records import CollectiveRecord, RankSpan, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.shard_data import micro_batches_of

from .handmade import two_requests

SLOT_S, SEND_S, CALL_S = 0.010, 0.002, 0.001
CONFIG = SHAPES["tiny-llama"]


def on_ranks(tensor_parallel: int, pipeline_parallel: int, micro_batches: int = 1) -> Trace:
    """`two_requests` as if so many ranks had computed it."""
    trace = two_requests()
    trace.model["config"] = CONFIG.to_dict()
    trace.engine |= {
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "micro_batches": micro_batches,
    }
    plan = ShardPlan(CONFIG, tensor_parallel, pipeline_parallel)
    trace.steps = [_on_ranks(plan, record, micro_batches) for record in trace.steps]
    return trace


def _on_ranks(plan: ShardPlan, record: StepRecord, most: int) -> StepRecord:
    pieces = micro_batches_of(record.sequences, most)
    told = collectives_of(plan.config, plan.tensor_parallel, plan.pipeline_parallel, pieces, 4)
    spans = []
    for shard in plan.shards:
        begin_s = record.start_s + shard.stage * (SLOT_S + SEND_S)
        spans += [
            RankSpan(shard.rank, i, rows, begin_s + i * SLOT_S, SLOT_S)
            for i, (rows, _) in enumerate(pieces)
        ]
    return replace(
        record,
        collectives=[CollectiveRecord(*each, record.start_s, CALL_S) for each in told],
        rank_spans=spans,
    )
