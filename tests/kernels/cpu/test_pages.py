"""Memory in huge pages is the same memory."""

import numpy as np
from pdlab_kernels.cpu.attention_plan import address
from pdlab_kernels.cpu.pages import use_huge_pages


def test_contents_and_addresses_stay_as_they_are() -> None:
    values = np.arange(5 << 20, dtype=np.uint8)
    before, copy = address(values), values.copy()
    assert use_huge_pages([values[: 3 << 20], values[3 << 20 :]]) in range(4)
    assert address(values) == before
    assert np.array_equal(values, copy)


def test_what_fills_less_than_half_a_page_is_left_alone() -> None:
    values = np.ones(100 << 10, np.uint8)
    assert use_huge_pages([values, values[:0]]) == 0
    assert values.all()
