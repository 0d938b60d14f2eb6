"""What a step should cost: FLOPs and bytes from shapes, seconds from a roofline.

This room knows shapes and never tensors; only `calibrate` runs torch, to time it.
"""

from pdlab.costmodel.calibrate import calibrate
from pdlab.costmodel.collectives import (
    ONE_SHOT_BYTES,
    Collective,
    all_reduce_bytes,
    collectives_of,
    is_one_shot,
    wire_bytes_by,
)
from pdlab.costmodel.cost import Chunk, StepCost, causal_pairs, dense_step_cost, step_cost
from pdlab.costmodel.distserve import DistServeStepTimes, load_distserve_profile
from pdlab.costmodel.fit import LinearQuadraticFit, fit_linear_quadratic
from pdlab.costmodel.hardware import Hardware, Provenance, load_hardware
from pdlab.costmodel.memory import activation_bytes, kv_bytes, score_matrix_bytes, weight_bytes
from pdlab.costmodel.parallel import (
    ParallelPrediction,
    PredictedStep,
    bubble_share,
    pipeline_ends_s,
    predict_parallel,
    predict_step,
)
from pdlab.costmodel.parallel_memory import (
    ElementBytes,
    RankMemory,
    kv_capacity_tokens,
    rank_kv_bytes_per_token,
    rank_memory,
    rank_weight_bytes,
)
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
from pdlab.costmodel.published import PUBLISHED, PublishedMachine, published, read_splitwise
from pdlab.costmodel.roofline_times import (
    Overheads,
    RooflineStepTimes,
    ServedBatch,
    fit_overheads,
    relative_errors,
)
from pdlab.costmodel.step_times import LinearStepTimes, StepShape, StepTimes, fit_step_times

__all__ = [
    "ONE_SHOT_BYTES",
    "PUBLISHED",
    "Chunk",
    "Collective",
    "DistServeStepTimes",
    "ElementBytes",
    "Hardware",
    "LinearQuadraticFit",
    "LinearStepTimes",
    "Overheads",
    "ParallelPrediction",
    "PredictedStep",
    "Prediction",
    "PreemptionCost",
    "Provenance",
    "PublishedMachine",
    "RankMemory",
    "RequestPrediction",
    "RooflineStepTimes",
    "ServedBatch",
    "StepCost",
    "StepShape",
    "StepTimes",
    "activation_bytes",
    "all_reduce_bytes",
    "bubble_share",
    "calibrate",
    "causal_pairs",
    "collectives_of",
    "dense_step_cost",
    "fit_linear_quadratic",
    "fit_overheads",
    "fit_step_times",
    "is_one_shot",
    "kv_bytes",
    "kv_capacity_tokens",
    "link_bytes_s",
    "load_distserve_profile",
    "load_hardware",
    "mbu",
    "mfu",
    "pipeline_ends_s",
    "predict",
    "predict_parallel",
    "predict_request",
    "predict_step",
    "preemption_cost",
    "published",
    "rank_kv_bytes_per_token",
    "rank_memory",
    "rank_weight_bytes",
    "read_splitwise",
    "relative_errors",
    "ridge_point",
    "score_matrix_bytes",
    "step_cost",
    "weight_bytes",
    "wire_bytes_by",
]
