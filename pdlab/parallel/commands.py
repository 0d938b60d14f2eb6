"""What the engine's process tells its ranks, and what they answer: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdlab.engine.batch import BatchInputs
from pdlab.kvcache import Release, Wire
from pdlab.trace import BlockMove, CollectiveRecord, RankSpan


@dataclass(frozen=True)
class CarryOut:
    """Move blocks, in this order."""

    orders: list[BlockMove | Release]


@dataclass(frozen=True)
class Run:
    """Compute a step's micro-batches; answered by `Ran`."""

    micro_batches: list[BatchInputs]


@dataclass(frozen=True)
class Ran:
    """What a rank did in a step."""

    logits: Tensor | None
    """Of all sampled rows, [num_rows, vocab_size]; of the last stage's first rank only."""
    collectives: list[CollectiveRecord]
    spans: list[RankSpan]
    stage_s: dict[str, float]


@dataclass(frozen=True)
class Commit:
    """The last step counts."""


@dataclass(frozen=True)
class Logits:
    """Of more rows of the last step; answered by `Ran`."""

    rows: list[int]


@dataclass(frozen=True)
class ReadCache:
    """K and V of a sequence, this rank's heads and layers; answered by a list of tensors."""

    block_table: list[int]
    num_tokens: int
    on_host: bool
    is_raw: bool
    """As `PagedKVCache.raw` has them, or one tensor as of `PagedKVCache.read`."""


@dataclass(frozen=True)
class PackKV:
    """As `KVPort.read_kv`, of this rank's heads and layers; answered by a payload."""

    block_table: list[int]
    layers: range
    """Of this rank's, from 0."""
    tokens: range
    wire: Wire


@dataclass(frozen=True)
class OpenWriter:
    """A `KVWriter` for this rank's heads and layers, to be known by a number."""

    number: int
    block_table: list[int]
    wire: Wire


@dataclass(frozen=True)
class WriteKV:
    """What a writer is to write."""

    number: int
    layers: range
    tokens: range
    payload: Tensor


@dataclass(frozen=True)
class Stop:
    """End in good order."""


Command = CarryOut | Run | Commit | Logits | ReadCache | PackKV | OpenWriter | WriteKV | Stop


@dataclass(frozen=True)
class Ready:
    """A rank has begun."""

    weight_bytes: int
    kv_bytes: int
    fingerprints: list[int]
    """Of its weights, see `fingerprints_of`."""


@dataclass(frozen=True)
class Failed:
    """A command could not be obeyed."""

    error: Exception
    trace: str
