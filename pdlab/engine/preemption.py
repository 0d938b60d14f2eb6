"""Which way a preempted sequence goes: to host memory, or back to be computed again."""

from __future__ import annotations

from pdlab.costmodel import Hardware, calibrate, preemption_cost
from pdlab.engine.admission import as_windows
from pdlab.engine.config import EngineConfig
from pdlab.engine.sequence import Sequence
from pdlab.kvcache import PagedKVCache
from pdlab.models import Model
from pdlab.trace import DROPPED


class PreemptionPolicy:
    """Says whether to swap; `auto` takes what the cost model predicts to be sooner done.

    It reckons with every token computed again: the pool is full, so what the prefix cache keeps of
    the sequence is about to be overwritten.

    Args:
        config: resolved.
        hardware: the machine's ceilings; None calibrates it, which takes some seconds the first
            time on a machine, if `auto` has something to choose between.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        kv_cache: PagedKVCache,
        hardware: Hardware | None = None,
    ):
        self._shape = as_windows(model.config, config)
        self._dtype = model.dtype_name
        self._weight_bytes = model.weight_element_bytes
        self._head_bytes = model.head_element_bytes
        self._kv_bytes = kv_cache.element_bytes
        self._block_size = config.block_size
        self._chunk = config.largest_chunk
        self._chooses = config.preemption == "auto" and config.num_swap_blocks > 0
        self._swaps = config.preemption == "swap"
        if not isinstance(hardware, Hardware | None):
            raise ValueError(f"hardware={hardware!r:.60} must be Hardware")
        if self._chooses and hardware is None:
            hardware = calibrate(str(model.device), model.dtype_name)
        if self._chooses and hardware is not None:
            hardware.peak(model.dtype_name)  # refuses a machine that lacks this dtype
        self._hardware = hardware

    def __call__(self, sequence: Sequence) -> bool:
        """Whether this sequence's K and V should wait in host memory."""
        if not self._chooses:
            return self._swaps
        assert self._hardware is not None
        blocks = sum(block != DROPPED for block in sequence.block_table)
        cost = preemption_cost(
            self._shape,
            sequence.num_computed_tokens,
            self._hardware,
            self._dtype,
            chunk_size=self._chunk,
            num_moved_tokens=blocks * self._block_size,
            weight_element_bytes=self._weight_bytes,
            head_element_bytes=self._head_bytes,
            kv_element_bytes=self._kv_bytes,
        )
        return cost.swap_s < cost.recompute_s
