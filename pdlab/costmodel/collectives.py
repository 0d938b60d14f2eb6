"""What the ranks of a parallel model tell each other in a step, counted from shapes.

    all_reduce   after the embedding, after attention's output projection and after the MLP: each
                 rank of a stage holds a partial sum of [rows, hidden_size] and needs the whole
    send         hidden states [rows, hidden_size], from a stage to the next
    gather       logits [sampled rows, vocabulary of the rank], to the last stage's first rank

These are the "f" and "g" of Megatron-LM (Shoeybi et al. 2019, section 3): two all-reduces a layer,
however many ranks there are. An all-reduce goes one of two ways, as in vLLM's custom all-reduce,
and both sum in the order of the ranks:

    one-shot     each rank sends its tensor to each other and sums all: one round
    two-shot     each rank sums its share of the columns, and sends the sum to the others (a
                 reduce-scatter and an all-gather): two rounds, and no more bytes than a ring has
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from pdlab.costmodel.checks import check_at_least
from pdlab.models.config import ModelConfig
from pdlab.models.shard_plan import Shard, ShardPlan, cut

ONE_SHOT_BYTES = 64 * 1024
"""Up to so many bytes of a tensor a round saved is worth the bytes sent twice."""
LOGIT_BYTES = 4
"""Logits are fp32, whatever the model's dtype."""


Part = Literal["embed", "output", "mlp", "logits", "hidden"]
PARTIAL_SUMS: tuple[Part, Part] = ("output", "mlp")
"""In each layer."""


class Collective(NamedTuple):
    """One rank's part in one exchange: the fields of a `CollectiveRecord` that need no clock."""

    kind: Literal["all_reduce", "gather", "send"]
    part: Part
    rank: int
    layer: int | None
    """The model's number of the layer, where it belongs to one."""
    micro_batch: int
    num_bytes: int
    """Of the tensor on this rank."""
    wire_bytes: int
    """That leave this rank for others."""


class _Exchanged(Protocol):
    """A `Collective`, or the record of one that took place."""

    @property
    def kind(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def wire_bytes(self) -> int: ...


def is_one_shot(num_ranks: int, num_bytes: int) -> bool:
    """Whether an all-reduce takes one round; with two ranks a second one would gain nothing."""
    return num_ranks == 2 or num_bytes <= ONE_SHOT_BYTES


def all_reduce_bytes(rows: int, hidden_size: int, element_bytes: int, num_ranks: int) -> list[int]:
    """Bytes that each of `num_ranks` ranks sends to sum up [rows, hidden_size].

    One-shot: (n - 1) times the tensor. Two-shot: of the columns, all but the rank's own to those
    who sum them, then its own sum to the n - 1 others: 2 (n - 1) times the tensor over all ranks.
    """
    whole = rows * hidden_size * element_bytes
    if is_one_shot(num_ranks, whole):
        return [(num_ranks - 1) * whole] * num_ranks
    own = [rows * len(columns) * element_bytes for columns in cut(hidden_size, num_ranks)]
    return [whole - each + (num_ranks - 1) * each for each in own]


def collectives_of(
    config: ModelConfig,
    tensor_parallel: int,
    pipeline_parallel: int,
    micro_batches: Sequence[tuple[int, int]],
    element_bytes: int,
    row_tile: int | None = None,
) -> list[Collective]:
    """What every rank exchanges in one step: by rank, and in the order it happens there.

    Args:
        micro_batches: (rows, sampled rows) of each piece of the step.
        element_bytes: of the hidden states.
        row_tile: rows of a padded tile where layers are computed tile by tile (exact mode): what
            comes out of attention and of the MLP is then summed one tile at a time. None: at once.

    Raises:
        ValueError: the model cannot be cut so (see `ShardPlan`), or a count is out of range.
    """
    check_at_least(1, element_bytes=element_bytes, row_tile=1 if row_tile is None else row_tile)
    for rows, sampled in micro_batches:
        check_at_least(1, num_tokens=rows)
        if not 0 <= sampled <= rows:
            raise ValueError(f"num_sampled={sampled} is not within 0 to {rows} (num_tokens)")
    plan = ShardPlan(config, tensor_parallel, pipeline_parallel)
    return [
        collective
        for shard in plan.shards
        for i, (rows, sampled) in enumerate(micro_batches)
        for collective in exchanged(plan, shard, i, rows, sampled, element_bytes, row_tile)
    ]


def wire_bytes_by(
    collectives: Iterable[_Exchanged], key: Literal["kind", "part", "rank"]
) -> dict[str | int, int]:
    """Bytes sent, over all ranks or by rank; of counted records as of predicted collectives."""
    sums: dict[str | int, int] = {}
    for each in collectives:
        value = getattr(each, key)
        sums[value] = sums.get(value, 0) + each.wire_bytes
    return sums


def exchanged(
    plan: ShardPlan,
    shard: Shard,
    micro_batch: int,
    rows: int,
    sampled: int,
    element_bytes: int,
    row_tile: int | None = None,
) -> Iterator[Collective]:
    """What one rank exchanges for one micro-batch, in order; see `collectives_of`."""
    hidden, ranks = plan.config.hidden_size, plan.tensor_parallel
    rank, tile = shard.rank, row_tile or rows
    if ranks > 1:
        sent = {
            n: all_reduce_bytes(n, hidden, element_bytes, ranks)[shard.place] for n in (rows, tile)
        }
        row_bytes = hidden * element_bytes

        def all_reduce(part: Part, layer: int | None, n: int) -> Collective:
            return Collective("all_reduce", part, rank, layer, micro_batch, n * row_bytes, sent[n])

        if shard.has_embedding:
            yield all_reduce("embed", None, rows)
        num_tiles = -(-rows // tile)
        for layer in shard.layers:
            for part in PARTIAL_SUMS:
                yield from [all_reduce(part, layer, tile)] * num_tiles
    if not shard.has_head:
        size = rows * hidden * element_bytes
        yield Collective("send", "hidden", rank, None, micro_batch, size, size)
    elif ranks > 1 and sampled:
        size = sampled * len(shard.vocabulary) * LOGIT_BYTES
        yield Collective(
            "gather", "logits", rank, None, micro_batch, size, size * (shard.place > 0)
        )
