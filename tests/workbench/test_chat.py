"""The Chat widget streams in pieces, stops, refuses to mix two answers, and gives memory back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdlab import Engine, Model, SamplingParams
from pdlab.engine.conversation import Conversation
from pdlab.workbench import chat as chat_module
from pdlab.workbench import chat_page
from pdlab.workbench.chat import Chat
from pdlab.workbench.chat_data import cached_to, edge_in_messages
from pdlab.workbench.picture import widget_page

from ..engine.test_text import speaking
from ..helpers import random_model

SHORT = SamplingParams(max_tokens=12)


class Browser:
    """Follows a widget's messages as its JavaScript does."""

    def __init__(self, widget: Chat):
        self.answer, self.number, self.lost = "", 0, 0
        self.characters = 0
        widget.send = self.hear
        widget.observe(self.begin, "exchanges")

    def begin(self, change) -> None:
        self.number = 0
        self.answer = change.new[-1]["answer"] if change.new else ""

    def hear(self, content, buffers=None) -> None:
        self.characters += len(content["text"])
        if content["type"] == "all":
            self.answer = content["text"]
        elif content["number"] != self.number + 1:
            self.lost += 1
            return
        else:
            self.answer += content["text"]
        self.number = content["number"]


@pytest.fixture
def engine(smollm2: Model):
    with speaking(smollm2, block_size=4) as engine:
        yield engine


@pytest.fixture(autouse=True)
def every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send each token as it comes: tests do not wait."""
    monkeypatch.setattr(chat_page, "DELTA_S", 0.0)


def test_an_answer_is_sent_in_pieces_and_no_text_twice(engine: Engine) -> None:
    widget = Chat(engine, params=replace(SHORT, max_tokens=40))
    page = Browser(widget)
    turns = [widget.say("Hello!"), widget.say("And?")]
    assert page.answer == widget.exchanges[-1]["answer"] == turns[-1].answer
    assert page.characters <= sum(len(turn.answer) for turn in turns)
    assert page.lost == 0
    assert [e["user"] for e in widget.exchanges] == ["Hello!", "And?"]
    assert (widget.busy, widget.message) == (False, "")


def test_pieces_that_come_quickly_are_sent_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_page, "DELTA_S", 1000.0)
    widget = Chat(engine, params=replace(SHORT, max_tokens=40))
    sent = []
    widget.send = lambda content, buffers=None: sent.append(content)
    widget.say("Hello!")
    assert [content["number"] for content in sent] == [1]
    assert widget.exchanges[-1]["answer"] == widget.conversation.turns[-1].answer


def test_the_numbers_are_the_conversations(engine: Engine) -> None:
    widget = Chat(engine, params=SHORT)
    first, second = widget.say("Hello!"), widget.say("And?")
    stats = widget.exchanges[-1]["stats"]
    assert (stats["prompt"], stats["cached"]) == (second.prompt_tokens, second.cached_tokens)
    assert second.cached_tokens == (first.context_tokens - 1) // 4 * 4
    assert sum(stats["blocks"]) == second.cached_blocks + second.own_blocks
    assert stats["blocks"][2] == sum(stats["blocks"]) - -(-second.prompt_tokens // 4)
    assert stats["kept_blocks"] == (second.context_tokens - 1) // 4


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_what_was_cached_is_found_in_the_messages(smollm2: Model, system: str | None) -> None:
    tokenizer = smollm2.tokenizer
    contents = [system or "", "Hello there!", "How are you? 世界 😀", "And"]
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": text} for text in contents[1:]]
    rendered = tokenizer.render_chat(messages)
    prompt_ids = tokenizer.encode(rendered)
    for count in range(len(prompt_ids) + 1):
        edge = len(tokenizer.decode(prompt_ids[:count]).rstrip("\ufffd"))
        index, characters = edge_in_messages(tokenizer, prompt_ids, count, contents)
        assert 0 <= characters <= len([*contents, ""][index])
        before = rendered.find(contents[index - 1]) + len(contents[index - 1]) if index else 0
        assert before <= edge + 1
        if characters:
            start = rendered.find(contents[index])
            assert abs(start + characters - edge) <= 3  # in the middle of a character


def test_the_edge_moves_with_every_turn(engine: Engine) -> None:
    widget = Chat(engine, params=SHORT, system="Be brief.")
    widget.say("Hello!")
    assert widget.cached_to == [-1, 0]  # nothing was cached
    widget.say("And?")
    message, _ = cached_to(widget.conversation)
    assert message >= 1  # in the first answer, or behind it


def test_an_event_loop_stays_free_and_stop_ends_the_answer(engine: Engine) -> None:
    async def talk() -> None:
        widget = Chat(engine, params=replace(SHORT, max_tokens=100))
        widget._on_message(widget, {"type": "say", "text": "Hello!"}, [])
        assert widget.busy
        widget._on_message(widget, {"type": "say", "text": "Me too!"}, [])
        assert "an answer is streaming" in widget.message
        widget.message = ""
        widget.reset()
        assert "an answer is streaming" in widget.message
        while not (widget.conversation.turn and len(widget.conversation.turn.token_ids) >= 3):
            await asyncio.sleep(0)
        widget._on_message(widget, {"type": "stop"}, [])
        await asyncio.wait_for(settled(widget), 30)
        [turn] = widget.conversation.turns
        assert (turn.text, turn.finish_reason) == ("Hello!", "abort")
        assert 3 <= len(turn.token_ids) < 100
        assert widget.exchanges[0]["answer"] == turn.answer
        widget.start("Go on.")
        await asyncio.wait_for(settled(widget), 30)
        assert len(widget.exchanges) == 2

    asyncio.run(talk())
    assert not engine.requests
    assert engine.pool.num_free == engine.pool.num_blocks


def test_stop_before_anything_was_begun_leaves_the_chat_ready(engine: Engine) -> None:
    async def talk() -> None:
        widget = Chat(engine, params=SHORT)
        widget.start("Hello!")
        widget.stop()
        await asyncio.wait_for(settled(widget), 30)
        widget.start("Hello!")
        await asyncio.wait_for(settled(widget), 30)
        assert widget.exchanges[-1]["stats"]["reason"] == "length"

    asyncio.run(talk())
    assert not engine.requests


async def settled(widget: Chat) -> None:
    while widget.busy:
        await asyncio.sleep(0.001)


def test_a_view_opened_meanwhile_catches_up(engine: Engine) -> None:
    async def talk() -> None:
        widget = Chat(engine, params=replace(SHORT, max_tokens=30))
        widget.start("Hello!")
        while not (widget.conversation.turn and len(widget.conversation.turn.token_ids) >= 3):
            await asyncio.sleep(0)
        page = Browser(widget)
        while not page.lost:
            await asyncio.sleep(0)
        widget._on_message(widget, {"type": "catch_up"}, [])
        lost, sent = page.lost, widget._page.sent
        assert page.answer == widget.conversation.turn.answer[:sent]
        await asyncio.wait_for(settled(widget), 30)
        assert page.lost == lost

    asyncio.run(talk())


def test_in_plain_python_an_answer_streams_in_a_thread(engine: Engine) -> None:
    widget = Chat(engine, params=SHORT)
    widget.start("Hello!")
    widget.wait(30)
    assert not widget.busy
    assert widget.exchanges[0]["answer"] == widget.conversation.turns[0].answer


@pytest.mark.parametrize("text", ["", "no " * 300])
def test_what_cannot_be_said_is_answered_in_words(smollm2: Model, text: str) -> None:
    with speaking(smollm2) as engine:
        widget = Chat(engine, params=SHORT)
        widget.say("Hello!")
        widget._on_message(widget, {"type": "say", "text": text}, [])
        widget.wait(30)
        assert widget.message.startswith("text")
        assert (len(widget.exchanges), widget.busy) == (1, False)
        with pytest.raises(ValueError, match="text"):
            widget.say(text)
        widget.say("And?")


def test_forgotten_and_hidden_exchanges_are_told(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "MAX_SHOWN", 3)
    with speaking(smollm2, max_model_len=120) as engine:
        widget = Chat(engine, params=SHORT)
        for i in range(8):
            widget.say(f"question {i}")
        assert (len(widget.exchanges), widget.num_hidden) == (3, 5)
        assert widget.num_forgotten == len(widget.conversation.forgotten) / 2 > 0
        widget.undo()
        assert widget.num_forgotten == len(widget.conversation.forgotten) / 2
        widget.reset()
        assert (widget.exchanges, widget.num_hidden, widget.num_forgotten) == ([], 0, 0)
        widget.undo()
        assert "nothing to undo" in widget.message


def test_an_engine_of_its_own_is_closed_with_the_last_view_and_made_anew(smollm2: Model) -> None:
    widget = Chat(smollm2, params=SHORT)
    first = widget.conversation.engine
    for opened in (True, True, False):
        widget._on_message(widget, {"type": "view", "open": opened}, [])
    assert first.memory is not None
    widget._on_message(widget, {"type": "view", "open": False}, [])
    assert first.memory is None
    widget._on_message(widget, {"type": "view", "open": True}, [])
    widget._begin()
    widget._finish()
    assert widget.conversation.engine.memory is not None
    widget.close()
    assert widget.conversation.engine.memory is None


def test_a_shared_engine_is_left_open_and_the_answer_is_stopped(engine: Engine) -> None:
    async def talk() -> None:
        widget = Chat(engine, params=replace(SHORT, max_tokens=100))
        widget._on_message(widget, {"type": "view", "open": True}, [])
        widget.start("Hello!")
        await asyncio.sleep(0.01)
        widget._on_message(widget, {"type": "view", "open": False}, [])
        await asyncio.wait_for(settled(widget), 30)
        assert widget.conversation.turns[0].finish_reason == "abort"

    asyncio.run(talk())
    assert engine.memory is not None
    assert not engine.requests
    assert engine.pool.num_free == engine.pool.num_blocks


def test_closing_while_an_answer_streams_frees_everything(engine: Engine) -> None:
    async def talk() -> None:
        widget = Chat(engine, params=replace(SHORT, max_tokens=100))
        widget.start("Hello!")
        await asyncio.sleep(0.01)
        widget.close()
        await asyncio.wait_for(settled(widget), 30)

    asyncio.run(talk())
    assert engine.pool.num_free == engine.pool.num_blocks


def test_readers_without_pictures_get_a_summary(engine: Engine) -> None:
    widget = Chat(engine, params=SHORT)
    assert widget.summary() == "Chat with random: nothing said yet"
    widget.say("Hello!")
    for part in ("turn 1: 0 of", "TTFT", "tokens/s", "KV blocks", "User: 'Hello!'"):
        assert part in widget.summary()
    data, _ = widget._repr_mimebundle_()
    assert "run this cell to make it live" in data["text/html"]
    assert "Hello!" in widget_page(widget)


def test_a_model_that_cannot_chat_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Chat(random_model())
    with pytest.raises(ValueError, match="model_or_engine"):
        Chat("smollm2-135m")
    with Engine(random_model()) as engine, pytest.raises(ValueError, match="no chat template"):
        Conversation(engine)
