"""Records of what an engine did: plain data that any room may write and only readers read."""

from pdlab.trace.cluster import ClusterTrace, WorkerTrace
from pdlab.trace.perfetto import save_perfetto, to_perfetto
from pdlab.trace.records import (
    DROPPED,
    BlockMove,
    Candidate,
    Capture,
    CollectiveRecord,
    DraftRecord,
    FailureRecord,
    MoveKind,
    ParcelRecord,
    Phase,
    RankSpan,
    RequestRecord,
    Resident,
    RoleSwitch,
    SequenceRecord,
    Span,
    StepRecord,
    TransferRecord,
    sample_ids,
)
from pdlab.trace.trace import Trace

__all__ = [
    "DROPPED",
    "BlockMove",
    "Candidate",
    "Capture",
    "ClusterTrace",
    "CollectiveRecord",
    "DraftRecord",
    "FailureRecord",
    "MoveKind",
    "ParcelRecord",
    "Phase",
    "RankSpan",
    "RequestRecord",
    "Resident",
    "RoleSwitch",
    "SequenceRecord",
    "Span",
    "StepRecord",
    "Trace",
    "TransferRecord",
    "WorkerTrace",
    "sample_ids",
    "save_perfetto",
    "to_perfetto",
]
