"""What each rank of a parallel model holds: its weights, its K and V, its activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdlab.costmodel.checks import check_at_least
from pdlab.costmodel.hardware import Hardware
from pdlab.costmodel.memory import activation_bytes, weight_bytes
from pdlab.costmodel.predict import ELEMENT_BYTES
from pdlab.models.config import ModelConfig
from pdlab.models.shard_plan import Shard, ShardPlan


@dataclass(frozen=True)
class ElementBytes:
    """Mean bytes of an element, scales of a quantized format included."""

    weights: float
    kv: float
    hidden: int
    """Of hidden states: what travels."""

    @classmethod
    def of(cls, dtype: str, weights: float | None = None, kv: float | None = None) -> ElementBytes:
        """All as of a dtype, where nothing else is given.

        Raises:
            ValueError: there is no such dtype.
        """
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype={dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        size = ELEMENT_BYTES[dtype]
        return cls(
            weights=size if weights is None else weights,
            kv=size if kv is None else kv,
            hidden=int(size),
        )


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds."""

    rank: int
    weights: int
    kv: int
    activations: int
    """The most that exist at once, in the largest micro-batch."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations


def stage_config(plan: ShardPlan, shard: Shard) -> ModelConfig:
    """A shard's shape, with an embedding and a head only where its stage has them.

    One matrix counts as a tied one, and none as an empty vocabulary.
    """
    config = shard.config(plan.config)
    if shard.has_embedding and shard.has_head:
        return config
    if shard.has_embedding or shard.has_head:
        return replace(config, tie_word_embeddings=True)
    return replace(config, vocab_size=0)


def rank_weight_bytes(plan: ShardPlan, element_bytes: float) -> list[int]:
    """Bytes of weights on each rank.

    Norms are on every rank, and of a stage's layers also the biases of what is summed up. The
    embedding is on the first stage and the head on the last: a tied one is on both, unless they are
    one stage.
    """
    return [weight_bytes(stage_config(plan, s), element_bytes) for s in plan.shards]


def rank_kv_bytes_per_token(plan: ShardPlan, element_bytes: float) -> list[float]:
    """Bytes of K and V of one token on each rank: those of its layers and its KV heads."""
    return [s.config(plan.config).kv_bytes_per_token(element_bytes) for s in plan.shards]


def rank_memory(
    plan: ShardPlan, sizes: ElementBytes, *, kv_tokens: int, rows: int, num_sampled: int
) -> list[RankMemory]:
    """What each rank holds, with `kv_tokens` in its cache and `rows` in a micro-batch."""
    check_at_least(0, kv_tokens=kv_tokens)
    weights = rank_weight_bytes(plan, sizes.weights)
    kv = rank_kv_bytes_per_token(plan, sizes.kv)
    return [
        RankMemory(
            rank=s.rank,
            weights=weights[s.rank],
            kv=round(kv_tokens * kv[s.rank]),
            activations=activation_bytes(
                stage_config(plan, s),
                rows,
                sizes.hidden,
                num_sampled=num_sampled if s.has_head else 0,
            ),
        )
        for s in plan.shards
    ]


def kv_capacity_tokens(
    plan: ShardPlan, memory: Sequence[RankMemory], hardware: Hardware, kv_element_bytes: float
) -> int:
    """Tokens whose K and V fit beside weights and activations on every rank.

    The fullest rank decides: a token has its K and V on all of them.
    """
    kv = rank_kv_bytes_per_token(plan, kv_element_bytes)
    room = [hardware.memory_bytes - each.weights - each.activations for each in memory]
    return max(0, min(int(r / kv[m.rank]) for r, m in zip(room, memory, strict=True)))


def check_fits(memory: Sequence[RankMemory], hardware: Hardware) -> None:
    """Refuse what does not fit; of a device whose memory is not known (0), nothing is.

    Raises:
        ValueError: a rank holds more than the device has.
    """
    most = max(memory, key=lambda each: each.total)
    if hardware.memory_bytes and most.total > hardware.memory_bytes:
        weights, kv, activations, total, has = (
            f"{n / 1e9:.3g} GB"
            for n in (most.weights, most.kv, most.activations, most.total, hardware.memory_bytes)
        )
        raise ValueError(
            f"rank {most.rank} needs {total} (weights {weights}, K and V {kv}, activations "
            f"{activations}); {hardware.name} has memory_bytes={has}"
        )
