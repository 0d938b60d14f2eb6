"""Bytes and FLOPs are those that a count of every query, key and tensor gives."""

import pytest
import torch
from pdlab_kernels.triton import reference, work

PARTS = (
    torch.zeros(8, 4, 2, 64, dtype=torch.int8),
    torch.zeros(8, 4, 2, 2, 1, dtype=torch.float16),
)
TABLES = torch.tensor([[0, 1, 2, 3, 4], [5, 6, -1, -1, -1], [7, -1, 3, 4, 0]])
LENS = torch.tensor([19, 5, 17])
TOKEN = 2 * (64 + 2 * 2)


@pytest.mark.parametrize(
    "window",
    [{}, {"window": 3}, {"window": 6, "sinks": 2}, {"window": 4, "sinks": 9},
     {"window": 4, "sinks": 6, "reach": 12}, {"window": 100, "sinks": 3}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("chunks", [[7, 5, 1], [1, 1, 1], [19, 0, 17]], ids=str)
def test_attention_counts_the_keys_that_are_seen(chunks, window) -> None:
    """Seen by probing the reference: a key is seen where its value reaches the output."""
    q = torch.zeros(sum(chunks), 4, 64)
    starts = torch.tensor([0, *chunks]).cumsum(0)
    zeros, pairs, keys = torch.zeros(8, 4, 2, 64), 0, set()
    for slot in range(32):
        v = zeros.clone()
        v.flatten(0, 1)[slot] = 1.0
        out = reference.prefill_attention(q, (zeros,), (v,), TABLES, starts, LENS, **window)
        for i in range(3):
            seen = int((out[starts[i] : starts[i + 1], 0, 0] > 0).sum())
            pairs += seen
            keys |= {(i, slot)} if seen else set()
    got = work.prefill_attention(q, PARTS, PARTS, TABLES, starts, LENS, **window)
    assert got.flops == 4 * pairs * 4 * 64
    assert got.bytes == len(keys) * 2 * TOKEN + 2 * q.nbytes


def test_decode_is_a_chunk_of_one_query_and_skips_empty_rows() -> None:
    q = torch.zeros(3, 4, 64)
    lens = torch.tensor([19, 0, 3])
    got = work.decode_attention(q, PARTS, PARTS, TABLES, lens)
    assert got.flops == 4 * (19 + 3) * 4 * 64
    assert got.bytes == (19 + 3) * 2 * TOKEN + 2 * q[:2].nbytes


def test_token_wise_kernels_count_each_tensor_once() -> None:
    q, k = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    assert work.rope_and_write_kv(q, k, k, PARTS, PARTS) == (
        2 * q.nbytes + 2 * k.nbytes + 3 * 64 * 4 + 3 * 2 * TOKEN, 3 * (3 * 6 * 64)
    )  # fmt: skip
    x = torch.zeros(3, 64)
    assert work.add_rms_norm(x, x).bytes == 4 * x.nbytes + 64 * 4
    assert work.add_rms_norm(x, None).bytes == 2 * x.nbytes + 64 * 4
    assert work.silu_mul(x).bytes == 1.5 * x.nbytes
    assert work.sample(x) == (x.nbytes, 0)


def test_a_product_reads_its_weights_once() -> None:
    x = torch.zeros(3, 64)
    codes, scales = torch.zeros(10, 32, dtype=torch.uint8), torch.zeros(10, 2)
    got = work.linear(x, codes, scales, scales)
    assert got == (x.nbytes + 3 * 10 * 4 + 320 + 2 * 80, 2 * 3 * 64 * 10)


def test_floor_is_what_takes_longer() -> None:
    assert work.Work(1000, 10).floor(bandwidth=100.0, peak=1.0) == 10.0
    assert work.Work(1000, 50).floor(bandwidth=100.0, peak=1.0) == 50.0
