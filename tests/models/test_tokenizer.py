"""The tokenizer, against a slow BPE written here from the vocabulary and merges alone."""

import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pdlab.models.chat import render_chat
from pdlab.models.fetch import fetch_model_file
from pdlab.models.gguf_file import GGUFFile
from pdlab.models.gguf_tokenizer import (
    eos_token_ids,
    tokenizer_from_gguf,
    tokenizer_settings,
)
from pdlab.models.loading import default_model_directory
from pdlab.models.tokenizer import (
    Tokenizer,
    byte_of_character,
    tokenizer_from_directory,
    tokenizer_from_settings,
)

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "我是谁？",
    "1234567890",
    "In 2024, 3.14159 and 1,000,000 (or 0x1F) cost $99.95.",
    "a1b22c333 x=10 y = 20",
    "   leading,    inner     and trailing   ",
    "\n\n\nnew\n\tlines\r\nand\ttabs \n \n",
    "def f(x):\n    if x > 10:\n        return x ** 2  # square\n",
    "I'll say it's they're we've I'd don't can't '12 ''s",
    "naïve café Ünïcödé ßtraße ИВАН ελληνικά עברית العربية",
    "日本語のテキスト、한국어 텍스트。中文，标点！",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 flags 🎉🎉",
    "½ ² ³ Ⅷ ① ٣٤٥ १२३ 一二三 digits of all kinds",
    "zero\u200bwidth\u00a0nbsp\u3000wide\ufeffbom\x00nul",
    "e\u0301 combining, \U0001d54f astral",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  there\n"}],
    [
        {"role": "user", "content": "<b>&amp;</b> 'quotes' \"double\" {{ 1 + 1 }}"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "谢谢 3x"},
    ],
]
CHARACTER_OF_BYTE = {byte: character for character, byte in byte_of_character().items()}
GPT2_WORDS = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = regex.compile(LLAMA3_WORDS.pattern.replace("{1,3}", ""))


@cache
def model_file() -> GGUFFile:
    return GGUFFile(fetch_model_file(progress=False))


@cache
def metadata_with(pre: str) -> dict[str, Any]:
    return model_file().metadata | {"tokenizer.ggml.pre": pre}


@cache
def smollm2() -> Tokenizer:
    metadata = model_file().metadata
    return tokenizer_from_settings(
        tokenizer_from_gguf(metadata), tokenizer_settings(metadata), eos_token_ids(metadata)
    )


@cache
def backend_with(pre: str) -> Backend:
    return tokenizer_from_gguf(metadata_with(pre))


def is_digit(character: str) -> bool:
    return unicodedata.category(character) in ("Nd", "Nl", "No")


def split_words(text: str, pre: str) -> list[str]:
    """Cut a text as the pre-tokenizer of that name is defined to."""
    if pre == "llama-bpe":
        return LLAMA3_WORDS.findall(text)
    if pre == "qwen2":
        return QWEN2_WORDS.findall(unicodedata.normalize("NFC", text))
    pieces, rest = [], ""
    for character in text:
        if is_digit(character):
            pieces += [rest, character]
            rest = ""
        else:
            rest += character
    return [word for piece in [*pieces, rest] for word in GPT2_WORDS.findall(piece)]


@cache
def vocabulary_and_ranks() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    metadata = model_file().metadata
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = metadata["tokenizer.ggml.merges"]
    return vocabulary, {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


def slow_encode(text: str, pre: str = "smollm") -> list[int]:
    """Byte-level BPE by its definition: always merge the pair of the lowest rank, leftmost first.

    Special tokens in the text are not looked for. A byte without a token is dropped.
    """
    vocabulary, ranks = vocabulary_and_ranks()
    token_ids = []
    for word in split_words(text, pre):
        parts = [CHARACTER_OF_BYTE[byte] for byte in word.encode()]
        if pre == "llama-bpe" and "".join(parts) in vocabulary:
            parts = ["".join(parts)]  # Llama 3 takes a whole known word without merging
        parts = [part for part in parts if part in vocabulary or len(part) > 1]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        token_ids += [vocabulary[part] for part in parts]
    return token_ids


def test_the_example_of_the_recipe() -> None:
    assert smollm2().encode("我是谁？") == [19805, 235, 27830, 179, 125, 219, 8083, 249]


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_slow_bpe(text: str, pre: str) -> None:
    assert backend_with(pre).encode(text, add_special_tokens=False).ids == slow_encode(text, pre)


@pytest.mark.parametrize(
    ("pre", "digits", "word"),
    [
        ("smollm", ["1", "2", "3"], ["ab", "c"]),
        ("qwen2", ["1", "2", "3"], ["ab", "c"]),
        ("llama-bpe", ["12", "3"], ["abc"]),
    ],
)
def test_digits_and_whole_words_where_the_vocabulary_could_tell(
    pre: str, digits: list[str], word: list[str]
) -> None:
    """SmolLM2's merges join no digits, and reach every token, so they cannot show this."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*"123abc", "12", "ab", "abc"],
        "tokenizer.ggml.merges": ["1 2", "a b"],
    }
    backend = tokenizer_from_gguf(metadata)
    assert backend.encode("123").tokens == digits
    assert backend.encode("abc").tokens == word


HARD_TEXT = st.text(
    st.one_of(
        st.sampled_from("  \n\t\r'.,0123456789abstdlmrveSTRELĠ¡½٣"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
@settings(max_examples=150, deadline=None)
@given(text=HARD_TEXT)
def test_encoding_random_text_equals_slow_bpe(pre: str, text: str) -> None:
    assert backend_with(pre).encode(text, add_special_tokens=False).ids == slow_encode(text, pre)


@settings(max_examples=200, deadline=None)
@given(HARD_TEXT)
def test_text_comes_back(text: str) -> None:
    """All but the bytes that SmolLM2 has no tokens for: six control characters, and the first
    byte of what Unicode has not assigned."""
    vocabulary, _ = vocabulary_and_ranks()
    known = [c for c in text if all(CHARACTER_OF_BYTE[b] in vocabulary for b in c.encode())]
    expected = "".join(known)
    assert smollm2().decode(smollm2().encode(expected)) == expected


def test_bytes_without_a_token_are_dropped() -> None:
    assert smollm2().encode("\x04a\x1d") == smollm2().encode("a")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 49_151), max_size=30))
def test_bytes_of_tokens_join_to_the_decoded_text(token_ids: list[int]) -> None:
    parts = [smollm2().token_bytes(token_id) for token_id in token_ids]
    joined = b"".join(part for part in parts if part is not None)
    assert joined.decode(errors="replace") == smollm2().decode(token_ids)


def test_every_token_has_bytes_and_a_text() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49_152
    for token_id in range(tokenizer.vocab_size):
        found = tokenizer.token_bytes(token_id)
        assert found
        text = tokenizer.token_text(token_id)
        assert text.encode() == found or text == f"<{found.hex(' ').upper()}>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None
    assert tokenizer.token_bytes(-1) is None


def test_token_text_shows_spaces_as_they_are_and_broken_bytes_in_hex() -> None:
    tokenizer = smollm2()
    assert [tokenizer.token_text(i) for i in tokenizer.encode("the  cat\n")] == [
        "the",
        " ",
        " cat",
        "\n",
    ]
    pieces = [tokenizer.token_text(i) for i in tokenizer.encode("谁")]
    assert pieces == ["<E8 B0>", "<81>"] or all(piece.startswith("<") for piece in pieces)
    assert tokenizer.token_text(2) == "<|im_end|>"


def test_special_tokens_are_found_in_text_and_skipped_on_request() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi\n"
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.is_byte_level


def test_generation_ends_at_end_of_turn_and_at_end_of_document() -> None:
    assert smollm2().eos_token_id == 2
    assert smollm2().eos_token_ids == (2, 0)


def test_it_equals_transformers_on_the_converted_directory() -> None:
    from transformers import AutoTokenizer

    directory = default_model_directory(progress=False)
    theirs: Any = AutoTokenizer.from_pretrained(directory)
    ours = tokenizer_from_directory(directory)
    assert ours is not None
    assert ours.eos_token_id == theirs.eos_token_id
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == smollm2().encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    for chat in CHATS:
        for prompt in (True, False):
            text = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
            assert ours.render_chat(chat, prompt) == text
            ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt).input_ids
            assert ours.apply_chat_template(chat, prompt) == ids


HARD_TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{% for message in messages %}
  {% if message['role'] == 'tool' %}{% continue %}{% endif %}
  {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
  {%- generation %}<{{ message['role'] }}> {{ message['content'] | tojson }}
{% endgeneration %}
{% endfor %}
{{ strftime_now('%Y') | length }} {{ system }} {{ style | default('plain') }}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def test_a_hard_template_renders_as_in_transformers() -> None:
    from transformers.utils import chat_template_utils

    render_with_transformers: Any = chat_template_utils.render_jinja_template
    call = {"name": "f", "arguments": {"x": "<é>", "y": [1, 2.5, None, True]}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "  Be kind. "},
        {"role": "user", "content": "a < b & 'c' 我"},
        {"role": "tool", "content": "unseen"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    names = {"bos_token": "<s>", "style": "fancy", "add_generation_prompt": True}
    theirs, _ = render_with_transformers([chat], chat_template=HARD_TEMPLATE, **names)
    assert render_chat(HARD_TEMPLATE, chat, names) == theirs[0]


def test_a_template_is_sandboxed_and_its_refusal_is_told() -> None:
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", chat, {})
    with pytest.raises(ValueError, match="unsafe"):
        render_chat("{{ ''.__class__.__mro__[1].__subclasses__() }}", chat, {})
    with pytest.raises(ValueError, match=r"messages\[0\]='x' is not a mapping with a 'role'"):
        render_chat("", ["x"], {})  # type: ignore[list-item]


def test_a_base_model_has_no_chat() -> None:
    tokenizer = Tokenizer(backend_with("smollm"))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat(CHATS[0])
    assert tokenizer.eos_token_id is None


def test_sentencepiece_tokens_have_bytes_too() -> None:
    vocabulary = {"▁the": 0, "<0xE6>": 1, "<s>": 2}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<s>"})
    assert not tokenizer.is_byte_level
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b" the", b"\xe6", b"<s>"]
    assert tokenizer.eos_token_ids == (2,)


def test_a_directory_without_tokenizer_json(tmp_path: Path) -> None:
    assert tokenizer_from_directory(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has tokenizer.model but no tokenizer.json"):
        tokenizer_from_directory(tmp_path)


def test_template_and_special_tokens_of_a_directory(tmp_path: Path) -> None:
    backend_with("smollm").save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        '{"eos_token": {"content": "<|im_end|>"}, "add_bos_token": true, "chat_template": '
        '[{"name": "rag", "template": "R"}, {"name": "default", "template": "D{{ eos_token }}"}]}'
    )
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer is not None
    assert tokenizer.render_chat(CHATS[0]) == "D<|im_end|>"
    assert tokenizer.eos_token_ids == (2,)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = tokenizer_from_directory(tmp_path, eos_token_ids=(7,))
    assert tokenizer is not None
    assert tokenizer.render_chat(CHATS[0]) == "from the file"
    assert tokenizer.eos_token_ids == (7,)
