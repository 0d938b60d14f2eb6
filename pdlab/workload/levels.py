"""How full the engine and its queue were over time.

Means over time run from the first arrival to the end of the last step. Between steps nothing is
computed, so batch size and tokens are 0 there. Who was admitted stays so, and holds his blocks,
through a pause between two steps of his; when all are done, nobody does. Where several steps are
told as one, the blocks that they took are counted as taken evenly over its time: right to a block
where its steps take equally long, and a few percent too low where the last takes twice the first.

The queue is reckoned from the requests and not from the steps, as a request may come in the middle
of one: it waits from its arrival, and again after each preemption, until a step computes any of its
tokens. So without preemption the mean queue depth is the arrival rate times the mean time in the
queue (Little 1961). Who was aborted while waiting is left out, as nobody knows when that was: the
queue was longer by them.

What the steps hold is told whole, including the work of others who used the engine meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdlab.workload.serving import ServedRequest, ServingRun

Floats = NDArray[np.float64]


class Level(NamedTuple):
    """Something that changes over time: its mean, weighted with time, and its maximum."""

    mean: float
    max: float


class Signal(NamedTuple):
    """A level that changes at `times`, and between them not or evenly; 0 before and after."""

    times: Floats
    levels: Floats
    """Up to the next time."""
    missing: Floats
    """How much less it is at first; it grows evenly to its level."""

    @classmethod
    def of(
        cls, starts: ArrayLike, ends: ArrayLike, heights: ArrayLike = 1.0, growths: ArrayLike = 0.0
    ) -> Signal:
        """The sum of intervals, each of its height from its start to its end.

        Args:
            growths: by how much each has grown from its start to its end, where it has its height.
                Those that grow must not overlap others.
        """
        starts, ends = np.asarray(starts, dtype=float), np.asarray(ends, dtype=float)
        heights = np.broadcast_to(np.asarray(heights, dtype=float), starts.shape)
        growths = np.where(ends > starts, np.asarray(growths, dtype=float), 0.0)
        times, places = np.unique(np.concatenate((starts, ends)), return_inverse=True)
        changes = np.bincount(places, np.concatenate((heights, -heights)), minlength=len(times))
        missing = np.zeros(len(times))
        np.add.at(missing, places[: len(starts)], growths)
        return cls(times, np.cumsum(changes), missing)

    def means(self, edges: Floats) -> Floats:
        """Mean level between neighbouring edges."""
        if not self.times.size:
            return np.zeros(len(edges) - 1)
        return per(np.diff(self._areas(edges)), np.diff(edges))

    def _areas(self, ends: Floats) -> Floats:
        """Level times time, from the beginning to each end."""
        lengths = np.diff(self.times, append=self.times[-1])
        whole = (self.levels - self.missing / 2) * lengths
        before = np.concatenate(([0.0], np.cumsum(whole[:-1])))
        at = np.maximum(np.searchsorted(self.times, ends, side="right") - 1, 0)
        spent = np.clip(ends - self.times[at], 0, lengths[at])
        lacking = self.missing[at] * (spent - per(spent**2, 2 * lengths[at]))
        return before[at] + self.levels[at] * spent - lacking

    def over(self, span_s: tuple[float, float], whole: float = 1.0) -> Level:
        """Mean over this span of time, and maximum, as parts of `whole`."""
        [mean] = self.means(np.array(span_s))
        return Level(float(mean) / whole, float(self.levels.max(initial=0.0)) / whole)


class Signals(NamedTuple):
    queue: Signal
    batch: Signal
    tokens: Signal
    running: Signal
    blocks: Signal

    @classmethod
    def of(cls, run: ServingRun) -> Signals:
        steps = run.steps
        starts = np.array([step.start_s for step in steps])
        ends = np.array([step.end_s for step in steps])
        next_starts = np.append(starts[1:], ends[-1:])
        ends = np.minimum(ends, next_starts)  # rounding must not make two steps overlap
        held = np.where(_busy_after(run.requests, ends, next_starts), next_starts, ends)
        used = np.array([step.num_used_blocks for step in steps])
        grown = np.array([step.num_grown_blocks for step in steps])
        return cls(
            queue=Signal.of(*_waits(run)),
            batch=Signal.of(starts, ends, [len(s.decodes) + len(s.prompts) for s in steps]),
            tokens=Signal.of(starts, ends, [step.num_tokens for step in steps]),
            running=Signal.of(starts, held, [step.num_running for step in steps]),
            blocks=Signal.of(
                np.concatenate((starts, ends)),
                np.concatenate((ends, held)),
                np.concatenate((used, used)),
                np.concatenate((grown, np.zeros(len(steps)))),
            ),
        )


def span_of_run(run: ServingRun) -> tuple[float, float]:
    """From the first arrival to the end of the last step, as `run.duration_s` has it."""
    start_s = run.start_s
    return start_s, max(start_s, run.steps[-1].end_s) if run.steps else start_s


def _busy_after(
    requests: Iterable[ServedRequest], ends: Floats, next_starts: Floats
) -> NDArray[np.bool_]:
    """Whether a request that began before the next step was still unfinished at a step's end."""
    begun = [r for r in requests if r.metrics.first_scheduled_s is not None]
    begun_s = np.sort([r.metrics.first_scheduled_s for r in begun])
    over_s = np.sort([_last_s(r) for r in begun if r.finish_reason is not None])
    num_begun = np.searchsorted(begun_s, next_starts, side="left")
    return num_begun > np.searchsorted(over_s, ends, side="right")


def _last_s(request: ServedRequest) -> float:
    """The last that is known of an ended request."""
    metrics = request.metrics
    assert metrics.first_scheduled_s is not None
    return max([metrics.first_scheduled_s, *metrics.token_times_s[-1:]])


def _waits(run: ServingRun) -> tuple[list[float], list[float]]:
    """When each wait began and ended. When someone gave up waiting is not known: left out."""
    end_s = span_of_run(run)[1]
    waits = list(_waits_of_preempted(run, end_s))
    for request in run.requests:
        metrics = request.metrics
        if metrics.first_scheduled_s is not None:
            waits.append((metrics.arrival_s, metrics.first_scheduled_s))
        elif request.finish_reason is None:
            waits.append((metrics.arrival_s, max(metrics.arrival_s, end_s)))
    return [start for start, _ in waits], [end for _, end in waits]


def _waits_of_preempted(run: ServingRun, end_s: float) -> Iterable[tuple[float, float]]:
    """From the step that a sequence had to make room for to its next one."""
    unfinished = {r.request_id: r.finish_reason is None for r in run.requests}
    out: dict[str, float] = {}
    for step in run.steps:
        for name in [n for n in out if n in step.prompts or n in step.decodes]:
            yield out.pop(name), step.start_s
        out |= dict.fromkeys((n for n in step.preempted if n in unfinished), step.start_s)
    for name in out:
        if unfinished[name]:
            yield out[name], end_s


def per(amounts: ArrayLike, lengths: Floats) -> Floats:
    """Quotients; 0 where the length is 0."""
    return np.divide(amounts, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
