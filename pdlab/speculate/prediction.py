"""What a draft model should bring on a machine, before anything of it has run."""

from __future__ import annotations

from dataclasses import dataclass

from pdlab.costmodel import Chunk, Hardware, Provenance, predict, step_cost
from pdlab.models import Model
from pdlab.requirements import require_int
from pdlab.speculate.formula import speedup


@dataclass(frozen=True)
class PredictedGain:
    """The formula, with what the cost model says of both models' steps."""

    speedup: float
    """Tokens a second over plain decoding."""
    cost_ratio: float
    """A drafted token over a plain step; 0 for drafts that no model computes."""
    check_ratio: float
    """A step that checks a draft over a plain step: 1 as long as reading the weights takes longer
    than computing with them."""
    hardware: str
    provenance: Provenance = "predicted"


def predict_gain(
    target: Model,
    draft: Model | None,
    hardware: Hardware,
    *,
    acceptance: float,
    num_tokens: int,
    batch: int = 1,
    context: int = 256,
) -> PredictedGain:
    """Predict the speed-up of speculation from shapes and a machine's ceilings.

    The cost model is a bound (see `pdlab.costmodel.predict`): it takes both models to reach the
    ceilings, and knows no overhead of a step, of which a small draft model has as much as a large
    target.

    Args:
        draft: computes the drafts (`ModelDrafter.model`); None for those that cost nothing.
        acceptance: as measured; nothing predicts it.
        batch: sequences that decode together, each with a draft.
        context: tokens that each has.

    Raises:
        ValueError: a number is out of range, or the machine has no peak for the dtype.
    """
    require_int("batch", batch, least=1)
    require_int("context", context, least=1)
    plain_s = _step_s(target, hardware, batch, context, 1)
    check_ratio = _step_s(target, hardware, batch, context, 1 + num_tokens) / plain_s
    cost_ratio = _step_s(draft, hardware, batch, context, 1) / plain_s if draft else 0.0
    gain = speedup(acceptance, num_tokens, cost_ratio, check_ratio)
    return PredictedGain(gain, cost_ratio, check_ratio, hardware.name)


def _step_s(model: Model, hardware: Hardware, batch: int, context: int, rows: int) -> float:
    """Predicted seconds of a step that computes `rows` tokens, with their logits, of each."""
    cost = step_cost(
        model.config,
        [Chunk(context, rows)] * batch,
        num_sampled=batch * rows,
        weight_element_bytes=model.weight_element_bytes,
        head_element_bytes=model.head_element_bytes,
        kv_element_bytes=model.dtype.itemsize,
    )
    return predict(cost, hardware, model.dtype_name).time_s
