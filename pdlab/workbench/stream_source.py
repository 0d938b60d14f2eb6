"""Where StreamView's tokens come from: a recorded run, or tokens made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdlab.engine.detokenizer import Detokenizer
from pdlab.engine.stops import StopFinder
from pdlab.models import Tokenizer
from pdlab.sampling import SamplingParams
from pdlab.trace.records import SequenceRecord, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.sequences import request_of

END_OF_TOKENS = "the tokens end here"
"""How hand-made tokens finish."""


@dataclass(frozen=True)
class Emission:
    """What came of one token, as it was recorded, or as the engine's own parts answer to it."""

    token_id: int
    released: str
    held: str
    """Still held back after it: text, then the bytes of an unfinished character as `<F0 9F>`."""
    step: int | None = None
    time_s: float | None = None
    """Since the request arrived."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Rules:
    """What decides about holding back: the stop strings, and whether special tokens are text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def of(cls, params: dict[str, Any]) -> Rules:
        """Of a recorded request."""
        stop = params.get("stop") or ()
        return cls(
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=params.get("include_stop", False),
            skip_special_tokens=params.get("skip_special_tokens", True),
        )


@dataclass(frozen=True)
class HandMade:
    """Tokens that no model made, and the rules by which they are streamed.

    Like a run, their stream ends at a stop string; tokens after it are not read.
    """

    token_ids: list[int]
    rules: Rules


def recorded_emissions(trace: Trace, sequence_id: str) -> list[Emission]:
    """One for each token of a recorded sequence; times are ends of steps, as TTFT is counted.

    Raises:
        ValueError: there is no such sequence, or no token came of it.
    """
    arrival_s = request_of(trace, sequence_id).arrival_s
    emissions = [
        _recorded(step, mine, arrival_s)
        for step, mine in trace.sequence_steps(sequence_id)
        if mine.sampled is not None
    ]
    if not emissions:
        raise ValueError(f"sequence_id={sequence_id!r} has no token in this trace")
    return emissions


def _recorded(step: StepRecord, mine: SequenceRecord, arrival_s: float) -> Emission:
    assert mine.sampled is not None
    return Emission(
        token_id=mine.sampled,
        released=mine.text,
        held=mine.held,
        step=step.step,
        time_s=step.start_s + step.wall_s - arrival_s,
        finish_reason=mine.finish_reason,
        stop_reason=mine.stop_reason,
    )


def replayed_emissions(tokenizer: Tokenizer, tokens: HandMade) -> list[Emission]:
    """What the engine's detokenizer and stop search make of tokens, up to a stop string.

    After the last one comes what was held back, as at the end of a request.
    """
    rules = tokens.rules
    detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens)
    finder = StopFinder(rules.stop, rules.include_stop)
    emissions = []
    for token_id in tokens.token_ids:
        released = finder.push(detokenizer.add(token_id))
        held = finder.held + bytes_shown(detokenizer.held_bytes)
        emissions.append(Emission(token_id, released, held))
        if finder.found is not None:
            break
    rest = ""
    if finder.found is None:
        rest = finder.push(detokenizer.flush()) + finder.flush()
    emissions[-1] = replace(
        emissions[-1],
        released=emissions[-1].released + rest,
        held="",
        finish_reason=END_OF_TOKENS if finder.found is None else "stop",
        stop_reason=finder.found,
    )
    return emissions


def rules_of(stop: str | Sequence[str], include_stop: bool, skip_special_tokens: bool) -> Rules:
    """Checked as the engine checks a request's.

    Raises:
        ValueError: a stop string is empty or no text, or a switch is no bool.
    """
    params = SamplingParams(
        stop=stop,  # type: ignore[arg-type]
        include_stop=include_stop,
        skip_special_tokens=skip_special_tokens,
    )
    return Rules.of(params.to_dict())


def check_token_ids(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The ids as a list.

    Raises:
        ValueError: there is none, or no token has one of them.
    """
    ids = list(token_ids)
    if not ids:
        raise ValueError("token_ids is empty: a stream needs at least one token")
    for token_id in ids:
        if not isinstance(token_id, int) or tokenizer.token_bytes(token_id) is None:
            raise ValueError(
                f"token_ids: {token_id!r:.40} is none of the {tokenizer.vocab_size:,} tokens"
            )
    return ids


def bytes_shown(data: bytes) -> str:
    """Bytes as a record writes them, `<F0 9F>`; nothing for none."""
    return f"<{data.hex(' ').upper()}>" if data else ""
