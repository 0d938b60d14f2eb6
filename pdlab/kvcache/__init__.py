"""Where K and V live, and who owns each block of them."""

from pdlab.kvcache.block_pool import BlockPool, blocks_for
from pdlab.kvcache.paged import KV_DTYPES, PagedKVCache

__all__ = ["KV_DTYPES", "BlockPool", "PagedKVCache", "blocks_for"]
