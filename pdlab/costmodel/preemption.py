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
"""One direction of PCI Express 4.0 with 16 lanes, as published (PCI-SIG: 16 GT/s a lane)."""


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
    num_cached_tokens: int = 0,
) -> PreemptionCost:
    """Both ways to bring back `num_tokens` tokens of K and V.

    Args:
        dtype: of the matrix products.
        num_cached_tokens: leading tokens that the prefix cache is expected to keep.

    Raises:
        ValueError: for counts out of range and for a dtype without a peak.
    """
    check_at_least(1, num_tokens=num_tokens)
    check_positive(kv_element_bytes=kv_element_bytes)
    chunk = Chunk(num_cached_tokens, max(1, num_tokens - num_cached_tokens))
    cost = step_cost(
        config,
        [chunk],
        num_sampled=1,
        weight_element_bytes=weight_element_bytes,
        kv_element_bytes=kv_element_bytes,
    )
    moved = 2 * num_tokens * config.kv_bytes_per_token(kv_element_bytes)
    return PreemptionCost(predict(cost, hardware, dtype).time_s, moved / link_bytes_s(hardware))


def link_bytes_s(hardware: Hardware) -> float:
    """Bytes a second between the memory that computes and host memory, in one direction.

    On a processor both are the same memory: a copy reads and writes each byte, at the speed that
    calibration measured, or at most at the memory's own. For a GPU it is PCIE_BYTES_S.
    """
    if hardware.kind == "gpu":
        return PCIE_BYTES_S
    return hardware.details.get("copy_bytes_s", hardware.bandwidth_bytes_s) / 2
