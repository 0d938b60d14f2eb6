"""What the lesson on disaggregation runs: real processes, and a simulator with their router."""

from pdlab.workbench.disagg_experiments.chats import (
    DOCUMENT_TOKENS,
    LABELS,
    Outcome,
    labels_of,
    many_answers,
    recorded_bench,
    scene,
)
from pdlab.workbench.disagg_experiments.elsewhere import (
    best_split,
    decode_elsewhere,
    devices,
    mean_lengths,
    mixed_requests,
    nearest,
    recorded_prefill_s,
    recorded_wait_s,
)
from pdlab.workbench.disagg_experiments.killing import kill_one, undisturbed
from pdlab.workbench.disagg_experiments.links import Room, SlowPair, exposed, shapes, waited_s
from pdlab.workbench.disagg_experiments.maps import corner, goodput_at
from pdlab.workbench.disagg_experiments.planning import (
    CONTROL,
    Twin,
    compared,
    conditional,
    follow,
    planned,
    simulated_capacity,
    tide,
    tide_slo,
)
from pdlab.workbench.disagg_experiments.processes import APART, CHUNKS, ONE, TWO, Plans
from pdlab.workbench.scheduling_experiments import RECORDED

__all__ = [
    "APART",
    "CHUNKS",
    "CONTROL",
    "DOCUMENT_TOKENS",
    "LABELS",
    "ONE",
    "RECORDED",
    "TWO",
    "Outcome",
    "Plans",
    "Room",
    "SlowPair",
    "Twin",
    "best_split",
    "compared",
    "conditional",
    "corner",
    "decode_elsewhere",
    "devices",
    "exposed",
    "follow",
    "goodput_at",
    "kill_one",
    "labels_of",
    "many_answers",
    "mean_lengths",
    "mixed_requests",
    "nearest",
    "planned",
    "recorded_bench",
    "recorded_prefill_s",
    "recorded_wait_s",
    "scene",
    "shapes",
    "simulated_capacity",
    "tide",
    "tide_slo",
    "undisturbed",
    "waited_s",
]
