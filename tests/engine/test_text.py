"""Streamed text: pieces joined are the one-shot text, whatever the tokens cut in two."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.detokenizer import Detokenizer
from pdlab.engine.fake import FakeRunner, expected_tokens
from pdlab.models import Tokenizer
from tests.helpers import random_model

CUT_TEXTS = [
    "世界",
    "é",
    "😀",
    "👨‍👩‍👧‍👦",
    "👍🏽",
    "🇨🇳🇫🇷",
    "e\u0301a\u0308\u0323",
    "नमस्ते",
    "한국어",
    "naïve café",
    "我是谁？",
    "\U0010ffff",
    "\ufffd",
    "\x00",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2.tokenizer


@pytest.fixture(scope="module")
def token_of_byte(tokenizer) -> dict[int, int]:
    """The token of each single byte that has one: UTF-8 knows no text with the other few."""
    singles = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return {byte: singles[bytes([byte])] for byte in range(256) if bytes([byte]) in singles}


def pieces(tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


def check(tokenizer, token_ids: list[int]) -> None:
    for skip in (True, False):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(pieces(tokenizer, token_ids, skip)) == expected


@settings(max_examples=300)
@given(st.data())
def test_random_tokens_of_the_real_vocabulary_stream_as_they_decode(tokenizer, data):
    token = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1),
        st.integers(0, 300),  # special tokens and single bytes live here
    )
    check(tokenizer, data.draw(st.lists(token, max_size=20)))


@settings(max_examples=200)
@given(text=st.text(max_size=12), cut=st.integers(0, 40))
@example(text="世é😀", cut=2)
def test_characters_cut_into_bytes_stream_as_they_decode(tokenizer, token_of_byte, text, cut):
    """One token a byte, and an end in the middle of a character."""
    known = [token_of_byte[byte] for byte in text.encode() if byte in token_of_byte]
    check(tokenizer, known)
    check(tokenizer, known[:cut])


@pytest.mark.parametrize("text", CUT_TEXTS)
def test_no_half_character_is_shown_while_the_rest_may_come(tokenizer, token_of_byte, text):
    token_ids = [token_of_byte[byte] for byte in text.encode()]
    shown = ""
    for piece in pieces(tokenizer, token_ids):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_a_cut_off_end_is_shown_as_unreadable_at_the_end_only(tokenizer, token_of_byte):
    token_ids = [token_of_byte[byte] for byte in "a世".encode()[:3]]
    assert pieces(tokenizer, token_ids) == ["a", "", "", "\ufffd"]


def test_special_tokens_give_no_text(tokenizer, token_of_byte):
    special = max(tokenizer.special_ids)
    token_ids = [special, token_of_byte[ord("a")], special]
    assert pieces(tokenizer, token_ids) == ["", "a", "", ""]


def test_without_a_tokenizer_there_is_no_text():
    with Engine(random_model()) as engine:
        output = engine.generate([1, 2, 3], SamplingParams(max_tokens=3))[0]
    assert (output.text, len(output.token_ids)) == ("", 3)


# --- through the engine, with random tokens of the real vocabulary ------------------------------


def speaking(smollm2: Model, **settings) -> Engine:
    """The real tokenizer over the fake runner: any token may follow, in no time."""
    config = replace(random_model().config, vocab_size=smollm2.config.vocab_size)
    model = replace(random_model(), config=config, tokenizer=smollm2.tokenizer)
    engine = Engine(model, EngineConfig(**settings))
    engine.runner = FakeRunner(
        engine.config.num_blocks, engine.config.block_size, config.vocab_size
    )
    return engine


PROMPTS = ["The capital of France", "我是谁？", "😀", "def f(x):"]
LONG = SamplingParams(max_tokens=30)


def expected_text(smollm2: Model, prompt: str, params: SamplingParams) -> tuple[list[int], str]:
    ids = smollm2.tokenizer.encode(prompt)
    tokens = expected_tokens(ids, params.max_tokens, smollm2.config.vocab_size)
    return tokens, smollm2.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("num_blocks", [14, 512])
def test_streams_say_the_same_with_and_without_preemption_and_nothing_twice(smollm2, num_blocks):
    with speaking(smollm2, block_size=4, num_blocks=num_blocks) as engine:
        streams = [engine.stream(prompt, LONG) for prompt in PROMPTS]
        chunks: list[list] = [[] for _ in streams]
        for mine, stream in zip(chunks, streams, strict=True):
            mine += stream
        preempted = sum(len(record.preempted) for record in engine.trace.steps)
        assert (preempted > 0) == (num_blocks == 14)
        assert engine.pool.num_free == num_blocks
        assert not engine.requests
    for prompt, mine in zip(PROMPTS, chunks, strict=True):
        tokens, text = expected_text(smollm2, prompt, LONG)
        assert [t for chunk in mine for t in chunk.token_ids] == tokens
        assert "".join(chunk.text for chunk in mine) == text
        assert [c.finish_reason for c in mine] == [None] * 30 + ["length"]


def test_two_streams_read_in_turn_do_not_mix(smollm2):
    with speaking(smollm2) as engine:
        one, other = (engine.stream(prompt, LONG) for prompt in PROMPTS[:2])
        mine, theirs = [], []
        for chunk, next_chunk in zip(one, other, strict=True):
            mine.append(chunk)
            theirs.append(next_chunk)
    for prompt, chunks in zip(PROMPTS, (mine, theirs), strict=False):
        _, text = expected_text(smollm2, prompt, LONG)
        assert "".join(chunk.text for chunk in chunks) == text


def test_streamed_text_equals_generated_text_and_recorded_text(smollm2):
    with speaking(smollm2) as engine:
        output = engine.generate(PROMPTS[1], LONG)[0]
        streamed = "".join(chunk.text for chunk in engine.stream(PROMPTS[1], LONG))
        recorded = [s.text for _, s in engine.trace.sequence_steps(output.request_id)]
    assert streamed == output.text == "".join(recorded)


@pytest.mark.parametrize("num_read", [0, 1, 7])
def test_closing_a_stream_aborts_its_request_and_frees_its_blocks(smollm2, num_read):
    with speaking(smollm2, block_size=4, num_blocks=64) as engine:
        stream, other = engine.stream(PROMPTS[0], LONG), engine.stream(PROMPTS[1], LONG)
        for _ in range(num_read):
            next(stream)
        stream.close()
        assert len(engine.requests) == 1
        _, text = expected_text(smollm2, PROMPTS[1], LONG)
        assert "".join(chunk.text for chunk in other) == text
        assert engine.pool.num_free == 64
        assert not engine.scheduler.has_work


def test_a_stream_that_is_dropped_is_closed(smollm2):
    with speaking(smollm2) as engine:
        for _ in engine.stream(PROMPTS[0], LONG):
            break
        assert not engine.requests
        assert engine.pool.num_free == engine.config.num_blocks


def test_a_stream_of_a_bad_prompt_is_refused_before_it_is_read(smollm2):
    with speaking(smollm2) as engine, pytest.raises(ValueError, match="prompt is empty"):
        engine.stream("")


def sentencepiece_like() -> Tokenizer:
    """A vocabulary of words, and a token for every byte: as Llama 2 and Mistral have."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "c", "世"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    return Tokenizer(backend)


def test_joined_chunks_are_the_text_with_byte_fallback_too() -> None:
    tokenizer = sentencepiece_like()
    draw = random.Random(0)
    interesting = [*range(257, 261), *(1 + byte for byte in "我😀é".encode()), 1 + 0xE6, 1 + 0x88]
    for _ in range(500):
        ids = draw.choices(interesting, k=draw.choice([3, 12, 60]))
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_a_held_character_says_its_bytes(tokenizer, token_of_byte):
    detokenizer = Detokenizer(tokenizer)
    held = []
    for byte in "é😀".encode():
        detokenizer.add(token_of_byte[byte])
        held.append(detokenizer.held_bytes.hex())
    assert held == ["c3", "", "f0", "f09f", "f09f98", ""]
    fallback = sentencepiece_like()
    detokenizer = Detokenizer(fallback)
    assert detokenizer.add(1 + 0xE6) == ""
    assert detokenizer.held_bytes == b"\xe6"


def test_sentencepiece_holds_nothing_back_but_bytes_of_a_character():
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(tokenizer)
    a, b = 257, 258
    shown = [(detokenizer.add(i), detokenizer.held_bytes) for i in (a, b, 1 + 0xE4, 1 + 0xB8, a)]
    assert [held for _, held in shown] == [b"", b"", b"\xe4", b"\xe4\xb8", b""]
    assert shown[0][0].strip() == "a"
