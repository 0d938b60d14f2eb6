"""Where a text ends: stop strings across tokens, stop tokens, min_tokens; nothing leaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.fake import FakeRunner
from pdlab.engine.runner import StepOutput
from pdlab.engine.stops import StopFinder
from pdlab.sampling import Sampled

# --- the finder alone ---------------------------------------------------------------------------


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: read on letter by letter until a stop string stands at the end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab世\n", max_size=30),
    stops=st.lists(st.text("ab世\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=12),
    include=st.booleans(),
)
@settings(max_examples=500)
def test_the_text_ends_where_a_stop_string_is_first_complete_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
):
    expected, found = cut(text, stops, include)
    finder = StopFinder(stops, include)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    shown = ""
    for start, end in pairwise(edges):
        shown += finder.push(text[start:end])
        assert expected.startswith(shown), "part of a stop string leaked"
        if finder.found is None:
            assert shown + finder.held == text[:end]
            assert not finder.held or any(stop.startswith(finder.held) for stop in stops)
    assert shown + finder.flush() == expected
    assert finder.found == found


def test_nothing_is_held_back_that_cannot_become_a_stop_string():
    finder = StopFinder(["STOP"])
    assert [finder.push(text) for text in ("a", "S", "T", "x", "ST", "ST", "OP!")] == [
        "a", "", "", "STx", "", "ST", "",
    ]  # fmt: skip
    assert (finder.found, finder.flush()) == ("STOP", "")


def test_a_stop_string_found_too_early_is_plain_text():
    finder = StopFinder(["ab"])
    assert finder.push("xab", searches=False) == "xab"
    assert finder.push("a", searches=False) == ""
    assert finder.push("b!") == ""
    assert finder.found == "ab"


# --- through the engine: chosen tokens of the real vocabulary -----------------------------------


class Scripted(FakeRunner):
    """Says the tokens that it is told, whatever the text."""

    def __init__(self, engine: Engine, script: list[int]):
        config = engine.config
        super().__init__(config.num_blocks, config.block_size, engine.model.config.vocab_size)
        self.script = script

    def run(self, batch, clock, step) -> StepOutput:
        output = super().run(batch, clock, step)
        for part in batch.scheduled:
            for drawer in part.drawers:
                token_id = self.script[drawer.num_output_tokens]
                output.sampled[drawer.sequence_id] = [Sampled(token_id, 1.0, [])]
        return output


def say(speaker: Model, script: list[int], **params):
    """The output, and the texts of its chunks."""
    with Engine(speaker, EngineConfig(block_size=4, num_blocks=64)) as engine:
        engine.runner = Scripted(engine, script + [0] * 50)
        given_params = SamplingParams(**{"max_tokens": len(script)} | params)
        chunks = list(engine.stream([1, 2, 3], given_params))
        [output] = engine.generate([[1, 2, 3]], given_params)
        assert engine.pool.num_free == 64
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [t for chunk in chunks for t in chunk.token_ids] == output.token_ids
    last = chunks[-1]
    assert (last.finish_reason, last.stop_reason) == (output.finish_reason, output.stop_reason)
    return output, [chunk.text for chunk in chunks]


def spell(speaker: Model, *texts: str) -> list[int]:
    """One token a character where possible."""
    return [t for text in texts for character in text for t in speaker.tokenizer.encode(character)]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_is_cut_exactly(speaker, include):
    script = spell(speaker, "say STOP now")
    output, texts = say(speaker, script, stop="STOP", include_stop=include, max_tokens=12)
    assert output.text == ("say STOP" if include else "say ")
    assert (output.finish_reason, output.stop_reason) == ("stop", "STOP")
    assert output.token_ids == script[:8]
    assert not any(part in text for text in texts for part in ("S", "ST", "STO")) or include


def test_what_was_held_back_is_flushed_at_the_end(speaker):
    output, texts = say(speaker, spell(speaker, "an ST"), stop=["STOP", "T!"])
    assert (output.text, output.finish_reason) == ("an ST", "length")
    assert texts[-2:] == ["", "ST"]


def test_a_stop_string_inside_one_token_cuts_the_token(speaker):
    [token] = speaker.tokenizer.encode(" something")
    output, _ = say(speaker, [token, token], stop="met")
    assert (output.text, output.token_ids) == (" so", [token])
    output, _ = say(speaker, [token, token], stop="met", include_stop=True)
    assert output.text == " somet"


def test_stop_strings_of_split_characters(speaker):
    """世 is three tokens; its stop string is found when the last byte is there."""
    script = spell(speaker, "a", "世", "b")
    assert len(script) > 3
    output, texts = say(speaker, script, stop="世")
    assert (output.text, output.stop_reason) == ("a", "世")
    assert "\ufffd" not in "".join(texts)


def test_stop_tokens_end_the_text_and_are_left_out_of_it(speaker):
    script = spell(speaker, "abcd")
    output, _ = say(speaker, script, stop_token_ids=[script[2]])
    assert (output.text, output.token_ids, output.stop_reason) == ("ab", script[:3], script[2])
    output, _ = say(speaker, script, stop_token_ids=[script[2]], include_stop=True)
    assert output.text == "abc"


@pytest.mark.parametrize("which", [0, 1])
def test_each_of_the_models_end_tokens_ends_the_text(speaker, which):
    end = speaker.config.eos_token_ids[which]
    script = [*spell(speaker, "ab"), end, *spell(speaker, "c")]
    output, _ = say(speaker, script)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
    output, _ = say(speaker, script, ignore_eos=True)
    assert (output.text, output.finish_reason) == ("abc", "length")
    output, _ = say(speaker, script, ignore_eos=True, skip_special_tokens=False)
    assert output.text == f"ab{speaker.tokenizer.token_text(end)}c"
    output, _ = say(speaker, script, include_stop=True, skip_special_tokens=False)
    assert output.text == f"ab{speaker.tokenizer.token_text(end)}"
    output, _ = say(speaker, script, ignore_eos=True, stop_token_ids=[end])
    assert (output.text, output.stop_reason) == ("ab", end)


def test_before_min_tokens_a_stop_string_is_plain_text(speaker):
    script = spell(speaker, "ab ab ab")
    texts = [say(speaker, script, stop="ab", min_tokens=n)[0].text for n in (0, 2, 3, 5, 6, 8)]
    assert texts == ["", "", "ab ", "ab ", "ab ab ", "ab ab "]


def test_a_text_that_ends_in_mid_character_is_shown_as_unreadable_at_the_end(speaker):
    script = spell(speaker, "a世")[:-1]
    output, texts = say(speaker, script)
    assert output.text == "a\ufffd"
    assert texts[-1] == "\ufffd"
    output, _ = say(speaker, script, stop="\ufffd")
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "\ufffd")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_tokens_with_stop_strings_stream_as_the_cut_one_shot_text(speaker, data):
    tokenizer = speaker.tokenizer
    ids = st.one_of(st.integers(3, 300), st.integers(3, tokenizer.vocab_size - 1))
    script = data.draw(st.lists(ids, min_size=1, max_size=12))
    whole = tokenizer.decode(script, skip_special_tokens=True)
    starts = data.draw(st.lists(st.integers(0, max(0, len(whole) - 1)), max_size=2))
    some = [whole[start : start + data.draw(st.integers(1, 4))] for start in starts]
    stops = [stop for stop in some if stop and "\ufffd" not in stop]
    include = data.draw(st.booleans())
    output, _ = say(speaker, script, stop=stops, include_stop=include)
    assert (output.text, output.stop_reason) == cut(whole, stops, include)


def test_what_is_held_is_in_the_record(speaker):
    script = spell(speaker, "S世")
    with Engine(speaker, EngineConfig()) as engine:
        engine.runner = Scripted(engine, script)
        engine.generate([[1, 2]], SamplingParams(max_tokens=len(script), stop="STOP"))
        records = [s for _, s in engine.trace.sequence_steps("r0")]
    assert records[0].held == "S"
    assert records[1].held.startswith("S<E4")
    assert "".join(r.text for r in records) == "S世"
    assert records[-1].held == ""
