"""A recorded run: header, requests, steps, captures; compact JSON that loads without a model."""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from pdlab.trace.files import read_json, write_json
from pdlab.trace.records import (
    BlockMove,
    Candidate,
    Capture,
    CollectiveRecord,
    DraftRecord,
    RankSpan,
    RequestRecord,
    Resident,
    SequenceRecord,
    Span,
    StepRecord,
)

TRACE_VERSION = 2
PLAIN = ("machine", "model", "engine", "tokens", "aborted")
"""Fields that are JSON as they stand."""


@dataclass
class Trace:
    """Everything a run recorded.

    `machine`, `model` and `engine` say what the numbers were measured on; `tokens` maps every
    token id that occurs to the string shown for it.
    """

    machine: dict[str, Any] = field(default_factory=dict)
    """processor, cores, threads, torch, python, device, date (ISO 8601, UTC)."""
    model: dict[str, Any] = field(default_factory=dict)
    """name, dtype, weights (their format), weight_bytes, and under `config` the fields of
    ModelConfig."""
    engine: dict[str, Any] = field(default_factory=dict)
    """The fields of EngineConfig, kv_bytes_per_token (scales included, maybe fractional), and
    kv_open_bytes: what block-wise formats keep beside the blocks, for those still filling."""
    tokens: dict[int, str] = field(default_factory=dict)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    aborted: dict[str, float] = field(default_factory=dict)
    """Requests ended by their caller, and when, in seconds since the engine was made."""
    steps: list[StepRecord] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)

    def sequence_steps(self, sequence_id: str) -> list[tuple[StepRecord, SequenceRecord]]:
        """The steps in which one sequence ran, in order, each with its part of the step."""
        return [(r, s) for r in self.steps for s in r.sequences if s.sequence_id == sequence_id]

    def output_ids(self, sequence_id: str) -> list[int]:
        """Token ids sampled for one sequence, in order."""
        return [token for _, s in self.sequence_steps(sequence_id) for token in s.put_out]

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON, compressed when the name ends in .gz."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is not a trace, is damaged, or has a version this code cannot read.
        """
        raw = read_json(path, "pdlab trace")
        version = raw.get("version") if isinstance(raw, dict) else None
        if version != TRACE_VERSION:
            raise ValueError(f"{path} has trace version {version}; this reads {TRACE_VERSION}")
        try:
            return cls.from_json(raw)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is a damaged pdlab trace: {error!r}") from error

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        raw = {name: getattr(self, name) for name in PLAIN}
        raw["version"] = TRACE_VERSION
        raw["requests"] = [asdict(r) for r in self.requests.values()]
        raw["steps"] = [asdict(s) for s in self.steps]
        raw["captures"] = [asdict(c) | {"array": _pack(c.array)} for c in self.captures]
        return raw

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Trace:
        """The inverse of `to_json`."""
        return cls(
            machine=raw["machine"],
            model=raw["model"],
            engine=raw["engine"],
            tokens={int(k): v for k, v in raw["tokens"].items()},
            aborted=raw["aborted"],
            requests={r["request_id"]: RequestRecord(**r) for r in raw["requests"]},
            steps=[_step(s) for s in raw["steps"]],
            captures=[Capture(**c | {"array": _unpack(c["array"])}) for c in raw["captures"]],
        )


def _step(raw: dict[str, Any]) -> StepRecord:
    return StepRecord(
        **raw
        | {
            "sequences": [_sequence(s) for s in raw["sequences"]],
            "residents": [Resident(**r) for r in raw["residents"]],
            "moves": [BlockMove(*m) for m in raw["moves"]],
            "spans": [Span(*s) for s in raw.get("spans", [])],
            "wasted": [_sequence(s) for s in raw.get("wasted", [])],
            "collectives": [CollectiveRecord(*c) for c in raw.get("collectives", [])],
            "rank_spans": [RankSpan(*s) for s in raw.get("rank_spans", [])],
        }
    )


def _sequence(raw: dict[str, Any]) -> SequenceRecord:
    top = [Candidate(*c) for c in raw["top"]]
    draft = DraftRecord(**raw["draft"]) if raw.get("draft") else None
    return SequenceRecord(**raw | {"top": top, "draft": draft})


def _pack(array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": base64.b64encode(array.tobytes()).decode("ascii"),
    }


def _unpack(raw: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(raw["data"]), dtype=raw["dtype"])
    return flat.reshape(raw["shape"])
