"""What the PDLab can simulate: this machine, a core for each worker, and one that was published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from pdlab.costmodel import StepTimes, published
from pdlab.disagg.simulated.search import KV_SHAPES
from pdlab.disagg.simulated.search import Machine as SearchMachine
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.engine import EngineConfig, admission
from pdlab.kvcache import KVLayout
from pdlab.link import LINKS
from pdlab.models import Model
from pdlab.workbench.policy_lab_data import Machine
from pdlab.workload.step_calibration import measured_step_times

HERE, THERE = "this machine", "A100, OPT-13B"
PUBLISHED_NAME, PUBLISHED_SHAPE = "a100-opt-13b", "opt-13b"
ENGINE = EngineConfig(
    num_blocks=512, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2048
)
"""Of each worker on this machine: room for some thousand tokens."""
SEATS_THERE = 128
CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)


class Device(NamedTuple):
    """A device to simulate, and the model on it: a worker has one."""

    machine: Machine
    kv_bytes_per_token: int = 0
    num_layers: int = 1
    layout: KVLayout | None = None

    @classmethod
    def of_model(cls, machine: Machine, model: Model) -> Device:
        """With K and V of the shape and format that the model's engine has."""
        shape, config = model.config, admission.resolve(model, machine.config)
        layout = KVLayout(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            config.block_size,
            config.kv_format,
            config.kv_head_groups,
        )
        return cls(machine, layout=layout)

    @classmethod
    def of_shape(cls, machine: Machine, shape: str) -> Device:
        """With K and V of a model that `KV_SHAPES` knows."""
        num_layers, kv_bytes_per_token = KV_SHAPES[shape]
        return cls(machine, kv_bytes_per_token, num_layers)

    def worker(self, link: str) -> SearchMachine:
        """One of them, as a candidate is made of."""
        machine = self.machine
        config = replace(machine.config, max_model_len=machine.max_model_len)
        spec = SimulatedSpec(
            "both",
            config,
            machine.step_times,
            kv_bytes_per_token=self.kv_bytes_per_token,
            num_layers=self.num_layers,
            layout=self.layout,
            link=LINKS.get(link),
        )
        return SearchMachine(machine.label, spec)

    @property
    def decode_chunks(self) -> list[int]:
        """Budgets of a step that leave no output out."""
        return [size for size in CHUNKS if size >= self.machine.config.max_num_seqs]


def devices_of(
    model: Model | None, step_times: StepTimes | None, config: EngineConfig | None
) -> dict[str, Device]:
    """By name, this machine first if its step times are given or there is a model to measure."""
    found = {}
    if step_times is None and model is not None:
        with _one_thread():
            step_times = measured_step_times(model, config or ENGINE, progress=True)
    if step_times is not None:
        here = _here(model, step_times, config or ENGINE)
        found[here.machine.label] = here
    return found | {THERE: _there()}


def _here(model: Model | None, step_times: StepTimes, config: EngineConfig) -> Device:
    name = HERE if step_times.basis.startswith("measured on") else "given step times"
    limit = config.max_model_len or 2048
    if model is None:
        return Device(Machine(name, step_times, config, limit))
    limit = min(limit, model.config.max_model_len)
    config = replace(config, max_model_len=limit)
    return Device.of_model(Machine(name, step_times, config, limit), model)


def _there() -> Device:
    times, knobs = published(PUBLISHED_NAME)
    config = EngineConfig(
        **knobs, max_num_seqs=SEATS_THERE, max_num_batched_tokens=2048, record_trace=False
    )
    machine = Machine(THERE, times, config, knobs["max_model_len"])
    return Device.of_shape(machine, PUBLISHED_SHAPE)


@contextmanager
def _one_thread() -> Iterator[None]:
    """As a worker has it that keeps to a core."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
