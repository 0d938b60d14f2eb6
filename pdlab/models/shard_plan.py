"""Which rank holds what: a model's shape, cut over a grid of ranks.

                tensor parallel: heads, MLP columns, vocabulary
              rank 0            rank 1          <- stage 0: embedding, first layers
              rank 2            rank 3          <- stage 1: last layers, head
    pipeline parallel: layers

Along a row each layer is cut as in Megatron-LM (Shoeybi et al. 2019): the projections into heads
and MLP by output rows, those out of them by input columns, so that one sum over the row's ranks is
due after attention and one after the MLP. Attention is cut by KV heads, each with the query heads
that share it, and so is the KV cache. Embedding and head are cut by vocabulary. Nothing has to be
even: what does not divide leaves the first ranks one more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from pdlab.models.config import ModelConfig
from pdlab.requirements import require_int

MOST_RANKS = 64


def cut(total: int, parts: int) -> list[range]:
    """0 to `total` in `parts` ranges, the first ones longer by one where it is not even."""
    size, rest = divmod(total, parts)
    ends = [size * i + min(i, rest) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Shard:
    """What one rank holds."""

    rank: int
    stage: int
    """Its place in the pipeline."""
    place: int
    """Its place among the ranks of its stage."""
    layers: range
    kv_heads: range
    heads: range
    """Query heads: those that share its KV heads."""
    mlp: range
    """Rows of gate and up, columns of down."""
    vocabulary: range
    """Rows of the embedding and of the head, where the stage has them."""
    has_embedding: bool
    has_head: bool

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The shape of the decoder that the rank computes with."""
        windows = whole.layer_windows
        return replace(
            whole,
            num_layers=len(self.layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.mlp),
            vocab_size=len(self.vocabulary),
            layer_windows=windows[self.layers.start : self.layers.stop],
        )


@dataclass(frozen=True)
class ShardPlan:
    """A model's shape over `pipeline_parallel` stages of `tensor_parallel` ranks each.

    Raises:
        ValueError: there is a rank that would have no KV head, no layer, or no part of the MLP or
            of the vocabulary.
    """

    config: ModelConfig
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        c = self.config
        limits = {
            "tensor_parallel": (
                ("KV heads", c.num_kv_heads),
                ("MLP columns", c.intermediate_size),
                ("tokens in the vocabulary", c.vocab_size),
            ),
            "pipeline_parallel": (("layers", c.num_layers),),
        }
        for name, things in limits.items():
            value = getattr(self, name)
            require_int(name, value, least=1, most=MOST_RANKS)
            for thing, number in things:
                if value > number:
                    raise ValueError(
                        f"{name}={value} is more than the model's {number} {thing}: "
                        "a rank would have none"
                    )
        if self.num_ranks > MOST_RANKS:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} x pipeline_parallel="
                f"{self.pipeline_parallel} are {self.num_ranks} ranks, the most is {MOST_RANKS}"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def shards(self) -> list[Shard]:
        """By rank; the ranks of a stage are neighbours."""
        c, tp, stages = self.config, self.tensor_parallel, self.pipeline_parallel
        shards = []
        for stage, layers in enumerate(cut(c.num_layers, stages)):
            parts = (cut(n, tp) for n in (c.num_kv_heads, c.intermediate_size, c.vocab_size))
            for place, (kv, mlp, vocabulary) in enumerate(zip(*parts, strict=True)):
                shards.append(
                    Shard(
                        rank=stage * tp + place,
                        stage=stage,
                        place=place,
                        layers=layers,
                        kv_heads=kv,
                        heads=range(kv.start * c.group_size, kv.stop * c.group_size),
                        mlp=mlp,
                        vocabulary=vocabulary,
                        has_embedding=stage == 0,
                        has_head=stage == stages - 1,
                    )
                )
        return shards
