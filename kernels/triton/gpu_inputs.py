"""Shapes of models, and random inputs of kernels at these shapes; for `gpu_check.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KV_FORMATS = ("bf16", "fp8", "int8", "int4")
"""What K and V are drawn in; "bf16" stands for the dtype that is computed in."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


LLAMA_1B = Shape("1B", 2048, 8192, 32, 8, 64, 128256)
LLAMA_8B = Shape("8B", 4096, 14336, 32, 8, 128, 128256)
TINY = Shape("tiny", 64, 96, 3, 1, 64, 300)


class Draw:
    """Random inputs on a device, in a dtype."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def codes(self, *shape: int, signed: bool) -> Tensor:
        low, high, dtype = (-127, 128, torch.int8) if signed else (0, 256, torch.uint8)
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def half(self, *shape: int, scale: float) -> Tensor:
        return (torch.rand(*shape, device=self.device) * scale).half()

    def numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def kv(self, kv_format: str, blocks: int, block_size: int, s: Shape) -> tuple[Tensor, ...]:
        """Stored K or V with values of about 1. int4 in groups of 32."""
        shape = (blocks, block_size, s.kv_heads)
        if kv_format == "int8":
            codes = self.codes(*shape, s.head_dim, signed=True)
            return codes, self.half(*shape, 1, 1, scale=0.03)
        if kv_format == "fp8":
            codes = self.floats(*shape, s.head_dim, dtype=torch.float32).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8), self.half(*shape, 1, 1, scale=2.0)
        if kv_format == "int4":
            groups = (*shape, s.head_dim // 32, 1)
            codes = self.codes(*shape, s.head_dim // 2, signed=False)
            return codes, self.half(*groups, scale=0.3), -self.half(*groups, scale=3.0)
        return (self.floats(*shape, s.head_dim),)

    def paged(
        self, kv_format: str, lens: list[int], s: Shape, block_size: int = 16
    ) -> dict[str, Any]:
        """k_parts, v_parts, block_tables and context_lens; blocks in random order."""
        width = max(1, max(-(-n // block_size) for n in lens))
        blocks = width * len(lens)
        order = torch.randperm(blocks, device=self.device).int()
        return {
            "k_parts": self.kv(kv_format, blocks, block_size, s),
            "v_parts": self.kv(kv_format, blocks, block_size, s),
            "block_tables": order.view(len(lens), width),
            "context_lens": self.numbers(lens),
        }

    def rope(self, kv_format: str, tokens: int, s: Shape) -> dict[str, Any]:
        """Arguments of `rope_and_write_kv`, q, k and v as views of a fused projection."""
        qkv = self.floats(tokens, s.heads + 2 * s.kv_heads, s.head_dim)
        q, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        angles = torch.rand(max(tokens, 64), s.head_dim // 2, device=self.device) * 6
        blocks = -(-tokens // 16) + 1
        positions = torch.arange(tokens, device=self.device)
        slots = torch.randperm(blocks * 16, device=self.device)[:tokens]
        return {
            "q": q, "k": k, "v": v, "cos": angles.cos(), "sin": angles.sin(),
            "positions": positions, "slots": slots,
            "k_parts": self.kv(kv_format, blocks, 16, s),
            "v_parts": self.kv(kv_format, blocks, 16, s),
        }  # fmt: skip

    def int8_weight(self, size_out: int, size_in: int) -> tuple[Tensor, ...]:
        codes = self.codes(size_out, size_in, signed=True)
        return codes, self.half(size_out, scale=0.02)

    def int4_weight(self, size_out: int, size_in: int) -> tuple[Tensor, ...]:
        codes = self.codes(size_out, size_in // 2, signed=False)
        groups = (size_out, size_in // 32)
        return codes, self.half(*groups, scale=0.2), -self.half(*groups, scale=1.5)

    def sampling(self, rows: int, vocab: int, chance: str) -> dict[str, Any]:
        """Arguments of `sample`; every fourth row is greedy."""
        temperature = torch.full((rows,), 0.8, device=self.device)
        temperature[::4] = 0.0
        chances = {
            "uniforms": torch.rand(rows, device=self.device, dtype=torch.float64),
            "seeds": torch.randint(1 << 40, (rows,), device=self.device),
        }
        return {
            "logits": 3 * self.floats(rows, vocab, dtype=torch.float32),
            "temperature": temperature,
            "top_k": torch.full((rows,), 50, device=self.device, dtype=torch.int32),
            "top_p": torch.full((rows,), 0.9, device=self.device),
            chance: chances[chance],
        }
