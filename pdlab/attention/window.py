"""Which keys a query may see, and which blocks that leaves to read.

A query at position p sees no key after it (causal). A window hides older keys, too:

    Window(size=4, sinks=2)     keys     0 1 2 3 4 5 6 7 8
                     query at 8 sees     x x       x x x x

Sinks are the first tokens of a sequence. A model that was trained without a window puts much of its
attention there whatever they say, and falls apart when they vanish (Xiao et al. 2024,
StreamingLLM). Here every key keeps the rotary position it had; StreamingLLM counts positions inside
the window instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdlab.kvcache import blocks_for


@dataclass(frozen=True)
class Window:
    """A query at position p sees the keys at p - size + 1 to p, and those before `sinks`.

    Raises:
        ValueError: size < 1 or sinks < 0; or reach < size.
    """

    size: int
    sinks: int = 0
    reach: int | None = None
    """Where a layer has a window of its own, its size: no sink is seen from further away."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"window size={self.size}, it must be at least 1 token")
        if self.sinks < 0:
            raise ValueError(f"window sinks={self.sinks}, it must be at least 0 tokens")
        if self.reach is not None and self.reach < self.size:
            raise ValueError(f"window reach={self.reach}, it must be at least size={self.size}")


def narrower(window: Window | None, model_window: int | None) -> Window | None:
    """The engine's window on a layer that was trained with one: a key must be visible in both.

    So such a layer never looks further back than it learned to. With a window of its own no wider
    than the engine's, nothing changes for it.
    """
    if model_window is None or window is None:
        return window if model_window is None else Window(model_window)
    if model_window <= window.size:
        return Window(model_window)
    return Window(window.size, window.sinks, model_window if window.sinks else None)


def visible(queries: Tensor, keys: Tensor, window: Window | None) -> Tensor:
    """Which keys each query may see, from their positions: bool [..., num_queries, num_keys].

    Args:
        queries: [..., num_queries]; keys: [..., num_keys]; integer positions in the sequence.
    """
    queries, keys = queries[..., :, None], keys[..., None, :]
    mask = keys <= queries
    if window is None:
        return mask
    seen = keys > queries - window.size
    if window.sinks:
        seen |= keys < window.sinks
    if window.reach is not None:
        seen &= keys > queries - window.reach
    return mask & seen


def visible_blocks(
    first_query: int, context_len: int, block_size: int, window: Window | None
) -> list[int]:
    """Which entries of a block table hold a key that a query from `first_query` on may see.

    Ascending, and those up to `context_len` only: a table may already hold blocks for tokens to
    come. What is missing before them, no later query will see either: windows move on.
    """
    end = blocks_for(context_len, block_size)
    if window is None:
        return list(range(end))
    recent = max(0, first_query - window.size + 1) // block_size
    oldest = 0 if window.reach is None else max(0, first_query - window.reach + 1)
    sink_end = min(blocks_for(window.sinks, block_size), recent) if oldest < window.sinks else 0
    return [*range(oldest // block_size, sink_end), *range(recent, end)]
