"""What is written at a slot is read at its position, and bytes are what the tensors take."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pdlab.costmodel.memory import kv_bytes
from pdlab.kvcache import PagedKVCache, copy_blocks
from pdlab.trace import DROPPED
from tests.helpers import TINY

FLOATS = ["fp32", "fp16", "bf16"]
TOKENWISE = ["fp8", "int8", "int4:token:4", "int8:token:2/bf16"]
BLOCKWISE = ["int8:head", "int8:channel", "int4:head", "fp8:channel", "int4:channel/int4:token"]
ALL = FLOATS + TOKENWISE + BLOCKWISE
WIDE = replace(TINY, head_dim=64)
TABLE = [5, 0, 3]


def random_kv(num_tokens: int, seed: int = 0) -> Tensor:
    """[num_layers, 2, num_tokens, num_kv_heads, head_dim]; a shorter one begins a longer one."""
    shape = (16, TINY.num_layers, 2, TINY.num_kv_heads, TINY.head_dim)
    tokens = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return tokens[:num_tokens].permute(1, 2, 0, 3, 4)


def slots_of(table: list[int], positions: Iterable[int]) -> list[int]:
    return [table[p // 4] * 4 + p % 4 for p in positions]


def write(
    cache: PagedKVCache, table: list[int], kv: Tensor, start: int, end: int, commit: bool = True
) -> None:
    """One step: tokens `start` to `end - 1` of kv, in all layers."""
    plan = cache.write_plan(slots_of(table, range(start, end)))
    for layer, (k, v) in enumerate(kv):
        cache.write(layer, plan, k[start:end], v[start:end])
    if commit:
        cache.commit(plan)


def filled(
    kv_format: str, chunks: list[int], table: list[int] = TABLE, **options: int
) -> PagedKVCache:
    """A cache of 6 blocks of 4 tokens, with random K and V written in these steps."""
    cache = PagedKVCache(TINY, 6, 4, kv_format, **options)
    kv, start = random_kv(sum(chunks)), 0
    for chunk in chunks:
        write(cache, table, kv, start, start + chunk)
        start += chunk
    return cache


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def relative_error(got: Tensor, kv: Tensor) -> float:
    want = kv.transpose(0, 1)
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("kv_format", FLOATS)
def test_what_is_written_in_scattered_blocks_is_read_in_order(kv_format):
    cache = PagedKVCache(TINY, num_blocks=6, block_size=4, kv_format=kv_format)
    k, v = random_kv(10)[0]
    plan = cache.write_plan(slots_of(TABLE, range(10)))
    cache.write(1, plan, k, v)
    stored = torch.stack((k, v)).to(cache.k_format.dtype)
    assert torch.equal(cache.read(TABLE, 10)[:, 1], stored)
    keys, values = cache.gather(1, torch.tensor(TABLE), torch.float32)
    assert keys.shape == (12, TINY.num_kv_heads, TINY.head_dim)
    assert torch.equal(keys[:10], stored[0].float())
    assert torch.equal(values[:10], stored[1].float())
    for tensor in cache.tensors:
        assert not tensor[0].any(), "another layer was written"
        assert not tensor[1, [1, 2, 4]].any(), "a block outside the table was written"


@pytest.mark.parametrize("kv_format", ALL)
def test_every_format_reads_what_was_written_within_its_error(kv_format):
    cache = filled(kv_format, [3, 8, 1])
    bound = 0.15 if "int4" in kv_format else 0.04
    assert relative_error(cache.read(TABLE, 12), random_kv(12)) < bound


@pytest.mark.parametrize("kv_format", ALL)
def test_gather_takes_many_block_tables_at_once(kv_format):
    cache = filled(kv_format, [10])
    tables = torch.tensor([[5, 0], [3, 3], [1, 3]])
    keys, values = cache.gather(0, tables, torch.float32)
    for i, table in enumerate(tables):
        one_k, one_v = cache.gather(0, table, torch.float32)
        assert torch.equal(keys[i], one_k)
        assert torch.equal(values[i], one_v)


@pytest.mark.parametrize("kv_format", ALL)
def test_gather_gives_the_dtype_of_the_queries(kv_format):
    cache = filled(kv_format, [10])
    for dtype in (torch.float32, torch.bfloat16):
        assert {x.dtype for x in cache.gather(0, torch.tensor(TABLE), dtype)} == {dtype}


@pytest.mark.parametrize("kv_format", ALL)
def test_read_and_raw_are_copies(kv_format):
    cache = filled(kv_format, [10])
    read, raw = cache.read(TABLE, 10), cache.raw(TABLE, 10)
    kept, kept_raw = read.clone(), [x.clone() for x in raw]
    write(cache, TABLE, random_kv(10, seed=1), 0, 10)
    assert torch.equal(read, kept)
    assert same(raw, kept_raw)


@pytest.mark.parametrize("kv_format", FLOATS + TOKENWISE)
@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [3, 3, 5], [10, 1]])
def test_bytes_of_a_tokenwise_format_do_not_depend_on_chunks_or_blocks(kv_format, chunks):
    whole = filled(kv_format, [11])
    parts = filled(kv_format, chunks, [2, 4, 1])
    assert same(parts.raw([2, 4, 1], 11), whole.raw(TABLE, 11))


@pytest.mark.parametrize("kv_format", ["fp32", *TOKENWISE])
def test_bytes_of_a_tokenwise_format_do_not_depend_on_the_block_size(kv_format):
    kv, raws = random_kv(10), []
    for block_size in (1, 4, 16):
        cache = PagedKVCache(TINY, 12, block_size, kv_format)
        plan = cache.write_plan(list(range(10)))
        for layer, (k, v) in enumerate(kv):
            cache.write(layer, plan, k, v)
        raws.append(cache.raw(list(range(12)), 10))
    assert same(raws[0], raws[1])
    assert same(raws[0], raws[2])


@pytest.mark.parametrize("kv_format", BLOCKWISE)
@pytest.mark.parametrize("chunks", [[1] * 12, [3, 3, 5, 1], [10, 2]])
def test_bytes_of_full_blocks_do_not_depend_on_chunks(kv_format, chunks):
    whole = filled(kv_format, [12])
    parts = filled(kv_format, chunks, [2, 4, 1])
    assert same(parts.raw([2, 4, 1], 12), whole.raw(TABLE, 12))


@pytest.mark.parametrize("kv_format", ALL)
def test_a_step_that_failed_half_way_can_be_done_again(kv_format):
    """In the middle of a block, at its end, and where a block starts and fills in the step."""
    kv = random_kv(12)
    for start, end in [(0, 2), (2, 3), (2, 4), (2, 10), (0, 12)]:
        caches = [PagedKVCache(TINY, 6, 4, kv_format, max_open_blocks=2) for _ in range(2)]
        for failing, cache in enumerate(caches):
            if start:
                write(cache, TABLE, kv, 0, start)
            if failing:
                plan = cache.write_plan(slots_of(TABLE, range(start, end)))
                cache.write(0, plan, *kv[0][:, start:end])
            write(cache, TABLE, kv, start, end)
        assert same(caches[0].raw(TABLE, end), caches[1].raw(TABLE, end))
        assert torch.equal(caches[0].read(TABLE, end), caches[1].read(TABLE, end))


@pytest.mark.parametrize("kv_format", ["int8:head", "int4:channel", "fp8:channel"])
def test_a_block_is_read_in_full_precision_until_the_step_that_fills_it_is_booked(kv_format):
    cache, kv = PagedKVCache(TINY, 6, 4, kv_format), random_kv(4)
    exact = kv.transpose(0, 1)
    for end in (1, 2, 3):
        write(cache, [2], kv, end - 1, end)
        assert torch.equal(cache.read([2], end), exact[:, :, :end])
    plan = cache.write_plan([2 * 4 + 3])
    for layer, (k, v) in enumerate(kv):
        cache.write(layer, plan, k[3:], v[3:])
    assert torch.equal(cache.read([2], 4), exact)
    cache.commit(plan)
    assert not torch.equal(cache.read([2], 4), exact)
    assert relative_error(cache.read([2], 4), kv) < 0.15


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_the_open_area_needs_one_place_between_steps_and_two_in_a_step(kv_format):
    filled(kv_format, [1, 9, 1, 1], max_open_blocks=2)
    filled(kv_format, [12], max_open_blocks=0)
    filled(kv_format, [1] * 12, max_open_blocks=1)
    with pytest.raises(AssertionError, match="all 1 open blocks are taken, block 0 has none"):
        filled(kv_format, [3, 3], max_open_blocks=1)


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_a_freed_block_leaves_nothing_open(kv_format):
    cache = PagedKVCache(TINY, 6, 4, kv_format, max_open_blocks=1)
    for block in range(6):
        write(cache, [block], random_kv(3), 0, 3)
        cache.release([block])


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_a_block_begun_anew_forgets_what_was_open_of_it(kv_format):
    fresh, used = (PagedKVCache(TINY, 6, 4, kv_format, max_open_blocks=1) for _ in range(2))
    write(used, [2], random_kv(3, seed=1), 0, 3)
    for cache in (fresh, used):
        write(cache, [2], random_kv(4), 0, 4)
    assert same(used.raw([2], 4), fresh.raw([2], 4))
    for cache in (fresh, used):
        write(cache, [2], random_kv(2, seed=2), 0, 2)
        write(cache, [2], random_kv(4, seed=2), 2, 4)
    assert same(used.raw([2], 4), fresh.raw([2], 4))


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_a_full_block_whose_last_token_is_rewritten_keeps_the_others(kv_format):
    cache, kv = PagedKVCache(TINY, 6, 4, kv_format, max_open_blocks=1), random_kv(4)
    write(cache, [2], kv, 0, 4)
    before = cache.read([2], 4)
    write(cache, [2], kv, 3, 4, commit=False)
    assert torch.equal(cache.read([2], 4)[:, :, :3], before[:, :, :3])
    if cache.k_format.is_blockwise:
        assert torch.equal(cache.read([2], 4)[0, :, 3], kv[:, 0, 3])
    write(cache, [2], kv, 3, 4)
    assert cache.open_blocks.get(2) is None
    assert relative_error(cache.read([2], 4), kv) < 0.2


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_a_full_block_taken_back_and_given_up_is_as_it_was(kv_format):
    """Reopening changes nothing that is stored: bytes change when a step is booked."""
    cache, kv = PagedKVCache(TINY, 6, 4, kv_format), random_kv(4)
    write(cache, [2], kv, 0, 4)
    before = cache.raw([2], 4)
    write(cache, [2], kv, 3, 4, commit=False)
    cache.release([2])
    assert same(cache.raw([2], 4), before)


@pytest.mark.parametrize("kv_format", ALL)
def test_a_copied_block_is_equal_and_goes_its_own_way(kv_format):
    cache = filled(kv_format, [10])
    copies, before = [1, 2, 4], cache.raw(TABLE, 10)
    copy_blocks(cache, TABLE, cache, copies)
    assert same(cache.raw(copies, 10), before)
    assert torch.equal(cache.read(copies, 10), cache.read(TABLE, 10))
    write(cache, copies, random_kv(12, seed=1), 10, 12)
    assert same(cache.raw(TABLE, 10), before)
    write(cache, TABLE, random_kv(12), 10, 12)
    assert same(cache.raw(TABLE, 12), filled(kv_format, [10, 2]).raw(TABLE, 12))


@pytest.mark.parametrize("kv_format", ALL)
def test_swapping_out_and_in_keeps_every_byte_open_ones_included(kv_format):
    cache = filled(kv_format, [10])
    host = PagedKVCache(TINY, 4, 4, kv_format, max_open_blocks=1)
    before = cache.raw(TABLE, 10)
    copy_blocks(cache, TABLE, host, [3, 1, 0])
    cache.release(TABLE)
    write(cache, TABLE, random_kv(12, seed=1), 0, 12)
    copy_blocks(host, [3, 1, 0], cache, [0, 4, 2])
    assert same(cache.raw([0, 4, 2], 10), before)
    write(cache, [0, 4, 2], random_kv(12), 10, 12)
    assert same(cache.raw([0, 4, 2], 12), filled(kv_format, [10, 2]).raw(TABLE, 12))


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_copying_a_full_block_over_an_open_one_closes_it(kv_format):
    cache = filled(kv_format, [4], [0, 1])
    write(cache, [1], random_kv(2), 0, 2)
    copy_blocks(cache, [0], cache, [1])
    assert same(cache.raw([1], 4), cache.raw([0], 4))
    assert cache.open_blocks.get(1) is None


@pytest.mark.parametrize("kv_format", ALL)
def test_a_swap_of_two_blocks_in_one_call_reads_before_it_writes(kv_format):
    cache = filled(kv_format, [4, 2], [0, 1])
    before = cache.raw([0], 4), cache.raw([1], 2)
    copy_blocks(cache, [0, 1], cache, [1, 0])
    assert same(cache.raw([1], 4), before[0])
    assert same(cache.raw([0], 2), before[1])


@pytest.mark.parametrize("kv_format", ALL)
def test_dropped_blocks_read_as_not_there(kv_format):
    cache = filled(kv_format, [10])
    whole, raw = cache.read(TABLE, 10), cache.raw(TABLE, 10)
    read = cache.read([DROPPED, 0, 3], 10)
    assert read[:, :, :4].isnan().all()
    assert torch.equal(read[:, :, 4:], whole[:, :, 4:])
    dropped = cache.raw([5, 0, DROPPED], 10)
    assert [x.shape for x in dropped] == [x.shape for x in raw]
    assert not any(x[:, -2:].any() for x in dropped if x.shape[1] == 10)
    assert not same(dropped, raw)
    assert same(dropped, cache.raw([5, 0, DROPPED], 10))


@pytest.mark.parametrize("kv_format", ALL)
def test_head_groups_change_where_bytes_are_and_none_of_them(kv_format):
    whole, halves = filled(kv_format, [10]), filled(kv_format, [10], head_groups=2)
    assert len(halves.tensors) == 2 * len(whole.tensors)
    assert halves.block_bytes == whole.block_bytes
    assert halves.open_bytes == whole.open_bytes
    assert same(halves.raw(TABLE, 10), whole.raw(TABLE, 10))
    table = torch.tensor(TABLE)
    assert same(
        list(halves.gather(1, table, torch.float32)), list(whole.gather(1, table, torch.float32))
    )


@pytest.mark.parametrize("head_groups", [0, 3])
def test_head_groups_that_do_not_divide_the_heads_are_refused(head_groups):
    with pytest.raises(ValueError, match=f"kv_head_groups={head_groups} must divide num_kv_heads"):
        PagedKVCache(TINY, 2, 4, head_groups=head_groups)


@pytest.mark.parametrize("kv_format", ["fp32", "int4", "int8:channel"])
def test_memory_that_is_not_there_is_refused_with_its_size(kv_format):
    with pytest.raises(ValueError, match=r"num_blocks=1000000000000 .* GiB of KV memory"):
        PagedKVCache(TINY, 10**12, 16, kv_format)


@pytest.mark.parametrize("kv_format", FLOATS)
@pytest.mark.parametrize("num_kv_heads", [32, 8, 1])
def test_bytes_per_token_by_formula_equal_those_of_the_tensor(kv_format, num_kv_heads):
    """32 query heads over 8 KV heads: only the 8 are kept."""
    config = replace(TINY, num_heads=32, num_kv_heads=num_kv_heads, num_layers=3)
    cache = PagedKVCache(config, num_blocks=5, block_size=16, kv_format=kv_format)
    by_formula = config.kv_bytes_per_token(cache.element_bytes)
    assert by_formula == 2 * 3 * num_kv_heads * config.head_dim * cache.element_bytes
    assert cache.bytes_per_token == by_formula
    assert cache.nbytes == sum(x.nbytes for x in cache.tensors) == 5 * 16 * by_formula
    assert kv_bytes(config, 7, cache.element_bytes) == cache.read([0], 7).nbytes


@pytest.mark.parametrize(
    ("kv_format", "of_bf16"),
    [
        ("fp32", 2),
        ("bf16", 1),
        ("int8", 0.515625),  # 48.4% less, not 50%: one fp16 scale for 64 channels
        ("fp8", 0.515625),
        ("int8:head", 0.5 + 1 / 1024),
        ("int8:channel", 0.5625),
        ("int4", 0.3125),  # scale and zero for 32 channels: 5 bits a number
        ("int4:token", 0.28125),
        ("int4:channel", 0.375),  # scale and zero for the 16 tokens of a block: 6 bits
        ("int4:channel/int4", 0.34375),
    ],
)
def test_bytes_with_scales_beside_bf16(kv_format, of_bf16):
    cache = PagedKVCache(WIDE, 3, 16, kv_format, max_open_blocks=5)
    assert sum(x.nbytes for x in cache.tensors) / 3 == cache.block_bytes
    assert cache.element_bytes == 2 * of_bf16
    assert cache.bytes_per_token == WIDE.kv_bytes_per_token(2) * of_bf16
    blockwise = sum(x.is_blockwise for x in (cache.k_format, cache.v_format))
    assert cache.open_bytes == 5 * 16 * WIDE.kv_bytes_per_token(4) / 2 * blockwise
    assert cache.nbytes == 3 * cache.block_bytes + cache.open_bytes
