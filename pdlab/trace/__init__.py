"""Records of what an engine did: plain data that any room may write and only readers read."""

from pdlab.trace.perfetto import save_perfetto, to_perfetto
from pdlab.trace.records import (
    Candidate,
    Capture,
    Phase,
    RequestRecord,
    Resident,
    SequenceRecord,
    StepRecord,
)
from pdlab.trace.trace import Trace

__all__ = [
    "Candidate",
    "Capture",
    "Phase",
    "RequestRecord",
    "Resident",
    "SequenceRecord",
    "StepRecord",
    "Trace",
    "save_perfetto",
    "to_perfetto",
]
