"""One request's K and V on their way from the worker of its prompt to that of its output, as data.

Times are in seconds, and 0 is the end of the prompt's last step: from there on the receiver waits
for what has not come yet, and transfers of several runs can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pdlab.disagg.serving import ClusterRun, WorkerRun
from pdlab.requirements import require_int, shown
from pdlab.trace import ClusterTrace, FailureRecord, Trace, TransferRecord, WorkerTrace
from pdlab.trace.records import Resident
from pdlab.workbench.widget import machine_line
from pdlab.workload.serving import StepSpan, span_of

MAX_RUNS = 6
"""Runs that one widget or picture holds."""
MAX_STEPS = 400
"""Steps of one lane; of more, the shortest of others are left out."""
MAX_PARCELS = 1200
"""Parcels of one transfer; of more, those of neighbouring layers are drawn as one."""
MAX_BLOCKS = 32
"""Blocks of the sender that are drawn."""
MAX_CHOICES = 200
"""Transfers that can be chosen from."""
NUMBER = re.compile(r"(\d+)")
Cluster = ClusterRun | ClusterTrace


@dataclass(frozen=True)
class Story:
    """What the pictures need of a run of several workers, whether served or only recorded."""

    provenance: Literal["measured", "simulated"]
    basis: str
    """What the times rest on."""
    workers: dict[str, WorkerRun]
    transfers: list[TransferRecord]
    """In order of the requests' names, as they are numbered."""
    failures: list[FailureRecord]
    traces: dict[str, WorkerTrace]
    """By worker, where there are any: they know block numbers."""
    way: str
    """How the router has K and V moved: `push`, `pull` or `stream`."""

    @property
    def line(self) -> str:
        """As it stands below every picture of a run."""
        word = "measured on" if self.provenance == "measured" else "simulated:"
        return f"{word} {self.basis}"

    @staticmethod
    def of(run: Cluster) -> Story:
        """Tell it of a run or a trace.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(run, ClusterRun):
            return Story(
                run.provenance,
                run.basis,
                run.workers,
                _ordered(run.transfers),
                run.failures,
                {},
                run.router.get("transfer", "run"),
            )
        if not isinstance(run, ClusterTrace):
            raise ValueError(f"run={shown(run)} must be a ClusterRun or a ClusterTrace")
        return Story(
            "measured",
            _basis_of(run.workers.values()),
            {name: _worker_run(worker) for name, worker in run.workers.items()},
            _ordered(run.transfers),
            run.failures,
            run.workers,
            run.router.get("transfer", "run"),
        )


def named_stories(runs: Cluster | Mapping[str, Cluster]) -> dict[str, Story]:
    """Stories by name; a single one is named after its way of moving K and V.

    Raises:
        ValueError: there is none, there are too many, or one is no run of a cluster.
    """
    if isinstance(runs, Cluster):
        story = Story.of(runs)
        return {story.way: story}
    if not isinstance(runs, Mapping):
        raise ValueError(f"runs={shown(runs)} must be a run of a cluster, or a dict of them")
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"runs has {len(runs)} runs, it must have from 1 to {MAX_RUNS}")
    return {str(name): Story.of(run) for name, run in runs.items()}


def request_of(sequence_id: str) -> str:
    """The request that a worker calls so: later attempts have names of their own."""
    return sequence_id.split("~")[0]


def largest_transfer(story: Story) -> int:
    """Place of the transfer with the most bytes; 0 where there is none."""
    sizes = [transfer.num_bytes for transfer in story.transfers]
    return sizes.index(max(sizes)) if sizes else 0


def require_place(name: str, value: int, count: int) -> None:
    """Raise a ValueError unless `value` is the number of one of `count` transfers."""
    require_int(name, value, 0)
    if value >= count:
        raise ValueError(f"{name}={value} must be below {count}, the number of transfers")


# --- one transfer ---------------------------------------------------------------------------------


def transfer_data(story: Story, place: int = 0, name: str = "") -> dict[str, Any]:
    """Transfer number `place` of a run as plain data of bounded size.

    Steps are `[start_s, end_s, own tokens, prompt tokens of others, decodes of others]`, parcels
    `[first layer, layer after the last, first token, token after the last, bytes, sent_s,
    arrived_s]`.

    Raises:
        ValueError: there is no such transfer.
    """
    require_place("place", place, len(story.transfers))
    record = story.transfers[place]
    sent = _own_name(story, record)
    prefills = [s for s in _steps(story, record.source) if sent in s.prompts]
    prompt_s = prefills[-1].end_s if prefills else record.start_s
    start_s = min([record.start_s, record.ready_s, *(s.start_s for s in prefills[:1])])
    next_s = _next_token_s(story, record)
    end_s = max(next_s, record.start_s + record.wall_s)
    sender, left = _lane(_steps(story, record.source), sent, start_s, end_s, prompt_s)
    receiver, right = _lane(_steps(story, record.target), sent, start_s, end_s, prompt_s)
    parcels = _parcels(record, prompt_s)
    return {
        "name": name,
        "provenance": story.provenance,
        "line": story.line,
        "request": record.request_id,
        "source": record.source,
        "target": record.target,
        "kind": record.kind,
        "transport": record.transport,
        "wire": record.wire,
        "link": record.link,
        "num_tokens": record.num_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_bytes": record.num_bytes,
        "wall_s": record.wall_s,
        "on_the_way_s": _on_the_way_s(record),
        "num_layers": max((p.end_layer for p in record.parcels), default=0),
        "num_parcels": len(record.parcels),
        "early_bytes": sum(p.num_bytes for p in record.parcels if p.arrived_s <= prompt_s),
        "start_s": _micro(start_s - prompt_s),
        "ready_s": _micro(record.ready_s - prompt_s),
        "next_s": _micro(next_s - prompt_s),
        "end_s": _micro(end_s - prompt_s),
        "wait_s": max(0.0, record.ready_s - prompt_s),
        "sender": sender,
        "receiver": receiver,
        "num_left_out": left + right,
        "parcels": parcels,
        "blocks": _blocks(story, record, sent),
    }


def choices(story: Story) -> list[str]:
    """What can be chosen from, in words."""
    return [
        f"{t.request_id}: {t.num_tokens} tokens, {t.num_bytes / 1e6:.3g} MB"
        for t in story.transfers[:MAX_CHOICES]
    ]


def _steps(story: Story, worker: str) -> list[StepSpan]:
    """None of a worker that was lost."""
    return story.workers[worker].steps if worker in story.workers else []


def _own_name(story: Story, record: TransferRecord) -> str:
    """What the workers called the request in the attempt whose K and V these are."""
    names = [
        name
        for step in _steps(story, record.source)
        if step.start_s < record.ready_s
        for name in step.prompts
        if request_of(name) == record.request_id
    ]
    return names[-1] if names else record.request_id


def _next_token_s(story: Story, record: TransferRecord) -> float:
    """When the receiver had made the first token of its own."""
    for step in _steps(story, record.target):
        its_own = any(request_of(name) == record.request_id for name in step.decodes)
        if its_own and step.end_s > record.ready_s:
            return max(step.start_s, record.ready_s) + step.wall_s / step.num_steps
    return record.ready_s


def _lane(
    steps: Sequence[StepSpan], name: str, start_s: float, end_s: float, zero_s: float
) -> tuple[list[list[float]], int]:
    """The steps that run meanwhile, and how many of them are left out."""
    seen = [s for s in steps if s.end_s >= start_s and s.start_s <= end_s]
    own = [s for s in seen if name in s.prompts or name in s.decodes]
    others = [s for s in seen if not (name in s.prompts or name in s.decodes)]
    kept = sorted(others, key=lambda s: -s.wall_s)[: max(0, MAX_STEPS - len(own))]
    drawn = sorted([*own[:MAX_STEPS], *kept], key=lambda s: s.start_s)
    found = []
    for step in drawn:
        mine = step.prompts.get(name, 0) + (step.num_steps if name in step.decodes else 0)
        prompts = step.num_prompt_tokens - step.prompts.get(name, 0)
        decodes = len(step.decodes) - (name in step.decodes)
        times = [_micro(step.start_s - zero_s), _micro(step.end_s - zero_s)]
        found.append([*times, mine, prompts, decodes])
    return found, len(seen) - len(drawn)


def _parcels(record: TransferRecord, zero_s: float) -> list[list[float]]:
    """By token range, then by layer; neighbours together where there are too many."""
    every = sorted(record.parcels, key=lambda p: (p.start, p.first_layer))
    together = -(-len(every) // MAX_PARCELS) or 1
    groups: list[list[Any]] = []
    for parcel in every:
        last = groups[-1] if groups else []
        if last and len(last) < together and last[0].start == parcel.start:
            last.append(parcel)
        else:
            groups.append([parcel])
    return [
        [
            group[0].first_layer,
            group[-1].end_layer,
            group[0].start,
            group[0].end,
            sum(p.num_bytes for p in group),
            _micro(min(p.sent_s for p in group) - zero_s),
            _micro(max(p.arrived_s for p in group) - zero_s),
        ]
        for group in groups
    ]


def _on_the_way_s(record: TransferRecord) -> float:
    """Seconds in which at least one parcel was between the two; less than from first to last."""
    total_s, until_s = 0.0, float("-inf")
    for parcel in sorted(record.parcels, key=lambda p: p.sent_s):
        total_s += max(0.0, parcel.arrived_s - max(parcel.sent_s, until_s))
        until_s = max(until_s, parcel.arrived_s)
    return total_s


def _blocks(story: Story, record: TransferRecord, name: str) -> dict[str, Any] | None:
    """How the tokens lie on both sides; None where a side's block size is not known."""
    sizes = [
        story.workers[side].config["block_size"]
        for side in (record.source, record.target)
        if side in story.workers and "block_size" in story.workers[side].config
    ]
    if len(sizes) < 2:
        return None
    num_tokens = record.num_cached_tokens + record.num_tokens
    sender = _table(story.traces.get(record.source), name, record.ready_s, before=True)
    receiver = _table(story.traces.get(record.target), name, record.ready_s, before=False)
    drawn = min(num_tokens, MAX_BLOCKS * sizes[0])
    return {
        "sizes": sizes,
        "num_tokens": num_tokens,
        "num_drawn": drawn,
        "num_cached_tokens": record.num_cached_tokens,
        "sender": sender[: -(-drawn // sizes[0])],
        "receiver": receiver[: -(-drawn // sizes[1])],
    }


def _table(worker: WorkerTrace | None, name: str, ready_s: float, before: bool) -> list[int]:
    """Block numbers of a sequence: the last before it went, or the first once it was there."""
    if worker is None:
        return []
    found: list[Resident] = []
    for step in worker.trace.steps:
        end_s = step.start_s + step.wall_s + worker.epoch_s
        if before != (end_s <= ready_s):
            continue
        found += [r for r in step.residents if request_of(r.sequence_id) == request_of(name)]
        if found and not before:
            break
    return list(found[-1].block_table) if found else []


def _ordered(transfers: Iterable[TransferRecord]) -> list[TransferRecord]:
    def key(record: TransferRecord) -> tuple[list[Any], float]:
        parts = NUMBER.split(record.request_id)
        return [int(p) if p.isdigit() else p for p in parts], record.ready_s

    return sorted(transfers, key=key)


def _worker_run(worker: WorkerTrace) -> WorkerRun:
    engine = worker.trace.engine
    num_blocks = engine["num_blocks"]
    steps = [span_of(step, -worker.epoch_s, num_blocks) for step in worker.trace.steps]
    return WorkerRun(worker.role, dict(engine), num_blocks, steps)


def _basis_of(workers: Iterable[WorkerTrace]) -> str:
    traces: list[Trace] = [worker.trace for worker in workers]
    if not traces:
        return "a cluster of which no worker is left"
    name = traces[0].model.get("name", "a model")
    return f"{name} on {machine_line(traces[0])}"


def _micro(seconds: float) -> float:
    return round(seconds, 6)
