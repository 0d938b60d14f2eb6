"""A CUDA GPU: every kernel against its reference, then whole models beside transformers.

    pdlab bench --gpu --save gpu.json

1. `pdlab_kernels.triton.gpu_check`: kernels in bf16 against fp32 references, the card's bandwidth
   and FLOP/s, and each kernel beside its floor.
2. Prefill and decode of random weights in the shapes of Llama 3.2 1B and 3.1 8B: pdlab with torch's
   operators, with Triton kernels, launched one by one and from CUDA graphs, and transformers; each
   in a process of its own, one after the other, for two 8B models need not fit at once.

It is made for a card that is rented by the minute: what time does not suffice for is named and
left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pdlab.bench.contest import Entry, PeerProcess
from pdlab.bench.prompts import passages
from pdlab.bench.speed import Case, Ceilings, SpeedBench
from pdlab.bench.speed_run import Contest, Start, Tell
from pdlab.machine import describe_machine, num_cores
from pdlab.models import ModelConfig, load_outline
from pdlab.requirements import require_number

SHAPES = ("llama-1b", "llama-8b")
CASES = (Case("b1 c2048", 1, 2048), Case("b32 c512", 32, 512))
ROUNDS, NUM_TOKENS = 3, 64
KERNEL_PART = 0.4
"""Of the time, for the kernels alone; what they leave is the models'."""
LEAST_S = 45.0
"""Left for one way of one model, or it is not begun: start, weights, compile, measure."""
WAYS: dict[str, dict[str, str]] = {
    "torch": {"backend": "torch"},
    "triton": {"backend": "triton", "cuda_graphs": "off"},
    "triton, CUDA graphs": {"backend": "triton", "cuda_graphs": "on"},
}
"""Of pdlab, as `peers.pdlab_engine` takes them."""
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class GpuBench:
    """Kernels, and models by shape."""

    kernels: dict[str, Any]
    """As `pdlab_kernels.triton.gpu_check.check` gives it."""
    models: dict[str, SpeedBench]
    not_reached: list[str] = field(default_factory=list)
    """Ways for which no time was left."""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether every kernel agrees with its reference, and none broke."""
        return not self.kernels["failed"]

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def check_kernels(seconds: float) -> dict[str, Any]:
    """The kernels' own script. Triton is there on Linux only, so it is imported here."""
    return dict(import_module("pdlab_kernels.triton.gpu_check").check(seconds))


def measure_gpu(
    *,
    minutes: float = 7.5,
    shapes: Sequence[str] = SHAPES,
    cases: Sequence[Case] = CASES,
    device: str = "cuda",
    kernels: Callable[[float], dict[str, Any]] = check_kernels,
    start: Start = PeerProcess,
    tell: Tell = lambda line: None,
) -> GpuBench:
    """All of it, within `minutes`, give or take the step that is under way then.

    Args:
        device: where models run; anything but `cuda` is for trying this out.
        kernels: given seconds, measures the kernels and the card's ceilings.

    Raises:
        ValueError: there is no CUDA GPU, or `minutes` is out of range.
    """
    require_number("minutes", minutes, 0.1, 120)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--gpu needs a CUDA GPU, and torch finds none here: nothing was measured")
    began = time.perf_counter()
    until = began + 60 * minutes
    tell("kernels ...")
    checked = kernels(60 * minutes * KERNEL_PART)
    ceilings = Ceilings(checked["bandwidth_gb_s"] * 1e9, checked["peak_tflop_s"] * 1e12, 1.0)
    if device == "cuda":
        torch.cuda.empty_cache()  # the models' processes need the memory
    models, not_reached = {}, []
    for shape in shapes:
        course = _Course(f"random:{shape}", cases, tell)
        for entry in entries(shape, device):
            left_s = until - time.perf_counter()
            if left_s < LEAST_S:
                not_reached.append(f"{shape}: {entry.name}")
                continue
            tell(f"{shape}: {entry.name} ...")
            course.run(entry, start, left_s)
        models[shape] = course.result(ceilings, checked["device"])
    return GpuBench(checked, models, not_reached, time.perf_counter() - began)


def entries(shape: str, device: str) -> list[Entry]:
    """pdlab's ways of one model, and transformers with random weights of the same shape."""
    model = f"random:{shape}"
    ours = [
        Entry(name, "pdlab_engine", sys.executable, model, {"device": device, **way})
        for name, way in WAYS.items()
    ]
    config = json.dumps(hugging_face_config(load_outline(model).config))
    options = {"device": device, "dtype": "bf16", "config": config}
    return [*ours, Entry(TRANSFORMERS, "transformers", sys.executable, model, options)]


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """A Llama's sizes under the names that transformers has for them."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


class _Course:
    """All ways of one model, one after the other."""

    def __init__(self, model: str, cases: Sequence[Case], tell: Tell):
        self._model, self._cases = load_outline(model), cases
        prompts = {case.name: passages(self._model, case.batch, case.context) for case in cases}
        self._contest = Contest(prompts, NUM_TOKENS, tell)

    def run(self, entry: Entry, start: Start, left_s: float) -> None:
        """Start one, measure it, end it; one that hangs gets no more than the time that is left."""
        self._contest.open_s = self._contest.answer_s = left_s
        with ExitStack() as stack:
            self._contest.admit(entry, num_cores(), start, stack)
            for number in range(ROUNDS):
                for case in self._cases:
                    self._contest.run(number, entry.name, case)
            self._contest.retire(entry.name)

    def result(self, ceilings: Ceilings, device: str) -> SpeedBench:
        """What was measured, on a card that does not change its pace between rounds."""
        return SpeedBench(
            model=self._model.name,
            shape=self._model.config.to_dict(),
            machine=describe_machine() | {"processor": device},
            rounds=ROUNDS,
            num_tokens=NUM_TOKENS,
            threads=num_cores(),
            cases=list(self._cases),
            ceilings=[ceilings] * (ROUNDS + 1),
            **self._contest.results(),
        )
