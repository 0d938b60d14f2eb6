"""What it costs to take a sequence's KV away and to have it again: by recomputing, or by moving it.

Recomputing grows with the tokens times the model's size, moving with the tokens times their KV
bytes, so which is sooner done depends on the machine: its arithmetic against its link to host
memory (Kwon et al. 2023, section 4.5 and figure 19).
"""

from __future__ import annotations

from typing import NamedTuple

from pdlab.costmodel.checks import check_at_least, check_positive
from pdlab.costmodel.cost import Chunk, step_cost
from pdlab.costmodel.hardware import Hardware
from pdlab.costmodel.predict import predict
from pdlab.models.config import ModelConfig

PCIE_BYTES_S = 31.5e9
"""One direction of PCI Express 4.0 with 16 lanes (PCI-SIG: 16 GT/s a lane, 128b/130b coding):
assumed of a GPU whose link is not known."""


class PreemptionCost(NamedTuple):
    """Predicted seconds until a preempted sequence has its K and V again."""

    recompute_s: float
    """One prefill of all its tokens."""
    swap_s: float
    """Its blocks to host memory and back."""


def preemption_cost(
    config: ModelConfig,
    num_tokens: int,
    hardware: Hardware,
    dtype: str,
    *,
    weight_element_bytes: float,
    kv_element_bytes: float,
    head_element_bytes: float | None = None,
    num_cached_tokens: int = 0,
    chunk_size: int | None = None,
    num_moved_tokens: int | None = None,
) -> PreemptionCost:
    """Both ways to bring back `num_tokens` tokens of K and V.

    Args:
        config: with the windows that are in force.
        dtype: of the matrix products.
        head_element_bytes: see `step_cost`.
        num_cached_tokens: leading tokens that the prefix cache is expected to keep.
        chunk_size: tokens that a step recomputes at most; None for all in one.
        num_moved_tokens: slots that a swap moves, in whole blocks and without those behind a
            window; None for `num_tokens`.

    Raises:
        ValueError: for counts out of range and for a dtype without a peak.
    """
    check_at_least(1, num_tokens=num_tokens)
    check_positive(kv_element_bytes=kv_element_bytes)
    rest = max(1, num_tokens - num_cached_tokens)
    size = min(chunk_size or rest, rest)
    check_at_least(1, chunk_size=size)
    recompute_s = 0.0
    for start in range(num_tokens - rest, num_tokens, size):
        cost = step_cost(
            config,
            [Chunk(start, min(size, num_tokens - start))],
            num_sampled=int(start + size >= num_tokens),
            weight_element_bytes=weight_element_bytes,
            kv_element_bytes=kv_element_bytes,
            head_element_bytes=head_element_bytes,
        )
        recompute_s += predict(cost, hardware, dtype).time_s
    moved = num_tokens if num_moved_tokens is None else num_moved_tokens
    moved_bytes = 2 * moved * config.kv_bytes_per_token(kv_element_bytes)
    return PreemptionCost(recompute_s, moved_bytes / link_bytes_s(hardware))


def link_bytes_s(hardware: Hardware) -> float:
    """Bytes a second between the memory that computes and host memory, in one direction.

    What the hardware table says; where both are the same memory, half the speed of a copy, which
    reads and writes each byte (as calibration measured it, or at most the memory's own).
    """
    if hardware.link_bytes_s:
        return hardware.link_bytes_s
    if hardware.kind == "gpu":
        return PCIE_BYTES_S
    return hardware.details.get("copy_bytes_s", hardware.bandwidth_bytes_s) / 2
