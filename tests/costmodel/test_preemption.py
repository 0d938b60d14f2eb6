"""Recompute or swap: what the prediction says, and that it follows the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab.costmodel import Hardware, link_bytes_s, load_hardware, preemption_cost
from pdlab.costmodel.preemption import PCIE_BYTES_S
from tests.helpers import TINY

CPU = Hardware(
    "slow", "cpu", {"fp32": 1e9}, 1e9, 0, "made up", measured=True, details={"copy_bytes_s": 4e9}
)
SIZES = {"weight_element_bytes": 4, "kv_element_bytes": 4}


def test_swap_moves_every_byte_twice_over_the_link():
    cost = preemption_cost(TINY, 100, CPU, "fp32", **SIZES)
    assert cost.swap_s == pytest.approx(2 * 100 * TINY.kv_bytes_per_token(4) / 2e9)


def test_recompute_is_a_prefill_and_cached_tokens_spare_their_part():
    whole = preemption_cost(TINY, 100, CPU, "fp32", **SIZES)
    half = preemption_cost(TINY, 100, CPU, "fp32", num_cached_tokens=50, **SIZES)
    assert half.recompute_s < whole.recompute_s
    assert half.swap_s == whole.swap_s


def test_which_is_cheaper_depends_on_the_machine():
    fast = replace(CPU, peak_flops={"fp32": 1e15}, bandwidth_bytes_s=1e15)
    here, there = (preemption_cost(TINY, 64, machine, "fp32", **SIZES) for machine in (CPU, fast))
    assert here.swap_s < here.recompute_s
    assert there.swap_s > there.recompute_s


def test_the_link_of_a_processor_is_half_its_copy_speed_and_of_a_gpu_its_bus():
    assert link_bytes_s(CPU) == 2e9
    assert link_bytes_s(replace(CPU, details={})) == CPU.bandwidth_bytes_s / 2
    h100 = load_hardware()["h100-sxm"]
    assert link_bytes_s(h100) == 64e9
    assert link_bytes_s(replace(h100, link_bytes_s=None)) == PCIE_BYTES_S


def test_chunks_read_the_weights_again_and_blocks_behind_a_window_do_not_move():
    whole = preemption_cost(TINY, 100, CPU, "fp32", **SIZES)
    cut = preemption_cost(TINY, 100, CPU, "fp32", chunk_size=1, num_moved_tokens=32, **SIZES)
    assert cut.recompute_s > 1.5 * whole.recompute_s
    assert cut.swap_s == pytest.approx(whole.swap_s * 0.32)


def test_nothing_to_bring_back_is_refused():
    with pytest.raises(ValueError, match="num_tokens=0"):
        preemption_cost(TINY, 0, CPU, "fp32", **SIZES)
