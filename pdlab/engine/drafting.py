"""What the engine asks of whoever guesses tokens ahead; `pdlab.speculate` has those who do."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from pdlab.engine.sequence import Sequence
from pdlab.sampling import Draft

if TYPE_CHECKING:
    from pdlab.engine.config import EngineConfig
    from pdlab.models import Model


class Outcome(NamedTuple):
    """What became of a draft."""

    sequence: Sequence
    num_drafted: int
    num_accepted: int


class Drafter(Protocol):
    """Guesses what follows the sequences of one engine."""

    def propose(self, sequences: Several[Sequence], limits: Several[int]) -> list[Draft]:
        """A draft for each sequence, of at most `limits[i]` tokens; none is fine.

        The sequences decode: all tokens but the newest are computed. May be interrupted, and asked
        again. That there is no room for a drafter's own memory is no error: it drafts less.
        """
        ...

    def learn(self, outcomes: Several[Outcome], draft_s: float, step_s: float) -> None:
        """Hear what became of the drafts of a step.

        Args:
            draft_s: how long the proposing took.
            step_s: how long all the rest of the step did.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """A sequence is not here any more, whether it was ever seen or not."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


@runtime_checkable
class Speculation(Protocol):
    """A way to guess, as the engine's knob has it."""

    def make(self, model: Model, config: EngineConfig) -> Drafter:
        """The drafter of an engine for `model`.

        Args:
            config: the engine's, resolved.

        Raises:
            ValueError: it does not fit the model, or the configuration.
        """
        ...


def check_draft(draft: Draft, limit: int, vocab_size: int) -> None:
    """Raise a ValueError for a draft that a drafter should not have made."""
    if len(draft) > limit:
        raise ValueError(f"speculation: a draft has {len(draft)} tokens, the limit was {limit}")
    for token_id in draft.token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"speculation: a draft has token id {token_id}, {vocab_size=}")
    q = draft.probabilities
    if q is not None and q.shape != (len(draft), vocab_size):
        raise ValueError(
            f"speculation: a draft of {len(draft)} tokens has probabilities of shape "
            f"{tuple(q.shape)}, not {(len(draft), vocab_size)}"
        )
