"""What a step should cost: FLOPs and bytes from shapes, seconds from a roofline."""

from pdlab.costmodel.cost import Chunk, StepCost, causal_pairs, dense_step_cost, step_cost

__all__ = ["Chunk", "StepCost", "causal_pairs", "dense_step_cost", "step_cost"]
