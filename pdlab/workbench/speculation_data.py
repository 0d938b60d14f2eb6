"""What became of drafts: step by step, by position, and what all of it gains.

Everything is read from recorded steps, so it is as good for a saved trace as for a run just made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pdlab.speculate import acceptance_of, speedup
from pdlab.trace.records import DraftRecord, SequenceRecord, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.sequences import request_of

LONGEST_MATCH = 4
"""Last tokens that are looked for in the text before; `PromptLookup` looks for as many."""
LEAST_PLAIN = 3
"""Steps without a draft that tell what such a step takes."""
NOT_LOOKED_AT, REJECTED, ACCEPTED = "not looked at", "rejected", "accepted"
BONUS, RESAMPLED, PLAIN = "bonus", "resampled", "plain"
"""What the model's own token of a step is: one more behind a draft that was right to its end, one
in the place of the first token that was not, or one where nothing was drafted."""


# --- a run as a whole ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """What the decode steps of a run drafted, kept and took; for all of its sequences together."""

    drafter: str
    num_steps: int
    num_drawn: int
    """Times that a sequence decoded: as many as the steps of one that runs alone."""
    num_tokens: int
    """Tokens put out."""
    wall_s: float
    """Of all the steps, as `usual_s` has it."""
    num_drafts: int
    num_drafted: int
    num_accepted: int
    num_cut: int
    """Drafts that lost a token."""
    positions: list[tuple[int, int]]
    """By place in the draft: tokens that were looked at, and how many of them stood."""
    by_tokens: list[int]
    """How often a sequence got 0, 1, 2 ... tokens in a step."""
    plain_s: float | None
    """A step without a draft, median; None where nothing tells."""
    cost_ratio: float
    """Drafting one token further, in plain steps; 0 where no plain step is known."""
    check_slope: float
    """How much longer each drafted token makes the step that checks it, in plain steps."""
    speedup: float | None
    """Tokens a second, times those of plain decoding."""
    against: str
    """What the speed-up is measured against."""

    @property
    def acceptance(self) -> float:
        """Of the tokens that were looked at; the same for all positions."""
        return acceptance_of(self.num_accepted, self.num_drafted, self.num_cut)

    @property
    def share(self) -> float:
        """Part of all draws that had a draft."""
        return self.num_drafts / self.num_drawn if self.num_drawn else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens of a draft, where there was one."""
        return self.num_drafted / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / self.num_drawn if self.num_drawn else 0.0

    def predicted(
        self, num_tokens: int, cost_ratio: float | None = None, check_slope: float | None = None
    ) -> float:
        """The speed-up that the formula expects of drafts of this length, as often as there were
        drafts here; by what was measured here unless it is given."""
        c = self.cost_ratio if cost_ratio is None else cost_ratio
        slope = self.check_slope if check_slope is None else check_slope
        return blended(speedup, self.acceptance, self.share, num_tokens, c, slope)


def blended(
    formula: Any, acceptance: float, share: float, num_tokens: int, cost_ratio: float, slope: float
) -> float:
    """Leviathan's speed-up where only a `share` of the steps have a draft, and checking costs.

    A step with a draft gives E tokens in the time T = E / speedup, in plain steps; the others give
    one in 1. With a share of 1 and a slope of 0 it is theorem 3.8 itself.
    """
    gain = formula(acceptance, num_tokens, cost_ratio, 1 + slope * num_tokens)
    seconds = num_tokens * cost_ratio + 1 + slope * num_tokens
    return float((share * gain * seconds + 1 - share) / (share * seconds + 1 - share))


def drafting(trace: Trace, plain: Trace | None = None) -> Drafting:
    """What a run's drafts came to.

    Args:
        plain: the same work without drafts, to measure the speed-up against. Without it, steps of
            the run itself that had no draft say what a plain step takes, if there are some.

    Raises:
        ValueError: no step of the trace only decoded.
    """
    steps = _decodes(trace)
    if not steps:
        raise ValueError("trace has no step that only decodes: nothing could be drafted")
    records = [record for step in steps for record in step.sequences]
    drafts = [(record, record.draft) for record in records if record.draft]
    num_tokens = sum(len(record.put_out) for record in records)
    wall_s = usual_s(steps)
    plain_s, plain_rate, against = _plain(steps, plain)
    return Drafting(
        drafter=str(trace.engine.get("speculation") or "nothing"),
        num_steps=len(steps),
        num_drawn=len(records),
        num_tokens=num_tokens,
        wall_s=wall_s,
        num_drafts=len(drafts),
        num_drafted=sum(len(draft.token_ids) for _, draft in drafts),
        num_accepted=sum(num_right(record, draft) for record, draft in drafts),
        num_cut=sum(num_looked_at(r, d) > num_right(r, d) for r, d in drafts),
        positions=_by_position(drafts),
        by_tokens=_histogram(Counter(len(record.put_out) for record in records)),
        plain_s=plain_s,
        cost_ratio=_cost_ratio(steps, plain_s),
        check_slope=_check_slope(steps, plain_s),
        speedup=num_tokens / wall_s / plain_rate if plain_rate and wall_s else None,
        against=against,
    )


def usual_s(steps: Sequence[StepRecord]) -> float:
    """Seconds of all the steps, if each had taken the median of those with as many tokens: one that
    was held up by other work on the machine does not count."""
    times: dict[int, list[float]] = {}
    for step in steps:
        times.setdefault(step.num_tokens, []).append(step.wall_s)
    return sum(len(each) * median(each) for each in times.values())


def num_right(record: SequenceRecord, draft: DraftRecord) -> int:
    """Drafted tokens that the model would have drawn: also the one that ended the output, which
    the record has as `sampled`."""
    count = draft.num_accepted
    last = draft.token_ids[count : count + 1] == [record.sampled]
    return count + last


def num_looked_at(record: SequenceRecord, draft: DraftRecord) -> int:
    """Tokens of a draft up to the first that did not stand, or to the end of the output."""
    right = num_right(record, draft)
    ended = right > draft.num_accepted
    return right if ended else min(right + 1, len(draft.token_ids))


def _decodes(trace: Trace) -> list[StepRecord]:
    return [step for step in trace.steps if step.phase == "decode"]


def _longest_draft(step: StepRecord) -> int:
    return max((len(r.draft.token_ids) for r in step.sequences if r.draft), default=0)


def _by_position(drafts: Sequence[tuple[SequenceRecord, DraftRecord]]) -> list[tuple[int, int]]:
    looked, right = Counter[int](), Counter[int]()
    for record, draft in drafts:
        looked.update(range(num_looked_at(record, draft)))
        right.update(range(num_right(record, draft)))
    return [(looked[place], right[place]) for place in range(len(looked))]


def _histogram(counts: Counter[int]) -> list[int]:
    return [counts[number] for number in range(max(counts, default=0) + 1)]


def _plain(
    steps: Sequence[StepRecord], plain: Trace | None
) -> tuple[float | None, float | None, str]:
    """Seconds of a plain step, tokens a second of plain decoding, and where both come from."""
    if plain is not None:
        steps = _decodes(plain)
        if not steps:
            raise ValueError("plain has no step that only decodes")
        tokens = sum(len(record.put_out) for step in steps for record in step.sequences)
        plain_s = median(step.wall_s for step in steps)
        return plain_s, tokens / usual_s(steps), "a run without drafts"
    size = Counter(len(step.sequences) for step in steps).most_common(1)[0][0]
    bare = [s.wall_s for s in steps if len(s.sequences) == size and not _longest_draft(s)]
    if len(bare) < LEAST_PLAIN:
        return None, None, ""
    plain_s = median(bare)
    return plain_s, size / plain_s, f"the {len(bare)} steps of this run without a draft"


def _cost_ratio(steps: Sequence[StepRecord], plain_s: float | None) -> float:
    """By the median step: one whose drafter had a prompt to compute first says nothing."""
    ratios = [
        step.stage_s.get("draft", 0.0) / depth for step in steps if (depth := _longest_draft(step))
    ]
    return median(ratios) / plain_s if ratios and plain_s else 0.0


def _check_slope(steps: Sequence[StepRecord], plain_s: float | None) -> float:
    """By the median step: one that was held up says nothing."""
    if not plain_s:
        return 0.0
    slopes = [
        ((step.wall_s - step.stage_s.get("draft", 0.0)) / plain_s - 1) / depth
        for step in steps
        if (depth := _longest_draft(step))
    ]
    return max(0.0, median(slopes)) if slopes else 0.0


# --- step by step -------------------------------------------------------------------------------


def drafting_frames(trace: Trace, sequence_id: str) -> list[dict[str, Any]]:
    """Each step of a sequence: what was drafted, what became of it, and what the model drew.

    `known` counts the tokens before the step drew any. `rule` is how tokens were judged: `greedy`,
    `chosen` (a draft without probabilities) or `drawn`. `match` are the last tokens before the
    draft that stand in the text before, if the draft goes on as the text did there.

    Raises:
        ValueError: the trace holds no such sequence.
    """
    request = request_of(trace, sequence_id)
    ids = request.prompt_ids + trace.output_ids(sequence_id)
    greedy = not request.params.get("temperature", 1)
    known, frames = len(request.prompt_ids), []
    for step, record in _records(trace, sequence_id):
        frames.append(_frame(trace, step, record, ids[:known], greedy))
        known += len(record.put_out)
    return frames


def first_told(frames: Sequence[dict[str, Any]]) -> int:
    """The first frame that has accepted tokens and a rejected one; else one with a draft."""
    for wanted in ({ACCEPTED, REJECTED}, {ACCEPTED}, {REJECTED}):
        for place, frame in enumerate(frames):
            if wanted <= {token["fate"] for token in frame["draft"]}:
                return place
    return 0


def _records(trace: Trace, sequence_id: str) -> Iterator[tuple[StepRecord, SequenceRecord]]:
    for step in trace.steps:
        for record in step.sequences:
            if record.sequence_id == sequence_id and record.sampled is not None:
                yield step, record


def _frame(
    trace: Trace, step: StepRecord, record: SequenceRecord, before: list[int], greedy: bool
) -> dict[str, Any]:
    draft = record.draft
    tokens = _draft_tokens(trace, record, draft) if draft else []
    stood = sum(token["fate"] == ACCEPTED for token in tokens)
    kind = BONUS if tokens and stood == len(tokens) else RESAMPLED if tokens else PLAIN
    ended = draft is not None and stood > draft.num_accepted
    drawn = {"text": _text(trace, record.sampled), "p": record.probability, "kind": kind}
    rule = "greedy" if greedy else "drawn" if draft and draft.proposed else "chosen"
    return {
        "step": step.step,
        "phase": record.phase,
        "known": len(before),
        "draft": tokens,
        "drawn": None if ended else drawn,
        "rule": rule,
        "match": _match(before, draft.token_ids) if draft and not draft.proposed else None,
        "wall_s": step.wall_s,
        "draft_s": step.stage_s.get("draft", 0.0),
        "batch": len(step.sequences),
        "put_out": len(record.put_out),
        "finish_reason": record.finish_reason,
    }


def _draft_tokens(trace: Trace, record: SequenceRecord, draft: DraftRecord) -> list[dict[str, Any]]:
    right, looked_at = num_right(record, draft), num_looked_at(record, draft)
    tokens = []
    for place, token_id in enumerate(draft.token_ids):
        fate = ACCEPTED if place < right else REJECTED if place < looked_at else NOT_LOOKED_AT
        tokens.append(
            {
                "text": _text(trace, token_id),
                "id": token_id,
                "q": draft.proposed[place] if draft.proposed else None,
                "p": draft.probabilities[place] if place < len(draft.probabilities) else None,
                "fate": fate,
            }
        )
    return tokens


def _text(trace: Trace, token_id: int | None) -> str:
    return "" if token_id is None else trace.tokens.get(token_id, f"<{token_id}>")


def _match(before: Sequence[int], drafted: Sequence[int]) -> dict[str, int] | None:
    """Where the end of the text stands before and goes on as the draft begins: the longest such
    place, and of several the last.

    `length` tokens at `start`, the same as the last ones; `copied` tokens of the draft follow.
    """
    end, best, start = len(before), 0, 0
    for behind in range(end - 1, 0, -1):
        if before[behind] == drafted[0] and before[behind - 1] == before[-1]:
            length = 1
            while length < min(LONGEST_MATCH, behind) and (
                before[behind - 1 - length] == before[end - 1 - length]
            ):
                length += 1
            if length > best:
                best, start = length, behind - length
                if best == LONGEST_MATCH:
                    break
    copied = min(len(drafted), end - start - best)
    return {"start": start, "length": best, "copied": copied} if best else None
