"""Times of one sequence, from which the usual latencies follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestMetrics:
    """When things happened, in seconds on one monotonic clock; None means not yet.

    TTFT: arrival to first token. ITL: each gap between tokens. TPOT: their mean. E2E: arrival to
    last token.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that kept K and V in host memory."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared at the first admission."""
    num_draft_tokens: int = 0
    """Tokens that were guessed ahead and computed."""
    num_accepted_tokens: int = 0
    """Those of them that stood."""

    @property
    def queue_s(self) -> float | None:
        """Arrival until the first step that ran any of its tokens."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        times_s = self.token_times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s)

    def to_dict(self) -> dict[str, Any]:
        """All latencies and counts, as JSON knows them."""
        return {
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "itl_s": self.itl_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_preemptions": self.num_preemptions,
            "num_swaps": self.num_swaps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }
