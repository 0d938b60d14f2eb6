"""The kernels on pdlab's own cache, between its own rope and attention: one layer of a step."""

import pytest
import torch
from pdlab_kernels.triton.attention import decode_attention, prefill_attention
from pdlab_kernels.triton.rotary import rope_and_write_kv

from pdlab.attention import AttentionInputs, ReferenceAttention, Window
from pdlab.kvcache import PagedKVCache
from pdlab.models.config import ModelConfig
from pdlab.models.rope import apply_rope, rope_tables
from pdlab.trace import DROPPED

CONFIG = ModelConfig("llama", 64, 192, 64, 2, 3, 1, 64, 128)
LAYER = 1
TABLES = [[4, 2, 9], [7], [DROPPED, DROPPED, 3, 1]]
CONTEXTS = [35, 8, 50]


def parts_of(cache: PagedKVCache) -> list[tuple[torch.Tensor, ...]]:
    """K and V of the layer, as the kernels take them."""
    return [tuple(part[LAYER] for part in stores[0].parts) for stores in cache.stores]


def slots_of(chunks: list[int]) -> tuple[list[int], list[int]]:
    positions, slots = [], []
    for table, context, chunk in zip(TABLES, CONTEXTS, chunks, strict=True):
        for position in range(context - chunk, context):
            positions.append(position)
            slots.append(table[position // 16] * 16 + position % 16)
    return positions, slots


def filled(kv_format: str) -> PagedKVCache:
    cache = PagedKVCache(CONFIG, 10, 16, kv_format)
    k, v = torch.randn(2, 160, 1, 64)
    cache.write(LAYER, cache.write_plan(list(range(160))), k, v)
    return cache


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "fp8", "int8:token:32/int4", "int4"])
@pytest.mark.parametrize("chunks", [[1, 1, 1], [20, 8, 2]], ids=["decode", "prefill"])
def test_a_layer_is_pdlabs_own(kv_format: str, chunks: list[int]) -> None:
    window = Window(12, sinks=4)
    cos, sin = rope_tables(CONFIG, 128, "cpu")
    starts = torch.tensor([0, *chunks]).cumsum(0)
    q, k, v = torch.randn(int(starts[-1]), 5, 64).split((3, 1, 1), dim=1)
    positions, slots = slots_of(chunks)
    torch.manual_seed(1)
    theirs = filled(kv_format)
    torch.manual_seed(1)
    ours = filled(kv_format)

    turned = [apply_rope(x, cos[positions], sin[positions]) for x in (q, k)]
    theirs.write(LAYER, theirs.write_plan(slots), turned[1], v)
    inputs = AttentionInputs(starts.tolist(), CONTEXTS, TABLES)
    expected = ReferenceAttention().paged(LAYER, turned[0], theirs, inputs, window)

    k_parts, v_parts = parts_of(ours)
    rotated = rope_and_write_kv(
        q, k, v, cos, sin, torch.tensor(positions), torch.tensor(slots), k_parts, v_parts
    )
    tables = torch.tensor([table + [0] * (4 - len(table)) for table in TABLES])
    args = (rotated, k_parts, v_parts, tables)
    hidden = {"window": window.size, "sinks": window.sinks}
    if max(chunks) == 1:
        got = decode_attention(*args, torch.tensor(CONTEXTS), num_splits=2, **hidden)
    else:
        got = prefill_attention(*args, starts, torch.tensor(CONTEXTS), **hidden)

    for part, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)
