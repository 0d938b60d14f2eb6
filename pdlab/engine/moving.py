"""Requests that one engine begins and another one goes on with: what has to travel.

The K and V travel apart, see `pdlab.kvcache.wire`; they follow from the tokens, so that who lost
them can compute them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdlab.sampling import SamplingParams


@dataclass(frozen=True)
class RequestState:
    """All that another engine needs to go on with a request, as plain data.

    A draw depends on the tokens, the seed and the parameters alone, and so do grammars, penalties
    and what is held back of the text: whoever goes on from here puts out what any other would.

    Raises:
        ValueError: `params.n` is not 1: samples of one request move one by one.
    """

    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    """Tokens drawn so far; their text has been released, as far as it was certain."""
    seed: int | None = None
    """What its draws depend on; None where none has been made."""
    prompt: str = ""
    """For people to read."""

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise ValueError(f"n={self.params.n}: a request that moves has one sample")

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True)
class Reservation:
    """Room in an engine for a request whose K and V are still elsewhere."""

    request_id: str
    num_tokens: int
    """Tokens that its K and V are expected for."""
    num_cached_tokens: int
    """The first of these, that the prefix cache has already: whole blocks."""
