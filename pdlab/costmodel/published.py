"""Step times from what others published, fits or measurements: simulate machines not here.

Sources:

- DistServe (Zhong et al. 2024, OSDI), `simdistserve`, Apache-2.0: fits to prefill and decode times
  of OPT-13B on A100 80 GB (see `pdlab.costmodel.distserve`), and how many tokens of K and V have
  room beside the weights. The times that they were fitted to, and how well, are not published.
- Splitwise (Patel et al. 2024, ISCA), `splitwise-sim`, MIT: measured times of Llama-2-70B on
  A100 80 GB. Of these there is a fit here (see `pdlab.costmodel.roofline_times`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

from pdlab.costmodel.distserve import DistServeStepTimes, Terms
from pdlab.costmodel.hardware import load_hardware
from pdlab.costmodel.memory import weight_bytes
from pdlab.costmodel.predict import ELEMENT_BYTES
from pdlab.costmodel.roofline_times import Overheads, RooflineStepTimes, ServedBatch
from pdlab.costmodel.step_times import StepTimes
from pdlab.models.config import ModelConfig
from pdlab.requirements import require_choice

# --- Splitwise -----------------------------------------------------------------------------------

LLAMA2_70B = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=8192,
    intermediate_size=28_672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=4096,
)
"""Touvron et al. 2023, "Llama 2", and the model's published configuration."""


def read_splitwise(path: Path | str, model: str = "llama2-70b") -> list[ServedBatch]:
    """The rows of `perf_model_a100.csv` for a model; a configuration was measured several times.

    Raises:
        ValueError: it is no such file, or has no row for the model; names the line.
        OSError: it cannot be read.
    """
    path = Path(path)
    batches = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                if row["model"] != model:
                    continue
                batches.append(_served(row))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
    if not batches:
        raise ValueError(f"{path}: no row has model={model!r}")
    return batches


def _served(row: Mapping[str, str]) -> ServedBatch:
    return ServedBatch(
        num_devices=int(row["tensor_parallel"]),
        num_prompt_tokens=int(row["prompt_size"]),
        batch=int(row["batch_size"]),
        num_output_tokens=int(row["token_size"]),
        prefill_s=float(row["prompt_time"]) / 1e3,
        token_s=float(row["token_time"]) / 1e3,
    )


# --- by name -------------------------------------------------------------------------------------

BLOCK_SIZE = 16
KV_SHARE = 0.9
"""Of the devices' memory, what weights and KV cache may fill: vLLM's default."""


class EngineKnobs(TypedDict):
    """Knobs of `EngineConfig` that follow from a machine and a model."""

    block_size: int
    num_blocks: int
    max_model_len: int


class PublishedMachine(NamedTuple):
    """A machine and a model to simulate."""

    step_times: StepTimes
    engine: EngineKnobs


class _OptFit(NamedTuple):
    """OPT-13B on A100s, in milliseconds."""

    num_devices: int
    num_kv_tokens: int
    """Room for K and V: `max_num_tokens.csv` with pipeline parallelism 1."""
    prefill: Terms
    small: Terms
    large: Terms
    server: str = "DistServe"


OPT_13B_LARGE_BATCH = 95
OPT_13B_MAX_LEN = 2048
OPT_13B = {
    "a100-opt-13b": _OptFit(
        1,
        66_144,
        (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
        (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
        (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
    ),
    "2xa100-opt-13b": _OptFit(
        2,
        163_008,
        (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
        (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
        (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
    ),
    "4xa100-opt-13b": _OptFit(
        4,
        356_736,
        (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
        (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
        (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
    ),
    "a100-opt-13b-vllm": _OptFit(
        1,
        66_144,
        (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
        (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
        (20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
        "vLLM",
    ),
}
"""Published fits for OPT-13B: `profiler-a100-80g.distserve.json`, and `.vllm.json`."""

LLAMA2_70B_STEP_S = {2: 0.023228, 4: 0.026726, 8: 0.035812}
LLAMA2_70B_OVERHEADS = {
    num_devices: Overheads(
        step_s,
        peak_share=0.69555,
        prompt_s=0.021587,
        decode_s=0.00037619,
        large_step_token_s=0.00011973,
    )
    for num_devices, step_s in LLAMA2_70B_STEP_S.items()
}
"""`fit_overheads` over Splitwise's table, each different prefill and decode once, by tensor
parallelism. The median error of prefill is 6.1% and of decode 2.7%, the worst 23% and 8%. Fitted to
half of them, the other half has medians of 7.5% and 2.8% over a hundred splits. The worst of a
split is 23% and 9% on average, and 29% and 16% in all; 92% of prefills and all decodes are within
20%.

All prompts were whole. `prompt_s` is charged with the first chunk, so that cutting a prompt does
not multiply it; without it 71% instead of 92% of the unseen prefills would be within 20%. What a
later chunk takes was not measured.
"""


def _opt_13b(fit: _OptFit) -> PublishedMachine:
    times = DistServeStepTimes.of_milliseconds(
        f"published: OPT-13B on {fit.num_devices} x A100 80 GB, fit for {fit.server} by Zhong et "
        "al. 2024; mixed steps composed by pdlab",
        fit.prefill,
        fit.small,
        fit.large,
        OPT_13B_LARGE_BATCH,
    )
    return PublishedMachine(times, _knobs(fit.num_kv_tokens, OPT_13B_MAX_LEN))


def _llama2_70b(num_devices: int) -> PublishedMachine:
    hardware, dtype = load_hardware()["a100-80gb"], "fp16"
    times = RooflineStepTimes(
        LLAMA2_70B,
        hardware,
        dtype,
        num_devices,
        LLAMA2_70B_OVERHEADS[num_devices],
        f"predicted: Llama-2-70B, roofline of {num_devices} x {hardware.name}, overheads fitted to "
        "the measurements of Splitwise (Patel et al. 2024), chunks of prompts extrapolated",
    )
    room = KV_SHARE * num_devices * hardware.memory_bytes
    room -= weight_bytes(LLAMA2_70B, ELEMENT_BYTES[dtype])
    num_tokens = int(room / LLAMA2_70B.kv_bytes_per_token(ELEMENT_BYTES[dtype]))
    return PublishedMachine(times, _knobs(num_tokens, LLAMA2_70B.max_model_len))


def _knobs(num_kv_tokens: int, max_model_len: int) -> EngineKnobs:
    return {
        "block_size": BLOCK_SIZE,
        "num_blocks": num_kv_tokens // BLOCK_SIZE,
        "max_model_len": max_model_len,
    }


PUBLISHED: dict[str, Callable[[], PublishedMachine]] = {
    **{name: partial(_opt_13b, fit) for name, fit in OPT_13B.items()},
    **{f"{n}xa100-llama2-70b": partial(_llama2_70b, n) for n in LLAMA2_70B_OVERHEADS},
}
"""The machines that `published` knows by name."""


def published(name: str) -> PublishedMachine:
    """Step times, and the engine's knobs that follow from the machine.

    `times, knobs = published("a100-opt-13b")`, and then `EngineConfig(**knobs, ...)`.

    Raises:
        ValueError: there is none of this name; lists the names.
    """
    require_choice("name", name, tuple(PUBLISHED))
    return PUBLISHED[name]()
