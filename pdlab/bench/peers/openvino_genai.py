"""OpenVINO GenAI: a GGUF file, or a directory made by `optimum-cli export openvino`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .serve import Emit, files_bytes


def open_peer(asked: dict[str, Any]) -> OpenVinoPeer:
    """No options: the format is that of the file."""
    return OpenVinoPeer(asked)


class OpenVinoPeer:
    """Its continuous batching over a paged cache, one step at a time."""

    def __init__(self, asked: dict[str, Any]):
        self._library: Any = import_module("openvino_genai")
        self._openvino: Any = import_module("openvino")
        self._numpy: Any = import_module("numpy")
        scheduler = self._library.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 1
        self._pipeline = self._library.ContinuousBatchingPipeline(
            asked["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": asked["threads"]}
        )
        self._asked = 0
        self.about = {
            "version": self._library.get_version(),
            "settings": "ContinuousBatchingPipeline, no prefix cache, 2048 tokens a step",
            "weight_bytes": files_bytes(asked["model"], (".bin", ".gguf")),
            "kv_element_bytes": 1,
        }
        self.generate(asked["warm_up"], 4, lambda *_: None)

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
            handles.append(self._pipeline.add_request(self._asked, ids, config))
            self._asked += 1
        found: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for number, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        found[number] += output.generated_ids
                        emit(*[number] * len(output.generated_ids))
        return found
