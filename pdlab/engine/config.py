"""The engine's knobs, and a request's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdlab.attention import BACKENDS
from pdlab.kvcache import KV_DTYPES


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Every field is a knob. All are lossless but a 16-bit `kv_format`.

    Raises:
        ValueError: a field is out of range, or two do not go together.
    """

    block_size: int = 16
    """Tokens in a KV block."""
    num_blocks: int = 512
    """KV blocks in the pool; all memory for KV is taken when the engine is made."""
    kv_format: str = "auto"
    """`fp32`, `fp16` or `bf16`; `auto` is the model's own dtype."""
    exact: bool = False
    """Bit-identical results whatever the batch, block size or chunking (float32, slower)."""
    attention_backend: str = "auto"
    """`reference`, `torch` or `exact`; `auto` is `exact` in exact mode and `torch` otherwise."""
    max_model_len: int | None = None
    """Longest prompt, and length at which generation stops, in tokens; None is the model's own."""
    max_num_seqs: int = 32
    """Sequences that may run at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step: prompt chunks and decodes together."""
    chunk_size: int | None = None
    """Most prompt tokens of one sequence in one step; None leaves only the token budget."""
    record_trace: bool = True
    """Keep every StepRecord in `engine.trace`."""
    top_k_recorded: int = 5
    """Most probable candidates kept with each sampled token."""
    seed: int | None = None
    """Seeds the requests that bring no seed of their own; None draws from the system."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            require_int(name, getattr(self, name), least=1)
        for name in ("exact", "record_trace"):
            require_bool(name, getattr(self, name))
        for name in ("chunk_size", "max_model_len"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), least=1)
        require_int("top_k_recorded", self.top_k_recorded, least=0)
        if self.seed is not None:
            require_int("seed", self.seed, least=0)
        require_choice("kv_format", self.kv_format, ("auto", *KV_DTYPES))
        require_choice("attention_backend", self.attention_backend, ("auto", *BACKENDS))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: some decodes would never run"
            )
        if self.exact and self.attention_backend not in ("auto", "exact"):
            raise ValueError(
                f"exact=True needs attention_backend='exact', not {self.attention_backend!r}"
            )
        if self.exact and self.kv_format not in ("auto", "fp32"):
            raise ValueError(f"exact=True needs kv_format='fp32', not {self.kv_format!r}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Raises:
        ValueError: a field is out of range.
    """

    temperature: float = 0.0
    """0 takes the most probable token; so does anything below GREEDY_BELOW."""
    max_tokens: int = 128
    """Most tokens to generate, at least 1; the token that ends the text counts."""
    seed: int | None = None
    """With a seed, the same tokens each time, alone or in company."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""

    def __post_init__(self) -> None:
        number = isinstance(self.temperature, int | float) and not isinstance(
            self.temperature, bool
        )
        if not number or not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature!r:.60} must be a number from 0 to {MAX_TEMPERATURE}"
            )
        require_int("max_tokens", self.max_tokens, least=1)
        require_bool("ignore_eos", self.ignore_eos)
        if self.seed is not None:
            require_int("seed", self.seed, least=0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


MAX_TEMPERATURE = 1000
"""Beyond this every token is as likely as any other."""
GREEDY_BELOW = 1e-5
"""Temperatures under this choose the most probable token: the difference could not be seen."""


def require_int(name: str, value: Any, least: int) -> None:
    """Raise a ValueError unless `value` is an int (not a bool) of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer >= {least}")


def require_bool(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a bool: the text "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
