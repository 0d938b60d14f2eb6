"""Random paged KV for tests: blocks in random order, and NaN wherever nothing was written."""

import math

import torch
from pdlab_kernels.triton import reference
from torch import Tensor

FORMATS = ("float", "fp8", "int8", "int4", "int4:32", "int8:16")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}


def empty_parts(
    kv_format: str, blocks: int, block_size: int, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """NAME or NAME:GROUP (all channels of a head, if not said); "float" is `dtype`."""
    name, _, group = kv_format.partition(":")
    shape = (blocks, block_size, heads)
    if name == "float":
        return (torch.full((*shape, dim), math.nan, dtype=dtype),)
    groups = dim // int(group or dim)
    scales = [torch.full((*shape, groups, 1), math.nan, dtype=torch.float16) for _ in range(2)]
    if name == "int4":
        return torch.full((*shape, dim // 2), 255, dtype=torch.uint8), *scales
    codes = torch.full((*shape, dim), 127, dtype=torch.int8 if name == "int8" else torch.uint8)
    return codes, scales[0]


class Paged:
    """K and V of sequences of given lengths, stored in blocks.

    Attributes:
        tables: int32 [num_sequences, width]; entries behind a sequence's last block are a block
            that holds NaN.
    """

    def __init__(
        self,
        lens: list[int],
        *,
        heads: int = 2,
        dim: int = 64,
        block_size: int = 16,
        k_format: str = "float",
        v_format: str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        counts = [-(-n // block_size) for n in lens]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.tables = torch.zeros(len(lens), max(counts, default=0) + 1, dtype=torch.int32)
        shape = (sum(counts) + 1, block_size, heads, dim)
        self.k = empty_parts(k_format, *shape, dtype)
        self.v = empty_parts(v_format or k_format, *shape, dtype)
        for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
            self.tables[i, :count] = torch.tensor([order.pop() for _ in range(count)])
            keys = torch.arange(n)
            slots = self.tables[i, keys // block_size].long() * block_size + keys % block_size
            for parts in (self.k, self.v):
                x = torch.randn(n, heads, dim, dtype=dtype)
                for part, new in zip(parts, reference.encode(x, parts), strict=True):
                    part.flatten(0, 1)[slots] = new
        self.block_size = block_size

    def drop(self, i: int, *entries: int) -> None:
        """Take blocks away from sequence i; what is in them must not be read."""
        self.tables[i, list(entries)] = -1
