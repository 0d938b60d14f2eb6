"""One pool of KV memory: the tensors, the blocks, and the moves between them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import groupby
from typing import Protocol

import torch

from pdlab.kvcache.block_pool import BlockPool
from pdlab.kvcache.manager import KEEP_ALL, KVManager, Release, Retention
from pdlab.kvcache.paged import PagedKVCache, copy_blocks
from pdlab.models.config import ModelConfig
from pdlab.trace import BlockMove


class UnderWay(Protocol):
    """What computes on the memory while nobody holds its lock."""

    def land(self) -> None:
        """Wait until it is done, whether well or badly."""
        ...


class KVMemory:
    """Device blocks, host blocks and their bookkeeping, for one engine or for several.

    Engines that share one memory share its prefix cache, too. They must run the same model with the
    same arithmetic, or one would read K and V that the other would have computed differently.

    Args:
        num_swap_blocks: blocks in host memory.
        max_num_seqs: most sequences that hold blocks at once, over all engines.
        retention: which tokens stay in the cache.
        cache_class: what holds the blocks, or knows who does.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        kv_format: str = "fp32",
        device: torch.device | str = "cpu",
        num_swap_blocks: int = 0,
        head_groups: int = 1,
        max_num_seqs: int = 32,
        retention: Retention = KEEP_ALL,
        cache_class: type[PagedKVCache] = PagedKVCache,
    ):
        def cache(blocks: int, place: torch.device | str, max_open: int, name: str) -> PagedKVCache:
            return cache_class(
                config,
                blocks,
                block_size,
                kv_format,
                place,
                head_groups=head_groups,
                max_open_blocks=max_open,
                name=name,
            )

        # A sequence may fill one block and begin the next in the same step.
        self.cache = cache(num_blocks, device, 2 * max_num_seqs, "num_blocks")
        self.host: PagedKVCache | None = None
        if num_swap_blocks:
            self.host = cache(num_swap_blocks, "cpu", max_num_seqs, "num_swap_blocks")
        self.manager = KVManager(
            BlockPool(num_blocks, block_size),
            BlockPool(num_swap_blocks, block_size),
            retention,
            max_swapped=max_num_seqs,
            rewrites=self.cache.open_blocks is None,
        )
        self.lock = threading.RLock()
        """Held while an engine plans, runs or books a step: threads take turns."""
        self.under_way: UnderWay | None = None
        """To be waited for, by `settle`, before anything else is computed, copied or given back."""
        self._changed = threading.Condition(self.lock)
        self._num_changes = 0
        self.num_engines = 0
        self._seats_left = max_num_seqs
        self._kind: dict[str, object] = {}

    def join(self, kind: dict[str, object], num_seqs: int) -> None:
        """Another engine is going to use this memory, with up to `num_seqs` sequences.

        Args:
            kind: all that decides what K and V are; the same for all engines.

        Raises:
            ValueError: the engine would store something else, or too many sequences.
        """
        if num_seqs > self._seats_left:
            raise ValueError(
                f"max_num_seqs={num_seqs} is more than the {self._seats_left} sequences that the "
                "KV memory has left"
            )
        for name, value in kind.items():
            first = self._kind.get(name, value)
            if first is not value and first != value:
                ours, its = (getattr(x, "name", x) for x in (value, first))
                raise ValueError(f"{name}={ours!r:.60} differs from {its!r:.60} of the KV memory")
        self._kind = self._kind or kind
        self._seats_left -= num_seqs
        self.num_engines += 1

    def settle(self) -> None:
        """Wait until nothing computes on this memory; to be called with the lock held.

        Interrupted, it can be called again.
        """
        if self.under_way:
            self.under_way.land()
            self.under_way = None

    def note_change(self) -> None:
        """An engine got on: blocks may have become free."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def wait_for_change(self, patience_s: float = 1.0) -> bool:
        """Wait, with the lock given up, until another engine gets on; False if none does.

        An engine that is in the middle of a step holds the lock: its step is waited for, however
        long it takes.
        """
        with self._changed:
            before = self._num_changes
            self._changed.wait_for(lambda: self._num_changes != before, patience_s)
            return self._num_changes != before

    def leave(self, num_seqs: int) -> None:
        """An engine that has freed all its blocks is done with this memory."""
        self._seats_left += num_seqs
        self.num_engines -= 1

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        """Copy blocks as the manager decided, in its order; neighbours of a kind go together."""
        for kind, group in groupby(orders, key=_kind):
            source = self.host if kind in ("swap_in", "release_host") else self.cache
            target = self.host if kind == "swap_out" else self.cache
            assert source is not None
            assert target is not None
            if kind.startswith("release"):
                source.release([o.block for o in group if isinstance(o, Release)])
            else:
                moves = [o for o in group if isinstance(o, BlockMove)]
                sources, targets = [m.source for m in moves], [m.target for m in moves]
                copy_blocks(source, sources, target, targets)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, host memory included."""
        return self.cache.nbytes + (self.host.nbytes if self.host else 0)


def _kind(order: BlockMove | Release) -> str:
    if isinstance(order, BlockMove):
        return order.kind
    return "release_host" if order.on_host else "release"
