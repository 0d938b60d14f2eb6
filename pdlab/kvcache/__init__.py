"""Where K and V live, and who owns each block of them."""

from pdlab.kvcache.block_pool import BlockPool, blocks_for
from pdlab.kvcache.formats import KVFormat, parse_kv_format
from pdlab.kvcache.manager import Hits, Holder, KVManager, PrefixCacheStats, Release, Retention
from pdlab.kvcache.memory import KVMemory
from pdlab.kvcache.open_blocks import WritePlan
from pdlab.kvcache.packing import KVWriter, Unpacker, pack, unpack
from pdlab.kvcache.paged import PagedKVCache, copy_blocks
from pdlab.kvcache.prefix import Prefix
from pdlab.kvcache.wire import KVLayout, Wire

__all__ = [
    "BlockPool",
    "Hits",
    "Holder",
    "KVFormat",
    "KVLayout",
    "KVManager",
    "KVMemory",
    "KVWriter",
    "PagedKVCache",
    "Prefix",
    "PrefixCacheStats",
    "Release",
    "Retention",
    "Unpacker",
    "Wire",
    "WritePlan",
    "blocks_for",
    "copy_blocks",
    "pack",
    "parse_kv_format",
    "unpack",
]
