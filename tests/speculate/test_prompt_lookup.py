"""Prompt lookup: the index against a search through the whole text, and what it drafts."""

from collections.abc import Sequence as Several
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab import EngineConfig, PromptLookup, SamplingParams
from pdlab.engine import Sequence
from pdlab.engine.drafting import Outcome
from pdlab.speculate import LookupDrafter, NgramIndex

from ..helpers import random_model, random_prompt
from .running import run


def searched(token_ids: Several[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """What followed the longest suffix where it last stood before, found by looking everywhere."""
    end = len(token_ids)
    for size in range(longest, shortest - 1, -1):
        suffix = token_ids[end - size :]
        for start in range(end - size - 1, -1, -1):
            if size < end and token_ids[start : start + size] == suffix:
                text = list(token_ids)
                for place in range(start + size, start + size + num_tokens):
                    text.append(text[place])
                return text[end:]
    return []


def sequence(token_ids: list[int], name: str = "r0") -> Sequence:
    return Sequence(name, name, token_ids, SamplingParams())


def drafter(**knobs: int | str) -> LookupDrafter:
    made = PromptLookup(**knobs).make(random_model(), EngineConfig())  # type: ignore[arg-type]
    assert isinstance(made, LookupDrafter)
    return made


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    longest=st.integers(1, 5),
    fewer=st.integers(0, 4),
    num_tokens=st.integers(1, 9),
)
def test_the_index_finds_what_a_search_finds_however_the_text_grows(
    token_ids, cuts, longest, fewer, num_tokens
) -> None:
    shortest = max(1, longest - fewer)
    index = NgramIndex(longest, shortest)
    for end in sorted({*(min(cut, len(token_ids)) for cut in cuts), len(token_ids)}):
        text = token_ids[:end]
        found = index.continuation(text, num_tokens)
        assert found == searched(text, num_tokens, longest, shortest)


def test_the_longest_match_counts_and_the_most_recent_of_several() -> None:
    index = NgramIndex(longest=3, shortest=1)
    #       1 2 3 is followed by 4;  3 alone later by 5, and last by 6
    text = [1, 2, 3, 4, 3, 5, 9, 3, 6, 1, 2, 3]
    assert index.continuation(text, 1) == [4]
    assert index.continuation([*text, 8, 3], 1) == [8]
    assert NgramIndex(1, 1).continuation([3, 5, 9, 3, 6, 7, 3], 1) == [6]


def test_a_loop_is_drafted_beyond_the_end_of_the_text() -> None:
    assert NgramIndex(2, 2).continuation([7, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert NgramIndex(1, 1).continuation([5, 5], 4) == [5, 5, 5, 5]


def test_what_a_step_adds_to_the_index_does_not_grow_with_the_text() -> None:
    index = NgramIndex(longest=4, shortest=2)
    text = random_prompt(4000)
    index.continuation(text, 5)
    asked = Counted([*text, 1, 2, 3])
    index.continuation(asked, 5)
    # of three new tokens and the last one before: 3 n-grams each, of up to 4 tokens; 3 questions
    assert asked.num_read <= 4 * (4 + 3 + 2) + (4 + 3 + 2) + 5


class Counted(list):
    """A list that counts the items read of it."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_drafts_keep_to_their_limits_and_belong_to_their_sequences() -> None:
    lookup = drafter(num_tokens=3, longest=2, shortest=1)
    loop, none = sequence([1, 2, 1, 2, 1]), sequence([1, 2, 3, 4], "r1")
    drafts = lookup.propose([loop, none, loop], [9, 9, 2])
    assert [draft.token_ids for draft in drafts] == [[2, 1, 2], [], [2, 1]]
    assert all(draft.probabilities is None for draft in drafts)
    assert [d.token_ids for d in lookup.propose([loop], [0])] == [[]]


def test_output_is_looked_up_as_the_prompt_is() -> None:
    lookup = drafter(num_tokens=2, longest=2, shortest=2)
    mine = sequence([1, 2, 3])
    assert lookup.propose([mine], [5])[0].token_ids == []
    mine.token_ids += [9, 8, 7, 9, 8]
    assert lookup.propose([mine], [5])[0].token_ids == [7, 9]


def test_who_is_forgotten_leaves_nothing() -> None:
    lookup = drafter(num_tokens="auto")
    mine = sequence([1, 2, 1, 2])
    lookup.propose([mine], [4])
    lookup.learn([Outcome(mine, 4, 2)], 1e-5, 1e-2)
    lookup.forget(mine)
    lookup.forget(sequence([3], "never seen"))
    assert not lookup.indexes
    assert not lookup.length.own  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_tokens": -1}, "num_tokens=-1"),
        ({"num_tokens": 65}, "num_tokens=65"),
        ({"num_tokens": "many"}, "num_tokens='many'"),
        ({"num_tokens": True}, "num_tokens=True"),
        ({"longest": 33}, "longest=33"),
        ({"shortest": 0}, "shortest=0"),
        ({"shortest": 5, "longest": 4}, "shortest=5 is more than longest=4"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs, message) -> None:
    with pytest.raises(ValueError, match=message):
        PromptLookup(**knobs)


def test_the_knobs_are_read_back_from_their_repr() -> None:
    knobs = PromptLookup(num_tokens="auto", longest=6)
    assert eval(repr(knobs)) == knobs


# --- with an engine ------------------------------------------------------------------------------

PROMPTS = [random_prompt(7, seed=i) * 3 for i in range(8)]
"""What repeats itself: there is something to look up from the first step on."""


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 5, "auto"])
def test_the_output_is_that_of_plain_decoding_bit_for_bit(batch, num_tokens) -> None:
    config = EngineConfig(exact=True, num_blocks=128, block_size=4)
    params = [
        SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), seed=i) for i in range(batch)
    ]
    plain = run(random_model(), config, PROMPTS[:batch], params)
    knobs = PromptLookup(num_tokens=num_tokens, longest=3, shortest=1)
    drafted = run(random_model(), replace(config, speculation=knobs), PROMPTS[:batch], params)
    assert drafted.num_drafted > 0
    for ours, theirs in zip(drafted.seen, plain.seen, strict=True):
        assert ours.is_same(theirs)


def test_a_loop_is_written_in_fewer_steps() -> None:
    config = EngineConfig(exact=True, num_blocks=128)
    params = SamplingParams(max_tokens=60)
    plain = run(random_model(), config, PROMPTS[:1], params)
    drafted = run(random_model(), replace(config, speculation=PromptLookup()), PROMPTS[:1], params)
    assert drafted.tokens == plain.tokens
    assert drafted.num_accepted > 20  # greedy text of a random model ends in a loop
    assert len(drafted.trace.steps) == len(plain.trace.steps) - drafted.num_accepted
