"""What is written at a slot is read at its position, and bytes are what the tensor takes."""

from dataclasses import replace

import pytest
import torch

from pdlab.costmodel.memory import kv_bytes
from pdlab.kvcache import KV_DTYPES, PagedKVCache
from tests.helpers import TINY


def test_what_is_written_in_scattered_blocks_is_read_in_order():
    cache = PagedKVCache(TINY, num_blocks=6, block_size=4)
    table = [5, 0, 3]
    k, v = torch.randn(2, 10, TINY.num_kv_heads, TINY.head_dim)
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(10)])
    cache.write(1, slots, k, v)
    assert torch.equal(cache.read(table, 10)[:, 1], torch.stack((k, v)))
    keys, values = cache.gather(1, torch.tensor(table), torch.float32)
    assert keys.shape == (12, TINY.num_kv_heads, TINY.head_dim)
    assert torch.equal(keys[:10], k)
    assert torch.equal(values[:10], v)
    assert not cache.storage[:, 0].any(), "another layer was written"
    assert not cache.storage[:, 1, [1, 2, 4]].any(), "a block outside the table was written"


def test_gather_takes_many_block_tables_at_once():
    cache = PagedKVCache(TINY, num_blocks=6, block_size=4)
    cache.storage.normal_()
    tables = torch.tensor([[5, 0], [2, 2]])
    keys, values = cache.gather(0, tables, torch.float32)
    for i, table in enumerate(tables):
        one_k, one_v = cache.gather(0, table, torch.float32)
        assert torch.equal(keys[i], one_k)
        assert torch.equal(values[i], one_v)


def test_read_is_a_copy():
    cache = PagedKVCache(TINY, num_blocks=2, block_size=4)
    before = cache.read([1], 3)
    cache.storage.fill_(1.0)
    assert not before.any()


@pytest.mark.parametrize("kv_format", KV_DTYPES)
@pytest.mark.parametrize("num_kv_heads", [32, 8, 1])
def test_bytes_per_token_by_formula_equal_those_of_the_tensor(kv_format, num_kv_heads):
    """32 query heads over 8 KV heads: only the 8 are kept."""
    config = replace(TINY, num_heads=32, num_kv_heads=num_kv_heads, num_layers=3)
    cache = PagedKVCache(config, num_blocks=5, block_size=16, kv_format=kv_format)
    by_formula = config.kv_bytes_per_token(cache.element_bytes)
    assert by_formula == 2 * 3 * num_kv_heads * config.head_dim * cache.element_bytes
    assert cache.bytes_per_token == by_formula
    assert cache.storage.nbytes == 5 * 16 * by_formula
    assert kv_bytes(config, 7, cache.element_bytes) == cache.read([0], 7).nbytes
