"""Records of what an engine did: plain data that any room may write and only readers read."""

from pdlab.trace.perfetto import save_perfetto, to_perfetto
from pdlab.trace.records import (
    DROPPED,
    BlockMove,
    Candidate,
    Capture,
    MoveKind,
    Phase,
    RequestRecord,
    Resident,
    SequenceRecord,
    StepRecord,
    sample_ids,
)
from pdlab.trace.trace import Trace

__all__ = [
    "DROPPED",
    "BlockMove",
    "Candidate",
    "Capture",
    "MoveKind",
    "Phase",
    "RequestRecord",
    "Resident",
    "SequenceRecord",
    "StepRecord",
    "Trace",
    "sample_ids",
    "save_perfetto",
    "to_perfetto",
]
