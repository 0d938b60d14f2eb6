"""Huge pages for memory that every step reads from end to end.

Memory is mapped in pages of 4 KB, and a processor remembers where some thousand of them lie. Of
weights that are larger than that each page has to be looked up again in each step, which cost 1 to
6% of a decode step where it was measured. Linux can put 512 pages into one of 2 MB.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable

import numpy as np

from .attention_plan import address

_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE of <linux/mman.h>, since Linux 6.1


def use_huge_pages(arrays: Iterable[np.ndarray]) -> int:
    """Put arrays into huge pages, where they fill at least half of one; returns how many.

    0 where the system does not do that. Contents and addresses stay as they are; what lies beside
    an array in its last page goes along.
    """
    if sys.platform != "linux":
        return 0
    filled: Counter[int] = Counter()
    for array in arrays:
        begin, end = address(array), address(array) + array.nbytes
        for page in range(begin // _PAGE, -(-end // _PAGE)):
            filled[page] += min(end, (page + 1) * _PAGE) - max(begin, page * _PAGE)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    most = [page for page, num_bytes in filled.items() if 2 * num_bytes >= _PAGE]
    return sum(madvise(page * _PAGE, _PAGE, _COLLAPSE) == 0 for page in most)
