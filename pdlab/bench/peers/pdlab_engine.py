"""pdlab itself, in one of its modes, measured as every other engine is."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from .serve import Emit


def open_peer(asked: dict[str, Any]) -> PdlabPeer:
    """Options: weights and device, of `load`; backend, kv_format and cuda_graphs, of the engine."""
    return PdlabPeer(asked)


OF_LOAD, OF_ENGINE = ("weights", "device"), ("backend", "kv_format", "cuda_graphs")
ONLY_WAY = {"weights": "fp32", "backend": "torch", "cuda_graphs": "off"}
"""What a version without the parameter does."""
KNOBS = {"enable_prefix_cache": False, "record_trace": False, "top_k_recorded": 0, "watermark": 0}
"""No prefix cache, since the same prompts come again; nothing recorded, since no peer records."""


class PdlabPeer:
    """An engine with its defaults, but for `KNOBS` and for what is asked."""

    def __init__(self, asked: dict[str, Any]):
        pdlab: Any = import_module("pdlab")
        import_module("torch").set_num_threads(asked["threads"])
        options = {"backend": "torch", **asked["options"]}
        chosen = _known(pdlab.load, options, OF_LOAD)
        model = pdlab.load(asked["model"], progress=False, **chosen)
        room = {
            "num_blocks": asked["tokens"] // 16 + 64,
            "max_num_batched_tokens": max(2048, asked["tokens"]),
        }
        chosen = _known(pdlab.EngineConfig, options, OF_ENGINE)
        self._engine = pdlab.Engine(model, pdlab.EngineConfig(**chosen, **KNOBS, **room))
        self._params = pdlab.SamplingParams
        self.about = {
            "version": pdlab.__version__,
            "settings": f"Engine, defaults without prefix cache and trace, KV "
            f"{self._engine.config.kv_format}",
            "weight_bytes": _read_bytes(model),
            "kv_element_bytes": self._engine.memory.cache.element_bytes,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        ids = [self._engine.submit(prompt, params) for prompt in prompts]
        numbers = {name: i for i, name in enumerate(ids)}
        while record := self._engine.step():
            emit(*(numbers[s.sequence_id] for s in record.sequences for _ in s.put_out))
        return [self._engine.collect(name).token_ids for name in ids]


def _read_bytes(model: Any) -> int:
    """Bytes of weights that a decode step reads: an embedding alone gives but a row."""
    packed = getattr(model, "packed", None)
    if packed:
        return int(packed.nbytes)
    embedding = 0 if model.config.tie_word_embeddings else model.decoder.embedding.nbytes
    return int(model.weight_bytes - embedding)


def _known(function: Any, options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Options of these names, less what is the only way of a version that has no such parameter.

    Raises:
        ValueError: another way is asked for, which that version does not have.
    """
    parameters = inspect.signature(function).parameters
    found = {}
    for name in names:
        if name in options and name in parameters:
            found[name] = options[name]
        elif options.get(name, ONLY_WAY.get(name)) != ONLY_WAY.get(name):
            raise ValueError(f"{name}={options[name]!r}: this pdlab has no such choice")
    if isinstance(found.get("cuda_graphs"), str):
        found["cuda_graphs"] = found["cuda_graphs"] == "on"
    return found
