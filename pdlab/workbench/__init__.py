"""The workbench: figures and widgets drawn from a recorded run, and what lessons need around them.

A figure is a pure function of a trace, a widget is a class around one:

    wb.show(wb.figures.kv_occupancy(engine.trace))
    wb.Stepper(engine.trace)
"""

from pdlab.bench.topics import topic_tokens
from pdlab.engine.recorder import cost_of
from pdlab.workbench import figures
from pdlab.workbench.attention_view import AttentionView
from pdlab.workbench.block_table import BlockTableView
from pdlab.workbench.bubble_view import BubbleView
from pdlab.workbench.chat import Chat
from pdlab.workbench.checks import check
from pdlab.workbench.constraint_lab import ConstraintLab
from pdlab.workbench.display import show, static_png
from pdlab.workbench.experiments import (
    compare_with_naive,
    decode_step_s,
    decode_steps,
    decode_sweep,
    kv_after_prefill,
    median_ttft_s,
    prefill_sweep,
    random_prompt,
    warm_up,
)
from pdlab.workbench.format_lab import FormatLab
from pdlab.workbench.frames import stepper_frames
from pdlab.workbench.gantt import Gantt
from pdlab.workbench.kv_costs import KVCost, greedy_agreement, kv_costs
from pdlab.workbench.kv_study import Study, format_configs, recorded_study, window_configs
from pdlab.workbench.latency_view import LatencyView
from pdlab.workbench.lesson import Predictions, glossary, progress
from pdlab.workbench.live_cluster import LiveCluster
from pdlab.workbench.memory_ledger import MemoryLedger
from pdlab.workbench.notebooks import execute_notebook
from pdlab.workbench.overlap_view import OverlapView
from pdlab.workbench.palette import legend
from pdlab.workbench.parallel_planner import ParallelPlanner
from pdlab.workbench.pd_lab import PDLab
from pdlab.workbench.pipeline_runs import record_pipelines
from pdlab.workbench.planner_data import plan_choices
from pdlab.workbench.policy_lab import PolicyLab
from pdlab.workbench.roofline_view import RooflineView
from pdlab.workbench.sampling_lab import SamplingLab
from pdlab.workbench.shard_view import ShardView
from pdlab.workbench.speculation_view import SpeculationView
from pdlab.workbench.stepper import Stepper
from pdlab.workbench.stream_view import StreamView
from pdlab.workbench.tokens import token_table
from pdlab.workbench.transfer_view import TransferView
from pdlab.workbench.win_map_view import WinMap

__all__ = [
    "AttentionView",
    "BlockTableView",
    "BubbleView",
    "Chat",
    "ConstraintLab",
    "FormatLab",
    "Gantt",
    "KVCost",
    "LatencyView",
    "LiveCluster",
    "MemoryLedger",
    "OverlapView",
    "PDLab",
    "ParallelPlanner",
    "PolicyLab",
    "Predictions",
    "RooflineView",
    "SamplingLab",
    "ShardView",
    "SpeculationView",
    "Stepper",
    "StreamView",
    "Study",
    "TransferView",
    "WinMap",
    "check",
    "compare_with_naive",
    "cost_of",
    "decode_step_s",
    "decode_steps",
    "decode_sweep",
    "execute_notebook",
    "figures",
    "format_configs",
    "glossary",
    "greedy_agreement",
    "kv_after_prefill",
    "kv_costs",
    "legend",
    "median_ttft_s",
    "plan_choices",
    "prefill_sweep",
    "progress",
    "random_prompt",
    "record_pipelines",
    "recorded_study",
    "show",
    "static_png",
    "stepper_frames",
    "token_table",
    "topic_tokens",
    "warm_up",
    "window_configs",
]
