"""What an engine stores and computes: digests, which one in another process can tell of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, uint8

from pdlab import Engine
from pdlab.child import process
from pdlab.child.job import Meeting
from pdlab.disagg.hosts.ranks import serve_rank
from pdlab.disagg.hosts.spec import WorkerSpec

CALL = "import_module(module).main(descriptor)"
BOOT = process.BOOT.replace(CALL, f"from {__name__} import watch_all\nwatch_all()\n{CALL}")
"""What the interpreter of a worker runs whose engine is watched."""


@dataclass
class Watched:
    """Of one sequence, by how many of its tokens had K and V then."""

    kv: dict[int, Any] = field(default_factory=dict)
    """What is stored of K and V: before the sequence's first step here, and after each one."""
    logits: dict[int, Any] = field(default_factory=dict)
    """The row that the next token was drawn from."""


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 over their bytes, of one after the other."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().flatten().view(uint8).numpy().tobytes())
    return sha.hexdigest()


def watch(engine: Engine, keep: Callable[[list[Tensor]], Any] = digest) -> dict[str, Watched]:
    """Every sequence from now on, by its id; the engine's trace tells it, too.

    Args:
        keep: what is kept of tensors.
    """
    seen: dict[str, Watched] = {}
    engine.trace.machine["seen"] = seen
    run = engine.runner.run

    def note(sequence: Any, num_tokens: int) -> None:
        stored = engine.kv_cache.raw(sequence.block_table, num_tokens)
        seen.setdefault(sequence.sequence_id, Watched()).kv[num_tokens] = keep(stored)

    def watched(batch: Any, clock: Any, step: Any) -> Any:
        for part in batch.scheduled:
            if part.start and part.sequence.sequence_id not in seen:
                note(part.sequence, part.start)
        output = run(batch, clock, step)
        rows = iter(() if output.logits is None else output.logits)
        for part in batch.scheduled:
            note(part.sequence, part.end)
            if part.samples:
                seen[part.sequence.sequence_id].logits[part.end] = keep([next(rows).clone()])
        return output

    engine.runner.run = watched  # type: ignore[method-assign]
    return seen


def watch_all() -> None:
    """In the process of a worker: every engine that is made from now on."""
    make = Engine.__init__

    def __init__(self: Engine, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        watch(self)

    Engine.__init__ = __init__  # type: ignore[method-assign]


def meeting_at(path: str, rank: int) -> Meeting:
    """Of a router and two workers, which meet in a file."""
    return Meeting(dist.FileStore(path, 3), rank, 3, "127.0.0.1")


def serve_watched_rank(spec: WorkerSpec, path: str, rank: int) -> None:
    """Be a worker whose engine is watched."""
    watch_all()
    serve_rank(spec, meeting_at(path, rank))
