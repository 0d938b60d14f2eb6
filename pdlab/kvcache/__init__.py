"""Where K and V live, and who owns each block of them."""

from pdlab.kvcache.block_pool import BlockPool, blocks_for
from pdlab.kvcache.manager import Hits, Holder, KVManager, PrefixCacheStats, Release, Retention
from pdlab.kvcache.paged import KV_DTYPES, PagedKVCache
from pdlab.kvcache.prefix import Prefix

__all__ = [
    "KV_DTYPES",
    "BlockPool",
    "Hits",
    "Holder",
    "KVManager",
    "PagedKVCache",
    "Prefix",
    "PrefixCacheStats",
    "Release",
    "Retention",
    "blocks_for",
]
