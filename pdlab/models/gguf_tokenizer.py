"""Build a tokenizer from the vocabulary, merges and pre-tokenizer name inside a GGUF file.

A GGUF file holds the vocabulary and merges of byte-level BPE, but of the step that cuts text into
words before merging only a *name*. Rebuilding without heeding it gives a tokenizer that round-trips
perfectly and yet feeds the model other tokens than it was trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of special tokens, and of added tokens that are text."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen2 cut text; they differ in how many digits stay together."""

END_OF_GENERATION = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "</s>",
)
"""Control tokens after which a model has nothing more to say."""


def tokenizer_from_gguf(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that the model was trained with.

    Raises:
        ValueError: not byte-level BPE, or a pre-tokenizer that is not known here.
    """
    from tokenizers import Tokenizer, decoders, models

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not supported; 'gpt2' (byte-level BPE) is. "
            "Load the model from a directory with a tokenizer.json instead."
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    _set_pre_tokenizer(tokenizer, pre)
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer.add_special_tokens(_added(tokens, types, CONTROL))
    tokenizer.add_tokens(_added(tokens, types, USER_DEFINED))
    return tokenizer


def _added(tokens: list[str], types: list[int], wanted: int) -> list[tokenizers.AddedToken]:
    """The tokens of one type; they are in the vocabulary already, so they keep their ids."""
    from tokenizers import AddedToken

    return [
        AddedToken(token, special=wanted == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == wanted
    ]


def _set_pre_tokenizer(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    from tokenizers import Regex, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "smollm":
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif name in ("llama-bpe", "qwen2"):
        digits = "{1,3}" if name == "llama-bpe" else ""
        words = Split(Regex(WORDS.replace("{DIGITS}", digits)), behavior="isolated")
        steps = [words, ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        known = "smollm, llama-bpe, qwen2"
        raise ValueError(f"tokenizer.ggml.pre={name!r} is not supported; supported: {known}")
    tokenizer.pre_tokenizer = Sequence(steps)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()


def eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Tokens that end generation: the declared one first, then the other end markers by name.

    A chat model declares its end of turn, but sometimes writes its end of document instead.
    """
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    declared = [metadata[key] for key in keys if key in metadata]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type") or []
    named = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in END_OF_GENERATION
    ]
    return tuple(dict.fromkeys(declared + named))


def tokenizer_settings(metadata: dict[str, Any]) -> dict[str, Any]:
    """What Hugging Face keeps beside the tokenizer, in tokenizer_config.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            settings[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    return settings
