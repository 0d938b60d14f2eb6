"""Seconds a step should take, from its FLOPs and bytes and from a machine's ceilings.

The roofline (Williams, Waterman and Patterson 2009): a computation takes at least its FLOPs over
the peak, and at least its bytes over the bandwidth. A step runs two kinds of operations one after
the other, and each meets its own roof:

- linear layers: the qkv, output, mlp and logits FLOPs, and the weights' bytes;
- attention: the attention FLOPs, and the KV bytes read and written.

The predicted time is the sum of the two. It matters where they differ: in a batched decode over
long contexts the linear layers may be bound by compute while attention stays bound by memory.

A prediction is a bound and not a forecast: it assumes that both ceilings are reached. What a
real step takes beyond it is the lesson.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdlab.costmodel.checks import check_at_least, check_positive
from pdlab.costmodel.cost import Chunk, StepCost, step_cost
from pdlab.costmodel.hardware import Hardware, Provenance
from pdlab.models.config import ModelConfig

Bound = Literal["compute", "memory"]

ELEMENT_BYTES: dict[str, float] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
"""Bytes of an element by dtype, as it lies in memory."""

ROOFS = {
    "linear": (("qkv", "output", "mlp", "logits"), ("weights",)),
    "attention": (("attention",), ("kv_read", "kv_write")),
}
"""The parts of FLOPs and of bytes that run together."""


@dataclass(frozen=True)
class Prediction:
    """What a step should take on one machine, in seconds."""

    compute_s: float
    """All FLOPs at the peak."""
    memory_s: float
    """All bytes at the bandwidth."""
    overhead_s: float
    """Starting the operations."""
    time_s: float
    """Sum of the two roofs (see the module) and the overhead."""
    hardware: str
    basis: Provenance
    """Whether the machine's ceilings were measured or published."""
    provenance: Provenance = "predicted"

    @property
    def bound(self) -> Bound:
        """What the step as a whole waits for."""
        return "compute" if self.compute_s >= self.memory_s else "memory"

    @property
    def roofline_s(self) -> float:
        """The step under one roof, as if attention and linear layers overlapped: <= time_s."""
        return max(self.compute_s, self.memory_s) + self.overhead_s


def predict(cost: StepCost, hardware: Hardware, dtype: str, *, num_launches: int = 0) -> Prediction:
    """Seconds of a step whose products run in `dtype`.

    Args:
        dtype: of the activations; int8 or int4 weights that are widened first compute in it.
        num_launches: operations the step starts, each at `hardware.launch_s`; a small model run
            operation by operation is bound by them.

    Raises:
        ValueError: for a dtype the machine has no peak for.
    """
    check_at_least(0, num_launches=num_launches)
    peak, bandwidth = hardware.peak(dtype), hardware.bandwidth_bytes_s
    overhead_s = num_launches * hardware.launch_s
    roofs_s = sum(
        max(
            sum(cost.flops[part] for part in flop_parts) / peak,
            sum(cost.bytes[part] for part in byte_parts) / bandwidth,
        )
        for flop_parts, byte_parts in ROOFS.values()
    )
    return Prediction(
        compute_s=cost.total_flops / peak,
        memory_s=cost.total_bytes / bandwidth,
        overhead_s=overhead_s,
        time_s=roofs_s + overhead_s,
        hardware=hardware.name,
        basis=hardware.provenance,
    )


def mfu(cost: StepCost, wall_s: float, hardware: Hardware, dtype: str) -> float:
    """Model FLOPs utilisation: FLOPs the model needs, over peak times time.

    Chowdhery et al. 2022, "PaLM", section 4.1: recomputed work does not count as done. Query-key
    pairs behind the causal mask are left out here too, which PaLM's formula (appendix B) counts.
    """
    check_positive(wall_s=wall_s)
    return cost.total_flops / (wall_s * hardware.peak(dtype))


def mbu(cost: StepCost, wall_s: float, hardware: Hardware) -> float:
    """Model bandwidth utilisation: least bytes the step must move, over bandwidth times time.

    Databricks 2023, "LLM Inference Performance Engineering: Best Practices". A value above 1 says
    that some of the bytes came from a cache and not from memory (a small model on a big processor).
    """
    check_positive(wall_s=wall_s)
    return cost.total_bytes / (wall_s * hardware.bandwidth_bytes_s)


def ridge_point(hardware: Hardware, dtype: str) -> float:
    """FLOP/byte from which a computation is bound by compute: peak over bandwidth.

    Williams, Waterman and Patterson 2009, "Roofline", section 3.
    """
    return hardware.peak(dtype) / hardware.bandwidth_bytes_s


@dataclass(frozen=True)
class RequestPrediction:
    """What one request, alone on a machine, should take."""

    ttft_s: float
    """Time to first token: all prefill steps."""
    tpot_s: float | None
    """Mean time per output token after the first; None when there is only one."""
    e2e_s: float
    prefill: StepCost
    decode: StepCost
    hardware: str
    basis: Provenance
    provenance: Provenance = "predicted"


def predict_request(
    config: ModelConfig,
    prompt_tokens: int,
    output_tokens: int,
    hardware: Hardware,
    dtype: str,
    *,
    chunk_size: int | None = None,
    num_cached_tokens: int = 0,
    weight_element_bytes: float | None = None,
    kv_element_bytes: float | None = None,
    num_launches: int = 0,
) -> RequestPrediction:
    """TTFT, TPOT and E2E of one request with no other beside it and no queue.

    Args:
        chunk_size: tokens a prefill step computes at most; None for the whole prompt in one.
        num_cached_tokens: leading tokens of the prompt found in the prefix cache.
        weight_element_bytes, kv_element_bytes: default to the size of `dtype`.
        num_launches: operations a step starts (see `predict`).

    Raises:
        ValueError: for counts out of range and for a dtype without a peak.
    """
    check_at_least(1, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    if not 0 <= num_cached_tokens < prompt_tokens:
        raise ValueError(
            f"num_cached_tokens={num_cached_tokens} is not within 0 to {prompt_tokens - 1} "
            f"(prompt_tokens={prompt_tokens}, of which the last is always computed)"
        )
    sizes = {
        "weight_element_bytes": _element_bytes(weight_element_bytes, dtype),
        "kv_element_bytes": _element_bytes(kv_element_bytes, dtype),
    }

    def step(chunk: Chunk, num_sampled: int) -> StepCost:
        return step_cost(config, [chunk], num_sampled=num_sampled, **sizes)

    def seconds(steps: list[StepCost]) -> float:
        return sum(predict(s, hardware, dtype, num_launches=num_launches).time_s for s in steps)

    chunks = _prefill_chunks(num_cached_tokens, prompt_tokens, chunk_size)
    prefill = [step(chunk, num_sampled=chunk is chunks[-1]) for chunk in chunks]
    decode = [step(Chunk(prompt_tokens + i, 1), num_sampled=1) for i in range(output_tokens - 1)]
    ttft_s, decode_s = seconds(prefill), seconds(decode)
    return RequestPrediction(
        ttft_s=ttft_s,
        tpot_s=decode_s / len(decode) if decode else None,
        e2e_s=ttft_s + decode_s,
        prefill=sum(prefill, StepCost.zero()),
        decode=sum(decode, StepCost.zero()),
        hardware=hardware.name,
        basis=hardware.provenance,
    )


def _prefill_chunks(start: int, end: int, chunk_size: int | None) -> list[Chunk]:
    """The chunks of positions start .. end - 1; the last one samples the first token."""
    size = end - start if chunk_size is None else chunk_size
    check_at_least(1, chunk_size=size)
    return [Chunk(at, min(size, end - at)) for at in range(start, end, size)]


def _element_bytes(given: float | None, dtype: str) -> float:
    """Bytes of an element: as given, else the size of `dtype`."""
    if given is not None:
        return given
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]
