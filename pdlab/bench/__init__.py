"""Measurements that stand side by side: made in one run, on one machine, in turns."""

from pdlab.bench.agreement import Agreement, measure_agreement
from pdlab.bench.sampling import MixCost, SamplingCosts, measure_sampling
from pdlab.bench.scheduling import SchedulingBench, measure_scheduling

__all__ = [
    "Agreement",
    "MixCost",
    "SamplingCosts",
    "SchedulingBench",
    "measure_agreement",
    "measure_sampling",
    "measure_scheduling",
]
