"""What is read back of K and V is as near as their format promises, and of one value for all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab.kvcache import KVFormat, parse_kv_format

HEAD_DIM = 64
INTEGERS = [
    "int8",
    "int8:token:16",
    "int8:head",
    "int8:channel",
    "int4",
    "int4:token",
    "int4:token:2",
    "int4:head",
    "int4:channel",
]
FP8 = ["fp8", "fp8:token:16", "fp8:head", "fp8:channel"]
SYMMETRIC = [name for name in INTEGERS + FP8 if not name.startswith("int4")]
FP16_MAX = 65504.0


@st.composite
def blocks(draw: st.DrawFn, exponents: tuple[int, int] = (-40, 15)) -> Tensor:
    """[4 tokens, 2 heads, 64 channels]: any magnitude, an offset, outliers, rows of zeros."""
    x = torch.randn(
        4, 2, HEAD_DIM, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    )
    offset = draw(st.sampled_from([0.0, 0.0, 5.0, -300.0]))
    if draw(st.booleans()):
        x[:, :, draw(st.integers(0, HEAD_DIM - 1))] *= 100  # a channel that is large in every token
    if draw(st.booleans()):
        x[draw(st.integers(0, 3)), 0, 3] *= 1000
    if draw(st.booleans()):
        x[draw(st.integers(0, 3))] = 0
    x = (x + offset) * 2.0 ** draw(st.integers(*exponents))
    return x.clamp(-FP16_MAX, FP16_MAX)


def there_and_back(kv_format: KVFormat, x: Tensor) -> Tensor:
    return kv_format.decode(kv_format.encode(x), torch.float32)


def in_groups(kv_format: KVFormat, x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, kv_format.group or x.shape[-1]))


@pytest.mark.parametrize("name", INTEGERS)
@settings(max_examples=40)
@given(x=blocks())
def test_an_integer_is_at_most_half_a_step_off(name, x):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    stored = kv_format.encode(x)
    error = in_groups(kv_format, kv_format.decode(stored, torch.float32) - x).abs()
    rounding = in_groups(kv_format, x).abs() * 2.0**-22  # fp32 arithmetic itself
    assert (error <= stored[1].float() / 2 + rounding).all()


@pytest.mark.parametrize("name", INTEGERS)
@settings(max_examples=40)
@given(x=blocks())
def test_a_step_is_as_small_as_the_group_allows(name, x):
    """Absmax / 127, or (max - min) / 15, plus what fp16 cannot express."""
    kv_format = KVFormat.parse(name, HEAD_DIM)
    scale = kv_format.encode(x)[1].float()
    x = in_groups(kv_format, x)
    dims = {"token": -1, "head": (-4, -1), "channel": -4}[kv_format.scales]
    if kv_format.name == "int8":
        width, steps = x.abs().amax(dims, keepdim=True), 127
    else:
        low = x.amin(dims, keepdim=True)
        width, steps = x.amax(dims, keepdim=True) - low + low.abs() * 2.0**-9 + 2.0**-23, 15
    assert (scale <= width / steps * (1 + 2.0**-10) + 2.0**-23).all()


@pytest.mark.parametrize("name", FP8)
@settings(max_examples=40)
@given(x=blocks())
def test_fp8_is_off_by_a_sixteenth_or_by_half_of_its_finest_step(name, x):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    stored = kv_format.encode(x)
    error = in_groups(kv_format, kv_format.decode(stored, torch.float32) - x).abs()
    magnitude = in_groups(kv_format, x).abs()
    assert (error <= magnitude / 16 + stored[1].float() * 2.0**-10 * 1.01).all()


@pytest.mark.parametrize("name", SYMMETRIC)
@given(x=blocks())
def test_zero_stays_zero_in_symmetric_formats(name, x):
    x[0, 1, 5] = 0
    back = there_and_back(KVFormat.parse(name, HEAD_DIM), x)
    assert (back[x == 0] == 0).all()


@pytest.mark.parametrize("name", INTEGERS + FP8)
def test_all_zeros_come_back_as_zeros(name):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    zeros = torch.zeros(4, 2, HEAD_DIM)
    stored = kv_format.encode(zeros)
    assert torch.equal(kv_format.decode(stored, torch.float32), zeros)
    assert all((scale > 0).all() for scale in stored[1:2])


@pytest.mark.parametrize("name", INTEGERS + FP8)
@pytest.mark.parametrize("magnitude", [3.4e38, 1e30, 65504.0 * 500, 65504.0, 1e-7, 1e-38, 1e-45])
def test_what_is_finite_stays_finite_and_keeps_its_sign(name, magnitude):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    x = magnitude * torch.linspace(-1, 1, 4 * 2 * HEAD_DIM).view(4, 2, HEAD_DIM)
    x[1] = magnitude
    x[2] = -magnitude
    stored = kv_format.encode(x)
    assert all(part.isfinite().all() for part in stored[1:])
    back = kv_format.decode(stored, torch.float32)
    assert back.isfinite().all()
    if kv_format.name != "int4":
        assert (back * x.sign() >= 0).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_values_beyond_the_largest_scale_saturate(name):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    x = torch.full((1, 1, HEAD_DIM), 1e12)
    assert (there_and_back(kv_format, x) == {"int8": 127, "fp8": 448}[name] * FP16_MAX).all()


@pytest.mark.parametrize("name", ["int8", "int8:token:16", "fp8"])
@given(x=blocks(exponents=(-3, 10)))
def test_symmetric_values_read_back_are_stored_as_themselves(name, x):
    """Quantizing twice loses no more than quantizing once."""
    kv_format = KVFormat.parse(name, HEAD_DIM)
    once = there_and_back(kv_format, x)
    assert torch.equal(there_and_back(kv_format, once), once)


@pytest.mark.parametrize("name", ["int4", "int4:token"])
@given(x=blocks())
def test_int4_values_read_back_move_at_most_half_a_step(name, x):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    once = there_and_back(kv_format, x)
    stored = kv_format.encode(once)
    moved = in_groups(kv_format, kv_format.decode(stored, torch.float32) - once).abs()
    rounding = in_groups(kv_format, x).abs() * 2.0**-22
    assert (moved <= stored[1].float() / 2 + rounding).all()


@pytest.mark.parametrize("name", ["int8", "int8:token:16", "fp8", "int4", "int4:token:2"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 31])
def test_a_token_is_stored_the_same_in_any_company(name, num_tokens):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    x = torch.randn(31, 3, HEAD_DIM) * torch.logspace(-9, 5, 31)[:, None, None]
    together = kv_format.encode(x)
    for start in range(0, 31, num_tokens):
        rows = slice(start, start + num_tokens)
        apart = kv_format.encode(x[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(apart, together, strict=True))


@pytest.mark.parametrize("name", INTEGERS + FP8)
def test_a_block_among_others_is_stored_as_alone(name):
    kv_format = KVFormat.parse(name, HEAD_DIM)
    x = torch.randn(2, 5, 4, 3, HEAD_DIM)
    together = kv_format.encode(x)
    alone = kv_format.encode(x[1, 3])
    assert all(torch.equal(a, b[1, 3]) for a, b in zip(alone, together, strict=True))


def test_a_large_channel_costs_the_others_nothing_if_it_has_its_own_scale():
    """Why KIVI scales K per channel: K has channels that are large in every token."""
    x = torch.randn(16, 2, HEAD_DIM)
    x[:, :, 7] += 50
    others = torch.arange(HEAD_DIM) != 7
    error = {
        name: (there_and_back(KVFormat.parse(name), x) - x)[..., others].norm().item()
        for name in ("int4:channel", "int4:token", "int4:token:32")
    }
    assert error["int4:channel"] * 10 < error["int4:token"]
    assert error["int4:channel"] * 5 < error["int4:token:32"]


def test_a_narrow_range_far_from_zero_keeps_its_steps():
    """A least value rounded to the nearest fp16 would cut values off here: 1000.3 becomes 1000.5"""
    x = 1000.3 + torch.rand(16, 1, HEAD_DIM) / 100
    error = there_and_back(KVFormat.parse("int4:channel"), x) - x
    assert error.abs().max() <= (0.01 + 1) / 15 / 2 * 1.01


@pytest.mark.parametrize(
    ("text", "k", "v"),
    [
        ("fp32", "fp32", "fp32"),
        ("int8", "int8:token", "int8:token"),
        ("fp8/bf16", "fp8:token", "bf16"),
        ("int4", "int4:token:32", "int4:token:32"),
        ("int4:channel/int4", "int4:channel", "int4:token:32"),
        ("int8:token:16/int8:head", "int8:token:16", "int8:head"),
    ],
)
def test_a_format_reads_back_as_it_is_written(text, k, v):
    parsed = parse_kv_format(text, HEAD_DIM)
    assert tuple(map(str, parsed)) == (k, v)
    assert parse_kv_format("/".join(map(str, parsed)), HEAD_DIM) == parsed
    assert parse_kv_format(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "auto",
        "int2",
        "INT8",
        "fp32:token",
        "int8:",
        "int8:row",
        "int8:head:16",
        "int8:token:x",
        "int8:token:-4",
        "int8:token:٤",
        "int8:token:16:2",
        "/int8",
        "int8/",
        "/",
        "int8/int8/int8",
    ],
)
def test_what_is_not_in_the_grammar_is_refused_with_what_is(text):
    with pytest.raises(ValueError, match=r"kv_format=.* is not one of fp32, fp16, bf16"):
        parse_kv_format(text)


@pytest.mark.parametrize(
    ("text", "head_dim", "limit"),
    [
        ("int8:token:48", 64, "GROUP=48 must be at least 1 and divide head_dim=64"),
        ("int8:token:0", None, "GROUP=0 must be at least 1"),
        ("int4:token:5", None, "int4 needs an even GROUP, got 5"),
        ("int4", 7, "int4 needs an even head_dim, got 7"),
        ("bf16/int4:token:32", 16, "GROUP=32 must be at least 1 and divide head_dim=16"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_with_both_numbers(text, head_dim, limit):
    with pytest.raises(ValueError, match=f"kv_format=.*{limit}"):
        parse_kv_format(text, head_dim)


@pytest.mark.parametrize(("head_dim", "group"), [(8, 8), (64, 32), (80, 16), (128, 32)])
def test_the_groups_of_int4_fit_any_even_head(head_dim, group):
    assert KVFormat.parse("int4", head_dim).group == group


def test_fp8_is_refused_where_torch_has_none(monkeypatch):
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"kv_format='fp8': torch .* has no float8_e4m3fn"):
        parse_kv_format("bf16/fp8")
