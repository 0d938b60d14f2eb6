"""What a greedy choice is made and reported from: the most probable tokens of each row."""

from typing import NamedTuple

import numpy as np
import torch

from .compiled import kernel
from .simd import (
    add_floats,
    exponential,
    larger,
    largest,
    load_floats,
    repeated,
    subtract,
    total,
    zero_floats,
)

_BLOCK = 32  # logits that are looked at together


class Survey(NamedTuple):
    """Of logits [rows, vocab_size].

    `token_ids` int64 and `probabilities` float32 [rows, k]: the most probable tokens, in order; of
    equal ones the lowest id first. NaN in a row makes all its probabilities NaN.
    `num_allowed` int64 [rows]: logits above -inf.
    """

    token_ids: np.ndarray
    probabilities: np.ndarray
    num_allowed: np.ndarray


def survey(logits: torch.Tensor, k: int) -> Survey:
    """The `k` >= 1 most probable tokens of each row of float32 logits, in one pass and a bit."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.device.type != "cpu":
        raise ValueError(
            f"logits: a float32 CPU matrix is needed, not {logits.dtype} {tuple(logits.shape)} "
            f"on {logits.device}"
        )
    rows, vocab_size = logits.shape
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k={k}: there are 1 to {vocab_size}")
    token_ids = np.full((rows, k), -1, np.int64)
    probabilities = np.empty((rows, k), np.float32)
    allowed = np.empty(rows, np.int64)
    flat = logits.detach().contiguous().view(-1).numpy()
    survey_rows(flat, rows, vocab_size, token_ids, probabilities, allowed)
    return Survey(token_ids, probabilities, allowed)


@kernel
def survey_rows(logits, rows, vocab_size, token_ids, values, allowed):
    """Fill ids, probabilities and counts of all rows of flat logits."""
    for row in range(rows):
        at = row * vocab_size
        values[row, :] = -np.inf
        _find_top(logits, at, vocab_size, token_ids[row], values[row])
        top = values[row, 0]
        weight, count = _weigh(logits, at, vocab_size, top)
        allowed[row] = count
        for i in range(len(values[row])):
            values[row, i] = np.exp(values[row, i] - top) / weight


@kernel
def _find_top(logits, at, count, ids, values):
    """The largest `len(ids)` of `count` logits, into ids, which are -1 before, and values."""
    least = np.float32(-np.inf)
    for first in range(0, count, _BLOCK):
        if first + _BLOCK <= count and ids[-1] >= 0:
            here = at + first
            a = larger(load_floats(logits, here), load_floats(logits, here + 8))
            b = larger(load_floats(logits, here + 16), load_floats(logits, here + 24))
            if not largest(larger(a, b)) > least:
                continue
        for i in range(first, min(first + _BLOCK, count)):
            if ids[-1] < 0 or logits[at + i] > least:
                least = _insert(ids, values, i, logits[at + i])


@kernel
def _insert(ids, values, token_id, value):
    """Put a token into its place among the largest; returns the least of them."""
    place = len(values) - 1
    while place > 0 and (ids[place - 1] < 0 or value > values[place - 1]):
        ids[place], values[place] = ids[place - 1], values[place - 1]
        place -= 1
    ids[place], values[place] = token_id, value
    return values[-1]


@kernel
def _weigh(logits, at, count, top):
    """Sum of e^(logit - top), and how many logits are above -inf."""
    sums, most, allowed = zero_floats(), repeated(top), 0
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        values = load_floats(logits, at + i)
        sums = add_floats(sums, exponential(subtract(values, most)))
    weight = total(sums)
    for i in range(whole, count):
        weight += np.exp(logits[at + i] - top)
    bad = 0
    row = logits[at : at + count]  # LLVM makes vectors of a loop over a slice from 0 on
    for i in range(count):
        allowed += row[i] > -np.inf
        bad += row[i] != row[i]
    return np.float32(np.nan) if bad else weight, allowed
