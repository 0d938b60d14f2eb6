"""In which numbers K and V are stored, and how values get there and back.

FORMAT = NAME[:SCALES[:GROUP]], one for both or K_FORMAT/V_FORMAT:

    NAME     fp32  fp16  bf16  fp8 (float8_e4m3fn)  int8  int4
    SCALES   token     one scale for each token, KV head and GROUP of channels (all, if not said)
             head      one scale for each block and KV head
             channel   one scale for each block, KV head and channel

The float formats have no scales. Alone, `fp8` means fp8:token, `int8` int8:token and `int4`
int4:token:32.

int8 and fp8 are symmetric, x = code * scale: zero stays zero. int4 is asymmetric, x = code * scale
+ zero, where zero is (just below) the group's least value, so that all 16 codes are used wherever
the values lie. Scales and zeros are fp16.

Who else does it: KIVI (Liu et al. 2024) stores K per channel, because a few channels of K are large
in every token, and V per token, both asymmetric, and keeps the newest tokens in full precision;
Hugging Face's QuantizedCache has the same residual (128 tokens), and one axis for both K and V.
KVQuant (Hooper et al. 2024) also scales K per channel, before the rotary embedding, and stores the
largest 1% apart.
llama.cpp's q8_0 and q4_0 have one fp16 scale for 32 channels of a token. vLLM stores fp8 with one
scale a tensor or a head, calibrated before; here a scale comes from the values themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

Scales = Literal["token", "head", "channel"]

FLOAT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_CODE = {"fp8": 448, "int8": 127, "int4": 15}
DEFAULT_INT4_GROUP = 32
SHARE_A_SCALE: dict[Scales, tuple[int, ...]] = {"token": (-1,), "head": (-4, -1), "channel": (-4,)}
"""Dimensions of [..., tokens, heads, groups, channels of a group] over which a scale reaches."""

FP16_MAX = 65504.0
FP16_TINIEST = 2.0**-24
GRAMMAR = (
    "one of fp32, fp16, bf16, fp8, int8, int4, the last three also with :token, :token:GROUP, "
    ":head or :channel; or one for K and one for V, as in int4:channel/int4:token:32"
)


@dataclass(frozen=True)
class KVFormat:
    """How K or V is stored. `group` channels of a head share a scale; None means all of them."""

    name: str
    scales: Scales | None = None
    group: int | None = None

    @classmethod
    def parse(cls, text: str, head_dim: int | None = None) -> KVFormat:
        """Read one FORMAT; `str` of the result reads back as the same.

        Raises:
            ValueError: it is not in the grammar, does not fit `head_dim`, or torch lacks its dtype.
        """
        name, *rest = text.split(":")
        if name in FLOAT_DTYPES and not rest:
            return cls(name)
        group = rest[1] if len(rest) == 2 and rest[0] == "token" else None
        if (
            name not in LARGEST_CODE
            or len(rest) > (1 if group is None else 2)
            or (rest and rest[0] not in get_args(Scales))
            or (group is not None and not (group.isascii() and group.isdigit() and len(group) < 9))
        ):
            raise ValueError(f"kv_format={text!r} is not {GRAMMAR}")
        if name == "fp8" and not hasattr(torch, "float8_e4m3fn"):
            raise ValueError(f"kv_format={text!r}: torch {torch.__version__} has no float8_e4m3fn")
        if name == "int4" and not rest:
            return cls(name, "token", math.gcd(DEFAULT_INT4_GROUP, head_dim or 0))._fit(head_dim)
        scales = cast(Scales, rest[0] if rest else "token")
        return cls(name, scales, None if group is None else int(group))._fit(head_dim)

    def _fit(self, head_dim: int | None) -> KVFormat:
        """This format, if groups of its channels fill a head."""
        if self.name == "int4":
            for what, number in (("head_dim", head_dim), ("GROUP", self.group)):
                if number is not None and number % 2:
                    raise ValueError(f"kv_format={self}: int4 needs an even {what}, got {number}")
        if self.group is not None and (self.group < 1 or (head_dim or 0) % self.group):
            raise ValueError(
                f"kv_format={self}: GROUP={self.group} must be at least 1"
                + (f" and divide head_dim={head_dim}" if head_dim else "")
            )
        return self

    def __str__(self) -> str:
        return ":".join(str(x) for x in (self.name, self.scales, self.group) if x is not None)

    @property
    def is_blockwise(self) -> bool:
        """Whether scales belong to blocks, so that only full blocks can be stored."""
        return self.scales in ("head", "channel")

    @property
    def dtype(self) -> torch.dtype:
        """Of the values: the format's own for float formats, else what they are computed in."""
        return FLOAT_DTYPES.get(self.name, torch.float32)

    def parts(
        self, block_size: int, num_heads: int, head_dim: int
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the tensors that store a block: codes, scales, zeros."""
        if self.scales is None:
            return [((block_size, num_heads, head_dim), self.dtype)]
        group = self.group or head_dim
        shape = [block_size, num_heads, head_dim // group, group]
        for dim in SHARE_A_SCALE[self.scales]:
            shape[dim] = 1
        width = head_dim // 2 if self.name == "int4" else head_dim
        codes = ((block_size, num_heads, width), torch.int8 if self.name == "int8" else torch.uint8)
        return [codes] + [(tuple(shape), torch.float16)] * (2 if self.name == "int4" else 1)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """What is stored of x, [..., tokens, heads, head_dim]; a block's tokens if block-wise.

        The error is at most half a step (a scale) of the group, for fp8 half the distance of its
        numbers. Values beyond the largest code times the largest fp16 (int8: 8.3 million), or for
        int4 below -65504, are stored as the nearest value that fits. What is finite stays finite,
        but for fp16 above 65504.
        """
        if self.scales is None:
            return (x.to(self.dtype),)
        dims, largest = SHARE_A_SCALE[self.scales], LARGEST_CODE[self.name]
        x = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        if self.name == "int4":
            zero = _at_most(x.amin(dims, keepdim=True))
            x = x - zero.float()
            scale = _scale(x.amax(dims, keepdim=True) / largest)
            codes = (x / scale.float()).round_().clamp_(0, largest).to(torch.uint8).flatten(-2)
            first, second = codes.chunk(2, dim=-1)  # a byte holds channels i and i + head_dim / 2
            return first | (second << 4), scale, zero
        scale = _scale(x.abs().amax(dims, keepdim=True) / largest)
        steps = (x / scale.float()).clamp_(-largest, largest).flatten(-2)
        if self.name == "fp8":
            return steps.to(torch.float8_e4m3fn).view(torch.uint8), scale
        return steps.round_().to(torch.int8), scale

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The values of what `encode` returned, [..., tokens, heads, head_dim]."""
        codes, *scaling = parts
        if not scaling:
            return codes.to(dtype)
        if self.name == "int4":
            x = torch.cat((codes & 15, codes >> 4), dim=-1).float()
        elif self.name == "fp8":  # looked up: torch converts fp8 on a CPU four times more slowly
            values = torch.arange(256, dtype=torch.uint8, device=codes.device)
            values = values.view(torch.float8_e4m3fn).float()
            x = values.index_select(0, codes.flatten().int()).view(codes.shape)
        else:
            x = codes.float()
        grouped = x.unflatten(-1, (-1, self.group or x.shape[-1]))
        grouped.mul_(scaling[0].float())
        if self.name == "int4":
            grouped.add_(scaling[1].float())
        return x.to(dtype)


def parse_kv_format(text: str, head_dim: int | None = None) -> tuple[KVFormat, KVFormat]:
    """The formats of K and of V that a `kv_format` names.

    Raises:
        ValueError: as KVFormat.parse, for more than one slash, and for what is no text.
    """
    formats = text.split("/") if isinstance(text, str) else []
    if len(formats) not in (1, 2) or not all(formats):
        raise ValueError(f"kv_format={text!r} is not {GRAMMAR}")
    return KVFormat.parse(formats[0], head_dim), KVFormat.parse(formats[-1], head_dim)


def _scale(step: Tensor) -> Tensor:
    """A step as fp16, such that the largest code times it still reaches the largest value.

    fp16 rounds to 1 in 2048, which costs even 127 steps no more than 0.07 of one. Its subnormal
    numbers, below 2^-14, lie 2^-24 apart: half of that is added, so that they round up. Never 0.
    """
    return (step + FP16_TINIEST / 2).clamp_(FP16_TINIEST, FP16_MAX).half()


def _at_most(low: Tensor) -> Tensor:
    """fp16 numbers not above `low` (but for those below -65504), so that codes start at 0."""
    below = low - low.abs() * 2.0**-11 - FP16_TINIEST / 2
    return below.clamp_(-FP16_MAX, FP16_MAX).half()
