"""Where K and V live: one tensor for all layers, cut into blocks of `block_size` token slots.

storage  [2 (K, V), num_layers, num_blocks, block_size, num_kv_heads, head_dim]

sequence position p  ->  block_table[p // block_size] * block_size + p % block_size = slot
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdlab.models.config import ModelConfig

KV_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class PagedKVCache:
    """K and V of every cached token, addressed by slot.

    Args:
        kv_format: `fp32`, `fp16` or `bf16`; what is read is converted to the dtype of the queries.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv_format: str = "fp32",
        device: torch.device | str = "cpu",
    ):
        self.block_size = block_size
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        dtype = KV_DTYPES[kv_format]
        try:
            self.storage = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError, MemoryError) as error:
            raise ValueError(
                f"num_blocks={num_blocks} of block_size={block_size} tokens need "
                f"{math.prod(shape) * dtype.itemsize / 2**30:,.1f} GiB of KV memory, "
                f"which {device} does not have"
            ) from error

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one slot takes over all layers, K and V, read off the tensor itself."""
        _, _, num_blocks, block_size, _, _ = self.storage.shape
        return self.storage.nbytes // (num_blocks * block_size)

    @property
    def element_bytes(self) -> int:
        return self.storage.element_size()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v, [num_tokens, num_kv_heads, head_dim], at `slots`, [num_tokens]."""
        for which, new in enumerate((k, v)):
            flat = self.storage[which, layer].flatten(0, 1)
            flat.index_copy_(0, slots, new.to(flat.dtype))

    def gather(self, layer: int, block_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks in table order.

        Args:
            block_table: [..., num_blocks] of block numbers.

        Returns:
            two tensors [..., num_blocks * block_size, num_kv_heads, head_dim]; the slots behind a
            sequence's last token hold zeros or what an earlier owner left.
        """
        k = self.storage[0, layer][block_table].flatten(-4, -3)
        v = self.storage[1, layer][block_table].flatten(-4, -3)
        return k.to(dtype), v.to(dtype)

    def read(self, block_table: list[int], num_tokens: int) -> Tensor:
        """A copy of one sequence's K and V: [2, num_layers, num_tokens, num_kv_heads, head_dim]."""
        table = torch.tensor(block_table, dtype=torch.long, device=self.storage.device)
        return self.storage[:, :, table].flatten(2, 3)[:, :, :num_tokens].clone()
