"""Who runs in the next step, and for how many tokens.

Two questions, two knobs. The batching mode says what a step may hold: decodes, prompts or both (Yu
et al. 2022, Orca: iteration-level scheduling; Agrawal et al. 2024, Sarathi-Serve: prompt chunks
beside decodes). The policy says who of those that wait is admitted next. This file knows sequences
and numbers of blocks; it does not know the model or tensors, and the time only as a number that
policies may ask for.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Callable
from dataclasses import dataclass, field

from pdlab.engine.config import EngineConfig
from pdlab.engine.output import FinishReason
from pdlab.engine.policies import Policy, PolicyError, QueueView, as_policy
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.engine.waiting import WaitingQueue
from pdlab.kvcache import Hits, KVManager, blocks_for
from pdlab.sampling import NO_DRAFT, Draft
from pdlab.trace import Phase

NO_POSITIONS = range(0)


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence's part of a step: its tokens `start` to `start + num_tokens - 1` are computed.

    The last of them may be a draft: tokens that the sequence does not have yet, and will have as
    far as the step confirms them.
    """

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
    draft: Draft = NO_DRAFT

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def kept_end(self) -> int:
        """`end` without the draft tokens that did not stand; once the sequence has its new tokens,
        the last of which is not computed."""
        if not self.draft.token_ids:
            return self.start + self.num_tokens
        return max(self.start + 1, self.sequence.num_tokens - 1)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to be computed; to be asked before the sequence has its new ones."""
        return self.sequence.token_ids[self.start : self.end] + self.draft.token_ids

    @property
    def prompt_positions(self) -> range:
        """Positions whose logits say how probable the next token of the prompt was, if that was
        asked for."""
        if self.sequence.params.prompt_logprobs is None:
            return NO_POSITIONS
        return range(self.start, min(self.end, self.sequence.num_prompt_tokens - 1))

    @property
    def num_logit_rows(self) -> int:
        """Tokens of this part whose logits are computed."""
        return len(self.prompt_positions) + self.samples + len(self.draft.token_ids)

    @property
    def drawers(self) -> list[Sequence]:
        """Who draws a next token from this part's last logits: the sequence and its forks."""
        return [self.sequence, *self.forks] if self.samples else []


@dataclass
class ScheduledBatch:
    """What one step computes. Decodes come first, then prompt chunks."""

    budget: int
    """Tokens that may still be added."""
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    blocks_freed: list[int] = field(default_factory=list)
    """Blocks that preemption gave back before this step's own were taken."""
    starved: bool = False
    """Whether somebody who runs found no blocks to go on."""
    shut: bool = False
    """Whether admission ended because there was no room, or nobody to admit."""
    unranked: dict[Sequence, PolicyError] = field(default_factory=dict)
    """Those that wait and for whom the policy has no rank. They would wait for ever: end them."""
    made_wait: bool = False
    """Whether the phase that goes first took the step and the other one has work."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def drawers(self) -> list[Sequence]:
        """All who draw a next token."""
        return [drawer for part in self.scheduled for drawer in part.drawers]


class Scheduler:
    """Keeps the queues and asks the manager for blocks.

    Batching modes:
        static         those that wait when nothing runs are the batch; nobody joins until all of it
                       has finished (or is paused). Prompts first, then decodes.
        prefill_first  a step holds prompts or decodes; prompts as long as there are any.
        decode_first   a step holds prompts or decodes; decodes as long as there are any.
                       (In these three, one that comes back after a preemption and has only its
                       newest token to compute decodes in a step of prompts.)
        mixed          a step holds all decodes, and chunks of prompts up to the token budget.

    No phase starves: in the two modes with an order, the first gets at most `max_phase_steps` steps
    in a row while the other waits; in mixed steps decodes go first, and those who have a seat
    number less than the budget has tokens, so a prompt that has one gets on.

    `running` is in order of turn: of first admission. Preemption takes the last of them, and they
    come back before anybody new and in their old order. So the first always gets on, and with it,
    in the end, all. The order in which new ones are admitted is the policy's; see `WaitingQueue`.

    A paused sequence is passed over, and those behind it may overtake. It keeps its blocks and its
    seat only as long as nobody else needs them; when it goes on it has its old place in the order.

    Args:
        config: the knobs: batching, policy, max_overtakes, max_phase_steps, max_num_seqs,
            max_num_batched_tokens, chunk_size and watermark, the part of the pool that admission
            leaves free, for those that run to grow.
        swaps: whether a sequence about to be preempted should go to host memory rather than be
            computed again; asked only where host memory has room.
    """

    def __init__(
        self,
        kv: KVManager,
        config: EngineConfig,
        swaps: Callable[[Sequence], bool] = lambda sequence: True,
    ):
        self.kv = kv
        self.batching = config.batching
        self.policy: Policy = as_policy(config.policy)
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_phase_steps = config.max_phase_steps
        self.chunk_size = config.largest_chunk
        self.max_model_len = config.max_model_len
        self.blocks_kept_free = int(config.watermark * kv.pool.num_blocks)
        self.swaps = swaps
        self.waiting = WaitingQueue(self.policy, config.max_overtakes)
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        """Computed for another engine, which has not fetched K and V yet."""
        self.reserved: list[Sequence] = []
        """Computed by another engine, from which K and V have not come yet."""
        self.claimed_s: float | None = None
        """When the first came that waits for `reserve`: no later one of the new is admitted."""
        self._num_arrivals = 0
        self._num_turns = 0
        self._num_phase_steps = 0
        """Steps in a row that made the other phase wait."""
        self._to_join: set[Sequence] = set()
        """Who may still join the static batch."""
        self._view: QueueView | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_seats_taken(self) -> int:
        """Sequences that run, those that will fork off them, and those that only hold blocks."""
        seated = len(self.running) + len(self.held) + len(self.reserved)
        return seated + sum([len(s.forks) for s in self.running])

    @property
    def holders(self) -> list[Sequence]:
        """All that have device blocks."""
        return [*self.running, *self.held, *self.reserved]

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait, with its forks.

        Raises:
            PolicyError: the policy has no rank for it.
        """
        self._give_arrival(sequence)
        self.waiting.add(sequence, QueueView(sequence.arrival_s, self.kv))

    def schedule(self, now_s: float = 0.0) -> ScheduledBatch:
        """Choose the next step's tokens and take the blocks they need.

        May be called again when the step it planned did not happen: nothing is computed twice.

        Args:
            now_s: the time, on the clock of the sequences' `arrival_s`.
        """
        batch = ScheduledBatch(self.max_num_batched_tokens)
        for phase in self._phases():
            if batch.scheduled and self.batching != "mixed":
                break
            if phase == "decode":
                self._add_decodes(batch)
            else:
                self._add_prompts(batch, now_s)
        if self.running and not batch.scheduled and (batch.starved or batch.preempted):
            # Others hold the rest of the blocks. Two that wait for each other never end.
            self._preempt(self._victim(), batch)
        batch.scheduled.sort(key=lambda part: part.phase)  # one that comes back may decode at once
        batch.made_wait = self._makes_wait(batch)
        batch.unranked = self.waiting.take_unranked()
        return batch

    def rank(self, now_s: float) -> None:
        """Ask the policy about those that wait; for `schedule` at the same time, which else does.

        Here it does no harm to interrupt a policy that takes too long: nothing has changed yet.
        """
        if self.num_seats_taken < self.max_num_seqs:
            self._view = QueueView(now_s, self.kv)
            self.waiting.rank(self._view)

    def _phases(self) -> tuple[Phase, Phase]:
        """What a step takes up first, and second."""
        first: Phase = "decode" if self.batching in ("mixed", "decode_first") else "prefill"
        if self.batching.endswith("_first") and self._num_phase_steps >= self.max_phase_steps:
            first = "prefill" if first == "decode" else "decode"
        return first, "prefill" if first == "decode" else "decode"

    def _add_decodes(self, batch: ScheduledBatch) -> None:
        """One more token for each that decodes; mostly its slot is there, and nothing to decide.

        The budget is enough: it has a token for each seat. One that was preempted has no slot.
        """
        self._to_join.clear()  # a static batch is complete once it decodes
        for sequence in self._awake(SequenceState.RUNNING):
            if self.kv.has_slot(sequence):
                start, cached = sequence.num_computed_tokens, sequence.num_cached_tokens
                part = ScheduledSequence(sequence, start, 1, "decode", True, [], [], cached)
                batch.scheduled.append(part)
                batch.budget -= 1
            else:
                self._go_on(sequence, batch)

    def _add_prompts(self, batch: ScheduledBatch, now_s: float) -> None:
        """Chunks of the prompts that are under way, then new ones."""
        for sequence in self._awake(SequenceState.PREFILLING):
            self._go_on(sequence, batch)
        if not batch.starved and not batch.preempted:
            view, self._view = self._view, None
            self._admit(batch, view if view and view.now_s == now_s else QueueView(now_s, self.kv))

    def _awake(self, state: SequenceState) -> list[Sequence]:
        """Those in a state (PREFILLING or RUNNING) that are not paused."""
        return [s for s in self.running if s.state is state and not s.paused]

    def _go_on(self, sequence: Sequence, batch: ScheduledBatch) -> None:
        """Take a sequence that runs into the batch, if there is budget and room for it."""
        if sequence.state is SequenceState.PREEMPTED or not batch.budget:
            return
        num_tokens = min(sequence.num_uncomputed_tokens, batch.budget, self.chunk_size)
        if self._make_room(sequence, num_tokens, batch):
            self._plan(sequence, num_tokens, batch)
        else:
            batch.starved = True

    def _makes_wait(self, batch: ScheduledBatch) -> bool:
        """Whether the phase that goes first has this step, and the other one has work."""
        states = [part.sequence.state for part in batch.scheduled]
        if self.batching == "prefill_first":
            running = SequenceState.RUNNING
            return len(self._awake(running)) > states.count(running)
        if self.batching == "decode_first" and SequenceState.PREFILLING not in states:
            waits = bool(self._awake(SequenceState.PREFILLING))
            return waits or any(not s.paused for s in self.waiting)
        return False

    # --- drafts -----------------------------------------------------------------------------------

    def may_draft(self, batch: ScheduledBatch) -> tuple[list[ScheduledSequence], list[int]]:
        """Whose draft the batch could take, and how many tokens each.

        A draft gets what nobody else needs: budget that is left, free blocks, and no more tokens
        than the sequence may still have behind the one that this step gives it anyhow.
        """
        parts = [p for p in batch.scheduled if p.phase == "decode" and p.samples]
        share = batch.budget // len(parts) if parts else 0
        return parts, [min(share, self._draft_room(part.sequence)) for part in parts]

    def _draft_room(self, sequence: Sequence) -> int:
        if sequence.holds:
            return 0  # it goes elsewhere with its next token
        left = sequence.params.max_tokens - sequence.num_output_tokens
        if self.max_model_len is not None:
            left = min(left, self.max_model_len - sequence.num_tokens)
        return max(0, min(left - 1, self.kv.draft_room(sequence)))

    def add_draft(self, part: ScheduledSequence, draft: Draft, batch: ScheduledBatch) -> None:
        """Let a part of the batch compute a draft, as far as there are blocks."""
        sequence, size = part.sequence, self.kv.pool.block_size
        slots = (len(sequence.block_table) + self.kv.pool.num_free) * size
        part.draft = draft.cut(slots - part.end)
        part.num_tokens += len(part.draft)
        batch.budget -= len(part.draft)
        part.blocks_taken += self.kv.grow(sequence, part.num_tokens)

    # --- what was computed ------------------------------------------------------------------------

    def update(self, batch: ScheduledBatch) -> list[int]:
        """Book what a step computed; the sequences have their new tokens.

        Returns:
            the blocks that fell out of a window, or held but drafts that did not stand, and are
            free now.
        """
        self._num_phase_steps = self._num_phase_steps + 1 if batch.made_wait else 0
        freed: list[int] = []
        size, drops = self.kv.pool.block_size, self.kv.retention.window is not None
        running = SequenceState.RUNNING
        for part in batch.scheduled:
            sequence, end = part.sequence, part.kept_end
            sequence.num_computed_tokens = end
            sequence.num_cached_tokens = 0
            if end < part.end:
                freed += self.kv.rewind(sequence)
            if end // size > len(sequence.prefixes):
                self.kv.register(sequence)
            if drops:
                freed += self.kv.drop_unseen(sequence)
            if part.samples:
                sequence.state = running
            if part.forks:
                self._seat(part.forks, behind=sequence)
        return freed

    def _seat(self, forks: list[Sequence], behind: Sequence) -> None:
        """Start the other samples of a prompt that is now computed, sharing all its blocks."""
        for fork in forks:
            self.kv.fork(behind, fork)
            fork.state = SequenceState.RUNNING
        seat = self.running.index(behind) + 1
        self.running[seat:seat] = forks
        behind.forks = []

    # --- many steps at once ---------------------------------------------------------------------

    def num_repeats(self, batch: ScheduledBatch, most: int) -> int:
        """How often the batch that was just booked would come again, up to `most` times.

        As long as nobody ends and nobody new comes, a step in which everybody decodes is followed
        by the same one, if nobody who waits can be admitted and there are blocks for all. So it is
        where prompts are halfway, and wait until the phase that goes first has had its steps.
        """
        if not all(part.phase == "decode" for part in batch.scheduled):
            return 0
        there = [s for s in self.running if s.state is SequenceState.RUNNING or not batch.made_wait]
        is_whole = len(batch.scheduled) == len(there)
        if not is_whole or batch.preempted or self.kv.retention.window is not None:
            return 0
        if any(s.paused for s in self.running) or not self._stays_shut(batch):
            return 0
        if batch.made_wait:
            most = min(most, self.max_phase_steps - self._num_phase_steps)
        while most > 0 and not self._has_blocks_for(most, there):
            most //= 2
        return max(0, most)

    def _stays_shut(self, batch: ScheduledBatch) -> bool:
        """Whether nobody who waits can be admitted, however long it waits."""
        if not self.waiting or batch.made_wait or self.batching == "static":
            return True
        is_full = self.num_seats_taken >= self.max_num_seqs
        return batch.shut and (is_full or not self.policy.changes)  # the same one is next, then

    def _has_blocks_for(self, num_steps: int, sequences: list[Sequence]) -> bool:
        """Whether there are blocks for so many decode steps of these."""
        num_free = self.kv.pool.num_free
        most = blocks_for(num_steps, self.kv.pool.block_size) + 1  # one more for a copy
        if len(sequences) * most <= num_free:
            return True
        return sum(self.kv.blocks_missing(s, num_steps) for s in sequences) <= num_free

    def repeat(self, batch: ScheduledBatch, num_steps: int, token_id: int = 0) -> None:
        """Book `num_steps` further steps like `batch`; at most `num_repeats` are possible.

        Args:
            token_id: what each of them samples.
        """
        kv, size, token_ids = self.kv, self.kv.pool.block_size, [token_id] * num_steps
        for part in batch.scheduled:
            sequence = part.sequence
            if not kv.has_slot(sequence, num_steps):
                kv.grow(sequence, num_steps)
            sequence.num_computed_tokens += num_steps
            sequence.token_ids += token_ids
            if sequence.num_computed_tokens // size > len(sequence.prefixes):
                kv.register(sequence)
        if batch.made_wait:
            self._num_phase_steps += num_steps

    # --- from one engine to another -------------------------------------------------------------

    def hold(self, sequence: Sequence) -> None:
        """Run a sequence no further: it keeps its seat and its blocks until it is finished."""
        self.running.remove(sequence)
        self.held.append(sequence)
        sequence.state = SequenceState.HELD

    def reserve(self, sequence: Sequence) -> bool:
        """Give a new sequence a seat, and blocks for all its tokens, which are computed elsewhere.

        False if there is no room, or if somebody waits who was preempted or came earlier: so those
        who wait here and those who come from elsewhere get on, both.
        """
        eldest = self.waiting.eldest
        if eldest and (eldest.turn or eldest.arrival_s < sequence.arrival_s):
            return False
        hits = self.kv.look_up(sequence, num_left=0)
        if not self._has_room(sequence, hits):
            return False
        self._give_arrival(sequence)
        self._give_turn(sequence)
        self.kv.count(sequence, hits)
        num_cached = sequence.num_cached_tokens = self.kv.start(sequence, hits)
        self.kv.grow(sequence, len(sequence.token_ids) - num_cached)
        sequence.state = SequenceState.RESERVED
        self.reserved.append(sequence)
        return True

    def admit(self, sequence: Sequence) -> None:
        """Let a reserved sequence run: K and V of its tokens are there; the caller appends the
        token that was drawn from the last of them."""
        sequence.num_computed_tokens, sequence.num_cached_tokens = len(sequence.token_ids), 0
        self.kv.register(sequence)
        self.reserved.remove(sequence)
        insort_right(self.running, sequence, key=_turn)
        sequence.state = SequenceState.RUNNING

    # --- leaving --------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason) -> list[int]:
        """End a sequence, wherever it is; returns the blocks that this freed."""
        if sequence.state is SequenceState.FINISHED:
            return []
        for queue in (self.running, self.waiting, self.held, self.reserved):
            if sequence in queue:
                queue.remove(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        return self.kv.release(sequence)

    # --- admission ------------------------------------------------------------------------------

    def _admit(self, batch: ScheduledBatch, view: QueueView) -> None:
        """Start those that wait, in the queue's order, while all their known tokens would fit."""
        if all(s.paused for s in self.running):
            self._to_join = set(self.waiting)
        while batch.budget and self._is_open:
            found = self._next_with_room(batch, view)
            if found is None:
                batch.shut = True
                break
            sequence, hits = found
            if sequence.state is SequenceState.WAITING:
                self.kv.count(sequence, hits)
                self._give_turn(sequence)
            sequence.num_cached_tokens = self.kv.start(sequence, hits)
            self.waiting.remove(sequence)
            insort_right(self.running, sequence, key=_turn)
            decodes = sequence.phase == "decode"  # its K and V come back from host memory
            sequence.state = SequenceState.RUNNING if decodes else SequenceState.PREFILLING
            self._to_join.discard(sequence)
            num_tokens = min(sequence.num_uncomputed_tokens, batch.budget, self.chunk_size)
            self._plan(sequence, num_tokens, batch)

    def _next_with_room(
        self, batch: ScheduledBatch, view: QueueView
    ) -> tuple[Sequence, Hits] | None:
        """Who is next, and what the prefix cache has of it; paused ones make room.

        None if there is no room for it, or nobody to admit.
        """
        while True:
            paused = [s for s in self.running if s.paused]
            if self.num_seats_taken >= self.max_num_seqs and not paused:
                return None  # whoever it is: a policy need not be asked
            sequence = self.waiting.next(view, self._candidates)
            if sequence is None:
                return None
            hits = self.kv.look_up(sequence)
            if self._has_room(sequence, hits):
                return sequence, hits
            if not paused:
                return None
            self._preempt(paused[-1], batch)

    @property
    def _candidates(self) -> set[Sequence] | None:
        """Who of those that wait may be admitted; None for all."""
        members = self._to_join if self.batching == "static" else None
        claimed_s = self.claimed_s
        if claimed_s is None:
            return members
        among = self.waiting if members is None else members
        return {s for s in among if s.turn or s.arrival_s <= claimed_s}

    @property
    def _is_open(self) -> bool:
        """Whether somebody may join those who run."""
        return self.batching != "static" or bool(self._to_join)

    def _give_arrival(self, sequence: Sequence) -> None:
        self._num_arrivals += 1
        for each in (sequence, *sequence.forks):
            each.arrival = self._num_arrivals

    def _give_turn(self, sequence: Sequence) -> None:
        self._num_turns += 1
        for each in (sequence, *sequence.forks):
            each.turn = self._num_turns

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
        batch.budget -= num_tokens

    def _make_room(self, sequence: Sequence, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Preempt the youngest, one after the other, until `sequence` can grow.

        False when the youngest is `sequence` itself or is in this batch already. A decode then
        gives its blocks back; a prompt chunk just waits, for those in the batch are older or are
        decodes and will end. Taking blocks from someone in between would let the younger overtake.
        """
        while self.kv.blocks_missing(sequence, num_tokens) > self.kv.pool.num_free:
            victim = self._victim()
            runs = victim is sequence or any(p.sequence is victim for p in batch.scheduled)
            if sequence.state is SequenceState.PREFILLING and runs:
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
        self.waiting.put_back(sequence)
        if self._to_join:
            self._to_join.add(sequence)  # the batch is not complete yet: it joins again
        sequence.state = SequenceState.PREEMPTED
        sequence.num_cached_tokens = 0
        batch.blocks_freed += self.kv.swap_out(sequence) if swaps else self.kv.release(sequence)
        batch.preempted.append(sequence)


def _turn(sequence: Sequence) -> int:
    return sequence.turn
