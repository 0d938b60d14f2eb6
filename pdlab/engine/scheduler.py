"""Who runs in the next step, and for how many tokens.

First come, first served, with a token budget a step (Yu et al. 2022, Orca: iteration-level
scheduling; Agrawal et al. 2024, Sarathi-Serve: prompt chunks beside decodes). This file knows
sequences and numbers of blocks; it does not know the model, tensors or time.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdlab.engine.output import FinishReason
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.kvcache import Hits, KVManager
from pdlab.trace import Phase


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's part of a step: its tokens `start` to `start + num_tokens - 1` are computed."""

    sequence: Sequence
    start: int
    num_tokens: int
    phase: Phase
    samples: bool
    """Whether this part reaches the newest token, whose logits give the next one."""
    blocks_taken: list[int]
    forks: list[Sequence]
    """Further samples of the request that start from this part's last logits."""
    num_cached_tokens: int
    """Tokens before `start` that the prefix cache spared in this step."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def prompt_positions(self) -> range:
        """Positions whose logits say how probable the next token of the prompt was, if that was
        asked for."""
        wanted = self.sequence.params.prompt_logprobs is not None
        return range(
            self.start, min(self.end, self.sequence.num_prompt_tokens - 1) if wanted else 0
        )

    @property
    def num_logit_rows(self) -> int:
        """Tokens of this part whose logits are computed."""
        return len(self.prompt_positions) + self.samples

    @property
    def drawers(self) -> list[Sequence]:
        """Who draws a next token from this part's last logits: the sequence and its forks."""
        return [self.sequence, *self.forks] if self.samples else []


@dataclass
class ScheduledBatch:
    """What one step computes. Decodes come first, then prompt chunks."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    blocks_freed: list[int] = field(default_factory=list)
    """Blocks that preemption gave back before this step's own were taken."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class Scheduler:
    """Keeps the queues and asks the manager for blocks.

    `running` and `waiting` are both in order of arrival, and everyone in `running` arrived before
    everyone in `waiting`: admission takes the oldest that waits, preemption the youngest that
    runs. So the oldest sequence always gets on, and with it, in the end, all.

    A paused sequence is passed over, and those behind it may overtake. It keeps its blocks and its
    seat only as long as nobody else needs them; when it goes on it has its old place in the order.

    Args:
        watermark: part of the pool that admission leaves free, for those that run to grow.
        swaps: whether a sequence about to be preempted should go to host memory rather than be
            computed again; asked only where host memory has room.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunk_size: int | None = None,
        watermark: float = 0.0,
        swaps: Callable[[Sequence], bool] = lambda sequence: True,
    ):
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_size = min(chunk_size or max_num_batched_tokens, max_num_batched_tokens)
        self.blocks_kept_free = int(watermark * kv.pool.num_blocks)
        self.swaps = swaps
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_seats_taken(self) -> int:
        """Sequences that run, and those that will fork off them."""
        return sum(1 + len(s.forks) for s in self.running)

    def add(self, sequence: Sequence) -> None:
        self._num_arrivals += 1
        for each in (sequence, *sequence.forks):
            each.arrival = self._num_arrivals
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's tokens and take the blocks they need.

        May be called again when the step it planned did not happen: nothing is computed twice.
        """
        batch = ScheduledBatch()
        budget = self.max_num_batched_tokens
        awake = [s for s in self.running if not s.paused]
        decodes = [s for s in awake if s.phase == "decode"]
        prefills = [s for s in awake if s.phase == "prefill"]
        starved = False
        for sequence in decodes + prefills:
            if sequence.state is SequenceState.PREEMPTED or budget == 0:
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget, self.chunk_size)
            if self._make_room(sequence, num_tokens, batch):
                self._plan(sequence, num_tokens, batch)
                budget -= num_tokens
            else:
                starved = True
        if not starved and not batch.preempted:
            self._admit(budget, batch)
        elif self.running and not batch.scheduled:
            # Other engines hold the rest of the blocks. Two that wait for each other never end.
            self._preempt(self._victim(), batch)
        batch.scheduled.sort(key=lambda part: part.phase)  # one that comes back may decode at once
        return batch

    def update(self, batch: ScheduledBatch, sampled: Mapping[str, list[int]]) -> list[int]:
        """Book what a step computed.

        Args:
            sampled: new tokens by sequence id; none for a prompt that goes on.

        Returns:
            the blocks that fell out of a window and are free now.
        """
        freed = []
        for part in batch.scheduled:
            sequence = part.sequence
            sequence.num_computed_tokens = part.end
            sequence.num_cached_tokens = 0
            self.kv.register(sequence)
            freed += self.kv.drop_unseen(sequence)
            if part.forks:
                self._seat(part.forks, behind=sequence)
            for drawer in part.drawers:
                drawer.token_ids += sampled[drawer.sequence_id]
                drawer.state = SequenceState.RUNNING
        return freed

    def _seat(self, forks: list[Sequence], behind: Sequence) -> None:
        """Start the other samples of a prompt that is now computed, sharing all its blocks."""
        for fork in forks:
            self.kv.fork(behind, fork)
        seat = self.running.index(behind) + 1
        self.running[seat:seat] = forks
        behind.forks = []

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[int]:
        """End a sequence, wherever it is; returns the blocks that this freed."""
        if sequence.state is SequenceState.FINISHED:
            return []
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        return self.kv.release(sequence)

    def _admit(self, budget: int, batch: ScheduledBatch) -> None:
        """Start waiting sequences, oldest first, while all their known tokens would fit."""
        while budget > 0 and (sequence := self._next_waiting()):
            hits = self.kv.look_up(sequence)
            if not self._has_room(sequence, hits):
                if not (paused := [s for s in self.running if s.paused]):
                    break
                self._preempt(paused[-1], batch)
                continue
            if sequence.state is SequenceState.WAITING:
                self.kv.count(sequence, hits)
            sequence.num_cached_tokens = self.kv.start(sequence, hits)
            self.waiting.remove(sequence)
            insort_right(self.running, sequence, key=_arrival)
            sequence.state = SequenceState.PREFILLING
            num_tokens = min(sequence.num_uncomputed_tokens, budget, self.chunk_size)
            self._plan(sequence, num_tokens, batch)
            budget -= num_tokens

    def _next_waiting(self) -> Sequence | None:
        return next((s for s in self.waiting if not s.paused), None)

    def _has_room(self, sequence: Sequence, hits: Hits) -> bool:
        """Whether there are seats for a waiting sequence and blocks for all that is known of it."""
        if self.num_seats_taken + 1 + len(sequence.forks) > self.max_num_seqs:
            return False
        kept_free = self.blocks_kept_free if self.running else 0
        needed = self.kv.blocks_to_start(sequence, hits, self.chunk_size)
        return needed + kept_free <= self.kv.pool.num_free

    def _plan(self, sequence: Sequence, num_tokens: int, batch: ScheduledBatch) -> None:
        """Take the blocks for a sequence's next tokens and put them into the batch."""
        samples = num_tokens == sequence.num_uncomputed_tokens
        part = ScheduledSequence(
            sequence,
            start=sequence.num_computed_tokens,
            num_tokens=num_tokens,
            phase=sequence.phase,
            samples=samples,
            blocks_taken=self.kv.grow(sequence, num_tokens),
            forks=list(sequence.forks) if samples else [],
            num_cached_tokens=sequence.num_cached_tokens,
        )
        batch.scheduled.append(part)

    def _make_room(self, sequence: Sequence, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Preempt the youngest, one after the other, until `sequence` can grow.

        False when the youngest is `sequence` itself or is in this batch already. A decode then
        gives its blocks back; a prompt chunk just waits, for those in the batch are older or are
        decodes and will end. Taking blocks from someone in between would let the younger overtake.
        """
        while self.kv.blocks_missing(sequence, num_tokens) > self.kv.pool.num_free:
            victim = self._victim()
            runs = victim is sequence or any(p.sequence is victim for p in batch.scheduled)
            if sequence.phase == "prefill" and runs:
                return False
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        """Who gives blocks back: the youngest of those that are paused, or of all."""
        return next((s for s in reversed(self.running) if s.paused), self.running[-1])

    def _preempt(self, sequence: Sequence, batch: ScheduledBatch) -> None:
        """Take a sequence's blocks away: its K and V go to host memory, or are computed again."""
        swaps = self.kv.can_swap_out(sequence) and self.swaps(sequence)
        self.running.remove(sequence)
        insort_left(self.waiting, sequence, key=_arrival)
        sequence.state = SequenceState.PREEMPTED
        sequence.num_cached_tokens = 0
        batch.blocks_freed += self.kv.swap_out(sequence) if swaps else self.kv.release(sequence)
        batch.preempted.append(sequence)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
