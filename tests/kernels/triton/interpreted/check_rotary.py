"""The kernel that rotates and writes K and V: the same bytes as pdlab's own store."""

import pytest
import torch
from pdlab_kernels.triton import reference
from pdlab_kernels.triton.kv_parts import understand
from pdlab_kernels.triton.rotary import rope_and_write_kv

from pdlab.kvcache.formats import KVFormat
from pdlab.models.rope import apply_rope

from .paged import empty_parts

PAIRS = [
    ("fp32", "float"), ("fp8", "fp8"), ("int8", "int8"), ("int8:token:16", "int8:16"),
    ("int4", "int4:32"), ("int4:token", "int4"),
]  # fmt: skip
"""pdlab's name of a format, and the tests' own."""


def same_bytes(parts, expected) -> bool:
    return all(
        torch.equal(part.view(torch.uint8), other.contiguous().view(torch.uint8))
        for part, other in zip(parts, expected, strict=True)
    )


def tables(dim: int, positions: int = 64):
    angles = torch.outer(torch.arange(positions).float(), 10000 ** -torch.linspace(0, 1, dim // 2))
    return angles.cos(), angles.sin()


def write(q, k, v, kv_format: str, slots: torch.Tensor, positions: torch.Tensor):
    """q rotated and what is stored at `slots`, by the kernel."""
    dim, heads = k.shape[2], k.shape[1]
    k_parts = empty_parts(kv_format, 5, 4, heads, dim, k.dtype)
    v_parts = empty_parts(kv_format, 5, 4, heads, dim, k.dtype)
    rotated = rope_and_write_kv(q, k, v, *tables(dim), positions, slots, k_parts, v_parts)
    return rotated, k_parts, v_parts


def at(parts, slots):
    return [part.flatten(0, 1)[slots] for part in parts]


@pytest.mark.parametrize(("name", "kv_format"), PAIRS)
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.float32), (96, torch.float32), (128, torch.float16)], ids=str
)
def test_bytes_are_those_of_the_torch_store(name, kv_format, dim, dtype) -> None:
    qkv = torch.randn(6, 12, dim, dtype=dtype) * 10 ** torch.linspace(-4, 3, 6)[:, None, None]
    qkv = qkv.to(dtype)
    q, k, v = qkv[:, :6], qkv[:, 6:9], qkv[:, 9:]
    slots = torch.tensor([3, 4, 19, 0, 7, 12])
    positions = torch.tensor([0, 1, 63, 5, 8, 2])
    rotated, k_parts, v_parts = write(q, k, v, kv_format, slots, positions)
    cos, sin = (table[positions] for table in tables(dim))
    assert torch.equal(rotated, apply_rope(q, cos, sin))
    stored_in = KVFormat.parse(name, dim) if kv_format != "float" else KVFormat(
        {torch.float32: "fp32", torch.float16: "fp16"}[dtype]
    )  # fmt: skip
    assert same_bytes(at(k_parts, slots), stored_in.encode(apply_rope(k, cos, sin)))
    assert same_bytes(at(v_parts, slots), stored_in.encode(v))
    values = stored_in.decode(tuple(at(v_parts, slots)), torch.float32)
    assert torch.equal(at([reference.decode_parts(v_parts, dim)], slots)[0], values)


def test_padded_tokens_are_not_stored() -> None:
    q, k, v = torch.randn(3, 4, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    slots = torch.tensor([2, -1, 9], dtype=torch.int32)
    _, k_parts, v_parts = write(q, k, v, "float", slots, torch.zeros(3, dtype=torch.int32))
    for parts in (k_parts, v_parts):
        written = ~parts[0].flatten(0, 1)[:, 0, 0].isnan()
        assert written.nonzero().flatten().tolist() == [2, 9]


HARD = torch.tensor(
    [0.0, -0.0, 1e-45, 3e-8, 6e-8, 1e-6, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 0.5, 1.5, 2.5, 7.5,
     126.5, 127.5, 208.0, 216.0, 432.0, 440.0, 447.9, 448.0, 65504.0, 65519.9, 8e6, 9e6, 1e30],
)  # fmt: skip


@pytest.mark.parametrize(("name", "kv_format"), PAIRS[1:])
@pytest.mark.parametrize("top", [1.0, 127.0, 448.0, 3e38])
def test_bytes_of_hard_numbers(name: str, kv_format: str, top: float) -> None:
    """Halves, subnormals, what is beyond the largest code times the largest fp16, and all equal."""
    within = torch.cat((HARD, -HARD))
    within = within[within.abs() <= top]
    v = within[torch.randint(len(within), (4, 2, 64))]
    v[0, :, ::16] = top
    v[1] = v[1].abs() + 1
    v[2, 0], v[2, 1] = -70000.0, 0.0
    slots = torch.arange(4)
    zeros = torch.zeros_like(v)
    _, _, v_parts = write(zeros, zeros, v, kv_format, slots, slots)
    assert same_bytes(at(v_parts, slots), KVFormat.parse(name, 64).encode(v))


def test_every_fp8_number_and_every_middle_between_two() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((middles, torch.nextafter(middles, codes[1:]),
                      torch.nextafter(middles, codes[:-1]), codes))  # fmt: skip
    near = torch.nn.functional.pad(near, (0, -len(near) % 63)).view(-1, 1, 63)
    v = torch.cat((torch.full((len(near), 1, 1), 448.0), near), dim=-1)  # so that the scale is 1
    v[1::2] *= -1
    slots = torch.arange(len(v))
    parts = empty_parts("fp8", 1, len(v), 1, 64, torch.float32)
    zeros = torch.zeros_like(v)
    spare = empty_parts("float", 1, len(v), 1, 64, torch.float32)
    rope_and_write_kv(zeros, zeros, v, *tables(64), slots, slots, spare, parts)
    assert parts[1].eq(1).all()
    assert torch.equal(parts[0][0], v.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("kv_format", ["float", "fp8", "int8", "int8:16", "int4", "int4:32"])
def test_formats_are_told_apart(kv_format: str) -> None:
    parts = empty_parts(kv_format, 2, 4, 2, 64, torch.float32)
    name, _, group = kv_format.partition(":")
    understood = understand("k_parts", parts, 64)
    assert (understood.format, understood.group) == (name, int(group or 64))
