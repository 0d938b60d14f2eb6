"""The most probable tokens of each row, as torch finds them."""

import numpy as np
import pytest
import torch
from pdlab_kernels.cpu.target import TARGET

if TARGET == "torch":
    pytest.skip("no compiled kernels here", allow_module_level=True)

from pdlab_kernels.cpu.survey import survey


def expected(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and probabilities of the `k` most probable tokens, the lowest id first among equals."""
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return order, logits.softmax(dim=-1).gather(1, order)


@pytest.mark.parametrize("vocab_size", [1, 5, 8, 31, 32, 33, 101, 4096, 49_152])
@pytest.mark.parametrize("k", [1, 5])
def test_survey_finds_what_torch_finds(vocab_size: int, k: int) -> None:
    k, logits = min(k, vocab_size), 8 * torch.randn(3, vocab_size)
    found = survey(logits, k)
    token_ids, probabilities = expected(logits, k)
    assert found.token_ids.tolist() == token_ids.tolist()
    torch.testing.assert_close(torch.from_numpy(found.probabilities), probabilities)
    assert found.num_allowed.tolist() == [vocab_size] * 3


def test_equal_logits_come_by_their_ids() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [7, 40, 99]] = 2.0
    assert survey(logits, 5).token_ids.tolist() == [[7, 40, 99, 0, 1]]


def test_forbidden_tokens_are_counted_out_and_have_no_probability() -> None:
    logits = torch.full((2, 70), -torch.inf)
    logits[0, 33] = 1.0
    logits[1, 3], logits[1, 69] = 1.0, 2.0
    found = survey(logits, 3)
    assert found.num_allowed.tolist() == [1, 2]
    assert found.token_ids[:, 0].tolist() == [33, 69]
    assert found.token_ids[1, 1] == 3
    assert found.probabilities[0].tolist() == [1.0, 0.0, 0.0]
    assert sorted(set(found.token_ids[0])) == sorted(found.token_ids[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 50, 66])
def test_a_row_that_is_no_numbers_spoils_only_itself(bad: float, place: int) -> None:
    logits = torch.randn(2, 67)
    logits[0, place] = bad
    found = survey(logits, 2)
    assert np.isnan(found.probabilities[0, 0])
    assert found.token_ids[1].tolist() == expected(logits[1:], 2)[0][0].tolist()


def test_a_row_where_nothing_is_allowed_has_no_probability() -> None:
    found = survey(torch.full((1, 40), -torch.inf), 2)
    assert np.isnan(found.probabilities[0, 0])
    assert found.num_allowed.tolist() == [0]


def test_no_rows_are_no_error() -> None:
    assert survey(torch.empty(0, 9), 2).token_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("logits", "k", "message"),
    [
        (torch.zeros(3), 1, "logits: a float32 CPU matrix"),
        (torch.zeros(1, 3, dtype=torch.float64), 1, "float64"),
        (torch.zeros(1, 3), 0, "k=0: there are 1 to 3"),
        (torch.zeros(1, 3), 4, "k=4: there are 1 to 3"),
    ],
)
def test_what_cannot_be_surveyed_is_refused(logits: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        survey(logits, k)
