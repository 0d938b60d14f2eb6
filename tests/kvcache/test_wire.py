"""What a cache receives is what it would have stored of the values that the other one has."""

import itertools
import pickle
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab.costmodel.memory import kv_bytes
from pdlab.kvcache import (
    KVFormat,
    KVLayout,
    PagedKVCache,
    Unpacker,
    Wire,
    blocks_for,
    pack,
    parse_kv_format,
    unpack,
)
from pdlab.trace import DROPPED
from tests.helpers import TINY

SHAPE = replace(TINY, head_dim=64)
ALL_LAYERS = range(SHAPE.num_layers)
TOKENWISE = ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int8:token:16/fp16"]
BLOCKWISE = [
    "int8:head",
    "fp8:channel",
    "int4:head",
    "int4:channel/int4:token:32",
    "bf16/int8:head",
]
FORMATS = TOKENWISE + BLOCKWISE
BLOCK_SIZES = [(8, 16), (16, 8), (16, 16), (4, 16)]
LENGTHS = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33]
HEAD_GROUPS = [(1, 1), (1, 2), (2, 1), (2, 2)]
NUM_SLOTS = 96
DATA = torch.randn(2, 2, 64, 2, 64, generator=torch.Generator().manual_seed(1)).mul_(
    torch.linspace(0.1, 3, 64)
)
"""K and V of 64 tokens, [2, num_layers, num_tokens, num_kv_heads, head_dim]."""


def new_cache(kv_format: str, block_size: int = 16, head_groups: int = 1) -> PagedKVCache:
    """Full of what earlier owners left."""
    cache = PagedKVCache(
        SHAPE,
        NUM_SLOTS // block_size,
        block_size,
        kv_format,
        head_groups=head_groups,
        max_open_blocks=2,
    )
    opened = [store.open for stores in cache.stores for store in stores if store.open is not None]
    for tensor in cache.tensors + opened:
        tensor.view(torch.uint8).fill_(0x3A)
    return cache


def new_table(cache: PagedKVCache, num_tokens: int, seed: int = 0) -> list[int]:
    """Blocks in any order; two neighbours, at times."""
    blocks = random.Random(seed).sample(range(cache.num_blocks), cache.num_blocks)
    return blocks[: blocks_for(num_tokens, cache.block_size)]


def write(
    cache: PagedKVCache, table: list[int], tokens: Iterable[int], commit: bool = True
) -> None:
    """One step."""
    tokens, size = list(tokens), cache.block_size
    plan = cache.write_plan([table[p // size] * size + p % size for p in tokens])
    for layer in ALL_LAYERS:
        cache.write(layer, plan, *DATA[:, layer, tokens])
    if commit:
        cache.commit(plan)


def filled(
    kv_format: str, block_size: int, num_tokens: int, head_groups: int = 1, seed: int = 0
) -> tuple[PagedKVCache, list[int]]:
    cache = new_cache(kv_format, block_size, head_groups)
    table = new_table(cache, num_tokens, seed)
    write(cache, table, range(num_tokens))
    return cache, table


def wire_of(sender: PagedKVCache, receiver: PagedKVCache) -> Wire:
    return Wire.between(KVLayout.of(sender), KVLayout.of(receiver))


def in_blocks(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Full blocks [num_layers, num_blocks, block_size, ...], and the tokens behind them."""
    full = x.shape[1] // block_size * block_size
    return x[:, :full].unflatten(1, (-1, block_size)), x[:, full:]


def values_of(kv_format: KVFormat, x: Tensor, block_size: int) -> Tensor:
    """By hand: what a cache has of x, [num_layers, num_tokens, num_kv_heads, head_dim]."""
    if not kv_format.is_blockwise:
        return kv_format.decode(kv_format.encode(x), torch.float32)
    blocks, rest = in_blocks(x, block_size)
    if blocks.shape[1]:
        blocks = kv_format.decode(kv_format.encode(blocks), torch.float32)
    return torch.cat((blocks.flatten(1, 2), rest), dim=1)


def raw_of(kv_format: KVFormat, x: Tensor, block_size: int) -> list[Tensor]:
    """By hand: `PagedKVCache.raw` of K or V where x was written."""
    if not kv_format.is_blockwise:
        return list(kv_format.encode(x))
    blocks, rest = in_blocks(x, block_size)
    padded = torch.nn.functional.pad(rest, (0, 0, 0, 0, 0, -rest.shape[1] % block_size))
    everything = torch.cat((blocks, in_blocks(padded, block_size)[0]), dim=1)
    parts = [part.clone() for part in kv_format.encode(everything)]
    for part in parts:
        part[:, blocks.shape[1] :] = 0
    opened = torch.cat((torch.zeros_like(blocks.flatten(1, 2)), rest), dim=1)
    return [part.flatten(1, 2)[:, : x.shape[1]] for part in parts] + [opened]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def assert_arrives(
    sender_format: str,
    receiver_format: str,
    block_sizes: tuple[int, int],
    head_groups: tuple[int, int],
    num_tokens: int,
) -> None:
    """A transfer stores what is stored, or encode_receiver(decode_sender(stored)): each byte."""
    sender, table = filled(sender_format, block_sizes[0], num_tokens, head_groups[0])
    receiver = new_cache(receiver_format, block_sizes[1], head_groups[1])
    target = new_table(receiver, num_tokens, seed=1)
    wire, tokens = wire_of(sender, receiver), range(num_tokens)
    before = sender.raw(table, num_tokens)
    payload = pack(sender, table, ALL_LAYERS, tokens, wire)
    unpack(receiver, target, ALL_LAYERS, tokens, wire, payload)

    expected = []
    for x, ours, theirs in zip(
        DATA[:, :, :num_tokens], formats(sender_format), formats(receiver_format), strict=True
    ):
        as_stored = ours == theirs and (not ours.is_blockwise or block_sizes[0] == block_sizes[1])
        values = x if as_stored else values_of(ours, x, block_sizes[0])
        expected += raw_of(theirs, values, block_sizes[1])
    assert same(receiver.raw(target, num_tokens), expected)
    assert same(sender.raw(table, num_tokens), before)
    assert len(payload) == wire.num_bytes(num_tokens)
    for tensor in receiver.tensors:
        others = [b for b in range(receiver.num_blocks) if b not in target]
        assert (tensor[:, others].view(torch.uint8) == 0x3A).all(), "another block was written"


def formats(text: str) -> tuple[KVFormat, KVFormat]:
    return parse_kv_format(text, SHAPE.head_dim)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_equal_formats_arrive_exactly(kv_format, block_sizes):
    """As stored, but for block-wise formats whose blocks differ in size."""
    for i, num_tokens in enumerate(LENGTHS):
        assert_arrives(kv_format, kv_format, block_sizes, HEAD_GROUPS[i % 4], num_tokens)


@pytest.mark.parametrize(
    ("number", "sender", "receiver"),
    [(i, *pair) for i, pair in enumerate(itertools.permutations(FORMATS, 2))],
)
def test_formats_that_differ_give_the_error_of_the_conversion_and_no_more(number, sender, receiver):
    for i, block_sizes in enumerate(BLOCK_SIZES):
        length = LENGTHS[(number + 3 * i) % 10]
        assert_arrives(sender, receiver, block_sizes, HEAD_GROUPS[(number + i) % 4], length)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_what_arrives_of_an_equal_layout_is_what_is_stored(kv_format, num_tokens):
    """The open area, too: both caches go on alike, and quantize the block that was open alike."""
    sender, table = filled(kv_format, 16, num_tokens)
    receiver = new_cache(kv_format, 16, head_groups=2)
    target, size = new_table(receiver, 64, seed=1), num_tokens
    wire = wire_of(sender, receiver)
    payload = pack(sender, table, ALL_LAYERS, range(size), wire)
    unpack(receiver, target, ALL_LAYERS, range(size), wire, payload)
    assert same(receiver.raw(target, size), sender.raw(table, size))
    table = [*table, *(b for b in range(sender.num_blocks) if b not in table)]
    for step in (range(num_tokens, 34), range(34, 40)):
        write(sender, table, step)
        write(receiver, target, step)
    assert same(receiver.raw(target, 40), sender.raw(table, 40))


@settings(max_examples=40)
@given(data=st.data())
def test_pieces_arrive_as_one_parcel_does(data):
    """Range by range and layer by layer, while the sender computes more."""
    kv_formats = st.sampled_from(FORMATS)
    ours, theirs = data.draw(kv_formats), data.draw(kv_formats)
    sizes, groups = data.draw(st.sampled_from(BLOCK_SIZES)), data.draw(st.sampled_from(HEAD_GROUPS))
    num_tokens = data.draw(st.integers(1, 40))
    sender, table = filled(ours, sizes[0], num_tokens, groups[0])
    whole, parts = (new_cache(theirs, sizes[1], groups[1]) for _ in range(2))
    wire, target = wire_of(sender, whole), new_table(whole, num_tokens, seed=1)
    payload = pack(sender, table, ALL_LAYERS, range(num_tokens), wire)
    unpack(whole, target, ALL_LAYERS, range(num_tokens), wire, payload)

    sender, sent, written = new_cache(ours, sizes[0], groups[0]), 0, 0
    unpacker = Unpacker(parts, target, wire)
    for step in sorted({num_tokens, *data.draw(st.lists(st.integers(1, num_tokens), max_size=4))}):
        write(sender, table, range(written, step))
        written, end = step, step if step == num_tokens else wire.settled(step)
        for layers in data.draw(st.sampled_from([[ALL_LAYERS], [range(1), range(1, 2)]])):
            tokens = range(sent, end)
            unpacker.write(layers, tokens, pack(sender, table, layers, tokens, wire))
        sent = end
    assert unpacker.end == num_tokens
    assert same(parts.raw(target, num_tokens), whole.raw(target, num_tokens))


@pytest.mark.parametrize("receiver_format", ["fp32", "bf16", "int4", "int4:channel/int4:token:32"])
@pytest.mark.parametrize("sender_format", ["fp32", "fp8", "int4", "int8:token:16/fp16"])
def test_a_layer_can_leave_before_the_next_one_is_written(sender_format, receiver_format):
    sender, receiver = new_cache(sender_format, 8), new_cache(receiver_format)
    wire, table, target = wire_of(sender, receiver), [3, 1, 2], [4, 0]
    assert wire.can_stream
    unpacker = Unpacker(receiver, target, wire)
    for tokens in (range(10), range(10, 21)):
        plan = sender.write_plan([table[p // 8] * 8 + p % 8 for p in tokens])
        for layer in ALL_LAYERS:
            sender.write(layer, plan, *DATA[:, layer, list(tokens)])
            layers = range(layer, layer + 1)
            unpacker.write(layers, tokens, pack(sender, table, layers, tokens, wire))
    expected = new_cache(receiver_format)
    payload = pack(sender, table, ALL_LAYERS, range(21), wire)
    unpack(expected, target, ALL_LAYERS, range(21), wire, payload)
    assert same(receiver.raw(target, 21), expected.raw(target, 21))


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_a_blockwise_sender_waits_for_its_blocks(kv_format):
    sender, receiver = new_cache(kv_format), new_cache("fp32")
    wire, tokens = wire_of(sender, receiver), range(16)
    assert not wire.can_stream
    assert [wire.settled(n) for n in (0, 15, 16, 17, 33)] == [0, 0, 16, 16, 32]
    write(sender, [3, 1], range(15))
    write(sender, [3, 1], range(15, 17), commit=False)
    with pytest.raises(ValueError, match=r"tokens=0:16 fill block 3, which is not quantized"):
        pack(sender, [3, 1], ALL_LAYERS, tokens, wire)
    pack(sender, [3, 1], ALL_LAYERS, range(15), wire)
    write(sender, [3, 1], range(15, 17))
    pack(sender, [3, 1], ALL_LAYERS, tokens, wire)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES)
@pytest.mark.parametrize("receiver_format", ["bf16", "int8:head", "int4:channel/int4:token:32"])
@pytest.mark.parametrize("sender_format", ["fp32", "int4", "int8:head"])
def test_only_what_a_prefix_cache_lacks_travels(sender_format, receiver_format, block_sizes):
    """Whole blocks of the receiver are there before; they are read, and not touched."""
    sender, table = filled(sender_format, block_sizes[0], 33)
    receiver, whole = (new_cache(receiver_format, block_sizes[1]) for _ in range(2))
    wire, target = wire_of(sender, receiver), new_table(receiver, 33)
    unpack(
        whole, target, ALL_LAYERS, range(33), wire, pack(sender, table, ALL_LAYERS, range(33), wire)
    )
    for cached in (16, 32):
        shared = target[: cached // block_sizes[1]]
        for tokens in (range(cached), range(cached, 33)):
            payload = pack(sender, table, ALL_LAYERS, tokens, wire)
            assert len(payload) == wire.num_bytes(len(tokens))
            before = [tensor[:, shared].clone() for tensor in receiver.tensors]
            unpack(receiver, target, ALL_LAYERS, tokens, wire, payload)
        assert same([tensor[:, shared] for tensor in receiver.tensors], before)
        assert same(receiver.raw(target, 33), whole.raw(target, 33))
        receiver.release(target)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_nothing_travels_where_all_is_cached(kv_format):
    sender, table = filled(kv_format, 16, 32)
    receiver, target = filled(kv_format, 16, 32, seed=1)
    wire, before = wire_of(sender, receiver), receiver.raw(target, 32)
    payload = pack(sender, table, ALL_LAYERS, range(32, 32), wire)
    assert len(payload) == wire.num_bytes(0) == 0
    unpack(receiver, target, ALL_LAYERS, range(32, 32), wire, payload)
    assert same(receiver.raw(target, 32), before)


@pytest.mark.parametrize("kv_format", TOKENWISE)
def test_a_payload_does_not_tell_in_which_blocks_it_was(kv_format):
    payloads = []
    for i, (block_size, head_groups) in enumerate([(4, 1), (8, 2), (16, 1), (16, 2), (32, 1)]):
        sender, table = filled(kv_format, block_size, 21, head_groups, seed=i)
        wire = wire_of(sender, new_cache("fp32", 8))
        payloads.append(pack(sender, table, ALL_LAYERS, range(3, 21), wire))
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)


@pytest.mark.parametrize("receiver_format", ["fp32", "int4", "int8:head"])
@pytest.mark.parametrize("sender_format", FORMATS)
def test_a_payload_is_that_of_its_layers_one_after_the_other(sender_format, receiver_format):
    sender, table = filled(sender_format, 16, 19)
    wire = wire_of(sender, new_cache(receiver_format))
    each = [pack(sender, table, range(i, i + 1), range(19), wire) for i in ALL_LAYERS]
    assert torch.equal(torch.cat(each), pack(sender, table, ALL_LAYERS, range(19), wire))
    assert len(each[0]) == wire.num_bytes(19, 1) == wire.num_bytes(19) // 2


def test_k_comes_before_v_and_tokens_before_heads():
    sender, table = filled("fp32", 4, 6)
    payload = pack(sender, table, ALL_LAYERS, range(6), wire_of(sender, new_cache("fp32")))
    assert torch.equal(
        payload.view(torch.float32).view(2, 2, 6, 2, 64), DATA[:, :, :6].transpose(0, 1)
    )


def test_codes_come_before_scales_and_zeros():
    sender, table = filled("int4", 4, 5)
    payload = pack(sender, table, range(1), range(5), wire_of(sender, new_cache("int4")))
    k, v = (formats("int4")[0].encode(DATA[i, 0, :5]) for i in range(2))
    assert payload.tolist() == [
        byte for part in (*k, *v) for byte in part.flatten().view(torch.uint8).tolist()
    ]


def test_a_part_may_begin_at_an_odd_byte():
    """3 tokens of 1 head of 5 channels in int8: the scales that follow begin at byte 15."""
    config = replace(SHAPE, num_kv_heads=1, head_dim=5)
    sender, receiver = PagedKVCache(config, 2, 4, "int8"), PagedKVCache(config, 2, 8, "fp32")
    x, plan = DATA[:, :, :3, :1, :5], sender.write_plan([4, 5, 6])
    for layer in ALL_LAYERS:
        sender.write(layer, plan, *x[:, layer])
    wire = wire_of(sender, receiver)
    payload = pack(sender, [1], ALL_LAYERS, range(3), wire)
    shifted = torch.cat((payload[:1], payload))[1:]  # nor need it begin at an even one
    unpack(receiver, [1], ALL_LAYERS, range(3), wire, shifted)
    assert torch.equal(receiver.read([1], 3), sender.read([1], 3))


@pytest.mark.parametrize(
    ("sender", "receiver", "text", "bytes_per_token"),
    [
        ("bf16", "bf16", "bf16", 2 * 128),
        ("fp32", "bf16", "fp32 -> bf16", 2 * 128),
        ("bf16", "fp32", "bf16 -> fp32", 2 * 128),
        ("fp16", "bf16", "fp16 -> bf16", 2 * 128),
        ("int8", "int4", "int8:token -> int4:token:32", 64 + 4 * 4),
        ("int4", "fp8", "int4:token:32 -> fp8:token", 64 + 4 * 4),
        ("fp32", "int8:head", "fp32 -> int8:head", 4 * 128),
        ("int8:head", "fp16", "int8:head -> fp16", 2 * 128),
        ("int8:head", "fp8:head", "int8:head -> fp32 -> fp8:head", 4 * 128),
    ],
)
def test_the_narrower_of_two_tokenwise_formats_travels(sender, receiver, text, bytes_per_token):
    wire = Wire.between(KVLayout(2, 2, 64, 16, sender), KVLayout(2, 2, 64, 8, receiver))
    assert str(wire) == text
    assert wire.num_bytes(5) == 5 * 2 * 2 * bytes_per_token  # 2 layers, K and V


def test_k_and_v_choose_apart():
    ours, theirs = (
        KVLayout(1, 2, 64, 16, "int8:head/fp32"),
        KVLayout(1, 2, 64, 16, "int8:head/int8"),
    )
    wire = Wire.between(ours, theirs)
    assert str(wire) == "int8:head/fp32 -> int8:head/int8:token"
    assert wire.num_bytes(16) == 16 * 128 + 2 * 2 + 16 * (128 + 2 * 2)
    assert wire.num_bytes(17) - wire.num_bytes(16) == 128 * 4 + 128 + 2 * 2  # K of it in fp32


def test_equal_blockwise_formats_travel_as_blocks_only_if_the_blocks_are_equal():
    layouts = [KVLayout(2, 2, 64, size, "int8:head") for size in (16, 8)]
    assert str(Wire.between(layouts[0], layouts[0])) == "int8:head"
    assert str(Wire.between(*layouts)) == "int8:head -> fp32 -> int8:head"


@pytest.mark.parametrize("kv_format", FORMATS)
def test_bytes_are_those_of_the_tensors(kv_format):
    """Of full blocks: what the cache counts for them. Of an open one: fp32."""
    sender, table = filled(kv_format, 16, 48)
    wire = wire_of(sender, new_cache(kv_format))
    assert wire.num_bytes(48) == 3 * sender.block_bytes
    assert wire.num_bytes(48) == len(pack(sender, table, ALL_LAYERS, range(48), wire))
    opened = sum(2 * 2 * 64 * 4 for each in formats(kv_format) if each.is_blockwise)
    token = torch.ones(1, 1, 64)
    stored = sum(
        2 * 2 * sum(part.nbytes for part in each.encode(token))
        for each in formats(kv_format)
        if not each.is_blockwise
    )
    assert wire.num_bytes(49) - wire.num_bytes(48) == opened + stored


def test_a_token_of_qwen3_8b_in_bf16_is_144_kib():
    config = replace(TINY, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128)
    sender, receiver = PagedKVCache(config, 3, 16, "bf16"), PagedKVCache(config, 5, 8, "bf16")
    for tensor in sender.tensors:
        tensor.normal_()
    wire, layers = wire_of(sender, receiver), range(36)
    payload = pack(sender, [2, 0, 1], layers, range(33), wire)
    assert wire.num_bytes(1) == 144 * 1024 == 147_456
    assert len(payload) == wire.num_bytes(33) == 33 * 147_456 == kv_bytes(config, 33, 2)
    assert len(payload) == sum(x.nbytes for x in sender.raw([2, 0, 1], 33))
    unpack(receiver, [4, 2, 0, 1, 3], layers, range(33), wire, payload)
    assert same(receiver.raw([4, 2, 0, 1, 3], 33), sender.raw([2, 0, 1], 33))


@pytest.mark.parametrize("receiver_format", BLOCKWISE)
@pytest.mark.parametrize("sender_format", ["fp32", "int8:head", "int4:channel/int4:token:32"])
def test_a_transfer_given_up_leaves_nothing_open(sender_format, receiver_format):
    sender, table = filled(sender_format, 16, 40)
    receiver, target = new_cache(receiver_format), [0, 1, 2]
    wire = wire_of(sender, receiver)
    one = [pack(sender, table, range(1), range(n), wire) for n in (20, 40)]
    for _ in range(3):  # of two places
        Unpacker(receiver, target, wire).write(range(1), range(20), one[0])
        assert receiver.open_blocks.get(1) is not None
        receiver.release(target)
        unpacker = Unpacker(receiver, target, wire)
        unpacker.write(range(1), range(40), one[1])
        assert unpacker.end is None
        receiver.release(target)
        assert receiver.open_blocks.get(1) is receiver.open_blocks.get(2) is None
    write(receiver, target, range(3))
    write(receiver, [4], range(3))
    receiver.release([0, 4])
    unpack(
        receiver,
        target,
        ALL_LAYERS,
        range(40),
        wire,
        pack(sender, table, ALL_LAYERS, range(40), wire),
    )
    fresh = new_cache(receiver_format)
    unpack(
        fresh, target, ALL_LAYERS, range(40), wire, pack(sender, table, ALL_LAYERS, range(40), wire)
    )
    assert same(receiver.raw(target, 40), fresh.raw(target, 40))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_range_that_ends_within_a_full_block_takes_what_is_stored(kv_format):
    sender, table = filled(kv_format, 16, 32)
    receiver = new_cache("fp32", 8)
    wire = wire_of(sender, receiver)
    payload = pack(sender, table, ALL_LAYERS, range(3, 21), wire)
    unpack(receiver, [0, 1, 2], ALL_LAYERS, range(3, 21), wire, payload)
    got = receiver.read([0, 1, 2], 21)[:, :, 3:]
    assert torch.equal(got, sender.read(table, 21)[:, :, 3:].float())
    twin = new_cache(kv_format)
    same_wire = wire_of(sender, twin)
    payload = pack(sender, table, ALL_LAYERS, range(21), same_wire)
    unpack(twin, [5, 2], ALL_LAYERS, range(21), same_wire, payload)
    assert torch.equal(twin.read([5, 2], 21), sender.read(table, 21))


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 3), ("num_kv_heads", 4), ("head_dim", 32)]
)
def test_caches_of_other_models_are_refused(field, value):
    layout = KVLayout(2, 2, 64, 16)
    with pytest.raises(ValueError, match=rf"{field}=\d+ of the sender is {value} at the receiver"):
        Wire.between(layout, replace(layout, **{field: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"head_groups": 3}, "head_groups=3 must divide num_kv_heads=2"),
        ({"kv_format": "int5"}, "kv_format='int5' is not one of"),
    ],
)
def test_a_layout_that_no_cache_has_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(KVLayout(2, 2, 64, 16), **change)


def test_layouts_and_wires_are_plain_data():
    wire = wire_of(new_cache("int4", head_groups=2), new_cache("bf16/int8:head", 8))
    assert wire.routes
    copy = pickle.loads(pickle.dumps(wire))
    assert (copy, hash(copy), str(copy)) == (wire, hash(wire), str(wire))
    assert copy.sender == KVLayout(2, 2, 64, 16, "int4", head_groups=2)


def test_one_format_has_one_spelling():
    """int8:token:64 of 64 channels is int8:token, and is not quantized twice."""
    assert KVLayout(2, 2, 64, 16, "int8/int8:token:64") == KVLayout(2, 2, 64, 16, "int8:token")
    sender, table = filled("int8:token:64", 16, 21)
    receiver = new_cache("int8", 8)
    wire = wire_of(sender, receiver)
    payload = pack(sender, table, ALL_LAYERS, range(21), wire)
    unpack(receiver, [3, 1, 0], ALL_LAYERS, range(21), wire, payload)
    assert same(receiver.raw([3, 1, 0], 21), sender.raw(table, 21))


@pytest.mark.parametrize(
    ("layers", "tokens", "message"),
    [
        (range(3), range(9), r"layers=0:3 must lie within 0:2"),
        (range(-1, 1), range(9), r"layers=-1:1 must lie within 0:2"),
        (range(0, 2, 2), range(9), r"layers=0:2:2 must lie within 0:2"),
        (range(2), range(33), r"tokens=0:33 must lie within 0:32, the slots of 2 blocks"),
        (range(2), range(-4, 9), r"tokens=-4:9 must lie within 0:32"),
        (range(2), range(9, 5), r"tokens=9:5 must lie within 0:32"),
        (range(2), range(0, 9, 2), r"tokens=0:9:2 must lie within 0:32"),
    ],
)
def test_ranges_that_are_not_there_are_refused(layers, tokens, message):
    sender, receiver = new_cache("fp32"), new_cache("fp32")
    wire = wire_of(sender, receiver)
    with pytest.raises(ValueError, match=message):
        pack(sender, [1, 2], layers, tokens, wire)
    with pytest.raises(ValueError, match=message):
        unpack(receiver, [1, 2], layers, tokens, wire, torch.zeros(0, dtype=torch.uint8))


@pytest.mark.parametrize("block", [DROPPED, 6])
def test_blocks_that_are_not_there_are_refused(block):
    sender = new_cache("fp32")
    wire = wire_of(sender, sender)
    payload = torch.zeros(wire.num_bytes(17), dtype=torch.uint8)
    message = rf"block_table has block {block} for tokens 0:17, not one of 0:6: .* window"
    with pytest.raises(ValueError, match=message):
        pack(sender, [1, block], ALL_LAYERS, range(17), wire)
    with pytest.raises(ValueError, match=message):
        unpack(sender, [1, block], ALL_LAYERS, range(17), wire, payload)
    pack(sender, [1, block], ALL_LAYERS, range(16), wire)
    pack(sender, [block, 1], ALL_LAYERS, range(16, 17), wire)


@pytest.mark.parametrize("kv_format", ["bf16", "int8:head"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x[:-1],
            r"payload has {less} bytes, not {size} as layers 0:2 of tokens 0:9 have",
        ),
        (lambda x: torch.cat((x, x)), r"payload has {double} bytes, not {size}"),
        (lambda x: x.view(torch.int8), r"must be uint8 with 1 dimension, not torch.int8 with 1"),
        (lambda x: x.view(2, -1), r"must be uint8 with 1 dimension, not torch.uint8 with 2"),
    ],
)
def test_a_malformed_payload_is_refused_and_changes_nothing(kv_format, change, message):
    sender, table = filled(kv_format, 16, 9)
    receiver = new_cache(kv_format)
    wire = wire_of(sender, receiver)
    payload = pack(sender, table, ALL_LAYERS, range(9), wire)
    size = wire.num_bytes(9)
    before, unpacker = [x.clone() for x in receiver.tensors], Unpacker(receiver, [2], wire)
    for take in (unpacker.write, lambda *x: unpack(receiver, [2], *x[:2], wire, x[2])):
        with pytest.raises(
            ValueError, match=message.format(less=size - 1, size=size, double=2 * size)
        ):
            take(ALL_LAYERS, range(9), change(payload))
    assert all(map(torch.equal, before, receiver.tensors))
    unpacker.write(ALL_LAYERS, range(9), payload)
    assert same(receiver.raw([2], 9), sender.raw(table, 9))


def test_parcels_out_of_order_are_refused_and_can_come_later():
    sender, table = filled("int8:head", 16, 40)
    receiver, target = new_cache("int8:head"), [5, 3, 1]
    wire = wire_of(sender, receiver)
    unpacker = Unpacker(receiver, target, wire)

    def write_part(layers: range, tokens: range) -> None:
        unpacker.write(layers, tokens, pack(sender, table, layers, tokens, wire))

    first, second = range(1), range(1, 2)
    with pytest.raises(ValueError, match=r"layers=1:2 must begin with layer 0"):
        write_part(second, range(16))
    write_part(first, range(16))
    with pytest.raises(ValueError, match=r"layers=0:1 must begin with layer 1"):
        write_part(first, range(16))
    with pytest.raises(ValueError, match=r"tokens=16:40 come before layer 1 of tokens 0:16"):
        write_part(second, range(16, 40))
    write_part(second, range(16))
    for tokens in (range(16), range(32, 40)):
        with pytest.raises(ValueError, match=rf"tokens={tokens.start}:.* must begin with token 16"):
            write_part(ALL_LAYERS, tokens)
    write_part(ALL_LAYERS, range(16, 40))
    assert same(receiver.raw(target, 40), sender.raw(table, 40))


def test_the_middle_of_a_block_needs_its_beginning():
    sender, table = filled("fp32", 16, 40)
    receiver = new_cache("int8:head")
    wire, tokens = wire_of(sender, receiver), range(8, 40)
    payload = pack(sender, table, ALL_LAYERS, tokens, wire)
    message = r"tokens=8:40 begin within block 5 of block_size=16"
    with pytest.raises(ValueError, match=message):
        unpack(receiver, [5, 1, 2], ALL_LAYERS, tokens, wire, payload)
    with pytest.raises(ValueError, match=message):
        Unpacker(receiver, [5, 1, 2], wire).write(ALL_LAYERS, tokens, payload)


def test_blocks_that_travel_are_whole():
    sender, table = filled("int8:head", 16, 40)
    wire = wire_of(sender, sender)
    with pytest.raises(ValueError, match=r"tokens=8:40 must begin at a multiple of block_size=16"):
        pack(sender, table, ALL_LAYERS, range(8, 40), wire)
    assert len(pack(sender, table, ALL_LAYERS, range(8, 8), wire)) == 0


def test_one_layer_of_a_blockwise_cache_needs_an_unpacker():
    sender, table = filled("fp32", 16, 16)
    receiver = new_cache("int8:head")
    wire = wire_of(sender, receiver)
    payload = pack(sender, table, range(1), range(16), wire)
    with pytest.raises(ValueError, match=r"layers=0:1 are not all 2: .* needs an Unpacker"):
        unpack(receiver, [2], range(1), range(16), wire, payload)


def test_a_cache_that_the_wire_is_not_for_is_refused():
    sender, receiver = new_cache("fp32"), new_cache("bf16")
    wire = wire_of(sender, receiver)
    with pytest.raises(ValueError, match=r"the cache has .*'bf16'.* the wire is for .*'fp32'"):
        pack(receiver, [0], ALL_LAYERS, range(4), wire)
    with pytest.raises(ValueError, match=r"the cache has .*'fp32'.* the wire is for .*'bf16'"):
        Unpacker(sender, [0], wire)


def test_a_negative_number_of_tokens_has_no_bytes():
    layout = KVLayout(2, 2, 64, 16)
    with pytest.raises(ValueError, match="num_tokens=-1 must be at least 0"):
        Wire.between(layout, layout).num_bytes(-1)
