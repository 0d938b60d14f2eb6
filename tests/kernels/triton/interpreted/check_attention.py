"""Attention kernels against their references, in Triton's interpreter."""

import math

import pytest
import torch
from pdlab_kernels.triton import attention, reference

from .paged import FORMATS, TOLERANCE, Paged

RAGGED = [0, 1, 15, 16, 17, 70]


def decode_both(q, paged: Paged, num_splits=None, **window):
    args = (q, paged.k, paged.v, paged.tables, paged.lens)
    got = attention.decode_attention(*args, num_splits=num_splits, **window)
    return got, reference.decode_attention(*args, **window)


def prefill_both(q, paged: Paged, chunks: list[int], **window):
    starts = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    args = (q, paged.k, paged.v, paged.tables, starts, paged.lens)
    return attention.prefill_attention(*args, **window), reference.prefill_attention(
        *args, **window
    )


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# --- decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "dim", "dtype"),
    [(1, 64, torch.float32), (2, 80, torch.float16), (3, 64, torch.float32),
     (4, 128, torch.float16), (5, 112, torch.float32), (7, 96, torch.float16),
     (8, 128, torch.float32), (6, 128, torch.float32)],
)  # fmt: skip
def test_decode_over_ragged_lengths(ratio: int, dim: int, dtype: torch.dtype) -> None:
    paged = Paged(RAGGED, heads=1, dim=dim, dtype=dtype)
    got, expected = decode_both(torch.randn(6, ratio, dim, dtype=dtype), paged, num_splits=2)
    assert_close(got, expected)
    assert not got[0].any(), "an empty context gives zeros"


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_decode_in_each_format(kv_format: str, dtype: torch.dtype) -> None:
    paged = Paged([1, 33], heads=2, dim=128, k_format=kv_format, dtype=dtype)
    assert_close(*decode_both(torch.randn(2, 6, 128, dtype=dtype), paged, num_splits=1))


def test_decode_with_groups_that_reach_over_the_middle_of_a_head() -> None:
    paged = Paged([20], dim=96, k_format="int4:32", v_format="int8:32")
    assert_close(*decode_both(torch.randn(1, 4, 96), paged))


def test_decode_with_k_and_v_in_formats_of_their_own() -> None:
    paged = Paged([20, 3], dim=64, k_format="int8", v_format="int4:32")
    assert_close(*decode_both(torch.randn(2, 2, 64), paged))


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_decode_over_blocks_of_any_size(block_size: int) -> None:
    paged = Paged([31, 32, 33], block_size=block_size)
    assert_close(*decode_both(torch.randn(3, 2, 64), paged, num_splits=2))


@pytest.mark.parametrize("num_splits", [1, 3, 20])
def test_number_of_splits_does_not_matter(num_splits: int) -> None:
    """Also more splits than tiles of keys."""
    paged = Paged([100, 33], heads=1)
    assert_close(*decode_both(torch.randn(2, 3, 64), paged, num_splits=num_splits))


WINDOWS = [
    {"window": 1}, {"window": 16}, {"window": 40, "sinks": 4}, {"window": 20, "sinks": 40},
    {"window": 8, "sinks": 4, "reach": 30}, {"window": 8, "sinks": 4, "reach": 97},
    {"window": 1000, "sinks": 3},
]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_decode_in_a_window(window: dict[str, int]) -> None:
    paged = Paged([1, 40, 99], heads=1)
    assert_close(*decode_both(torch.randn(3, 3, 64), paged, num_splits=2, **window))


def test_decode_does_not_read_what_a_window_dropped() -> None:
    paged = Paged([99], heads=1)
    q = torch.randn(1, 3, 64)
    before, _ = decode_both(q, paged, window=20, sinks=4)
    paged.drop(0, 1, 2, 3)
    after, expected = decode_both(q, paged, window=20, sinks=4)
    assert_close(after, expected)
    assert torch.equal(before, after)


def test_dropped_blocks_are_not_seen_without_a_window() -> None:
    paged = Paged([60], heads=1)
    paged.drop(0, 0, 2)
    assert_close(*decode_both(torch.randn(1, 3, 64), paged, num_splits=2))


def test_scale_is_taken() -> None:
    paged = Paged([20], heads=1)
    got, expected = decode_both(torch.randn(1, 2, 64), paged, scale=0.5)
    assert_close(got, expected)


def test_great_scores_do_not_overflow() -> None:
    paged = Paged([40], heads=1)
    got, expected = decode_both(300 * torch.randn(1, 2, 64), paged, num_splits=2)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_rows_of_q_may_be_strided() -> None:
    paged = Paged([20, 3], heads=1)
    fused = torch.randn(2, 5, 64)
    got, expected = decode_both(fused[:, :3], paged)
    assert_close(got, expected)


def test_an_empty_batch() -> None:
    paged = Paged([])
    assert decode_both(torch.randn(0, 2, 64), paged)[0].shape == (0, 2, 64)
    assert prefill_both(torch.randn(0, 2, 64), paged, [])[0].shape == (0, 2, 64)


# --- prefill -------------------------------------------------------------------------------------

CHUNKS = [0, 1, 5, 16, 33, 2]
CONTEXTS = [0, 1, 5, 40, 33, 64]


@pytest.mark.parametrize(
    ("ratio", "dim", "dtype"),
    [(1, 64, torch.float32), (2, 80, torch.float16), (3, 64, torch.float32),
     (4, 96, torch.float16), (5, 64, torch.float16), (6, 128, torch.float32),
     (7, 64, torch.float32), (8, 128, torch.float16)],
)  # fmt: skip
def test_chunks_of_a_ragged_batch(ratio: int, dim: int, dtype: torch.dtype) -> None:
    paged = Paged(CONTEXTS, heads=1, dim=dim, dtype=dtype)
    q = torch.randn(sum(CHUNKS), ratio, dim, dtype=dtype)
    assert_close(*prefill_both(q, paged, CHUNKS))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_chunks_in_each_format(kv_format: str) -> None:
    paged = Paged([40, 9], heads=2, dim=64, k_format=kv_format)
    assert_close(*prefill_both(torch.randn(29, 4, 64), paged, [20, 9]))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_chunks_in_a_window(window: dict[str, int]) -> None:
    paged = Paged([99, 20], heads=1)
    assert_close(*prefill_both(torch.randn(15, 3, 64), paged, [12, 3], **window))


def test_chunks_do_not_read_what_a_window_dropped() -> None:
    paged = Paged([99, 20], heads=1)
    paged.drop(0, 1, 2)
    got, expected = prefill_both(torch.randn(22, 3, 64), paged, [20, 2], window=20, sinks=4)
    assert_close(got, expected)
    assert got.isfinite().all()


def test_a_prompt_in_chunks_is_the_prompt_in_one() -> None:
    whole = Paged([50], heads=1)
    q = torch.randn(50, 3, 64)
    once, _ = prefill_both(q, whole, [50])
    for start, end in ((0, 17), (17, 49), (49, 50)):
        whole.lens[0] = end
        part, _ = prefill_both(q[start:end], whole, [end - start])
        assert_close(part, once[start:end])


def test_a_chunk_of_one_is_a_decode_step() -> None:
    paged = Paged([50, 1, 17], heads=2)
    q = torch.randn(3, 4, 64)
    decoded, _ = decode_both(q, paged, num_splits=3)
    assert_close(prefill_both(q, paged, [1, 1, 1])[0], decoded)


def test_many_short_sequences_find_their_tiles() -> None:
    chunks = [3, 0, 0, 1, 33, 0, 32, 64, 1]
    paged = Paged(chunks, heads=1)
    assert_close(*prefill_both(torch.randn(sum(chunks), 1, 64), paged, chunks))


def test_bf16_is_refused_in_the_interpreter() -> None:
    paged = Paged([4], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter computes wrongly"):
        decode_both(torch.randn(1, 2, 64, dtype=torch.bfloat16), paged)


def test_nan_of_fp8_stays_nan() -> None:
    paged = Paged([4], k_format="fp8", heads=1)
    paged.v[0][paged.tables[0, 0], 2, 0, 7] = 0x7F
    got, _ = decode_both(torch.randn(1, 1, 64), paged)
    assert math.isnan(got[0, 0, 7])
    assert got.isnan().sum() == 1
