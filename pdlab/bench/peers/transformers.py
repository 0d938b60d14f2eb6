"""transformers: `generate` on a Hugging Face directory, attention by torch's SDPA."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from .serve import Emit


def open_peer(asked: dict[str, Any]) -> TransformersPeer:
    """Options: dtype (fp32 or bf16), device; config, JSON of a Llama's to be filled at random."""
    return TransformersPeer(asked)


class TransformersPeer:
    """Its static way: one batch, prefilled at once and decoded to the end."""

    def __init__(self, asked: dict[str, Any]):
        self._torch: Any = import_module("torch")
        library: Any = import_module("transformers")
        self._torch.set_num_threads(asked["threads"])
        options = asked["options"]
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[options.get("dtype", "fp32")]
        self._device = options.get("device", "cpu")
        kinds, dtype_of_weights = library.AutoModelForCausalLM, getattr(self._torch, dtype)
        if "config" in options:
            config = library.LlamaConfig(**json.loads(options["config"]))
            with self._torch.device(self._device):
                model = kinds.from_config(config, dtype=dtype_of_weights)
        else:
            model = kinds.from_pretrained(asked["model"], dtype=dtype_of_weights)
        self._model = model.to(self._device).eval()
        self._model.generation_config.eos_token_id = None  # so that all answers are of one length
        self._criteria = library.StoppingCriteriaList
        self.about = {
            "version": f"{library.__version__}, torch {self._torch.__version__}",
            "settings": f"generate, {dtype}, attention {self._model.config._attn_implementation}",
            "weight_bytes": self._read_bytes(),
            "kv_element_bytes": self._model.dtype.itemsize,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def _read_bytes(self) -> int:
        """Bytes of weights that a decode step reads: an embedding alone gives but a row."""
        embedding = self._model.get_input_embeddings().weight
        unread = 0 if self._model.config.tie_word_embeddings else embedding.nbytes
        return sum(p.nbytes for p in self._model.parameters()) - unread

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        ids = self._torch.tensor(prompts, device=self._device)
        running = self._torch.zeros(len(prompts), dtype=self._torch.bool, device=self._device)

        def told(*_: Any, **__: Any) -> Any:
            emit(*range(len(prompts)))
            return running

        out = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            stopping_criteria=self._criteria([told]),
        )
        return out[:, ids.shape[1] :].tolist()
