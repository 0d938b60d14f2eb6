"""The MemoryLedger widget: where every byte is, over the steps of a run and at one of them."""

from __future__ import annotations

from typing import Any

import traitlets

from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.memory_data import Ledger, block_bytes, ledger, shares_memory
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_FRAMES = 2000
"""Steps that one ledger sends to the browser; its footer says when it cuts."""


class MemoryLedger(TraceWidget):
    """Weights, KV pool, host memory and activations: every byte is in exactly one row.

    The chart shows the KV pool (and host memory, if there is any) over all steps; the table and
    the bar show one step, and set them beside the weights.

    Args:
        trace: a run of the engine.
        step: number of the recorded step to begin with, counted from 0.
    """

    name = "ledger"
    shared = ("transport",)

    header = traitlets.Dict().tag(sync=True)
    """Constants of the run: bytes of the pools, of the weights and of the open area."""
    frames = traitlets.List().tag(sync=True)
    """The bytes of every step, as in `Ledger`."""
    step = traitlets.Int(0).tag(sync=True)
    """Number of the recorded step shown, counted from 0."""

    def __init__(self, trace: Trace, step: int = 0) -> None:
        if not trace.steps:
            raise ValueError("trace holds no step: run the engine first")
        books = [ledger(trace, record) for record in trace.steps[:MAX_FRAMES]]
        super().__init__(
            header={
                "weights": books[0].weights,
                "pool": books[0].pool,
                "open": books[0].open,
                "host": books[0].host,
                "block_bytes": block_bytes(trace),
                "num_blocks": trace.engine["num_blocks"],
                "dtype": trace.model.get("dtype", ""),
                "shares_memory": shares_memory(trace),
                "machine": machine_line(trace),
                "cut": max(0, len(trace.steps) - MAX_FRAMES),
            },
            frames=[_frame(r, b) for r, b in zip(trace.steps, books, strict=False)],
        )
        self.step = step

    @property
    def frame(self) -> dict[str, Any]:
        """The bytes of the step shown now."""
        return self.frames[self.step]

    def summary(self) -> str:
        frame = self.frame
        return f"Memory ledger, engine step {frame['step']}: {frame['title']}"

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.frames) - 1))


def _frame(record: StepRecord, book: Ledger) -> dict[str, Any]:
    title, note = _caption(record, book)
    return {
        "step": record.step,
        "phase": record.phase,
        "num_sequences": len(record.residents),
        "title": title,
        "note": note,
        "activations_total": record.activation_total_bytes,
        **book._asdict(),
    }


def _caption(record: StepRecord, book: Ledger) -> tuple[str, str]:
    """What this step's ledger says, and what stands beside it."""
    taken = book.used + book.wasted
    if not taken:
        return f"No sequence{' of this engine' * bool(book.others)} holds a block", _beside(book)
    count = len(record.residents)
    title = (
        f"{count} sequence{'s' * (count > 1)} hold{'s' * (count == 1)} {taken / book.pool:.0%} of "
        f"the KV pool; {book.wasted / taken:.0%} of that is empty slots"
    )
    return title, _beside(book)


def _beside(book: Ledger) -> str:
    parts = []
    if book.shared:
        unshared = book.used + book.shared
        parts.append(f"Sharing saves {book.shared / unshared:.0%} of the KV that sequences see.")
    if book.others:
        parts.append(f"Other engines hold {book.others / book.pool:.0%} of the pool.")
    if book.cached:
        parts.append(f"{book.cached / book.pool:.0%} of the pool is free but keeps prefixes.")
    if book.swapped:
        parts.append(f"{book.swapped / book.host:.0%} of host memory holds swapped blocks.")
    return " ".join(parts) or "Nothing is shared, cached or swapped in this step."
