"""A conversation says what it would say afresh, and computes only what is new."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.conversation import Conversation, Turn
from pdlab.engine.history import continue_tokens
from pdlab.models import Tokenizer

from ..helpers import random_model
from .test_text import speaking

SHORT = SamplingParams(max_tokens=12)
THINKING = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('.')[-1] }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Qwen3's: what an assistant thought before its answer is left out of history."""


def listen(conversation: Conversation, text: str) -> Turn:
    """Say it and hear the answer out."""
    said = "".join(chunk.text for chunk in conversation.say(text))
    turn = conversation.turns[-1]
    assert turn.answer == said
    return turn


def scripted(smollm2: Model, answers: list[list[int]], **settings) -> Engine:
    """The real tokenizer over a runner that answers each request with these tokens."""
    engine = speaking(smollm2, **settings)
    config = replace(engine.model.config, eos_token_ids=smollm2.tokenizer.eos_token_ids)
    engine.model = replace(engine.model, config=config)
    run, end = engine.runner.run, smollm2.tokenizer.eos_token_id

    def answer(batch, clock, step):
        output = run(batch, clock, step)
        for part in batch.scheduled:
            for drawn in output.sampled.get(part.sequence.sequence_id, ()):
                words = answers[int(part.sequence.request_id[1:])]
                at = part.sequence.num_output_tokens
                token_id = words[at] if at < len(words) else end
                index = output.sampled[part.sequence.sequence_id].index(drawn)
                output.sampled[part.sequence.sequence_id][index] = replace(drawn, token_id=token_id)
        return output

    engine.runner.run = answer
    return engine


def fed(engine: Engine, conversation: Conversation) -> list[int]:
    """The prompt of the last turn, from what the conversation has seen."""
    turn = conversation.turns[-1]
    return conversation.token_ids[: turn.prompt_tokens]


# --- which tokens are fed ---------------------------------------------------------------------


def test_the_next_prompt_is_what_was_fed_and_generated_and_the_template_goes_on(smollm2: Model):
    tokenizer = smollm2.tokenizer
    [h, e, llo] = (tokenizer.encode(part)[0] for part in ("H", "e", "llo"))
    assert tokenizer.encode("Hello") != [h, e, llo]
    with scripted(smollm2, [[h, e, llo], [h]]) as engine:
        chat = Conversation(engine, SHORT)
        first = listen(chat, "Hi!")
        assert first.token_ids == [h, e, llo, tokenizer.eos_token_id]
        seen = list(chat.token_ids)
        listen(chat, "And?")
        assert chat.messages[1] == {"role": "assistant", "content": "Hello"}
        rest = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
        assert fed(engine, chat) == seen + tokenizer.encode(rest)


@pytest.mark.parametrize("reason", ["length", "abort", "stop string", "another end token"])
def test_an_answer_that_did_not_end_itself_is_ended_by_the_template(smollm2: Model, reason: str):
    tokenizer = smollm2.tokenizer
    words = [tokenizer.encode(part)[0] for part in ("H", "e", "llo")]
    words += tokenizer.encode(" STOP")
    params = replace(SHORT, max_tokens=3) if reason == "length" else SHORT
    if reason == "stop string":
        params = replace(SHORT, stop=(" STOP",))
    if reason == "another end token":
        words = [*words[:3], tokenizer.eos_token_ids[1]]
    with scripted(smollm2, [words, words]) as engine:
        chat = Conversation(engine, params)
        stream = chat.say("Hi!")
        for count, _ in enumerate(stream, 1):
            if reason == "abort" and count == 3:
                stream.close()
        assert chat.messages[1]["content"] == "Hello"
        seen = chat.token_ids[: chat.turns[0].prompt_tokens + 3]
        assert seen[-3:] == words[:3]
        listen(chat, "And?")
        rest = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
        assert fed(engine, chat) == seen + tokenizer.encode(rest)


def test_history_that_the_template_rewrites_is_encoded_anew(smollm2: Model):
    tokenizer = Tokenizer(
        smollm2.tokenizer.backend,
        chat_template=THINKING,
        eos_token_ids=smollm2.tokenizer.eos_token_ids,
    )
    answer = tokenizer.encode("Let me see. Paris")
    with scripted(replace(smollm2, tokenizer=tokenizer), [answer, answer], block_size=4) as engine:
        chat = Conversation(engine, SHORT)
        listen(chat, "Which city?")
        turn = listen(chat, "Sure?")
        fresh = tokenizer.encode(tokenizer.render_chat(chat.messages[:3]))
        assert b" Paris<|im_end|>" in b"".join(map(tokenizer.token_bytes, fresh))
        assert fed(engine, chat) == fresh
        assert 0 < turn.cached_tokens <= chat.turns[0].prompt_tokens


def test_random_answers_of_the_whole_vocabulary_are_continued_correctly(smollm2: Model):
    """Half characters, control tokens, odd splits: the prompt always spells the conversation."""
    tokenizer = smollm2.tokenizer
    with speaking(smollm2, block_size=4) as engine:
        chat = Conversation(engine, replace(SHORT, max_tokens=40), system="世界")
        for text in ("one", "é😀", "<|im_end|>", "two\n"):
            listen(chat, text)
            messages = [{"role": "system", "content": "世界"}, *chat.messages[:-1]]
            expected = tokenizer.decode(tokenizer.apply_chat_template(messages))
            assert tokenizer.decode(fed(engine, chat)) == expected


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ("<|im_start|>user\nstay there", "<|im_start|>user\nstay thereafter<|im_end|>"),
        ("<|im_start|>user\nhello there", "<|im_start|>user\nhell<|im_end|>"),
        ("<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>user\nBye<|im_end|>\n"),
        ("something else", "<|im_start|>user\nBye<|im_end|>\n"),
        ("", "Bye"),
    ],
)
def test_a_message_is_never_a_mixture_of_old_and_new_tokens(smollm2: Model, seen: str, text: str):
    tokenizer = smollm2.tokenizer
    if seen.endswith("there"):  # the tokens seen go on, the text does not
        text_ids = continue_tokens(tokenizer, tokenizer.encode(seen)[:-1], text)
        assert tokenizer.decode(text_ids) == text
    seen_ids = [*tokenizer.encode(seen), tokenizer.encode(" x")[0]]
    assert continue_tokens(tokenizer, seen_ids, text) == tokenizer.encode(text)


# --- what is computed -------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_turn_computes_what_the_one_before_did_not(smollm2: Model, block_size: int):
    with speaking(smollm2, block_size=block_size, num_blocks=2048 // block_size) as engine:
        chat = Conversation(engine, SHORT)
        computed = 0
        for text in ("Hello!", "What is KV?", "Why?"):
            before = len(chat.token_ids)
            turn = listen(chat, text)
            assert fed(engine, chat)[:before] == chat.token_ids[:before]
            assert turn.cached_tokens == computed // block_size * block_size
            assert turn.cached_tokens + turn.new_tokens == turn.prompt_tokens
            assert turn.context_tokens == len(chat.token_ids)
            computed = turn.context_tokens - 1  # the last token was never fed
            assert turn.kept_blocks == computed // block_size == chat.cached_blocks()
            assert turn.cached_blocks + turn.own_blocks == -(-computed // block_size)
            assert turn.kv_bytes == -(-computed // block_size) * engine.kv_cache.block_bytes
        assert engine.pool.num_free == engine.pool.num_blocks


def test_two_conversations_on_one_engine_do_not_mix(smollm2: Model):
    def talk(engines: list[Engine]) -> list[list[int]]:
        chats = [Conversation(engine, SHORT) for engine in engines]
        for text in ("Hello!", "Go on."):
            for _ in zip(*(chat.say(text + str(i)) for i, chat in enumerate(chats)), strict=True):
                pass
        assert all(chat.turns[-1].cached_tokens > 0 for chat in chats)
        return [chat.token_ids for chat in chats]

    with speaking(smollm2) as one, speaking(smollm2) as other, speaking(smollm2) as shared:
        assert talk([shared, shared]) == talk([one, other])


def test_undo_goes_back_and_keeps_the_cache(smollm2: Model):
    with speaking(smollm2, block_size=4) as engine:
        chat = Conversation(engine, SHORT)
        listen(chat, "Hello!")
        once = listen(chat, "Tell me of Rome.")
        messages, seen = list(chat.messages), list(chat.token_ids)
        assert chat.undo() == "Tell me of Rome."
        assert (len(chat.messages), len(chat.turns)) == (2, 1)
        again = listen(chat, "Tell me of Rome.")
        assert (chat.messages, chat.token_ids) == (messages, seen)
        assert again.cached_tokens == min(once.prompt_tokens // 4 * 4, once.prompt_tokens - 1)
        for _ in chat.retry():
            pass
        assert chat.messages == messages
        assert len(chat.turns) == 2
        chat.undo()
        chat.undo()
        with pytest.raises(ValueError, match="nothing to undo"):
            chat.undo()
        listen(chat, "Hello!")
        chat.reset()
        assert (chat.messages, chat.turns, chat.token_ids) == ([], [], [])


# --- stopping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_stopped_answer_is_what_was_said_so_far(smollm2: Model, num_read: int):
    with speaking(smollm2, block_size=4) as engine:
        chat = Conversation(engine, SHORT)
        stream = chat.say("Hello!")
        said = "".join(next(stream).text for _ in range(num_read))
        with pytest.raises(RuntimeError, match="still streaming"):
            chat.say("And?")
        assert chat.answering
        stream.close()
        turn = chat.turns[-1]
        assert chat.messages[-1] == {"role": "assistant", "content": said}
        assert (turn.finish_reason, len(turn.token_ids)) == ("abort", num_read)
        assert not engine.requests
        assert engine.pool.num_free == engine.pool.num_blocks
        listen(chat, "And?")


def test_ctrl_c_stops_the_answer_and_keeps_it(smollm2: Model):
    with speaking(smollm2) as engine:
        chat, run, steps = Conversation(engine, SHORT), engine.runner.run, []

        def interrupted(*arguments):
            steps.append(arguments)
            if len(steps) == 4:
                raise KeyboardInterrupt
            return run(*arguments)

        engine.runner.run = interrupted
        with pytest.raises(KeyboardInterrupt):
            listen(chat, "Hello!")
        assert (len(chat.turns[-1].token_ids), chat.turns[-1].finish_reason) == (3, "abort")
        assert not engine.requests
        listen(chat, "And?")


def test_a_failed_answer_takes_the_exchange_back(smollm2: Model):
    with speaking(smollm2) as engine:
        chat, run = Conversation(engine, SHORT), engine.runner.run
        listen(chat, "Hello!")
        before = list(chat.messages), list(chat.turns)

        def broken(*_):
            raise ArithmeticError("the model is broken")

        engine.runner.run = broken
        with pytest.raises(ArithmeticError):
            listen(chat, "And?")
        assert (chat.messages, chat.turns, chat.answering) == (*before, False)
        engine.runner.run = run
        listen(chat, "And?")


# --- forgetting -------------------------------------------------------------------------------


@pytest.mark.parametrize("limited_by", ["max_model_len", "num_blocks"])
def test_the_oldest_exchanges_are_forgotten_and_it_is_said(smollm2: Model, limited_by: str):
    limits = {"max_model_len": {"max_model_len": 120}, "num_blocks": {"num_blocks": 30}}
    with speaking(smollm2, block_size=4, **limits[limited_by]) as engine:
        chat = Conversation(engine, SHORT, system="Be brief.")
        said = []
        for i in range(12):
            said += [f"question {i}", listen(chat, f"question {i}").answer]
            turn = chat.turns[-1]
            assert turn.context_tokens <= turn.context_limit == chat.context_limit <= 121
            assert [m["content"] for m in chat.forgotten + chat.messages] == said
            assert chat.token_ids[1:6] == engine.model.tokenizer.encode("system\nBe brief.")
        assert sum(turn.forgotten for turn in chat.turns) == len(chat.forgotten) / 2 > 1
        assert 0 < sum(turn.forgotten > 0 for turn in chat.turns) < 6  # not in every turn


def test_a_message_that_never_fits_is_refused_and_nothing_is_forgotten(smollm2: Model):
    with speaking(smollm2, max_model_len=100) as engine:
        chat = Conversation(engine, SHORT)
        listen(chat, "Hello!")
        before = list(chat.messages), list(chat.token_ids)
        with pytest.raises(ValueError, match=r"text has 91 tokens.*more than the 100 that fit"):
            chat.say("no " * 90)
        assert (chat.messages, chat.token_ids, chat.forgotten) == (*before, [])
        turn = listen(chat, "no " * 60)  # with all else forgotten it fits
        assert turn.forgotten == 1
        assert turn.context_tokens <= 100


def test_the_answer_takes_the_room_there_is(smollm2: Model):
    with speaking(smollm2, max_model_len=100) as engine:
        chat = Conversation(engine, replace(SHORT, max_tokens=1000, ignore_eos=True))
        assert listen(chat, "Hello!").context_tokens == 100
        assert chat.turns[-1].finish_reason == "length"


@pytest.mark.parametrize("text", ["", "  \n", None, "\ud800"])
def test_what_cannot_be_said_changes_nothing(smollm2: Model, text: str):
    with speaking(smollm2) as engine:
        chat = Conversation(engine, SHORT)
        with pytest.raises(ValueError, match="text"):
            chat.say(text)
        assert (chat.messages, chat.answering) == ([], False)
        listen(chat, "Hello!")


def test_bad_parameters_are_named(smollm2: Model):
    with speaking(smollm2) as engine:
        with pytest.raises(ValueError, match="n=2"):
            Conversation(engine, SamplingParams(n=2))
        with pytest.raises(ValueError, match="params="):
            Conversation(engine, {"n": 1})
    with (
        Engine(random_model()) as mute,
        pytest.raises(ValueError, match="'random' has no chat template"),
    ):
        Conversation(mute)


# --- in an event loop -------------------------------------------------------------------------


def test_an_event_loop_hears_the_same_and_may_stop_it(smollm2: Model):
    async def talk(engine: Engine) -> Conversation:
        chat = Conversation(engine, SHORT)
        async for _ in chat.asay("Hello!"):
            pass
        answer = chat.asay("Go on.")
        await anext(answer)
        await answer.aclose()
        return chat

    with speaking(smollm2) as engine, speaking(smollm2) as other:
        chat = asyncio.run(talk(engine))
        assert not engine.requests
        plain = Conversation(other, SHORT)
        listen(plain, "Hello!")
        stream = plain.say("Go on.")
        next(stream)
        stream.close()
        assert (chat.messages, chat.token_ids) == (plain.messages, plain.token_ids)
        assert chat.turns[-1].finish_reason == "abort"


def test_a_system_message_that_is_no_text_is_refused_at_once(smollm2: Model):
    with speaking(smollm2) as engine, pytest.raises(ValueError, match="not valid Unicode"):
        Conversation(engine, SHORT, system="\ud800")


# --- the real model ---------------------------------------------------------------------------


def test_a_real_conversation_equals_a_fresh_one_with_the_same_messages(smollm2: Model):
    params = SamplingParams(max_tokens=6)
    config = EngineConfig(exact=True, block_size=4)
    with Engine(smollm2, config) as engine, Engine(smollm2, config) as other:
        chat, fresh = (Conversation(e, params, system="Answer briefly.") for e in (engine, other))
        listen(chat, "Name a city in France.")
        turn = listen(chat, "And one in Italy?")
        assert turn.cached_tokens == (chat.turns[0].context_tokens - 1) // 4 * 4 > 16
        fresh.messages = list(chat.messages[:2])
        alone = listen(fresh, "And one in Italy?")
        assert alone.cached_tokens == 0
        assert (alone.token_ids, alone.answer) == (turn.token_ids, turn.answer)
        assert fresh.token_ids == chat.token_ids
        assert turn.ttft_s > 0
        assert turn.tokens_per_s > 0
