"""CTranslate2: a directory made by `ct2-transformers-converter`."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from .serve import Emit, files_bytes


def open_peer(asked: dict[str, Any]) -> CTranslate2Peer:
    """Options: compute_type (default: as converted)."""
    return CTranslate2Peer(asked)


class CTranslate2Peer:
    """`Generator.generate_batch` with a callback for each token; it speaks words, not ids."""

    def __init__(self, asked: dict[str, Any]):
        library: Any = import_module("ctranslate2")
        compute = asked["options"].get("compute_type", "default")
        self._generator = library.Generator(
            asked["model"],
            device="cpu",
            compute_type=compute,
            inter_threads=1,
            intra_threads=asked["threads"],
        )
        vocabulary = Path(asked["model"]) / "vocabulary.json"
        self._words = json.loads(vocabulary.read_text(encoding="utf-8"))
        kind = self._generator.compute_type
        self.about = {
            "version": library.__version__,
            "settings": f"generate_batch, {kind}, {asked['threads']} intra-threads",
            "weight_bytes": files_bytes(asked["model"], (".bin",)),
            "kv_element_bytes": 4,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]

        def told(result: Any) -> bool:
            found[result.batch_id].append(result.token_id)
            emit(result.batch_id)
            return False

        self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            beam_size=1,
            sampling_topk=1,
            max_length=num_tokens,
            min_length=num_tokens,
            include_prompt_in_result=False,
            callback=told,
        )
        return found
