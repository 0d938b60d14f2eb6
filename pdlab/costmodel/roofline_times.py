"""Step times from a machine's published ceilings, and the overheads that make them come true.

A roofline is what a step takes at least. A real server takes longer: it never reaches the peak, and
its host has work for each step, prompt and decode that no ceiling knows. `Overheads` are these few
constants; `fit_overheads` finds them from measurements of one server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from pdlab.costmodel.checks import check_at_least
from pdlab.costmodel.cost import Chunk, causal_pairs, step_cost
from pdlab.costmodel.fit import nonnegative_least_squares
from pdlab.costmodel.hardware import Hardware
from pdlab.costmodel.predict import ELEMENT_BYTES, ROOFS
from pdlab.costmodel.step_times import StepShape
from pdlab.models.config import ModelConfig

LARGE_STEP = 2048
"""Prompt tokens of a step from which on each costs `large_step_token_s` more."""


class Overheads(NamedTuple):
    """What a step takes beside the roofline."""

    step_s: float = 0.0
    peak_share: float = 1.0
    """Part of the peak FLOP/s that products bound by compute reach."""
    prompt_s: float = 0.0
    """Of each prompt, with its first chunk (see `num_begun`)."""
    decode_s: float = 0.0
    """Of each decode."""
    large_step_token_s: float = 0.0
    """Of each prompt token beyond the first `LARGE_STEP` of a step."""


NO_OVERHEADS = Overheads()


class Roofs(NamedTuple):
    """The roofline's seconds of a step, by what each of its two kinds of operations waits for."""

    compute_s: float
    memory_s: float


class _Work(NamedTuple):
    """FLOPs and bytes by what they grow with, as `step_cost` counts them."""

    token_flops: int
    sampled_flops: int
    pair_flops: int
    weight_bytes: int
    kv_read_bytes: int
    """Of a position that a chunk or a decode sees."""
    kv_write_bytes: int
    """Of a token."""

    @classmethod
    def of(cls, config: ModelConfig, element_bytes: float) -> _Work:
        one = step_cost(
            config,
            [Chunk(0, 1)],
            num_sampled=1,
            weight_element_bytes=element_bytes,
            kv_element_bytes=element_bytes,
        )
        linear = sum(one.flops[part] for part in ROOFS["linear"][0] if part != "logits")
        return cls(
            token_flops=linear,
            sampled_flops=one.flops["logits"],
            pair_flops=one.flops["attention"],
            weight_bytes=one.bytes["weights"],
            kv_read_bytes=one.bytes["kv_read"],
            kv_write_bytes=one.bytes["kv_write"],
        )


class RooflineStepTimes:
    """The cost model's `predict` for steps by shape, on tensor-parallel devices, plus overheads.

    Each device does its part of every product and reads its part of the weights; what they tell
    each other is not counted. All prompts are taken to be sampled from. Chunks of different lengths
    in one step are taken as equally long, which matters only to the K and V they read.

    Args:
        config: the model; every layer sees all tokens.
        dtype: of weights, K and V, and of the products.
        num_devices: over which the model is spread.

    Raises:
        ValueError: the model has sliding windows, the machine has no peak for `dtype`, or a number
            is out of range.
    """

    def __init__(
        self,
        config: ModelConfig,
        hardware: Hardware,
        dtype: str = "fp16",
        num_devices: int = 1,
        overheads: Overheads = NO_OVERHEADS,
        basis: str | None = None,
    ):
        check_at_least(1, num_devices=num_devices)
        if any(config.windows):
            raise ValueError(f"config has layer_windows={config.layer_windows}: not supported")
        if not 0 < overheads.peak_share <= 1:
            raise ValueError(f"peak_share={overheads.peak_share} is not above 0 and at most 1")
        self.peak_flops = hardware.peak(dtype) * num_devices
        self.bandwidth_bytes_s = hardware.bandwidth_bytes_s * num_devices
        self.overheads = overheads
        self.basis = basis or f"predicted: roofline of {num_devices} x {hardware.name}, {dtype}"
        self._work = _Work.of(config, ELEMENT_BYTES[dtype])

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        compute_s, memory_s = self.roofs(shape)
        step_s, peak_share, prompt_s, decode_s, large_step_token_s = self.overheads
        seconds = compute_s / peak_share + memory_s + step_s
        seconds += prompt_s * num_begun(shape) + decode_s * shape[3]
        return seconds + large_step_token_s * max(0, shape[1] - LARGE_STEP)

    def roofs(self, shape: StepShape) -> Roofs:
        """Linear layers and attention, each under its own roof (see `pdlab.costmodel.predict`)."""
        prompts, tokens, pairs, decodes, context, _ = shape
        work, rows = self._work, tokens + decodes
        linear = rows * work.token_flops + (prompts + decodes) * work.sampled_flops
        seen = context
        if tokens:  # of `prompts` equally long chunks, each up to its own end
            seen += (prompts * pairs) // tokens + (tokens - prompts) // 2
        attention = (pairs + context) * work.pair_flops
        kv = seen * work.kv_read_bytes + rows * work.kv_write_bytes
        compute_s = memory_s = 0.0
        for flops, moved in ((linear, work.weight_bytes), (attention, kv)):
            needs_s, waits_s = flops / self.peak_flops, moved / self.bandwidth_bytes_s
            if needs_s >= waits_s:
                compute_s += needs_s
            else:
                memory_s += waits_s
        return Roofs(compute_s, memory_s)


def num_begun(shape: StepShape) -> int:
    """Prompts that a step begins, as far as its shape tells: the others go on with a later chunk.

    Tokens that see more than each other stand behind earlier ones, so then one chunk is a later
    one. For a chunk alone that is exact; of several later chunks in one step only one is told.
    """
    prompts, tokens, pairs, *_ = shape
    return prompts - 1 if pairs > causal_pairs(0, tokens) else prompts


class MeasuredStep(NamedTuple):
    """Seconds of a step on so many devices."""

    num_devices: int
    shape: StepShape
    seconds: float

    @property
    def phase(self) -> str:
        """`prefill` or `decode`."""
        return "prefill" if self.shape.num_prompts else "decode"


class ServedBatch(NamedTuple):
    """A measured run: equal prompts start together, then decode together until all are done."""

    num_devices: int
    num_prompt_tokens: int
    """Of each prompt."""
    batch: int
    num_output_tokens: int
    prefill_s: float
    token_s: float
    """Mean time of a decode step."""

    @property
    def prefill(self) -> StepShape:
        n = self.num_prompt_tokens
        return StepShape(self.batch, self.batch * n, self.batch * causal_pairs(0, n), 0, 0)

    @property
    def decode(self) -> StepShape:
        """A decode step half-way through."""
        context = self.num_prompt_tokens + self.num_output_tokens // 2
        return StepShape(0, 0, 0, self.batch, self.batch * context, context)


def distinct_steps(batches: Iterable[ServedBatch]) -> list[MeasuredStep]:
    """Each different prefill and each different decode once: the median of its repeats.

    A prefill does not depend on how many tokens follow. So runs that differ in these alone hold the
    same prefill, and only its different decodes count apart.
    """
    seconds: dict[tuple[int, StepShape], list[float]] = {}
    for batch in batches:
        for shape, taken_s in ((batch.prefill, batch.prefill_s), (batch.decode, batch.token_s)):
            seconds.setdefault((batch.num_devices, shape), []).append(taken_s)
    return [MeasuredStep(*key, median(values)) for key, values in sorted(seconds.items())]


FITTED = ("peak_share", "prompt_s", "decode_s", "large_step_token_s")
"""Overheads that hold for any number of devices; `step_s` is fitted for each."""


def fit_overheads(
    steps: Iterable[MeasuredStep],
    config: ModelConfig,
    hardware: Hardware,
    dtype: str = "fp16",
    *,
    fitted: Sequence[str] = FITTED,
) -> dict[int, Overheads]:
    """Least squares over non-negative constants, weighing relative errors alike.

    Args:
        steps: what was measured on one or several numbers of devices.
        fitted: of `FITTED`, which constants to fit beside `step_s`; the others stay as by default.

    Returns:
        overheads by number of devices; they differ in `step_s` alone.

    Raises:
        ValueError: there are no steps, or a time is not above 0.
    """
    unknown = set(fitted) - set(FITTED)
    if unknown:
        raise ValueError(f"fitted={unknown} is not among {', '.join(FITTED)}")
    steps = list(steps)
    if not steps:
        raise ValueError("steps is empty: there is nothing to fit to")
    if not all(step.seconds > 0 for step in steps):
        raise ValueError("steps holds a time that is not above the limit 0")
    counts = sorted({step.num_devices for step in steps})
    bare = {n: RooflineStepTimes(config, hardware, dtype, n) for n in counts}
    roofs = [bare[step.num_devices].roofs(step.shape) for step in steps]
    measured = np.array([step.seconds for step in steps])
    known = np.array([sum(r) for r in roofs])  # the peak's share can only add to it
    columns = [[float(step.num_devices == n) for step in steps] for n in counts]
    for name in fitted:
        columns.append([_amount(name, s.shape, r) for s, r in zip(steps, roofs, strict=True)])
    matrix = np.array(columns).T / measured[:, None]
    constants = nonnegative_least_squares(matrix, 1 - known / measured).tolist()
    shared = dict(zip(fitted, constants[len(counts) :], strict=True))
    if "peak_share" in shared:
        shared["peak_share"] = 1 / (1 + shared["peak_share"])
    return {n: Overheads(step_s=constants[i], **shared) for i, n in enumerate(counts)}


def _amount(name: str, shape: StepShape, roofs: Roofs) -> float:
    """How much of a constant a step has; of the peak share, the time at the whole peak."""
    return {
        "peak_share": roofs.compute_s,
        "prompt_s": float(num_begun(shape)),
        "decode_s": float(shape.num_decodes),
        "large_step_token_s": float(max(0, shape.num_prompt_tokens - LARGE_STEP)),
    }[name]


def relative_errors(
    steps: Iterable[MeasuredStep], times: Mapping[int, RooflineStepTimes]
) -> dict[str, list[float]]:
    """Signed relative errors of `prefill` and `decode`, in the order of the steps."""
    errors: dict[str, list[float]] = {"prefill": [], "decode": []}
    for step in steps:
        predicted_s = times[step.num_devices].step_s(step.shape)
        errors[step.phase].append(predicted_s / step.seconds - 1)
    return errors
