"""llama.cpp: its server with a slot for each prompt, asked for streams of token ids on loopback.

The library comes in the package `xllamacpp`, which is a wheel for processors with AVX2 and needs no
compiler.
"""

from __future__ import annotations

import json
import urllib.request
from importlib import import_module
from importlib.metadata import version
from typing import Any

from .serve import Emit, files_bytes

SLOTS, CONTEXT = 8, 2304
"""Prompts at once, and tokens of each."""
GREEDY = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True}


def open_peer(asked: dict[str, Any]) -> LlamaCppPeer:
    """No options: the format is that of the GGUF file."""
    return LlamaCppPeer(asked)


class LlamaCppPeer:
    """`POST /completion` of the server that the package starts."""

    def __init__(self, asked: dict[str, Any]):
        library: Any = import_module("xllamacpp")
        params = library.CommonParams()
        params.model.path = asked["model"]
        params.n_parallel, params.n_ctx = SLOTS, SLOTS * CONTEXT
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
        params.cache_ram_mib = 0
        self._server = library.Server(params)
        self.about = {
            "version": f"xllamacpp {version('xllamacpp')}",
            "settings": f"server with {SLOTS} slots, cache_prompt off, KV f16, flash attention "
            f"auto, batch {params.n_batch} / {params.n_ubatch}",
            "weight_bytes": files_bytes(asked["model"], (".gguf",)),
            "kv_element_bytes": 2,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        question = {
            "prompt": prompts,
            "n_predict": num_tokens,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
            **GREEDY,
        }
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        found: list[list[int]] = [[] for _ in prompts]
        with urllib.request.urlopen(request) as stream:
            for line in stream:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                prompt = event.get("index", 0)
                for token in event.get("tokens", ()):
                    if len(found[prompt]) < num_tokens:
                        found[prompt].append(token)
                        emit(prompt)
        return found
