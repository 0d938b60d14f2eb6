"""What a caller gets back: pieces of a stream, and the finished request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdlab.engine.metrics import RequestMetrics
from pdlab.sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error", "moved"]
"""`moved`: another engine went on with it."""
StopReason = str | int | None
"""Why a text stopped: the stop string, the stop token's id, or CONSTRAINT_OVER. None for the
model's own end-of-sequence token, and where it did not stop."""
CONSTRAINT_OVER = "constraint"
"""The text is complete, and its constraint allows nothing more."""


@dataclass(slots=True)
class Chunk:
    """A piece of a stream: as a rule a token, and the text that became certain with it.

    `text` may be empty while a character's bytes are incomplete, or while it may be the beginning
    of a stop string. The last chunk brings no token, but what was held back.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    index: int = 0
    """Which of the request's samples it belongs to."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, where they were asked for."""
    times_s: list[float] = field(default_factory=list)
    """When each token was there, in seconds since the engine was made."""
    stop_reason: StopReason = None


@dataclass(frozen=True)
class Completion:
    """One sample of a finished request."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    stop_reason: StopReason = None
    logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None
    """Why it could not go on, where `finish_reason` is "error"."""

    @property
    def sum_logprob(self) -> float:
        """Log probability of the whole output, in the model's own distribution.

        Raises:
            ValueError: the request did not ask for `logprobs`.
        """
        if self.logprobs is None:
            raise ValueError("logprobs=None: ask for logprobs=0 to have the sum")
        return sum(each.logprob for each in self.logprobs)


@dataclass
class RequestOutput:
    """A finished request. A refused one has no request id, no tokens, and an `error`.

    `token_ids`, `text`, `finish_reason`, `metrics` and so on are those of the first sample.
    """

    request_id: str
    prompt: str
    prompt_ids: list[int]
    completions: list[Completion]
    """As many as `SamplingParams.n` asked for; one of a refused request."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each token of the prompt, where they were asked for; None for the first token."""

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> StopReason:
        return self.completions[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics

    @property
    def error(self) -> Exception | None:
        """The first error of its samples."""
        return next((c.error for c in self.completions if c.error is not None), None)
