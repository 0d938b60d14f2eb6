"""What a step should cost: FLOPs and bytes from shapes, seconds from a roofline.

This room knows shapes and never tensors; only `calibrate` runs torch, to time it.
"""

from pdlab.costmodel.calibrate import calibrate
from pdlab.costmodel.cost import Chunk, StepCost, causal_pairs, dense_step_cost, step_cost
from pdlab.costmodel.fit import LinearQuadraticFit, fit_linear_quadratic
from pdlab.costmodel.hardware import Hardware, Provenance, load_hardware
from pdlab.costmodel.memory import activation_bytes, kv_bytes, score_matrix_bytes, weight_bytes
from pdlab.costmodel.predict import (
    Prediction,
    RequestPrediction,
    mbu,
    mfu,
    predict,
    predict_request,
    ridge_point,
)
from pdlab.costmodel.preemption import PreemptionCost, link_bytes_s, preemption_cost
from pdlab.costmodel.step_times import LinearStepTimes, StepShape, StepTimes, fit_step_times

__all__ = [
    "Chunk",
    "Hardware",
    "LinearQuadraticFit",
    "LinearStepTimes",
    "Prediction",
    "PreemptionCost",
    "Provenance",
    "RequestPrediction",
    "StepCost",
    "StepShape",
    "StepTimes",
    "activation_bytes",
    "calibrate",
    "causal_pairs",
    "dense_step_cost",
    "fit_linear_quadratic",
    "fit_step_times",
    "kv_bytes",
    "link_bytes_s",
    "load_hardware",
    "mbu",
    "mfu",
    "predict",
    "predict_request",
    "preemption_cost",
    "ridge_point",
    "score_matrix_bytes",
    "step_cost",
    "weight_bytes",
]
