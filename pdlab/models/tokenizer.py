"""Text to token ids and back; and what each token is, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.models.chat import Message, render_chat

if TYPE_CHECKING:
    import tokenizers
    from llguidance import LLTokenizer


BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A Hugging Face `tokenizers.Tokenizer` with its model's chat template and end tokens.

    Args:
        backend: does the splitting and merging.
        chat_template: Jinja source, or None for a base model.
        special_tokens: names a chat template may read: `bos_token`, `eos_token`, ...
        eos_token_ids: tokens that end generation, the main one first.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        backend.no_truncation()  # a saved tokenizer may hold settings of its training
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(eos_token_ids) or self._declared_eos()
        self._bytes_of: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of the text. Nothing is added; special tokens spelled out in it are found.

        A byte that the vocabulary lacks is dropped, as the model's own tokenizer drops it: SmolLM2
        has no token for six control characters.

        Raises:
            ValueError: the text holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error}") from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of the tokens; bytes that are not valid UTF-8 become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the text that the model was trained on.

        Args:
            messages: {"role": "user", "content": "..."} each.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further settings of this model's template, say `enable_thinking`.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give it plain text")
        names = self.special_tokens | variables
        names["add_generation_prompt"] = add_generation_prompt
        return render_chat(self.chat_template, messages, names)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables))

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that this token adds to a text, or None if no token has this id.

        A special token stands for its own name. The bytes of one token need not be valid UTF-8:
        byte-level BPE may cut a character in two.
        """
        known = self._bytes_of.get(token_id)
        if known is not None:
            return known
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return None
        return self._bytes_of.setdefault(token_id, self._look_up(token_id, token))

    def _look_up(self, token_id: int, token: str) -> bytes:
        if token_id in self._added_ids:
            return token.encode()
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if self.is_byte_fallback(token_id):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether this is one of SentencePiece's tokens for a single byte, `<0x00>` to `<0xFF>`."""
        token = self.backend.id_to_token(token_id) or ""
        return not self.is_byte_level and BYTE_FALLBACK.fullmatch(token) is not None

    def token_text(self, token_id: int) -> str:
        """What to show for a token: its text, or its bytes as `<E6 88>` if they are no text."""
        found = self.token_bytes(token_id)
        if found is None:
            return f"<no token {token_id}>"
        try:
            return found.decode()
        except UnicodeDecodeError:
            return f"<{found.hex(' ').upper()}>"

    @property
    def eos_token_id(self) -> int | None:
        """The main token that ends generation."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        """Tokens there are; a model's embedding may have more rows, for alignment."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which are no part of the text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are strings of bytes (byte-level BPE) rather than of characters."""
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def llguidance(self) -> LLTokenizer:
        """This vocabulary as llguidance wants it, which takes about half a second."""
        from llguidance import LLTokenizer

        return LLTokenizer(self.backend.to_str(), eos_token=list(self.eos_token_ids) or None)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    def _declared_eos(self) -> tuple[int, ...]:
        name = self.special_tokens.get("eos_token")
        token_id = self.backend.token_to_id(name) if name else None
        return () if token_id is None else (token_id,)


def tokenizer_from_directory(
    directory: Path, eos_token_ids: Sequence[int] = ()
) -> Tokenizer | None:
    """The tokenizer of a Hugging Face model directory, None if it has none.

    Raises:
        ValueError: there is one, but not as tokenizer.json.
    """
    from tokenizers import Tokenizer as Backend

    path = directory / "tokenizer.json"
    if not path.exists():
        for other in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (directory / other).exists():
                raise ValueError(f"{directory} has {other} but no tokenizer.json, which is needed")
        return None
    settings = _read_json(directory / "special_tokens_map.json")
    settings |= _read_json(directory / "tokenizer_config.json")
    settings["chat_template"] = _chat_template(directory, settings)
    return tokenizer_from_settings(Backend.from_file(str(path)), settings, eos_token_ids)


def tokenizer_from_settings(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], eos_token_ids: Sequence[int] = ()
) -> Tokenizer:
    """A Tokenizer from the contents of a tokenizer_config.json."""
    names = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
    return Tokenizer(
        backend,
        chat_template=settings.get("chat_template"),
        special_tokens={key: text for key, text in names.items() if text is not None},
        eos_token_ids=eos_token_ids,
    )


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    """From chat_template.jinja, or the older field; of several, the one named default."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _text(value: Any) -> str | None:
    """A special token is written as text or as {"content": text, ...}; flags end in _token too."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def byte_of_character() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019).

    Printable bytes stand for themselves; the other 68 are numbered from U+0100 in order, so a
    space is written `Ġ`.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = byte_of_character()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()  # not written in the alphabet: it stands for itself
