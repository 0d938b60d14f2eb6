"""What a model should take on each grid of devices: predicted, for a picture and a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdlab.costmodel import (
    ElementBytes,
    Hardware,
    ParallelPrediction,
    RankMemory,
    kv_capacity_tokens,
    load_hardware,
    predict_parallel,
)
from pdlab.costmodel.parallel import memory_at
from pdlab.link import Link
from pdlab.models.catalog import shape
from pdlab.models.config import ModelConfig
from pdlab.models.shard_plan import ShardPlan

GRIDS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8))
"""(tensor_parallel, pipeline_parallel) that are compared: up to eight devices."""
DTYPES = ("bf16", "fp16", "fp32")
"""The first of them that a device has a peak for is what the model computes in."""


class Choice(NamedTuple):
    """A grid of devices, and what it comes to."""

    tensor_parallel: int
    pipeline_parallel: int
    prediction: ParallelPrediction | None
    memory: RankMemory | None
    """Of the fullest rank; None where the model cannot be cut so."""
    kv_capacity: int
    """Tokens whose K and V fit, over all sequences."""
    refusal: str = ""
    """Why it does not go."""

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def name(self) -> str:
        """`2 x 4`: tensor parallel by pipeline parallel."""
        return f"{self.tensor_parallel} x {self.pipeline_parallel}"


class Plans(NamedTuple):
    """Choices for one model, device and link. All times are predicted."""

    model: str
    hardware: Hardware
    link: Link
    dtype: str
    prompt_tokens: int
    batch: int
    micro_batches: int | None
    choices: list[Choice]

    @property
    def line(self) -> str:
        """What is predicted, in words."""
        pieces = "as many micro-batches as stages"
        if self.micro_batches is not None:
            pieces = f"up to {self.micro_batches} micro-batches"
        return (
            f"{self.model}, {self.dtype}, on {self.hardware.name} over {self.link.name}; prompt of "
            f"{self.prompt_tokens:,} tokens, batch {self.batch}, {pieces}"
        )

    @property
    def basis(self) -> str:
        """What the predictions rest on."""
        return (
            f"predicted: roofline of {self.hardware.provenance} ceilings, and "
            "rounds x latency + bytes / bandwidth of the link"
        )

    def soonest(self, what: str) -> Choice | None:
        """The choice with the least `ttft_s` or `tpot_s`; None if nothing goes."""
        going = [c for c in self.choices if c.prediction]
        return min(going, key=lambda c: getattr(c.prediction, what), default=None)


def plan_choices(
    model: str | ModelConfig,
    device: str | Hardware,
    link: str | Link,
    grids: Sequence[tuple[int, int]] = GRIDS,
    *,
    prompt_tokens: int = 1024,
    batch: int = 8,
    micro_batches: int | None = None,
    dtype: str | None = None,
) -> Plans:
    """TTFT of a prompt, TPOT of a batch and memory of a device on each of these grids.

    Args:
        model: a shape of the catalog, or a configuration.
        device: a name of the hardware table, or a machine, such as a calibrated one.
        link: a name of `pdlab.link.LINKS`, or a link.
        micro_batches: as of `EngineConfig`; a grid of one stage takes a step in one piece.
        dtype: of weights, K and V and products; None for the first of `DTYPES` that there is.

    Raises:
        ValueError: a name is unknown, a count out of range, or the device has no peak for `dtype`.
    """
    config = shape(model) if isinstance(model, str) else model
    machine = _hardware(device) if isinstance(device, str) else device
    wire = Link.named(link) if isinstance(link, str) else link
    kind = dtype or next((d for d in DTYPES if d in machine.peak_flops), DTYPES[0])
    machine.peak(kind)
    for name, value in (("prompt_tokens", prompt_tokens), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value} is below the limit 1")
    if micro_batches is not None and micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} is below the limit 1")

    def choice(tensor_parallel: int, pipeline_parallel: int) -> Choice:
        memory, capacity = None, 0
        pieces = 1 if pipeline_parallel == 1 else micro_batches or pipeline_parallel
        try:
            plan = ShardPlan(config, tensor_parallel, pipeline_parallel)
            held = memory_at(
                plan, ElementBytes.of(kind), prompt_tokens, batch, prompt_tokens, pieces
            )
            memory = max(held, key=lambda each: each.total)
            capacity = kv_capacity_tokens(plan, held, machine, ElementBytes.of(kind).kv)
            found = predict_parallel(
                config,
                machine,
                wire,
                tensor_parallel,
                pipeline_parallel,
                prompt_tokens=prompt_tokens,
                batch=batch,
                micro_batches=pieces,
                dtype=kind,
            )
        except ValueError as error:
            refusal = str(error)
            return Choice(tensor_parallel, pipeline_parallel, None, memory, capacity, refusal)
        return Choice(tensor_parallel, pipeline_parallel, found, memory, capacity)

    return Plans(
        model if isinstance(model, str) else "the model",
        machine,
        wire,
        kind,
        prompt_tokens,
        batch,
        micro_batches,
        [choice(*grid) for grid in grids],
    )


def _hardware(name: str) -> Hardware:
    table = load_hardware()
    if name not in table:
        raise ValueError(f"device={name!r} is not one of {', '.join(table)}")
    return table[name]
