"""What overlap brings: decode steps with and without it, and a reader who takes his time.

Both engines decode the same batch, in turns, round after round, so that a machine that is busy for
a while does not slow one of them only. The reader of a step's chunks is stood in for by sleeping:
somebody who writes to a socket, and leaves the processor alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm

from pdlab.bench.files import write_by_line
from pdlab.bench.prompts import passages
from pdlab.engine import Engine, EngineConfig
from pdlab.machine import describe_machine
from pdlab.models import Model, load
from pdlab.requirements import require_choice, require_int, require_number
from pdlab.sampling import SamplingParams
from pdlab.trace import StepRecord

BACKENDS = ("torch fp32", "cpu fp32", "cpu int8")
BATCHES = (1, 8, 32)
READERS_MS = (0.0, 2.0)
PROMPT_TOKENS = 32
DIGITS = 4
"""Significant digits of the times that are kept."""


@dataclass(frozen=True)
class OverlapCost:
    """A batch, with and without: seconds from step to step, the reading included."""

    backend: str
    batch: int
    reader_ms: float
    """That a reader takes for a chunk."""
    plain_s: list[float]
    """The mean of each round."""
    overlap_s: list[float]
    host_s: float
    """Of an overlapped step, what lay beside a computation, without the reader: the median."""

    @property
    def gain(self) -> float:
        """The median of plain over overlapped, round by round: below 1 it loses."""
        return median(a / b for a, b in zip(self.plain_s, self.overlap_s, strict=True))

    @property
    def most(self) -> float:
        """What there would be if reading and telling cost nothing any more: the bound of it."""
        plain_s = median(self.plain_s)
        return plain_s / max(1e-9, plain_s - self.batch * self.reader_ms / 1e3 - self.host_s)


@dataclass(frozen=True)
class OverlapCosts:
    """Every batch, and what it was measured on."""

    costs: list[OverlapCost]
    model: str
    num_steps: int
    rounds: int
    busy: bool
    """Whether other processes were at work: then times may be too high."""
    machine: dict[str, Any]
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        """Write JSON, a batch a line."""
        raw = asdict(self)
        costs = [json.dumps(_short(cost)) for cost in raw.pop("costs")]
        write_by_line(path, raw, "costs", costs)

    @classmethod
    def load(cls, path: Path) -> OverlapCosts:
        """Read what `save` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**raw | {"costs": [OverlapCost(**cost) for cost in raw["costs"]]})


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_short(each) for each in value]
    return {k: _short(v) for k, v in value.items()} if isinstance(value, dict) else value


def measure_overlap(
    name: str = "smollm2-135m",
    *,
    backends: Sequence[str] = BACKENDS,
    batches: Sequence[int] = BATCHES,
    readers_ms: Sequence[float] = READERS_MS,
    num_steps: int = 12,
    rounds: int = 5,
    progress: bool = False,
) -> OverlapCosts:
    """Decode every batch with every backend and reader, with and without overlap.

    Args:
        name: of the model, as of `load`.
        backends: `torch fp32`, `cpu fp32` or `cpu int8`.
        readers_ms: milliseconds that a reader takes for a chunk.
        num_steps: decode steps of a round.

    Raises:
        ValueError: an argument is out of range.
    """
    for backend in backends:
        require_choice("backend", backend, BACKENDS)
    for batch in batches:
        require_int("batch", batch, least=1, most=256)
    for reader_ms in readers_ms:
        require_number("reader_ms", reader_ms, 0, 1000)
    require_int("num_steps", num_steps, least=2, most=1000)
    require_int("rounds", rounds, least=1, most=1000)
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    costs: list[OverlapCost] = []
    total = len(backends) * len(batches) * len(readers_ms) * rounds
    with tqdm(total=total, unit="round", disable=not progress) as bar:
        for backend in backends:
            model = load(name, dtype="fp32", weights=_weights(backend), progress=False)
            for batch in batches:
                costs += _of_batch(model, backend, batch, readers_ms, num_steps, rounds, bar)
    return OverlapCosts(
        costs,
        name,
        num_steps,
        rounds,
        busy=load_before > 0.5,
        machine=describe_machine()
        | {"threads": torch.get_num_threads(), "load_before": round(load_before, 2)},
        versions={"torch": torch.__version__},
    )


def _weights(backend: str) -> str:
    return backend.split()[1]


def _of_batch(
    model: Model,
    backend: str,
    batch: int,
    readers_ms: Sequence[float],
    num_steps: int,
    rounds: int,
    bar: tqdm,
) -> Iterator[OverlapCost]:
    engines = [_engine(model, backend, batch, overlap) for overlap in (False, True)]
    found: dict[float, tuple[list[float], list[float]]] = {ms: ([], []) for ms in readers_ms}
    hidden: dict[float, list[float]] = {ms: [] for ms in readers_ms}
    for number in range(rounds + 1):  # the first warms up
        for reader_ms in readers_ms:
            for index, engine in enumerate(engines):
                step_s, records = _decode(engine, model, batch, num_steps, batch * reader_ms / 1e3)
                if number:
                    found[reader_ms][index].append(step_s)
                    if engine.config.overlap:
                        hidden[reader_ms] += [_told_s(record) for record in records]
            if number:
                bar.update()
    for engine in engines:
        engine.close()
    for reader_ms, (plain_s, overlap_s) in found.items():
        yield OverlapCost(backend, batch, reader_ms, plain_s, overlap_s, median(hidden[reader_ms]))


def _told_s(record: StepRecord) -> float:
    return sum(span.wall_s for span in record.spans if span.name == "tell")


def _engine(model: Model, backend: str, batch: int, overlap: bool) -> Engine:
    config = EngineConfig(
        backend=backend.split()[0],
        max_num_seqs=batch,
        num_blocks=batch * 16,
        enable_prefix_cache=False,
        overlap=overlap,
    )
    return Engine(model, config)


def _decode(
    engine: Engine, model: Model, batch: int, num_steps: int, reader_s: float
) -> tuple[float, list[StepRecord]]:
    """Seconds from step to step of a whole batch that decodes."""
    params = SamplingParams(max_tokens=num_steps + 4, ignore_eos=True)
    ids = [engine.submit(prompt, params) for prompt in passages(model, batch, PROMPT_TOKENS)]
    for _ in range(2):  # the prompts, and one step in which both engines are under way
        engine.step()
    records, start_s = [], time.perf_counter()
    for _ in range(num_steps):
        record = engine.step()
        assert record
        records.append(record)
        if reader_s:
            time.sleep(reader_s)
    step_s = (time.perf_counter() - start_s) / num_steps
    for request_id in ids:
        engine.discard(request_id)
    return step_s, records
