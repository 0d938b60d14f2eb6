"""The ParallelPlanner widget: a model, a device and a link, and what each grid should take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import traitlets

from pdlab.costmodel import Hardware, PredictedStep, load_hardware
from pdlab.link import LINKS
from pdlab.models.catalog import NOTES, SHAPES
from pdlab.requirements import require_choice, require_int
from pdlab.workbench.background import Background
from pdlab.workbench.figures.parallel_plan import short_reason
from pdlab.workbench.lab import Lab, refuse_unknown
from pdlab.workbench.planner_data import GRIDS, Choice, Plans, plan_choices

HERE = "this machine"
MODELS = tuple(name for name in SHAPES if not name.startswith("tiny"))
MOST_PARALLEL = 16
MOST_TOKENS = 1_000_000
MOST_BATCH = 4096


@dataclass(frozen=True)
class Settings:
    """What the controls say."""

    model: str = "llama-8b"
    device: str = "h100-sxm"
    link: str = "NVLink4"
    tensor_parallel: int = 2
    pipeline_parallel: int = 1
    micro_batches: int | None = None
    """None for as many as there are stages."""
    prompt_tokens: int = 1024
    batch: int = 8

    def checked(self) -> Settings:
        """Itself.

        Raises:
            ValueError: a name is unknown, or a number out of its range.
        """
        require_choice("model", self.model, MODELS)
        require_choice("link", self.link, tuple(LINKS))
        require_int("tensor_parallel", self.tensor_parallel, 1, MOST_PARALLEL)
        require_int("pipeline_parallel", self.pipeline_parallel, 1, MOST_PARALLEL)
        if self.micro_batches is not None:
            require_int("micro_batches", self.micro_batches, 1, MOST_BATCH)
        require_int("prompt_tokens", self.prompt_tokens, 1, MOST_TOKENS)
        require_int("batch", self.batch, 1, MOST_BATCH)
        return self

    @property
    def grid(self) -> tuple[int, int]:
        return self.tensor_parallel, self.pipeline_parallel


SETTABLE = tuple(field.name for field in fields(Settings))


class ParallelPlanner(Lab):
    """Predicted TTFT, TPOT and memory of a device, for the chosen grid and beside it for others.

    All numbers are predicted: by the roofline of the device and by rounds x latency + bytes /
    bandwidth of the link. A row chooses its grid. Every control is a trait of the same name and can
    be set from Python.

        wb.ParallelPlanner()
        wb.ParallelPlanner(model="qwen3-8b", device="l4", link="PCIe4x16", batch=32)
        wb.ParallelPlanner(calibrate(), model="smollm2-135m", link="10GbE")

    Args:
        machine: a device of your own, called `this machine`, beside those of the hardware table.
        settings: what the controls begin with.

    Raises:
        ValueError: a setting is unknown or out of its range.
    """

    name = "parallel_planner"
    shared = ("asker", "lab")
    settable = SETTABLE
    _settings: Settings

    header = traitlets.Dict().tag(sync=True)
    model = traitlets.Unicode().tag(sync=True)
    device = traitlets.Unicode().tag(sync=True)
    link = traitlets.Unicode().tag(sync=True)
    tensor_parallel = traitlets.Int().tag(sync=True)
    pipeline_parallel = traitlets.Int().tag(sync=True)
    micro_batches = traitlets.Int(None, allow_none=True).tag(sync=True)
    prompt_tokens = traitlets.Int().tag(sync=True)
    batch = traitlets.Int().tag(sync=True)
    result = traitlets.Dict().tag(sync=True)
    """What is drawn; see `plain`."""

    def __init__(self, machine: Hardware | None = None, **settings: Any) -> None:
        refuse_unknown(settings, SETTABLE)
        self._devices = load_hardware() | ({HERE: machine} if machine else {})
        begin = {"device": HERE} if machine else {}
        first = Settings(**begin | settings).checked()
        plans = self._plans_of(first)
        super().__init__(header=self._header())
        self._follow(first, result=plain(plans, first.grid))
        self.plans = plans
        self._listen()

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def choice(self) -> Choice:
        """The chosen grid and what it comes to."""
        return chosen(self.plans, self._settings.grid)

    def summary(self) -> str:
        return f"ParallelPlanner: {in_words(self.choice)}. {self.plans.line}. {self.plans.basis}"

    def _plans_of(self, settings: Settings) -> Plans:
        require_choice("device", settings.device, tuple(self._devices))
        grids = GRIDS if settings.grid in GRIDS else (*GRIDS, settings.grid)
        return plan_choices(
            settings.model,
            self._devices[settings.device],
            settings.link,
            grids,
            prompt_tokens=settings.prompt_tokens,
            batch=settings.batch,
            micro_batches=settings.micro_batches,
        )

    def _header(self) -> dict[str, Any]:
        return {
            "models": {name: NOTES[name] for name in MODELS},
            "devices": {name: device.name for name, device in self._devices.items()},
            "links": {
                name: f"{link.bandwidth_bytes_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} \u00b5s"
                for name, link in LINKS.items()
            },
            "most_parallel": MOST_PARALLEL,
        }

    # --- the lab --------------------------------------------------------------------------------

    _tried = traitlets.validate(*SETTABLE)(Lab.tried)

    def _set(self, values: Mapping[str, Any]) -> None:
        refuse_unknown(values, SETTABLE)
        settings = replace(self._settings, **values).checked()
        plans = self._plans_of(settings)
        self._follow(settings, result=plain(plans, settings.grid))
        self.plans = plans

    def _actions(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        return {}

    def _under_way(self) -> Background | None:
        return None


def chosen(plans: Plans, grid: tuple[int, int]) -> Choice:
    return next(c for c in plans.choices if (c.tensor_parallel, c.pipeline_parallel) == grid)


def in_words(choice: Choice) -> str:
    """`2 x 1: TTFT 24.6 ms, TPOT 4.02 ms, 8.6 GB on the fullest rank, predicted`."""
    found, memory = choice.prediction, choice.memory
    if not found or not memory:
        return f"{choice.name} does not go: {choice.refusal}"
    return (
        f"{choice.name}: TTFT {found.ttft_s * 1e3:.3g} ms, TPOT {found.tpot_s * 1e3:.3g} ms, "
        f"{memory.total / 1e9:.3g} GB on the fullest rank, predicted"
    )


def plain(plans: Plans, grid: tuple[int, int]) -> dict[str, Any]:
    """Plans as the browser reads them."""
    return {
        "line": plans.line,
        "basis": plans.basis,
        "title": in_words(chosen(plans, grid)),
        "dtype": plans.dtype,
        "memory_bytes": plans.hardware.memory_bytes,
        "chosen": plans.choices.index(chosen(plans, grid)),
        "choices": [_plain_choice(choice) for choice in plans.choices],
    }


def _plain_choice(choice: Choice) -> dict[str, Any]:
    found, memory = choice.prediction, choice.memory
    return {
        "name": choice.name,
        "grid": [choice.tensor_parallel, choice.pipeline_parallel],
        "num_devices": choice.num_devices,
        "refusal": choice.refusal,
        "short": "" if found else short_reason(choice),
        "ttft": _parts(found.prefill) if found else None,
        "tpot": _parts(found.decode) if found else None,
        "tokens_s": found.tokens_s if found else None,
        "memory": [memory.weights, memory.kv, memory.activations] if memory else None,
        "kv_capacity": choice.kv_capacity,
    }


def _parts(step: PredictedStep) -> dict[str, float]:
    return {
        "time_s": step.time_s,
        "compute_s": step.compute_s,
        "collective_s": step.collective_s,
        "waiting_s": max(0.0, step.waiting_s),
        "bubble_share": step.bubble_share,
    }
