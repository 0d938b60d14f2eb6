"""Weights as the kernels read them.

A weight [out, in] multiplies rows x [rows, in] to y = x W^T [rows, out]. Formats:

| name | what a weight is | bytes a weight |
|---|---|---|
| `fp32` | itself; row by row, as torch keeps it | 4 |
| `int8` | code x scale of its row | 1 |
| `q8_0` | code x scale of its group of 32 (GGUF's Q8_0) | 1.0625 |
| `int4` | code x scale + minimum of its group of 32 (GGUF's Q4_1) | 0.625 |

GGUF's Q4_0 is `int4` whose minima are -8 x scale.

Integer formats are cut into **panels** of 16 output rows, so that one stream of memory feeds 16
sums and no sum goes across a vector. A panel is a sequence of groups of 32 inputs:

    int4  [16 scales][16 minima]  float16     then 2 x 4 x 32 bytes of codes
    q8_0  [16 scales]             float16     then 16 x 32 bytes of codes
    int8  16 x 32 bytes of codes; the scales, float32 [panels * 16], lie apart

`int4` codes: byte (half h, quarter j, row r, c) holds of row 8h + r input 4j + c in its low and
16 + 4j + c in its high four bits: 4 neighbouring inputs of 8 rows in each vector.
`int8`, `q8_0` codes: byte (pair p, row r, c) holds of row r input 2p + c.
Rows that fill up the last panel are zero.
"""

from dataclasses import dataclass, field
from typing import Final, Literal, cast, get_args

import numpy as np
import torch

Format = Literal["fp32", "int8", "q8_0", "int4"]
FORMATS: Final = get_args(Format)
GROUP: Final = 32
PANEL: Final = 16
INT4_BYTES, Q8_0_BYTES, INT8_BYTES = 320, 544, 512  # of one group of a panel
_GROUP_BYTES: Final = {"int4": INT4_BYTES, "q8_0": Q8_0_BYTES, "int8": INT8_BYTES}
_BLOCK_BYTES: Final = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # of one GGUF block of 32 weights


@dataclass(frozen=True)
class Weight:
    """A packed weight [out_features, in_features].

    `data`: float32 [out * in] for `fp32`, else bytes [panels * groups * bytes of a group].
    `scales`: float32 [panels * 16] for `int8`, else empty.
    """

    format: Format
    out_features: int
    in_features: int
    data: np.ndarray = field(repr=False)
    scales: np.ndarray = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that one product with a single row has to read."""
        return int(self.data.nbytes + self.scales.nbytes)

    @property
    def panels(self) -> int:
        return -(-self.out_features // PANEL)

    @property
    def groups(self) -> int:
        """Groups in a row."""
        return self.in_features // GROUP


# --- packing -------------------------------------------------------------------------------------


def pack(weight: torch.Tensor, format: Format) -> Weight:
    """Quantize a float weight [out, in] to the nearest codes, and pack it.

    `fp32` shares the memory of a contiguous float32 tensor. Raises ValueError for a weight that is
    no matrix of finite floats with a multiple of 32 columns, or an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: known are {', '.join(FORMATS)}")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight: a float matrix is needed, not {weight.dtype} {tuple(weight.shape)}"
        )
    _check_shape(*weight.shape)
    values = weight.detach().to("cpu", torch.float32).contiguous().numpy()
    if not np.isfinite(values).all():
        raise ValueError("weight: it holds NaN or infinity")
    if format == "fp32":
        out, inputs = values.shape
        return Weight("fp32", out, inputs, values.reshape(-1), np.empty(0, np.float32))
    if format == "int8":
        return pack_int8(*_nearest(values, np.abs(values).max(axis=1), np.float32))
    groups = values.reshape(len(values), -1, GROUP)
    if format == "q8_0":
        codes, scales = _nearest(groups, np.abs(groups).max(axis=2), np.float16)
        return pack_q8_0(codes.reshape(values.shape), scales)
    return pack_int4(*_nearest_int4(groups))


def pack_int8(codes: np.ndarray, scales: np.ndarray) -> Weight:
    """Pack int8 codes [out, in] with float32 scales [out]."""
    _check_codes(codes, np.int8, -128, 127)
    _check_shape(*codes.shape)
    _check_scales("scales", scales, np.float32, (len(codes),))
    padded = np.zeros(_up(len(codes)), np.float32)
    padded[: len(codes)] = scales
    out, inputs = codes.shape
    return Weight("int8", out, inputs, _aligned(_pairs(codes)), padded)


def pack_q8_0(codes: np.ndarray, scales: np.ndarray) -> Weight:
    """Pack int8 codes [out, in] with float16 scales [out, in / 32]."""
    _check_codes(codes, np.int8, -128, 127)
    _check_shape(*codes.shape)
    _check_scales("scales", scales, np.float16, (len(codes), codes.shape[1] // GROUP))
    data = np.concatenate([_by_panel(scales), _pairs(codes)], axis=2)
    out, inputs = codes.shape
    return Weight("q8_0", out, inputs, _aligned(data), np.empty(0, np.float32))


def pack_int4(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> Weight:
    """Pack codes 0..15, uint8 [out, in], with float16 scales and minima [out, in / 32]."""
    _check_codes(codes, np.uint8, 0, 15)
    out, inputs = codes.shape
    _check_shape(out, inputs)
    halves = codes.reshape(out, inputs // GROUP, 2, GROUP // 2)
    return _pack_nibbles(halves[:, :, 0] | halves[:, :, 1] << 4, scales, minima)


def pack_gguf(blocks: np.ndarray, type_name: str, in_features: int) -> Weight:
    """Pack the bytes of a GGUF tensor, `Q4_0`, `Q4_1` or `Q8_0`, without a way through floats.

    `blocks` is uint8, [out, in / 32 * bytes of a block] or flat. Q4_1 and Q8_0 keep every bit; the
    minimum of Q4_0, -8 scale, is exact too. Raises ValueError for another type or a wrong size.
    """
    if type_name not in _BLOCK_BYTES:
        raise ValueError(f"type_name={type_name!r}: known are {', '.join(_BLOCK_BYTES)}")
    if in_features < GROUP or in_features % GROUP:
        raise ValueError(f"in_features={in_features}: a multiple of {GROUP} is needed")
    size = _BLOCK_BYTES[type_name]
    row = in_features // GROUP * size
    if blocks.dtype != np.uint8 or blocks.size == 0 or blocks.size % row:
        raise ValueError(
            f"blocks: {blocks.size} values of {blocks.dtype}; bytes in rows of {row} are needed"
        )
    cut = np.ascontiguousarray(blocks).reshape(-1, in_features // GROUP, size)
    scales = _halves(cut[:, :, :2])
    if type_name == "Q8_0":
        return pack_q8_0(cut[:, :, 2:].view(np.int8).reshape(len(cut), in_features), scales)
    if type_name == "Q4_1":
        return _pack_nibbles(cut[:, :, 4:], scales, _halves(cut[:, :, 2:4]))
    return _pack_nibbles(cut[:, :, 2:], scales, -8 * scales)


def codes_and_scales(weight: Weight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was packed: codes [out, in], scales and minima [out, groups], or [out, 1] for `int8`."""
    out, groups, panels = weight.out_features, weight.groups, weight.panels
    if weight.format == "fp32":
        raise ValueError("weight: fp32 has no codes")
    data = weight.data.reshape(panels, groups, _GROUP_BYTES[weight.format])
    if weight.format == "int4":
        scales, minima = _by_row(data[:, :, :32], out), _by_row(data[:, :, 32:64], out)
        packed = data[:, :, 64:].reshape(panels, groups, 2, 4, 8, 4)
        bytes_ = packed.transpose(0, 2, 4, 1, 3, 5).reshape(-1, groups, GROUP // 2)[:out]
        codes = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2)
        return codes.reshape(out, -1), scales, minima
    pairs = data[:, :, -INT8_BYTES:].reshape(panels, groups, GROUP // 2, PANEL, 2)
    codes = pairs.transpose(0, 3, 1, 2, 4).reshape(-1, weight.in_features)[:out].view(np.int8)
    if weight.format == "int8":
        return codes, weight.scales[:out, None], np.zeros((out, 1), np.float32)
    scales = _by_row(data[:, :, :32], out)
    return codes, scales, np.zeros_like(scales)


def unpack(weight: Weight) -> torch.Tensor:
    """The weight as float32 [out, in], every element as its format defines it."""
    shape = weight.out_features, weight.in_features
    if weight.format == "fp32":
        return torch.from_numpy(weight.data).view(shape)
    codes, scales, minima = codes_and_scales(weight)
    cut = codes.reshape(shape[0], scales.shape[1], -1).astype(np.float32)
    values = cut * scales[..., None].astype(np.float32) + minima[..., None].astype(np.float32)
    return torch.from_numpy(values.reshape(shape))


# --- parts ---------------------------------------------------------------------------------------


def _nearest(
    values: np.ndarray, largest: np.ndarray, dtype: type[np.floating]
) -> tuple[np.ndarray, np.ndarray]:
    """Codes -127..127 of groups (last axis) and their scales, rounded to `dtype` first."""
    with np.errstate(over="ignore"):  # refused when packed
        scales = (largest / np.float32(127)).astype(dtype)
    steps = scales.astype(np.float32)
    inverse = np.where(steps == 0, 0, 1 / np.where(steps == 0, 1, steps))
    codes = np.clip(np.rint(values * inverse[..., None]), -127, 127)
    return codes.astype(np.int8), scales


def _nearest_int4(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], scales and minima of groups [out, groups, 32], the range cut in 15 steps."""
    with np.errstate(over="ignore", invalid="ignore"):  # refused when packed
        minima = groups.min(axis=2).astype(np.float16)
        low = minima.astype(np.float32)
        scales = (np.maximum(groups.max(axis=2) - low, 0) / np.float32(15)).astype(np.float16)
    steps = scales.astype(np.float32)
    inverse = np.where(steps == 0, 0, 1 / np.where(steps == 0, 1, steps))
    codes = np.clip(np.rint((groups - low[..., None]) * inverse[..., None]), 0, 15)
    return codes.astype(np.uint8).reshape(len(groups), -1), scales, minima


def _pack_nibbles(nibbles: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> Weight:
    """Pack bytes [out, groups, 16], whose byte i holds inputs i (low) and i + 16 of its group."""
    out, groups, _ = nibbles.shape
    _check_shape(out, groups * GROUP)
    _check_scales("scales", scales, np.float16, (out, groups))
    _check_scales("minima", minima, np.float16, (out, groups))
    padded = np.zeros((_up(out), groups, GROUP // 2), np.uint8)
    padded[:out] = nibbles
    cut = padded.reshape(-1, 2, 8, groups, 4, 4)  # panel, half, row, group, quarter, input
    codes = cut.transpose(0, 3, 1, 4, 2, 5).reshape(len(cut), groups, -1)
    data = np.concatenate([_by_panel(scales), _by_panel(minima), codes], axis=2)
    return Weight("int4", out, groups * GROUP, _aligned(data), np.empty(0, np.float32))


def _pairs(codes: np.ndarray) -> np.ndarray:
    """int8 codes [out, in] as bytes [panels, groups, 512]: pairs of inputs, row after row."""
    out, inputs = codes.shape
    padded = np.zeros((_up(out), inputs), np.int8)
    padded[:out] = codes
    cut = padded.reshape(-1, PANEL, inputs // GROUP, GROUP // 2, 2)
    return cut.transpose(0, 2, 3, 1, 4).reshape(len(cut), inputs // GROUP, -1).view(np.uint8)


def _by_panel(values: np.ndarray) -> np.ndarray:
    """float16 [out, groups] as bytes [panels, groups, 32]."""
    padded = np.zeros((_up(len(values)), values.shape[1]), np.float16)
    padded[: len(values)] = values
    cut = padded.reshape(-1, PANEL, values.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(cut).view(np.uint8)


def _by_row(data: np.ndarray, out: int) -> np.ndarray:
    """The reverse of `_by_panel`."""
    values = _halves(data)  # [panels, groups, 16]
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])[:out]


def _halves(data: np.ndarray) -> np.ndarray:
    """Bytes [..., 2 n] as float16 [..., n], without the last axis where n is 1."""
    values = np.ascontiguousarray(data).view(np.float16)
    return cast(np.ndarray, values[..., 0] if values.shape[-1] == 1 else values)


def _up(rows: int) -> int:
    """The next multiple of a panel's rows."""
    return -(-rows // PANEL) * PANEL


def _aligned(data: np.ndarray) -> np.ndarray:
    """A flat copy that begins on a cache line, so that a group of `int4` lies on five of them."""
    room = np.empty(data.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    flat = room[start : start + data.nbytes]
    flat[:] = data.reshape(-1).view(np.uint8)
    return flat


def _check_shape(out: int, inputs: int) -> None:
    if out < 1:
        raise ValueError(f"weight: it has {out} rows; at least one is needed")
    if inputs < GROUP or inputs % GROUP:
        raise ValueError(f"weight: it has {inputs} columns; a multiple of {GROUP} is needed")


def _check_codes(codes: np.ndarray, dtype: type[np.integer], low: int, high: int) -> None:
    if codes.ndim != 2 or codes.dtype != dtype:
        raise ValueError(f"codes: a matrix of {dtype.__name__} is needed, not {codes.dtype}")
    if codes.size and (codes.min() < low or codes.max() > high):
        raise ValueError(f"codes: they reach {codes.min()}..{codes.max()}, limit {low}..{high}")


def _check_scales(
    name: str, values: np.ndarray, dtype: type[np.floating], shape: tuple[int, ...]
) -> None:
    if values.dtype != dtype or values.shape != shape:
        raise ValueError(
            f"{name}: {values.dtype} {values.shape}; {dtype.__name__} {shape} is needed"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{name}: they hold NaN or infinity")
