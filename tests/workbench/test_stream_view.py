"""StreamView shows which bytes wait and why, and its text is the text that was sent."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import Engine, EngineConfig, Model, SamplingParams, Trace
from pdlab.models import Tokenizer
from pdlab.workbench import stream_view
from pdlab.workbench.characters import utf8_characters
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workbench.stream_data import StreamRow, split_held, stream_rows
from pdlab.workbench.stream_source import HandMade, Rules, replayed_emissions
from pdlab.workbench.stream_view import HAND_MADE, StreamView
from tests.helpers import random_model

from .handmade import two_requests

TEXT = "Hello 世界 😀, café STOP here"
"""No token of SmolLM2 holds 世 or 😀 whole."""


@pytest.fixture(scope="module")
def tokenizer(speaker: Model) -> Tokenizer:
    return speaker.tokenizer


def rows_of(tokenizer: Tokenizer, token_ids: list[int], **rules: object) -> list[StreamRow]:
    tokens = HandMade(list(token_ids), Rules(**rules))
    return stream_rows(replayed_emissions(tokenizer, tokens), tokenizer, tokens.rules)


def token_of(tokenizer: Tokenizer, data: bytes) -> int:
    """The token that stands for exactly these bytes."""
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == data)


def sent(rows: list[StreamRow]) -> str:
    return "".join(row.released for row in rows)


@pytest.fixture(scope="module")
def run(speaker: Model) -> Trace:
    """A real run that had to write TEXT, up to its stop string, and a second request beside it."""
    with Engine(speaker, EngineConfig(num_blocks=32)) as engine:
        written = SamplingParams(choice=(TEXT,), stop=("STOP", "REAL"), n=2)
        engine.generate(["Say hello."] * 2, [written, SamplingParams(max_tokens=3)])
        return engine.trace


# --- characters -----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=12), st.text(max_size=8).map(str.encode)))
def test_bytes_are_divided_into_characters_as_python_decodes_them(data: bytes) -> None:
    found = list(utf8_characters(data))
    assert "".join(c.text for c in found) == data.decode(errors="replace")
    assert [c.start for c in found] == [0, *(c.end for c in found)][: len(found)]
    assert b"".join(data[c.start : c.end] for c in found) == data


@pytest.mark.parametrize(
    ("char", "size"), [("A", 1), ("é", 2), ("߿", 2), ("世", 3), ("😀", 4), ("\U0010ffff", 4)]
)
def test_the_first_byte_announces_the_size(char: str, size: int) -> None:
    [found] = utf8_characters(char.encode())
    assert (found.size, found.end) == (size, size)
    [unfinished] = utf8_characters(char.encode()[: max(1, size - 1)])
    assert unfinished.size == size


@settings(max_examples=100)
@given(st.data())
def test_parts_are_the_bytes_of_their_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12))
    rows = rows_of(tokenizer, ids)
    for token_id, row in zip(ids, rows, strict=True):
        expected = b"" if token_id in tokenizer.special_ids else tokenizer.token_bytes(token_id)
        assert bytes(byte for part in row.parts for byte in part.bytes) == expected
    shown = "".join(part.text for row in rows for part in row.parts)
    assert shown == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100)
@given(st.data())
def test_what_was_sent_and_what_is_held_are_all_there_is(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """After every token: text sent, text held and bytes held are the tokens' bytes."""
    text = data.draw(st.text(alphabet="STOP 世😀é", min_size=1, max_size=20))
    ids = tokenizer.encode(text)
    rows = rows_of(tokenizer, ids, stop=("STOP", "P世"))
    so_far = b""
    for row in rows[:-1]:
        so_far += tokenizer.token_bytes(row.token_id) or b""
        seen = sent(rows[: rows.index(row) + 1]) + row.held_text
        assert seen.encode() + bytes(row.held_bytes) == so_far
        assert bool(row.reasons) == bool(row.held_text or row.held_bytes)
    assert sent(rows) + rows[-1].cut == text[: len(sent(rows) + rows[-1].cut)]
    assert not any(stop in sent(rows) for stop in ("STOP", "P世"))


# --- why something waits --------------------------------------------------------------------------


def test_an_unfinished_character_says_how_many_bytes_it_has(tokenizer: Tokenizer) -> None:
    first, last = tokenizer.encode(" 😀")
    begun, done = rows_of(tokenizer, [first, last])
    assert (begun.released, begun.held_bytes, begun.open) == (" ", [0xF0, 0x9F, 0x98], True)
    assert begun.reasons == ["unfinished character: 3 of 4 bytes"]
    assert (begun.parts[-1].before, begun.parts[-1].size, begun.parts[-1].text) == (0, 4, "")
    assert (done.released, done.held_bytes, done.open) == ("😀", [], False)
    assert (done.parts[0].before, done.parts[0].bytes, done.parts[0].text) == (3, [0x80], "😀")
    assert "completes the 4 bytes of '😀'" in done.note


def test_a_possible_stop_string_is_named(tokenizer: Tokenizer) -> None:
    ids = [token_of(tokenizer, b"S"), token_of(tokenizer, b"T"), token_of(tokenizer, b"R")]
    one, both, none = rows_of(tokenizer, ids, stop=("STOP", "TO", "x"))
    assert (one.held_text, one.reasons) == ("S", ["could become the stop string 'STOP'"])
    assert both.held_text == "ST"
    assert both.reasons == ["could become the stop strings 'STOP' or 'TO'"]
    assert (none.released, none.reasons) == ("STR", [])
    assert "did not become a stop string" in none.note


def test_text_and_bytes_can_wait_together(tokenizer: Tokenizer) -> None:
    ids = [token_of(tokenizer, b"S"), *tokenizer.encode("世")[:1]]
    row = rows_of(tokenizer, [*ids, *tokenizer.encode("世")[1:]], stop=("S世x",))[1]
    assert (row.held_text, row.held_bytes) == ("S", [0xE4, 0xB8])
    assert len(row.reasons) == 2


def test_bytes_that_never_become_a_character_are_said_so(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode("世")[0], token_of(tokenizer, b"A")]
    begun, broken = rows_of(tokenizer, ids)
    assert begun.reasons == ["unfinished character: 2 of 3 bytes"]
    assert broken.released == "\ufffdA"
    assert "never became a character" in broken.note
    [last] = rows_of(tokenizer, ids[:1])
    assert (last.released, last.reasons) == ("\ufffd", [])
    assert "stayed unfinished" in last.note


def test_text_that_looks_like_held_bytes_stays_text() -> None:
    assert split_held("<F0 9F>", b"<F0 9F>") == ("<F0 9F>", b"")
    assert split_held("S<F0 9F>", b"S\xf0\x9f") == ("S", b"\xf0\x9f")
    assert split_held("S", b"S") == ("S", b"")


def test_special_tokens_bring_no_bytes_unless_they_are_text(tokenizer: Tokenizer) -> None:
    ids = [token_of(tokenizer, b"A"), tokenizer.eos_token_id, token_of(tokenizer, b"B")]
    skipped = rows_of(tokenizer, ids)[1]
    assert (skipped.skipped, skipped.parts, skipped.released) == (True, [], "")
    kept = rows_of(tokenizer, ids, skip_special_tokens=False)[1]
    assert (kept.skipped, kept.released) == (False, tokenizer.token_text(ids[1]))


# --- the end --------------------------------------------------------------------------------------


def test_a_stop_string_over_several_tokens_is_cut_whole(tokenizer: Tokenizer) -> None:
    rows = rows_of(tokenizer, tokenizer.encode(TEXT), stop=("STOP",))
    assert sent(rows) == TEXT[: TEXT.index("STOP")]
    assert (rows[-1].stop, rows[-1].cut, rows[-1].finish_reason) == ("STOP", "STOP", "stop")
    assert len(rows) < len(tokenizer.encode(TEXT))  # what follows is not read


def test_text_after_the_stop_string_in_its_token_is_cut_too(tokenizer: Tokenizer) -> None:
    [row] = rows_of(tokenizer, [token_of(tokenizer, b" the")], stop=("t",))
    assert (row.released, row.stop, row.cut) == (" ", "t", "the")


def test_an_included_stop_string_is_sent(tokenizer: Tokenizer) -> None:
    rows = rows_of(tokenizer, tokenizer.encode(TEXT), stop=("STOP",), include_stop=True)
    assert sent(rows) == TEXT[: TEXT.index("STOP") + 4]
    assert (rows[-1].stop, rows[-1].cut) == ("STOP", "")


def test_the_end_sends_what_only_could_have_become_a_stop(tokenizer: Tokenizer) -> None:
    rows = rows_of(tokenizer, tokenizer.encode("the ST"), stop=("STOP",))
    assert sent(rows) == "the ST"
    assert (rows[-1].held_text, rows[-1].cut) == ("", "")


# --- recorded runs --------------------------------------------------------------------------------


def test_rows_of_a_run_are_its_records(run: Trace, speaker: Model) -> None:
    for name in ("r0", "r0.1", "r1"):
        view = StreamView(run, speaker, name)
        steps = [(r, s) for r, s in run.sequence_steps(name) if s.sampled is not None]
        arrival_s = run.requests[name.split(".")[0]].arrival_s
        assert len(view.rows) == len(steps)
        for row, (record, mine) in zip(view.rows, steps, strict=True):
            assert (row["token_id"], row["released"], row["step"]) == (
                mine.sampled,
                mine.text,
                record.step,
            )
            assert row["time_s"] == record.start_s + record.wall_s - arrival_s
        assert sum(row["gap_s"] for row in view.rows) == pytest.approx(view.rows[-1]["time_s"])


def test_a_run_holds_back_what_its_tokens_alone_would(run: Trace, speaker: Model) -> None:
    """The engine streamed by the rules that its detokenizer and stop search follow by hand."""
    view = StreamView(run, speaker, "r0")
    by_hand = StreamView.from_tokens(
        speaker, [row["token_id"] for row in view.rows], stop=("STOP", "REAL")
    )
    for name in ("released", "held_text", "held_bytes", "reasons", "cut", "parts", "stop"):
        assert [row[name] for row in view.rows] == [row[name] for row in by_hand.rows], name
    assert view.text == TEXT[: TEXT.index("STOP")]
    assert any(row["held_bytes"] for row in view.rows)
    assert any(row["held_text"] for row in view.rows)


def test_a_stop_token_is_no_part_of_the_answer(speaker: Model) -> None:
    stopper = speaker.tokenizer.encode("Hello there")[1]
    params = SamplingParams(choice=("Hello there",), stop_token_ids=(stopper,))
    view = StreamView.of_run(speaker, "Greet me.", params)
    assert (view.text, view.rows[-1]["cut"], view.rows[-1]["stop"]) == ("Hello", " there", "")


def test_an_aborted_stream_keeps_what_it_held(speaker: Model) -> None:
    with Engine(speaker, EngineConfig(num_blocks=16)) as engine:
        request = engine.submit("Say it.", SamplingParams(choice=("世界",)))
        engine.step()
        engine.abort(request)
        row = StreamView(engine.trace, speaker).rows[-1]
    assert (row["held_bytes"], row["finish_reason"]) == ([0xE4, 0xB8], None)


# --- the widget -----------------------------------------------------------------------------------


def test_the_stream_is_moved_from_python(speaker: Model) -> None:
    ids = speaker.tokenizer.encode("one two 世")
    view = StreamView.from_tokens(speaker, ids)
    assert (view.step, view.text) == (len(ids), "one two 世")
    view.step = 0
    assert (view.row, view.text) == (None, "")
    view.step = 2
    assert view.text == "one two"
    view.step = 10_000
    assert view.step == len(ids)


def test_hand_made_tokens_are_called_so(speaker: Model, run: Trace) -> None:
    view = StreamView.from_tokens(speaker, speaker.tokenizer.encode("one two"))
    assert view.header["provenance"] == HAND_MADE
    assert HAND_MADE in view.summary()
    assert all(row["time_s"] is None for row in view.rows)
    assert StreamView(run, speaker).header["provenance"] == "recorded"


def test_every_sequence_can_be_chosen_and_no_other(run: Trace, speaker: Model) -> None:
    view = StreamView(run, speaker)
    assert view.header["sequences"] == ["r0", "r0.1", "r1"]
    view.sequence_id = "r1"
    assert len(view.rows) == 3
    with pytest.raises(ValueError, match="sequence_id='r9' is not in this trace"):
        view.sequence_id = "r9"
    assert (view.sequence_id, len(view.rows)) == ("r1", 3)


def test_rows_are_plain_data(run: Trace, speaker: Model) -> None:
    view = StreamView(run, speaker)
    assert json.loads(json.dumps(view.rows)) == view.rows


def test_a_saved_trace_shows_the_same(run: Trace, speaker: Model, tmp_path) -> None:
    run.save(tmp_path / "run.json.gz")
    again = StreamView(Trace.load(tmp_path / "run.json.gz"), speaker.tokenizer)
    view = StreamView(run, speaker)
    assert (again.rows, again.header) == (view.rows, view.header)


def test_long_streams_are_cut_and_say_so(speaker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_view, "MAX_ROWS", 3)
    view = StreamView.from_tokens(speaker, speaker.tokenizer.encode("one two three four five"))
    assert (len(view.rows), view.header["cut"]) == (3, 2)


@pytest.mark.parametrize(
    ("token_ids", "stop", "message"),
    [
        ([], (), "token_ids is empty"),
        ([10**6], (), "token_ids: 1000000 is none of the 49,152 tokens"),
        ([-1], (), "token_ids: -1 is none"),
        (["a"], (), "token_ids: 'a' is none"),
        ([5], ("",), "stop has an empty text"),
        ([5], 7, "stop=7"),
    ],
)
def test_bad_tokens_and_stops_are_named(
    speaker: Model, token_ids: list, stop: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StreamView.from_tokens(speaker, token_ids, stop=stop)  # type: ignore[arg-type]


def test_a_view_needs_a_run_and_a_tokenizer(speaker: Model) -> None:
    with pytest.raises(ValueError, match="holds no request"):
        StreamView(Trace(), speaker)
    with pytest.raises(ValueError, match="has no tokenizer"):
        StreamView(two_requests(), random_model())
    waiting = two_requests()
    del waiting.steps[1:]
    with pytest.raises(ValueError, match="sequence_id='second' has no token in this trace"):
        StreamView(waiting, speaker, "second")


def test_a_token_cannot_break_out_of_the_page(speaker: Model) -> None:
    ids = speaker.tokenizer.encode("</script><script>window.hacked = 1</script>")
    assert "</script><script>window" not in widget_page(StreamView.from_tokens(speaker, ids))


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_a_saved_notebook_gets_a_small_picture(
    run: Trace, speaker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_PICTURES", "1")
    data, _ = StreamView(run, speaker, step=5)._repr_mimebundle_()
    assert 8_000 < len(data["image/png"]) * 3 / 4 < 80_000
    assert len(data["text/plain"]) > 20
