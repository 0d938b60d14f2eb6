"""Which way a preempted sequence goes: to host memory, or back to be computed again."""

from __future__ import annotations

from pdlab.costmodel import Hardware, calibrate, preemption_cost
from pdlab.engine.config import EngineConfig
from pdlab.engine.sequence import Sequence
from pdlab.models import Model


class PreemptionPolicy:
    """Says whether to swap; `auto` takes what the cost model predicts to be sooner done.

    Args:
        config: resolved.
        kv_element_bytes: mean bytes of a cached element.
        hardware: the machine's ceilings; None calibrates it, which takes some seconds the first
            time on a machine, if `auto` has something to choose between.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        kv_element_bytes: float,
        hardware: Hardware | None = None,
    ):
        self._model = model
        self._kv_element_bytes = kv_element_bytes
        self._chooses = config.preemption == "auto" and config.num_swap_blocks > 0
        self._swaps = config.preemption == "swap"
        self._hardware = hardware
        if self._chooses and hardware is None:
            self._hardware = calibrate(str(model.decoder.device), model.dtype_name)

    def __call__(self, sequence: Sequence) -> bool:
        """Whether this sequence's K and V should wait in host memory."""
        if not self._chooses:
            return self._swaps
        assert self._hardware is not None
        cost = preemption_cost(
            self._model.config,
            sequence.num_computed_tokens,
            self._hardware,
            self._model.dtype_name,
            weight_element_bytes=self._model.decoder.dtype.itemsize,
            kv_element_bytes=self._kv_element_bytes,
        )
        return cost.swap_s < cost.recompute_s
