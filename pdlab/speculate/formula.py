"""What speculation buys, from acceptance and cost (Leviathan et al. 2023).

A step checks a draft of `num_tokens` tokens. Each is accepted with probability `acceptance` if all
before it were, and one more token comes from the target in any case. Drafting a token takes
`cost_ratio` times a plain step of the target. The paper takes a step that checks a draft to be as
long as a plain one; where it is longer, `check_ratio` says how much.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.requirements import require_int, require_number

LONGEST_DRAFT = 64
"""More tokens than any draft is worth."""


def expected_tokens(acceptance: float, num_tokens: int) -> float:
    """Tokens that a step gives on average (equation 1): (1 - a^(k+1)) / (1 - a).

    Raises:
        ValueError: acceptance is not from 0 to 1, or num_tokens is negative.
    """
    _check(acceptance, num_tokens)
    return sum(acceptance**position for position in range(num_tokens + 1))


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """The same where acceptance differs by position; each given that all before were accepted."""
    tokens = reached = 1.0
    for acceptance in acceptances:
        require_number("acceptance", acceptance, 0, 1)
        reached *= acceptance
        tokens += reached
    return tokens


def speedup(
    acceptance: float, num_tokens: int, cost_ratio: float, check_ratio: float = 1.0
) -> float:
    """Tokens a second, times those of plain decoding (theorem 3.8, where `check_ratio` is 1):

        (1 - a^(k+1)) / ((1 - a) (k c + 1))

    Args:
        cost_ratio: c, a drafted token's time over a plain step's.
        check_ratio: the time of a step that checks the draft, over a plain step's.

    Raises:
        ValueError: a number is out of range.
    """
    require_number("cost_ratio", cost_ratio, 0, 1e9)
    require_number("check_ratio", check_ratio, 1e-9, 1e9)
    return expected_tokens(acceptance, num_tokens) / (num_tokens * cost_ratio + check_ratio)


def best_num_tokens(
    acceptance: float, cost_ratio: float, check_slope: float = 0.0, most: int = LONGEST_DRAFT
) -> int:
    """The draft length with the greatest speed-up; 0 where every draft loses.

    Args:
        check_slope: how much longer each drafted token makes the step that checks it, as a share of
            a plain step.
    """

    def gain(num_tokens: int) -> float:
        return speedup(acceptance, num_tokens, cost_ratio, 1 + num_tokens * check_slope)

    return max(range(most + 1), key=gain)  # the shortest of equals


def acceptance_of(num_accepted: int, num_drafted: int, num_drafts: int) -> float:
    """The acceptance that makes what was counted most likely, if it is the same at each position.

    Tokens behind the first that was rejected were not looked at and say nothing: a draft whose
    tokens were not all accepted has one rejection, so `num_accepted` accepted ones and at most
    `num_drafts` rejected ones were looked at.

    Args:
        num_accepted, num_drafted: tokens of all drafts.
        num_drafts: drafts that lost a token.

    Raises:
        ValueError: the counts contradict each other.
    """
    require_int("num_accepted", num_accepted, least=0)
    require_int("num_drafts", num_drafts, least=0)
    if num_accepted + num_drafts > num_drafted:
        raise ValueError(
            f"num_drafted={num_drafted} is less than num_accepted={num_accepted} and "
            f"num_drafts={num_drafts} that lost a token"
        )
    looked_at = num_accepted + num_drafts
    return num_accepted / looked_at if looked_at else 0.0


def _check(acceptance: float, num_tokens: int) -> None:
    require_number("acceptance", acceptance, 0, 1)
    require_int("num_tokens", num_tokens, least=0)
