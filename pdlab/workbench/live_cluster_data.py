"""What the LiveCluster widget shows: a cluster at one moment, as plain data of bounded size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.disagg import WorkerSpec
from pdlab.disagg.hosts.host import Host
from pdlab.disagg.jobs import Job, Peer, Stage
from pdlab.engine import Prompt, RequestOutput, SamplingParams
from pdlab.machine import describe_machine

Picture = dict[str, Any]
"""As JSON knows it; see `picture_of`."""
MAX_TEXT_CHARS, CUT_CHARS = 88, 16
"""Of an answer its last characters are shown; the first of them go by so many at a time, so that
lines do not jump with every token."""
MAX_PROMPT_CHARS = 52
MAX_LOG_LINES = 6
PACE_S = 60
"""Seconds of the past whose tokens are counted."""
STALLED_S = 1.0
"""Without a token for so long, a row says so."""
RECORDED = Path(__file__).parent / "static" / "live_cluster.json"
"""What is shown where nothing was started: a picture of a run, and what it was measured on."""


class Line(NamedTuple):
    """Something that happened."""

    time_s: float
    kind: str
    """`note`, `kill`, `lost` or `recovered`."""
    text: str


class Cut(NamedTuple):
    """Where in an answer a worker was lost."""

    num_chars: int
    worker: str


class Answer(NamedTuple):
    """What a reader asked, and what came of it."""

    prompt: Prompt
    params: SamplingParams
    output: RequestOutput


@dataclass(eq=False)
class Reader:
    """Somebody with one question after the other."""

    name: str
    color: int
    """Number of its colour among those of sequences."""
    job: Job | None = None
    """What it asked last."""
    prompt: Prompt = ""
    cuts: list[Cut] = field(default_factory=list)
    num_counted: int = 0
    """Tokens of its answer that are in the pace."""
    over_s: float | None = None
    """Since when its answer is over."""


@dataclass
class Totals:
    """Counted since the beginning."""

    answers: int = 0
    errors: int = 0
    """Answers that ended with an error."""
    transfers: int = 0
    transfer_bytes: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    """By the second in which they came, of the last PACE_S."""

    def count(self, times_s: Iterable[float]) -> None:
        for time_s in times_s:
            self.tokens[int(time_s)] = self.tokens.get(int(time_s), 0) + 1

    def forget_before(self, second: int) -> None:
        self.tokens = {at: number for at, number in self.tokens.items() if at >= second}


def picture_of(
    now_s: float,
    workers: Sequence[Picture],
    readers: Sequence[Reader],
    lines: Sequence[Line],
    totals: Totals,
) -> Picture:
    """All that is drawn.

    Args:
        now_s: on the clock of the lines, the jobs and the totals.
        workers: see `worker_of`.
    """
    first = max(0, int(now_s) - PACE_S)
    shown = [line._asdict() for line in lines if line.time_s >= first]
    return {
        "now_s": now_s,
        "workers": list(workers),
        "rows": [row_of(reader, now_s) for reader in readers],
        "log": [line._asdict() for line in lines[-MAX_LOG_LINES:]],
        "answers": totals.answers,
        "errors": totals.errors,
        "transfers": totals.transfers,
        "transfer_bytes": totals.transfer_bytes,
        "pace_from_s": first,
        "pace": [totals.tokens.get(second, 0) for second in range(first, int(now_s))],
        "marks": [line for line in shown if line["kind"] in ("kill", "lost", "recovered")],
    }


def worker_of(
    spec: WorkerSpec, peer: Peer | None = None, host: Host | None = None, *, is_starting: bool
) -> Picture:
    """One worker's card.

    Args:
        peer: as the router knows it, if it does.
        host: of its process, if there is one.
    """
    is_alive = peer is not None and peer.is_alive
    card: Picture = {
        "name": spec.name,
        "role": peer.role if peer else spec.role,
        "state": "starting" if is_starting else "serving" if is_alive else "lost",
        "pid": getattr(getattr(host, "process", None), "pid", None),
        "jobs": 0,
        "reading": 0,
        "fill": 0.0,
        "step_s": None,
        "prompt_tokens": 0,
        "decodes": 0,
    }
    if peer is None or not is_alive:
        return card
    load = peer.load
    return card | {
        "jobs": len(peer.jobs),
        "reading": sum(
            len(job.state.prompt_ids) for job in peer.jobs.values() if _reads(peer, job)
        ),
        "fill": 1 - load.num_free_blocks / peer.hello.num_blocks,
        "step_s": load.step_s,
        "prompt_tokens": load.num_prompt_tokens,
        "decodes": load.num_decodes,
    }


def _reads(peer: Peer, job: Job) -> bool:
    """Whether a worker has a prompt of which no token came yet; it tells nothing in mid-step."""
    if job.stage is Stage.SERVING:
        return not job.metrics.token_times_s
    return job.stage is Stage.PREFILLING and job.prefill_on == peer.name


def row_of(reader: Reader, now_s: float) -> Picture:
    """One answer's row."""
    row: Picture = {"reader": reader.name, "color": reader.color, "stage": "thinking"}
    job = reader.job
    if job is None:
        return row
    times_s = job.metrics.token_times_s
    since_s = now_s - (times_s[-1] if times_s else job.metrics.arrival_s)
    stalled = job.stage is not Stage.DONE and since_s > STALLED_S
    text = text_of(job)
    pieces, lost = pieces_of(text, reader.cuts)
    return row | {
        "request": job.request_id,
        "prompt": _prompt_of(reader.prompt, job),
        "is_shortened": len("".join(pieces)) < len(text),
        "pieces": pieces,
        "lost": lost,
        "tokens": len(job.state.output_ids),
        "most": job.state.params.max_tokens,
        "stage": "failed" if job.error else job.stage.value,
        "attempt": job.attempt,
        "prefill_on": job.prefill_on,
        "decode_on": job.decode_on,
        "stalled_s": since_s if stalled else None,
        "error": str(job.error or "")[:200],
    }


def text_of(job: Job) -> str:
    """What the reader has been sent; token ids where the model has no words."""
    text = "".join(chunk.text for chunk in job.chunks)
    return text or " ".join(map(str, job.state.output_ids))


def pieces_of(text: str, cuts: Sequence[Cut]) -> tuple[list[str], list[str]]:
    """The end of a text, divided where workers were lost, and the names of these, between pieces.

    A cut before the end that is shown leaves with it.
    """
    excess = max(0, len(text) - MAX_TEXT_CHARS)
    start = -(-excess // CUT_CHARS) * CUT_CHARS
    if start:  # begin with a whole word
        start = max(start, text.find(" ", start, start + CUT_CHARS))
    inside = [cut for cut in cuts if start < cut.num_chars]
    ends = [start, *(cut.num_chars for cut in inside), len(text)]
    return [text[a:b] for a, b in pairwise(ends)], [cut.worker for cut in inside]


def _prompt_of(prompt: Prompt, job: Job) -> str:
    num_tokens = len(job.state.prompt_ids)
    if isinstance(prompt, str) and len(prompt) <= MAX_PROMPT_CHARS:
        return prompt
    return f"[{num_tokens} tokens]"


# --- in words -------------------------------------------------------------------------------------


def lines_of(picture: Mapping[str, Any]) -> list[str]:
    """A picture in words, for a page without pictures: workers, totals, and what happened."""
    workers = ", ".join(f"{w['name']} ({w['role']}) {w['state']}" for w in picture["workers"])
    totals = (
        f"{picture['now_s']:.0f} s: {picture['answers']} answers finished, {picture['errors']} "
        f"with an error; {picture['transfers']} transfers, {picture['transfer_bytes'] / 1e6:.0f} MB"
    )
    return [
        workers,
        totals,
        *(f"{line['time_s']:.1f} s  {line['text']}" for line in picture["log"]),
    ]


# --- recorded -------------------------------------------------------------------------------------


def recorded_picture() -> Picture:
    """The picture that is shipped; `recorded` in it says on what, and when."""
    picture: Picture = json.loads(RECORDED.read_text(encoding="utf-8"))
    return picture


def save_picture(picture: Picture, what: str, path: Path = RECORDED) -> None:
    """Keep a picture as the one that is shown before a start.

    Args:
        what: was served: the model, and how.
    """
    machine = describe_machine()
    line = f"{what}, {machine['processor']}, {machine['cores']} cores, {str(machine['date'])[:10]}"
    text = json.dumps(picture | {"recorded": line}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
