"""What masks tokens by the text they would make: a state for each sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdlab.sampling.params import SamplingParams
from pdlab.sampling.tally import Tally


class Matcher(ABC):
    """How far one sequence has come in what it is allowed to write.

    The state follows from the output tokens alone, so preemption cannot harm it, and a copy of the
    sequence elsewhere can work it out again.
    """

    @abstractmethod
    def sync(self, output_ids: Sequence[int]) -> None:
        """Take in those of the output tokens that are new; with none that is, do nothing.

        Raises:
            ValueError: a token is not allowed where it stands.
        """

    @abstractmethod
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Tokens that may come next, [vocab_size]; those that end the text are not among them."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text is complete as it stands."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it is complete and nothing may follow."""

    @property
    def problem(self) -> str:
        """What went wrong, where it can follow the text no further; "" as a rule."""
        return ""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent copy for another sample that goes on from here."""


class Drawer(Protocol):
    """Who draws a token: what the chain, and the draw, may look at. An engine's Sequence is one."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def token_ids(self) -> list[int]:
        """Prompt and output."""
        ...

    @property
    def output_ids(self) -> list[int]: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def tally(self) -> Tally:
        """What `token_ids` holds, for penalties."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end this sequence."""
        ...

    @property
    def bad_words(self) -> Matcher | None:
        """Where the output stands towards the texts it must not contain."""
        ...

    @property
    def constraint(self) -> Matcher | None:
        """Where the output stands in what it must be."""
        ...
