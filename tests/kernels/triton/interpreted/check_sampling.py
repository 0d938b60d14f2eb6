"""The sampling kernel against a sort, and against pdlab's own chain."""

import math

import pytest
import torch
from pdlab_kernels.triton import reference, sampling

from pdlab.sampling.filters import cut_below


def parameters(rows: int, temperature=1.0, top_k=0, top_p=1.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
    )


def both(logits: torch.Tensor, *args, **chance):
    return (
        sampling.sample(logits, *args, **chance).tolist(),
        reference.sample(logits, *args, **chance).tolist(),
    )


@pytest.mark.parametrize("chance", ["uniforms", "seeds"])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(37, torch.float32), (5000, torch.float16)])
def test_filters_and_draw(vocab_size: int, dtype: torch.dtype, chance: str) -> None:
    """All filters, alone and together; 5000 tokens take two tiles."""
    settings = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 20, 0.5, 0.0),
                (1.0, 0, 1.0, 0.3), (2.0, 30, 0.95, 0.05), (1.0, 1, 1.0, 0.0),
                (1.0, 10**6, 0.999, 0.0), (5.0, 0, 1e-6, 0.0)]  # fmt: skip
    temperature, top_k, top_p, min_p = (
        torch.tensor(column) for column in zip(*settings, strict=True)
    )
    logits = (3 * torch.randn(len(settings), vocab_size)).to(dtype)
    chances = {
        "uniforms": torch.rand(len(settings), dtype=torch.float64),
        "seeds": torch.randint(1 << 62, (len(settings),)),
    }
    got, expected = both(logits, temperature, top_k, top_p, min_p, **{chance: chances[chance]})
    assert got == expected


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.6, 0.0),
                                                       (9, 0.7, 0.0), (0, 1.0, 0.2)])  # fmt: skip
def test_exactly_what_is_kept_can_be_drawn(top_k: int, top_p: float, min_p: float) -> None:
    """A dart into the middle of each kept token's share hits it; 0 and 1 hit the first and last."""
    row = torch.randn(40) * 2
    row[11] = row[3]  # ties stay together
    kept = row.clone()[None]
    if top_k:
        kept = cut_below(kept, kept.topk(top_k).values[:, -1:])
    if top_p < 1:
        ranked = kept.softmax(-1).sort(descending=True)
        last = int((ranked.values.cumsum(-1) - ranked.values < top_p).sum()) - 1
        kept = cut_below(kept, kept[0, ranked.indices[0, last]].view(1, 1))
    if min_p:
        kept = cut_below(kept, kept.max() + math.log(min_p))
    wanted = kept[0].isfinite().nonzero().flatten()
    shares = kept[0].softmax(-1).double()
    darts = (shares.cumsum(0) - shares / 2)[wanted]
    darts = torch.cat((darts, torch.tensor([0.0, 1 - 2**-53])))
    args = parameters(len(darts), top_k=top_k, top_p=top_p)
    drawn = sampling.sample(
        row.expand(len(darts), -1), *args, torch.full((len(darts),), min_p), uniforms=darts
    )
    assert drawn.tolist() == [*wanted.tolist(), int(wanted[0]), int(wanted[-1])]


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    row = torch.arange(6.0)
    shares = (row / temperature).softmax(-1).double()
    darts = torch.cat((shares.cumsum(0) - shares * 0.99, shares.cumsum(0) - shares * 0.01))
    drawn = sampling.sample(
        row.expand(12, -1), *parameters(12, temperature=temperature), uniforms=darts
    )
    assert drawn.tolist() == [*range(6), *range(6)]


def test_greedy_takes_the_first_of_the_best() -> None:
    """Also of those in different tiles."""
    logits = torch.randn(3, 5000)
    logits[0, [7, 30, 4990]] = 9.0
    logits[2] = 0.0
    args = parameters(3, temperature=0.0, top_k=3, top_p=0.5)
    assert sampling.sample(logits, *args, seeds=torch.zeros(3, dtype=torch.int64)).tolist() == [
        7, int(logits[1].argmax()), 0
    ]  # fmt: skip


def test_rows_of_their_own_kind_in_one_batch() -> None:
    logits = torch.randn(3, 50)
    args = (torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 2, 0]), torch.tensor([1.0, 1.0, 0.4]))
    got, expected = both(logits, *args, uniforms=torch.tensor([0.5, 0.9, 0.1]).double())
    assert got == expected


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((5, 60), -math.inf)
    logits[:, [4, 59]] = torch.tensor([1.0, 1.0])
    darts = torch.tensor([0.0, 0.4, 0.6, 0.99, 1 - 2.0**-53], dtype=torch.float64)
    for top_k in (0, 1, 40):
        args = parameters(5, top_k=top_k, top_p=0.9)
        assert sampling.sample(logits, *args, uniforms=darts).tolist() == [4, 4, 59, 59, 59]
    drawn = sampling.sample(logits, *parameters(5), seeds=torch.arange(5))
    assert set(drawn.tolist()) <= {4, 59}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_give_minus_one(temperature: float) -> None:
    logits = torch.randn(4, 30)
    logits[0] = -math.inf
    logits[1, 5] = math.nan
    logits[2, 5] = math.inf
    args = parameters(4, temperature, top_k=3, top_p=0.5)
    got, expected = both(logits, *args, uniforms=torch.full((4,), 0.5).double())
    assert got == expected
    assert got[:3] == [-1, -1, -1]
    assert got[3] >= 0


def test_numbers_far_apart_are_sorted_out() -> None:
    row = torch.tensor([30.0, -3e38, 30.0 - 2**-19, 30.0 - 2**-18, -1e-45, 0.0, 29.0, -7.0])
    temperature, _, top_p = parameters(8)
    dart = torch.full((8,), 1 - 2**-53, dtype=torch.float64)  # the last token that is kept
    top_k = torch.arange(1, 9)
    got, expected = both(row.expand(8, -1), temperature, top_k, top_p, uniforms=dart)
    assert got == expected
