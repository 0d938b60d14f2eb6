"""Who runs in the next step, and for how many tokens.

First come, first served, with a token budget a step (Yu et al. 2022, Orca: iteration-level
scheduling; Agrawal et al. 2024, Sarathi-Serve: prompt chunks beside decodes). This file knows
sequences and block numbers; it does not know the model, tensors or time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.kvcache import BlockPool, blocks_for
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

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


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
    """Keeps the queues and hands out blocks.

    `running` and `waiting` are both in order of arrival, and everyone in `running` arrived before
    everyone in `waiting`: admission takes the oldest that waits, preemption the youngest that
    runs. So the oldest sequence always gets on, and with it, in the end, all.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunk_size: int | None = None,
    ):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_size = chunk_size or max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> ScheduledBatch:
        """Choose the next step's tokens and take the blocks they need.

        May be called again when the step it planned did not happen: nothing is computed twice.
        """
        batch = ScheduledBatch()
        budget = self.max_num_batched_tokens
        decodes = [s for s in self.running if s.phase == "decode"]
        prefills = [s for s in self.running if s.phase == "prefill"]
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
        return batch

    def update(self, batch: ScheduledBatch, sampled: Iterable[int | None]) -> None:
        """Book what a step computed: tokens done, tokens sampled (None where none was)."""
        for part, token_id in zip(batch.scheduled, sampled, strict=True):
            sequence = part.sequence
            sequence.num_computed_tokens = part.end
            if token_id is not None:
                assert part.samples, f"{sequence.request_id} sampled before its last chunk"
                sequence.token_ids.append(token_id)
                sequence.state = SequenceState.RUNNING

    def finish(self, sequence: Sequence, reason: str) -> list[int]:
        """End a sequence, wherever it is; returns the blocks that this freed."""
        if sequence.state is SequenceState.FINISHED:
            return []
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        return self._release(sequence)

    def _admit(self, budget: int, batch: ScheduledBatch) -> None:
        """Start waiting sequences, oldest first, while all their known tokens would fit."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if blocks_for(sequence.num_tokens, self.pool.block_size) > self.pool.num_free:
                break
            self.running.append(self.waiting.popleft())
            sequence.state = SequenceState.PREFILLING
            num_tokens = min(sequence.num_uncomputed_tokens, budget, self.chunk_size)
            self._plan(sequence, num_tokens, batch)
            budget -= num_tokens

    def _plan(self, sequence: Sequence, num_tokens: int, batch: ScheduledBatch) -> None:
        """Take the blocks for a sequence's next tokens and put them into the batch."""
        taken = self.pool.allocate(self._blocks_missing(sequence, num_tokens))
        sequence.block_table += taken
        part = ScheduledSequence(
            sequence,
            start=sequence.num_computed_tokens,
            num_tokens=num_tokens,
            phase=sequence.phase,
            samples=num_tokens == sequence.num_uncomputed_tokens,
            blocks_taken=taken,
        )
        batch.scheduled.append(part)

    def _blocks_missing(self, sequence: Sequence, num_tokens: int) -> int:
        needed = blocks_for(sequence.num_computed_tokens + num_tokens, self.pool.block_size)
        return max(0, needed - len(sequence.block_table))

    def _make_room(self, sequence: Sequence, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Preempt the youngest, one after the other, until `sequence` can grow.

        False when the youngest is `sequence` itself or is in this batch already. A decode then
        gives its blocks back; a prompt chunk just waits, for those in the batch are older or are
        decodes and will end. Taking blocks from someone in between would let the younger overtake.
        """
        while self._blocks_missing(sequence, num_tokens) > self.pool.num_free:
            victim = self.running[-1]
            runs = victim is sequence or any(p.sequence is victim for p in batch.scheduled)
            if sequence.phase == "prefill" and runs:
                return False
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, batch: ScheduledBatch) -> None:
        """Take a sequence's blocks away; its tokens will be computed again (recompute)."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.state = SequenceState.PREEMPTED
        batch.blocks_freed += self._release(sequence)
        batch.preempted.append(sequence)

    def _release(self, sequence: Sequence) -> list[int]:
        freed = self.pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        return freed
