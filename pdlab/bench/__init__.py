"""Measurements that stand side by side: made in one run, on one machine, in turns."""

from pdlab.bench.sampling import MixCost, SamplingCosts, measure_sampling

__all__ = ["MixCost", "SamplingCosts", "measure_sampling"]
