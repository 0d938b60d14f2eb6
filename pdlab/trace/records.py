"""What one step of the engine leaves behind: plain data, no tensors and no model.

Everything a picture shows comes from these records, so a saved trace replays offline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

Phase = Literal["prefill", "decode"]


class Candidate(NamedTuple):
    """One of the most probable next tokens at a sampled position."""

    token_id: int
    probability: float


DROPPED = -1
"""Stands in a block table for a block that was given back because no query will see it again."""


MoveKind = Literal["copy", "swap_out", "swap_in"]


class BlockMove(NamedTuple):
    """A block whose bytes were copied before the forward pass.

    `copy` makes a private block of a shared one that is about to be written (copy-on-write);
    `swap_out` goes from a block of the pool to one of host memory, `swap_in` the other way.
    """

    kind: MoveKind
    source: int
    target: int
    sequence_id: str


@dataclass(slots=True)
class DraftRecord:
    """Tokens that were guessed ahead, computed in the step, and how many of them stood.

    The first `num_accepted` are part of the output. Behind them stands the record's `sampled`.
    """

    token_ids: list[int]
    num_accepted: int
    proposed: list[float] | None
    """The probability of each in the distribution it was drawn from; None if they were chosen."""
    probabilities: list[float]
    """Of each that was looked at, those that stood and the first that did not, in the distribution
    that the model draws from."""


@dataclass(slots=True)
class SequenceRecord:
    """What one sequence did in one step.

    The step computed K and V for `token_ids`, which stand at positions `start` to `end - 1`, and
    for the tokens of a draft that did not stand. `sampled` is the token drawn from the last of
    them, or None when this was not the last chunk.
    Where a request asks for several samples, the sequences that fork off in this step have records
    of their own: no tokens computed, a first token sampled, and `forked_from`.
    """

    sequence_id: str
    phase: Phase
    start: int
    token_ids: list[int]
    blocks_taken: list[int]
    num_cached_tokens: int = 0
    """Tokens whose K and V this step found in the prefix cache: those right before `start`."""
    forked_from: str | None = None
    sampled: int | None = None
    probability: float | None = None
    """Of the sampled token, in the distribution it was drawn from."""
    top: list[Candidate] = field(default_factory=list)
    """The most probable tokens of that distribution."""
    num_allowed: int | None = None
    """Tokens that could have been drawn; None where nobody counted."""
    text: str = ""
    """Text released to the caller in this step (may lag the token by a few bytes)."""
    held: str = ""
    """What is held back after this step: text that may begin a stop string, and the bytes of an
    unfinished character, as `<F0 9F>`."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, or `constraint`."""
    draft: DraftRecord | None = None

    @property
    def put_out(self) -> list[int]:
        """The tokens of the output that this step gave, in order."""
        accepted = self.draft.token_ids[: self.draft.num_accepted] if self.draft else []
        return accepted if self.sampled is None else [*accepted, self.sampled]

    @property
    def num_drawn(self) -> int:
        """Places at which the model drew a token, or would have done."""
        return (self.sampled is not None) + (len(self.draft.token_ids) if self.draft else 0)

    @property
    def num_tokens(self) -> int:
        """Tokens computed, those of a draft that did not stand among them."""
        rejected = len(self.draft.token_ids) - self.draft.num_accepted if self.draft else 0
        return len(self.token_ids) + rejected

    @property
    def end(self) -> int:
        """Context length after this step, in tokens."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Resident:
    """A sequence that held KV blocks while the step ran (scheduled in it or not).

    Tables of two residents may name one block: they share it. DROPPED stands for a block that fell
    out of an attention window.
    """

    sequence_id: str
    block_table: list[int]
    num_computed_tokens: int


class Span(NamedTuple):
    """A piece of a step's time, on one of two lanes: what the caller's thread did, or the model's
    computation in a thread of its own."""

    lane: Literal["host", "compute"]
    name: str
    start_s: float
    wall_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.wall_s


CollectiveKind = Literal["all_reduce", "gather", "send"]
CollectivePart = Literal["embed", "output", "mlp", "logits", "hidden"]


class CollectiveRecord(NamedTuple):
    """What one rank of a parallel engine exchanged with others. Times on the engine's clock."""

    kind: CollectiveKind
    part: CollectivePart
    """What was exchanged: partial sums of the embedding, of attention's output projection or of the
    MLP; slices of the logits; or hidden states, from stage to stage."""
    rank: int
    layer: int | None
    """The model's number of the layer, where it belongs to one."""
    micro_batch: int
    num_bytes: int
    """Of the tensor: what the collective is called with on this rank."""
    wire_bytes: int
    """That left this rank for others."""
    start_s: float
    wall_s: float
    """Waiting for the other ranks included."""


class RankSpan(NamedTuple):
    """What one rank did with one micro-batch: its layers, collectives within the stage included.

    Between two spans a rank has nothing to do: the bubbles of a pipeline."""

    rank: int
    micro_batch: int
    num_tokens: int
    start_s: float
    wall_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.wall_s


@dataclass(frozen=True)
class StepRecord:
    """One engine step. Times in seconds; bytes and FLOPs are counted from the shapes that ran.

    `residents` and the KV figures are taken after the forward pass and before finished sequences
    give their blocks back; `blocks_freed` and `num_free_blocks` are taken after that.
    """

    step: int
    start_s: float
    """Start of the step, in seconds since the engine was made."""
    wall_s: float
    """What it took. With overlap: from the beginning of its scheduling until all was computed, and
    the time to take in the tokens; neither the telling of its text, beside the next step, nor what
    its caller may have done meanwhile."""
    stage_s: dict[str, float]
    """Wall time by stage. The engine's own: schedule, draft, prepare, sample, deliver; the model's:
    embed, qkv, attention, output (attention's projection), mlp, logits; or forward, all of them but
    logits in one, where a CUDA graph was replayed; probe, where one looked in."""
    sequences: list[SequenceRecord]
    residents: list[Resident]
    waiting: list[str]
    preempted: list[str]
    """Sequences that lost their blocks; those in `swapped` kept a copy in host memory."""
    blocks_freed: list[int]
    num_free_blocks: int
    """Blocks that could be taken: empty ones, and cached ones that nobody holds."""
    kv_used_bytes: int
    """Bytes of KV slots that hold a token's K and V; a shared slot counts once."""
    kv_wasted_bytes: int
    """Bytes of KV slots inside taken blocks that hold nothing yet (or nothing still visible)."""
    flops: dict[str, int]
    """FLOPs by part: qkv, attention, output, mlp, logits."""
    bytes_moved: dict[str, int]
    """The least bytes the step had to move, by part: weights, kv_read, kv_write. What kernels move
    beyond that (copies, activations) is not counted."""
    moves: list[BlockMove] = field(default_factory=list)
    """Blocks copied before the forward pass, in order."""
    swapped: dict[str, list[int]] = field(default_factory=dict)
    """Preempted sequences in host memory, each with its table of host blocks."""
    cached_blocks: list[int] = field(default_factory=list)
    """Free blocks that still hold a cached prefix, the next to be evicted first."""
    kv_shared_bytes: int = 0
    """Bytes that sharing saves now: slots counted once for each further sequence that uses them."""
    kv_swapped_bytes: int = 0
    """Bytes of the host blocks in `swapped`."""
    blocks_of_others: list[int] = field(default_factory=list)
    """Blocks held by sequences of other engines on the same KV memory."""
    activation_peak_bytes: int | None = None
    """Most bytes of activations that existed at once; measured only where it was asked for."""
    activation_total_bytes: int | None = None
    """Bytes of all activations that the step made, one after the other; measured as the peak."""
    spans: list[Span] = field(default_factory=list)
    """What was done when, of a step with overlap: schedule, (draft), compute, wait (for it), book,
    and tell, which lies beside the next step's compute. Empty without: all follows in a row."""
    wasted: list[SequenceRecord] = field(default_factory=list)
    """Sequences that were computed in vain: they were aborted before the step was booked. FLOPs and
    bytes count them."""
    collectives: list[CollectiveRecord] = field(default_factory=list)
    """What the ranks of a parallel engine exchanged, by rank and in order."""
    rank_spans: list[RankSpan] = field(default_factory=list)
    """When each of them computed, by rank and in order."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_moved.values())

    @property
    def idle_share(self) -> float:
        """Of the time in which any rank computed, the part in which a rank had no micro-batch to
        compute, mean of all: the bubbles. 0 where there is one rank."""
        spans = self.rank_spans
        if not spans:
            return 0.0
        wall_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
        num_ranks = len({span.rank for span in spans})
        return 1 - sum(span.wall_s for span in spans) / (num_ranks * wall_s)

    @property
    def exchange_share(self) -> float:
        """Of the time in which ranks computed, the part that went into collectives within a stage,
        waiting for each other included. 0 where there is one rank."""
        exchanged_s = sum(c.wall_s for c in self.collectives if c.kind != "send")
        spent_s = sum(span.wall_s for span in self.rank_spans)
        return exchanged_s / spent_s if spent_s else 0.0

    @property
    def phase(self) -> Literal["prefill", "decode", "mixed", "idle"]:
        phases = {s.phase for s in self.sequences}
        if len(phases) == 2:
            return "mixed"
        return phases.pop() if phases else "idle"


@dataclass(frozen=True)
class RequestRecord:
    """A request as it was submitted."""

    request_id: str
    prompt: str
    prompt_ids: list[int]
    params: dict
    arrival_s: float
    priority: int = 0
    """The lower, the sooner, where a policy goes by it."""

    @property
    def sequence_ids(self) -> list[str]:
        """Names of its samples: the first bears the request's own."""
        return sample_ids(self.request_id, self.params.get("n", 1))


def sample_ids(request_id: str, n: int) -> list[str]:
    """Names of a request's `n` sequences: r0, r0.1, r0.2, ..."""
    return [request_id] + [f"{request_id}.{i}" for i in range(1, n)]


@dataclass(frozen=True)
class Capture:
    """An intermediate tensor kept by a probe.

    `attention` has shape [heads, num_queries, num_keys]; `q`, `k`, `v` and `attended` (what
    attention returned, before its projection) have shape [num_tokens, heads, head_dim]. Rows stand
    for positions `start` and on; `heads` are the numbers of the heads kept, KV heads for `k`, `v`.
    `source` says who computed it: `engine` for a tensor the step itself used, `reference` for one
    recomputed beside it (fused attention keeps no weights, so these are always recomputed from the
    engine's own q and cached K).
    """

    step: int
    sequence_id: str
    layer: int
    name: Literal["attention", "q", "k", "v", "attended"]
    source: Literal["engine", "reference"]
    start: int
    heads: list[int]
    array: np.ndarray


class ParcelRecord(NamedTuple):
    """K and V of some layers and tokens on their way. Times in seconds, on the workers' clock."""

    first_layer: int
    end_layer: int
    start: int
    """The first token."""
    end: int
    """The token after the last."""
    num_bytes: int
    sent_s: float
    """When they were computed, or asked for, and left."""
    arrived_s: float
    """When they stood in the receiver's blocks."""


@dataclass(slots=True)
class TransferRecord:
    """K and V of one request, moved from one worker to another."""

    request_id: str
    source: str
    target: str
    kind: str
    """`push`, `pull`, or `stream` for layer by layer."""
    transport: str
    wire: str
    """The formats of K and V on the way."""
    num_tokens: int
    """Tokens that travelled."""
    num_cached_tokens: int
    """Tokens before them that the receiver had in its prefix cache."""
    parcels: list[ParcelRecord]
    ready_s: float
    """When the receiver could go on."""
    link: str = ""
    """The simulated link, where there was one."""

    @property
    def num_bytes(self) -> int:
        return sum(parcel.num_bytes for parcel in self.parcels)

    @property
    def start_s(self) -> float:
        return min((parcel.sent_s for parcel in self.parcels), default=self.ready_s)

    @property
    def wall_s(self) -> float:
        """From the first byte that left to the last that arrived."""
        return (
            max((parcel.arrived_s for parcel in self.parcels), default=self.start_s) - self.start_s
        )

    @property
    def bandwidth_bytes_s(self) -> float:
        return self.num_bytes / self.wall_s if self.wall_s > 0 else 0.0

    def shifted(self, sent_s: float, arrived_s: float) -> TransferRecord:
        """With so much added to each time of its sending, and of its arriving."""
        parcels = [
            each._replace(sent_s=each.sent_s + sent_s, arrived_s=each.arrived_s + arrived_s)
            for each in self.parcels
        ]
        return replace(self, parcels=parcels, ready_s=self.ready_s + arrived_s)


@dataclass(slots=True)
class FailureRecord:
    """A worker that was lost, and what that meant for the requests it had."""

    time_s: float
    """When it was noticed."""
    worker: str
    reason: str
    request_ids: list[str]
    recovered_s: dict[str, float] = field(default_factory=dict)
    """When each of them that went on had its next token."""

    def shifted(self, offset_s: float) -> FailureRecord:
        """The same on another clock."""
        recovered_s = {name: time_s + offset_s for name, time_s in self.recovered_s.items()}
        return replace(self, time_s=self.time_s + offset_s, recovered_s=recovered_s)


@dataclass(slots=True)
class RoleSwitch:
    """A worker that was given another role."""

    time_s: float
    worker: str
    role: str
    """What it is sent from then on: `prefill`, `decode` or `both`."""
    reason: str
