"""The ShardView widget: which rank holds what, and what travels between them in a step."""

from __future__ import annotations

from typing import Any

import traitlets

from pdlab.costmodel.predict import ELEMENT_BYTES
from pdlab.engine import Engine
from pdlab.models.shard_plan import ShardPlan
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.parallel import exchange_words
from pdlab.workbench.roofline_data import trace_dtype
from pdlab.workbench.shard_data import PARTS, exchanges, holdings, plan_of, uneven
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_FRAMES = 500
"""Steps that are sent to the browser, half a KB each; the footer says when it cuts."""


class ShardView(TraceWidget):
    """A row for each rank, with its layers, heads, MLP columns and its part of the vocabulary; and
    step by step, what the ranks told each other: bytes counted beside those of the formula, time.

    Pointing at what travels shows of which part of the ranks it comes.

    Args:
        run: a trace, or an engine that has run.
        step: the frame to begin with.

    Raises:
        ValueError: there is no step, or the trace does not say what model it was.
    """

    name = "shard_view"
    shared = ("transport",)

    header = traitlets.Dict().tag(sync=True)
    """Constants of the run: the grid, what each rank holds, what is not even."""
    frames = traitlets.List().tag(sync=True)
    """What travelled in each step."""
    step = traitlets.Int(0).tag(sync=True)
    """Number of the frame shown."""

    def __init__(self, run: Trace | Engine, step: int = 0) -> None:
        trace = run.trace if isinstance(run, Engine) else run
        if not isinstance(trace, Trace):
            raise ValueError(f"run={run!r:.60} must be a Trace or an Engine")
        if not trace.steps:
            raise ValueError("run holds no step: run the engine first")
        plan = plan_of(trace)
        super().__init__(
            header=_header(trace, plan),
            frames=[_frame(trace, record) for record in trace.steps[:MAX_FRAMES]],
        )
        self.step = step

    @property
    def frame(self) -> dict[str, Any]:
        """The step shown now."""
        frame: dict[str, Any] = self.frames[self.step]
        return frame

    def summary(self) -> str:
        held = self.header
        left = "; ".join(held["uneven"]) or "everything is cut evenly"
        return (
            f"{held['model']} on {held['grid']} ranks (tensor x pipeline): {left}. "
            f"{self.frame['title']}; recorded on {held['machine']}"
        )

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.frames) - 1))


def _header(trace: Trace, plan: ShardPlan) -> dict[str, Any]:
    c = plan.config
    return {
        "model": trace.model.get("name", "a model"),
        "grid": f"{plan.tensor_parallel} x {plan.pipeline_parallel}",
        "num_stages": plan.pipeline_parallel,
        "columns": [
            ["layers", "layers", c.num_layers],
            ["kv_heads", "KV heads", c.num_kv_heads],
            ["heads", "query heads", c.num_heads],
            ["mlp", "MLP columns", c.intermediate_size],
            ["vocabulary", "tokens", c.vocab_size],
        ],
        "ranks": holdings(plan, ELEMENT_BYTES[trace_dtype(trace)]),
        "uneven": uneven(plan),
        "parts": PARTS,
        "link": trace.engine.get("rank_link") or "",
        "host": trace.engine.get("rank_host", ""),
        "machine": machine_line(trace),
        "num_cut": max(0, len(trace.steps) - MAX_FRAMES),
    }


def _frame(trace: Trace, record: StepRecord) -> dict[str, Any]:
    told = exchanges(trace, record)
    rows: dict[int, int] = {s.micro_batch: s.num_tokens for s in record.rank_spans}
    return {
        "step": record.step,
        "phase": record.phase,
        "num_tokens": record.num_tokens,
        "micro_batches": list(rows.values()),
        "wall_s": record.wall_s,
        "wire_bytes": sum(each.wire_bytes for each in told),
        "title": exchange_words(record, told)
        if told
        else f"Step {record.step} ({record.phase}): one rank computed it alone",
        "exchanges": [each._asdict() for each in told],
    }
