"""Four chats and a document: the scene that each plan plays, and what its people notice."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from pdlab.bench.disaggregation import Overlap, PlanFigures
from pdlab.disagg.serving import ClusterRun
from pdlab.shipped import shipped
from pdlab.workload import TraceRequest

CHAT, DOCUMENT = "chat", "document"
CHATS, CHAT_TOKENS, DOCUMENT_TOKENS, DOCUMENT_AFTER = 4, 32, 512, 8
"""Chats, tokens that each writes, tokens of the document, and after how many steps it comes."""
LABELS = [*(f"{CHAT} {i + 1}" for i in range(CHATS)), DOCUMENT]


def scene(step_s: float) -> list[TraceRequest]:
    """Four chats, and a document of which only a few words are to be written.

    Args:
        step_s: seconds of a decode step; the document's arrival is counted in them, so that the
            story is the same on a slow machine and on a fast one.
    """
    chats = [TraceRequest(0.0, 24, CHAT_TOKENS) for _ in range(CHATS)]
    return [*chats, TraceRequest(DOCUMENT_AFTER * step_s, DOCUMENT_TOKENS, 4)]


def many_answers() -> list[TraceRequest]:
    """Sixteen short questions at once: next to nothing to prefill, and all the rest is decode."""
    return [TraceRequest(0.0, 16, 24) for _ in range(16)]


class Outcome(NamedTuple):
    """What the people in the scene notice."""

    chat_p50_s: float
    """Between two tokens of a chat."""
    chat_gap_s: float
    """The longest."""
    document_ttft_s: float | None
    """None where there is none."""
    ttft_p50_s: float
    """Of all."""
    tokens_per_s: float
    """Output tokens, of all, from the first arrival to the end."""

    @classmethod
    def of(cls, run: ClusterRun) -> Outcome:
        """Of a run in which long outputs are chats."""
        gaps = np.concatenate(
            [r.metrics.itl_s for r in run.requests if r.metrics.num_output_tokens >= 16]
        )
        documents = [r for r in run.requests if r.metrics.num_prompt_tokens >= DOCUMENT_TOKENS]
        tokens = sum(r.metrics.num_output_tokens for r in run.requests)
        return cls(
            float(np.median(gaps)),
            float(gaps.max()),
            documents[0].metrics.ttft_s if documents else None,
            float(np.median([r.metrics.ttft_s for r in run.requests])),
            tokens / run.serving.duration_s,
        )


def busy(run: ClusterRun) -> list[float]:
    """Part of the run's time that each worker spent in steps."""
    duration_s = run.serving.duration_s
    return [sum(s.wall_s for s in w.steps) / duration_s for w in run.workers.values()]


def prefill_s(run: ClusterRun) -> float:
    """Seconds of the steps that computed the document."""
    document = run.requests[LABELS.index(DOCUMENT)].request_id
    steps = [step for worker in run.workers.values() for step in worker.steps]
    return sum(step.wall_s for step in steps if document in step.prompts)


def labels_of(run: ClusterRun) -> dict[str, str]:
    """What the scene calls each request, by its id; they are numbered as they came.

    Raises:
        ValueError: the run has another number of requests.
    """
    ids = [request.request_id for request in run.requests]
    if len(ids) != len(LABELS):
        raise ValueError(f"run has {len(ids)} requests, the scene has {len(LABELS)}")
    return dict(zip(ids, LABELS, strict=True))


def recorded_bench(
    path: Path | None = None,
) -> tuple[list[PlanFigures], list[Overlap], str]:
    """What `pdlab bench disaggregation --save` wrote: plans, overlaps, and what they rest on.

    Args:
        path: None for the file that pdlab ships.
    """
    raw = _recorded(path)
    spread = ("itl_p50_s", "itl_p99_s", "ttft_p50_s", "tokens_per_s")
    plans = [PlanFigures(**p | {key: tuple(p[key]) for key in spread}) for p in raw["plans"]]
    waits = ("push_wait_s", "stream_wait_s")
    overlaps = [Overlap(**o | {key: tuple(o[key]) for key in waits}) for o in raw["overlaps"]]
    machine = raw["machine"]
    line = f"recorded: {raw['model']} on {machine['processor']}, {str(machine['date'])[:10]}"
    return plans, overlaps, f"{line}; {raw['repeats']} turns each"


def recorded_agreement(path: Path | None = None) -> dict[str, tuple[float, float, int]]:
    """By workload: TTFT and TPOT of a simulated pair over those of a real one; turns.

    Medians of the turns, as `pdlab bench disaggregation --save` wrote them.
    """
    agreements = _recorded(path)["agreements"]
    found = {}
    for each in agreements:
        ttft, tpot = (
            each["simulated"][key] / median(turn[key] for turn in each["measured"])
            for key in ("ttft_s", "tpot_s")
        )
        found[each["workload"]] = ttft, tpot, len(each["measured"])
    return found


def _recorded(path: Path | None) -> dict[str, Any]:
    path = path or shipped("data") / "measured" / "disaggregation.json"
    return json.loads(path.read_text(encoding="utf-8"))
