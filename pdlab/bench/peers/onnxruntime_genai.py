"""ONNX Runtime GenAI: a directory made by `python -m onnxruntime_genai.models.builder`."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .serve import Emit, files_bytes


def open_peer(asked: dict[str, Any]) -> GenaiPeer:
    """No options: precision is that of the directory."""
    return GenaiPeer(asked)


class GenaiPeer:
    """The loop of its documentation: append the prompts, then generate token by token."""

    def __init__(self, asked: dict[str, Any]):
        self._library: Any = import_module("onnxruntime_genai")
        self._numpy: Any = import_module("numpy")
        config = self._library.Config(asked["model"])
        threads = {"intra_op_num_threads": asked["threads"], "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        self._model = self._library.Model(config)
        self.about = {
            "version": version("onnxruntime-genai"),
            "settings": f"Generator, CPU provider, {asked['threads']} intra-op threads",
            "weight_bytes": files_bytes(asked["model"], (".data", ".onnx")),
            "kv_element_bytes": 4,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        length = len(prompts[0]) + num_tokens
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=len(prompts), min_length=length, max_length=length, do_sample=False
        )
        generator = self._library.Generator(self._model, params)
        generator.append_tokens(self._numpy.array(prompts, dtype=self._numpy.int32))
        found: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            generator.generate_next_token()
            for row, token in zip(found, generator.get_next_tokens()):  # noqa: B905 (Python 3.9 has no strict)
                row.append(int(token))
            emit(*range(len(prompts)))
        return found
