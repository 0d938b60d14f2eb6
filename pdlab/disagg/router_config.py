"""How a router routes."""

from __future__ import annotations

from dataclasses import dataclass

from pdlab.requirements import require_choice, require_int, require_number

MODES = ("aggregated", "disaggregated")
TRANSFERS = ("stream", "push", "pull")
ON_FAILURE = ("recompute", "fail")


@dataclass(frozen=True)
class RouterConfig:
    """How a router routes.

    Raises:
        ValueError: a field is out of range.
    """

    mode: str = "disaggregated"
    """`aggregated`: each worker serves whole requests, as its engine's batching says;
    `disaggregated`: prompts on some, outputs on others."""
    transfer: str = "stream"
    """`stream`: room is reserved before the prompt runs, and K and V leave layer by layer as they
    are computed; `push` and `pull`: the whole prompt, once it is computed and there is room."""
    local_prefill_tokens: int = 0
    """Prompts with no more than this many tokens that the decode worker has not cached are computed
    there."""
    max_backlog_tokens: int = 16384
    """Prompt tokens that wait at one worker; further requests wait at the router."""
    on_failure: str = "recompute"
    """`recompute`: what a lost worker had is computed elsewhere, from the tokens that were handed
    on; `fail`: the request ends with an error."""
    max_attempts: int = 4
    """Times that a request is begun."""
    max_transfers: int = 2
    """Times that one attempt's K and V are pushed or pulled."""
    lease_s: float = 30.0
    """The router renews what workers keep in a third of it, or of their own shortest lease."""
    patience_s: float = 120.0
    """How long a worker that has requests may say nothing, before it is given up. It answers each
    renewal, but not before its step is over."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("transfer", self.transfer, TRANSFERS)
        require_choice("on_failure", self.on_failure, ON_FAILURE)
        require_int("local_prefill_tokens", self.local_prefill_tokens, least=0)
        for name in ("max_backlog_tokens", "max_attempts", "max_transfers"):
            require_int(name, getattr(self, name), least=1)
        require_number("lease_s", self.lease_s, 0.001, 1e9)
        require_number("patience_s", self.patience_s, self.lease_s, 1e9)
