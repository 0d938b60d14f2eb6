"""The formula of speculation: against the sum it abbreviates, simulated draws, and the paper."""

import random

import pytest

from pdlab.speculate import (
    acceptance_of,
    best_num_tokens,
    expected_tokens,
    expected_tokens_by_position,
    speedup,
)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 16])
def test_expected_tokens_is_equation_1(acceptance: float, num_tokens: int) -> None:
    closed = (1 - acceptance ** (num_tokens + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, num_tokens) == pytest.approx(closed)
    by_position = expected_tokens_by_position([acceptance] * num_tokens)
    assert by_position == pytest.approx(closed)


def test_a_draft_that_is_always_accepted_gives_one_token_more_than_it_has() -> None:
    assert expected_tokens(1, 7) == 8


def test_expected_tokens_is_what_drafts_give_on_average() -> None:
    draw, total = random.Random(0), 0
    for _ in range(20_000):
        accepted = 0
        while accepted < 4 and draw.random() < 0.7:
            accepted += 1
        total += accepted + 1
    assert total / 20_000 == pytest.approx(expected_tokens(0.7, 4), rel=0.02)


@pytest.mark.parametrize(
    ("acceptance", "num_tokens", "cost_ratio", "expected"),
    [
        (0.75, 7, 0.02, 3.2),  # T5-small for T5-XXL, translation
        (0.80, 7, 0.04, 3.3),  # T5-base
        (0.82, 7, 0.11, 2.5),  # T5-large
        (0.65, 5, 0.02, 2.4),  # T5-small, summarization
        (0.73, 5, 0.04, 2.6),  # T5-base
    ],
)
def test_speedup_is_what_the_paper_expects(acceptance, num_tokens, cost_ratio, expected) -> None:
    """Leviathan et al. 2023, appendix: the factors that theorem 3.8 expects of their drafters."""
    assert round(speedup(acceptance, num_tokens, cost_ratio), 1) == expected


def test_a_slower_check_costs_what_it_takes_longer() -> None:
    assert speedup(0.5, 1, 0.0, check_ratio=1.5) == pytest.approx(1.0)
    assert speedup(0.5, 1, 0.25, check_ratio=1.25) == pytest.approx(1.0)


def test_best_num_tokens_is_none_where_a_draft_costs_more_than_it_brings() -> None:
    # corollary 3.9: there is a gain if and only if acceptance is greater than the cost ratio
    assert best_num_tokens(0.5, 0.6) == 0
    assert best_num_tokens(0.5, 0.4) > 0
    assert best_num_tokens(0.9, 0.0, most=8) == 8
    assert best_num_tokens(0.9, 0.0, check_slope=1.0) == 0


def test_acceptance_is_that_of_the_tokens_looked_at() -> None:
    # drafts of 4: all accepted; 2 accepted, the third rejected, the fourth not looked at
    assert acceptance_of(num_accepted=6, num_drafted=8, num_drafts=1) == pytest.approx(6 / 7)
    assert acceptance_of(0, 0, 0) == 0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: expected_tokens(1.1, 3), "acceptance=1.1"),
        (lambda: expected_tokens(0.5, -1), "num_tokens=-1"),
        (lambda: expected_tokens_by_position([0.5, -0.1]), "acceptance=-0.1"),
        (lambda: speedup(0.5, 3, -1), "cost_ratio=-1"),
        (lambda: speedup(0.5, 3, 0.1, 0), "check_ratio=0"),
        (lambda: acceptance_of(5, 5, 1), "num_drafted=5"),
    ],
)
def test_what_is_out_of_range_is_named(call, name) -> None:
    with pytest.raises(ValueError, match=name):
        call()
