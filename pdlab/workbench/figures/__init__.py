"""Figures: pure functions from a Trace, a ServingRun or a ClusterRun to a plotly Figure.

Show one with `pdlab.workbench.show`.
"""

from pdlab.workbench.figures.attention import attention_heatmap
from pdlab.workbench.figures.cache import naive_against_cached
from pdlab.workbench.figures.disagg import cluster_timeline, recovery_figure, token_rows
from pdlab.workbench.figures.disagg_costs import break_even_figure, overlap_figure, plans_figure
from pdlab.workbench.figures.kv_costs import error_heatmap, kv_costs
from pdlab.workbench.figures.kv_values import kv_magnitudes
from pdlab.workbench.figures.latency import (
    tpot_by_batch,
    tpot_by_context,
    ttft_by_prompt,
    ttft_points,
)
from pdlab.workbench.figures.memory import block_grid, kv_occupancy
from pdlab.workbench.figures.overlap import overlap_timeline
from pdlab.workbench.figures.parallel import (
    collectives_of_step,
    parallel_gains,
    pipeline_timeline,
    shard_map,
)
from pdlab.workbench.figures.parallel_plan import parallel_plan
from pdlab.workbench.figures.replay import fragmentation, hit_rate_by_blocks
from pdlab.workbench.figures.roofline import roofline
from pdlab.workbench.figures.serving import (
    comparison_figure,
    gantt_figure,
    latency_cdf_figure,
    queue_figure,
)
from pdlab.workbench.figures.speculation import (
    acceptance_by_position,
    batch_figure,
    draft_length_figure,
    own_work_figure,
    predicted_speedups,
    rejection_figure,
    step_rows,
)
from pdlab.workbench.figures.speed import (
    layer_timelines,
    mode_bars,
    mode_roofline,
    rows_figure,
    step_timelines,
)
from pdlab.workbench.figures.steps import stage_breakdown, step_timeline
from pdlab.workbench.figures.window_costs import perplexity_by_position, window_costs

__all__ = [
    "acceptance_by_position",
    "attention_heatmap",
    "batch_figure",
    "block_grid",
    "break_even_figure",
    "cluster_timeline",
    "collectives_of_step",
    "comparison_figure",
    "draft_length_figure",
    "error_heatmap",
    "fragmentation",
    "gantt_figure",
    "hit_rate_by_blocks",
    "kv_costs",
    "kv_magnitudes",
    "kv_occupancy",
    "latency_cdf_figure",
    "layer_timelines",
    "mode_bars",
    "mode_roofline",
    "naive_against_cached",
    "overlap_figure",
    "overlap_timeline",
    "own_work_figure",
    "parallel_gains",
    "parallel_plan",
    "perplexity_by_position",
    "pipeline_timeline",
    "plans_figure",
    "predicted_speedups",
    "queue_figure",
    "recovery_figure",
    "rejection_figure",
    "roofline",
    "rows_figure",
    "shard_map",
    "stage_breakdown",
    "step_rows",
    "step_timeline",
    "step_timelines",
    "token_rows",
    "tpot_by_batch",
    "tpot_by_context",
    "ttft_by_prompt",
    "ttft_points",
    "window_costs",
]
