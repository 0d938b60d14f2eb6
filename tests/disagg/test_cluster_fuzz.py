"""Thousands of random clusters, requests, kills and lost parcels: see `fuzz.py`."""

import pytest

from tests.disagg.fuzz import fuzz


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_clusters_keep_every_promise(first):
    total: dict[str, int] = {}
    for seed in range(first, first + 50):
        try:
            events = fuzz(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        total = {name: total.get(name, 0) + count for name, count in events.items()}
    assert all(total.values()), total
