"""What the fuzzer knows of each request, and what must hold after every step."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from pdlab import Engine, EngineConfig, SamplingParams, StepRecord
from pdlab.engine.fake import FakeKVError, FakeRunner, _extend, prefix_hashes
from pdlab.engine.policies import Policy, QueueView
from pdlab.engine.recorder import Spoken
from pdlab.engine.runner import StepOutput
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence
from pdlab.engine.sequence import Sequence
from pdlab.engine.timing import StageClock
from pdlab.kvcache import KVManager, Prefix, Release
from pdlab.trace import DROPPED, BlockMove, SequenceRecord

Events = dict[str, int]


def new_events() -> Events:
    names = (
        "steps preempted swapped_out swapped_in copied hits hit_tokens whole_hits forked evicted"
    )
    names += " dropped oversized blocked aborted refused failed chunks finished paused yielded"
    names += " overtook one_phase kept_waiting drafted accepted rejected ended_early"
    names += " overlapped wasted"
    return dict.fromkeys(names.split(), 0)


WAITING = ("WAITING", "PREEMPTED")


class LastCome(Policy):
    """The newest first: the one policy under which everybody is overtaken."""

    def rank(self, sequence: Sequence, view: QueueView) -> float:
        return -sequence.arrival


class CheckedRunner(FakeRunner):
    """The fake-KV oracle, with a look at the blocks it writes to and at those others may find.

    With heavy hitters it invents the attention that blocks receive. What was dropped then, nobody
    can tell; what is there must be right.
    """

    def __init__(
        self, manager: KVManager, config: EngineConfig, vocab_size: int, rng: random.Random
    ):
        super().__init__(
            config.num_blocks,
            config.block_size,
            vocab_size,
            num_swap_blocks=config.num_swap_blocks,
            window=config.window,
            sinks=config.sink_tokens,
        )
        self.pool = manager.pool
        self.heavy = config.heavy_tokens > 0
        self.rng = rng
        self.num_free = 0
        self.moves: list[BlockMove] = []
        self._content: dict[int, tuple[Prefix, list[int]]] = {}

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        orders = list(orders)
        self.moves += [order for order in orders if isinstance(order, BlockMove)]
        super().carry_out(orders)

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        self.num_free = self.pool.num_free
        for part in batch.scheduled:
            for position in range(part.start, part.end):
                block = part.sequence.block_table[position // self.block_size]
                assert self.pool.ref_count(block) == 1, f"block {block} is shared and written"
                assert not self.pool.is_known(block), f"block {block} is cached and written"
        output = super().run(batch, clock, step)
        if self.heavy:
            for part in batch.scheduled:
                mass = [self.rng.random() for _ in part.sequence.block_table]
                output.block_mass[part.sequence.sequence_id] = mass
        return output

    def _check(self, part: ScheduledSequence, block_table: list[int], prefix: list[int]) -> None:
        super()._check(part, block_table, prefix)  # all that is in the window must be there
        for position, expected in enumerate(prefix):  # also what is out of sight and still there
            block, offset = divmod(position, self.block_size)
            if block_table[block] != DROPPED:
                slot = block_table[block] * self.block_size + offset
                if self.slots[slot] != expected:
                    raise FakeKVError(f"{part.sequence.sequence_id}: position {position}")

    def content(self, prefix: Prefix) -> list[int]:
        """What a block with this prefix must hold."""
        if id(prefix) not in self._content:
            parents = self.content(prefix.parent) if prefix.parent else [1]
            hashes = list(accumulate(prefix.token_ids, _extend, initial=parents[-1]))[1:]
            self._content[id(prefix)] = prefix, hashes
        return self._content[id(prefix)][1]

    def check_known_blocks(self) -> None:
        """Every block that the prefix cache would give away holds what it says."""
        for block, prefix in known_blocks(self.pool).items():
            assert self.slots[self._span(block)] == self.content(prefix), f"block {block} is stale"


def known_blocks(pool) -> dict[int, Prefix]:
    return {block: prefix for prefix, block in pool._known.values()}


@dataclass
class Told:
    """A request: what it asked for, and its samples by sequence id."""

    arrival: int
    prompt_ids: list[int]
    params: SamplingParams
    samples: dict[str, Said] = field(default_factory=dict)
    priority: int = 0
    ttft_slo_s: float | None = None
    turn: int | None = None
    """How many were admitted before it."""
    overtaken: int = 0
    """Later ones admitted before it."""
    forgone: int = 0
    """Later ones admitted before it while it was paused."""
    passed: dict[str, int] = field(default_factory=dict)
    """Steps in a row in which each of its samples, decoding, had to wait."""
    aborted: bool = False
    paused: bool = False
    was_paused: bool = False
    was_in_flight: bool = False
    """Aborted while a step that it may be part of was on its way."""
    sequences: list[Sequence] = field(default_factory=list)

    def let_by(self, other: Told, *, paused: bool) -> None:
        if self.turn is None and self.arrival < other.arrival:
            self.overtaken += not paused
            self.forgone += paused


@dataclass
class Said:
    """A sample: what it has to say, what it said, and how far its K and V are."""

    told: Told
    index: int
    expected: list[int]
    reason: str
    shown: list[int] = field(default_factory=list)
    computed: int = 0
    on_host: bool = False
    preempted: int = 0
    swaps: int = 0
    cached: int | None = None
    found: int = 0
    """Tokens found in the prefix cache by a step that then failed."""

    @property
    def known(self) -> list[int]:
        return self.told.prompt_ids + self.shown


class Before:
    """How things stood before a step."""

    def __init__(self, desk: Desk):
        pool = desk.manager.pool
        self.states = {i: s.state.name for i, s in desk.sequences().items()}
        waiting = desk.engine.scheduler.waiting
        self.on_host = {s.sequence_id: s.num_computed_tokens for s in waiting if s.host_table}
        self.paused = {id(told) for told in desk.live.values() if told.paused}
        self.free = pool.num_free
        self.evictions = pool.num_evictions
        self.held = {b for s in desk.everybody() for b in s.block_table if b != DROPPED}
        self.cached = pool.cached_blocks
        self.known = {desk.runner.content(p)[-1] for p in known_blocks(pool).values()}
        if not desk.engine.has_flight:
            desk.runner.moves.clear()


class Desk:
    """One engine, the requests it was given, and the checks around its steps."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        desks: list[Desk],
        runner: CheckedRunner,
        events: Events,
    ):
        self.engine, self.config, self.desks = engine, config, desks
        self.runner, self.events = runner, events
        assert engine.memory is not None
        self.memory, self.manager = engine.memory, engine.memory.manager
        self.live: dict[str, Told] = {}
        self.gone: list[str] = []
        self.unrecorded_free = 0
        self.num_queries = 0
        self.num_turns = 0
        self.members: set[str] = set()  # of a static batch
        self.has_decoded = False
        self.before = Before(self)
        """How things stood when the step that is checked was planned."""
        self.early: StepRecord | None = None
        """A record made when the step was booked, before the next one was planned."""

    def watch(self) -> None:
        """With overlap: check each step when it has been booked and nothing else happened yet.

        The thread gets its work done only when somebody waits for it: as late as it can be.
        """
        engine, gate = self.engine, threading.Event()
        plan, book = engine._plan, engine._book
        settle = self.memory.settle

        def planned(start_s, apart):
            gate.clear()
            self.before = Before(self)
            return plan(start_s, apart)

        def booked(called_s):
            book(called_s)
            for told in self.live.values():  # which the engine takes for its own business
                for sequence in told.sequences:
                    sequence.paused = told.paused
            self.early = self.record_of(engine._untold[-1])
            self.check(self.early, self.before)

        def settled():
            gate.set()
            settle()

        compute = self.runner.run

        def computed(batch, clock, step):
            assert gate.wait(20)
            return compute(batch, clock, step)

        engine._plan, engine._book, self.memory.settle = planned, booked, settled
        self.runner.run = computed

    def record_of(self, booked) -> StepRecord:
        """As the engine will make it when it has begun the next step."""
        flight = booked.flight
        return self.engine._recorder.record(
            step=flight.step,
            start_s=0,
            wall_s=0,
            stage_s={},
            batch=flight.batch,
            output=booked.output,
            moves=flight.moves,
            spoken={each.sample.sequence.sequence_id: Spoken("", "", None) for each in booked.told},
            stock=booked.stock,
            activations=None,
            wasted=booked.wasted,
            spans=[],
            epoch_s=0,
        )

    def check_told(self, record: StepRecord) -> None:
        """That the next step was planned meanwhile changed nothing; and those who ended did."""
        told = replace(record, start_s=0, wall_s=0, stage_s={}, spans=[])
        assert told == replace(self.early, sequences=told.sequences)
        for part, early in zip(told.sequences, self.early.sequences, strict=True):
            assert part == replace(early, stop_reason=part.stop_reason)
        self.events["overlapped"] += self.engine.has_flight
        self.events["wasted"] += len(record.wasted)
        self.collect_finished()

    def forget(self, request_id: str, flies: bool) -> None:
        """A request is gone that a step in flight may count with."""
        told = self.live[request_id]
        was_admitted = told.turn is None and told.sequences[0].turn
        for name in told.samples:
            self.before.states.pop(name, None)
            self.before.on_host.pop(name, None)
        if flies and was_admitted:
            for other in self.live.values():
                other.let_by(told, paused=True)
        told.was_in_flight = flies

    def sequences(self) -> dict[str, Sequence]:
        scheduler = self.engine.scheduler
        return {s.sequence_id: s for s in [*scheduler.running, *scheduler.waiting]}

    def everybody(self) -> list[Sequence]:
        """Sequences of all engines on this memory that may hold blocks."""
        return [s for desk in self.desks for s in desk.sequences().values()]

    def said(self, sequence_id: str) -> Said:
        return self.live[sequence_id.split(".")[0]].samples[sequence_id]

    def is_here(self, sequence_id: str) -> bool:
        return sequence_id.split(".")[0] in self.live

    def is_paused(self, sequence_id: str) -> bool:
        return id(self.said(sequence_id).told) in self.before.paused

    @property
    def all_paused(self) -> bool:
        return all(told.paused for told in self.live.values())

    def uses_cache(self, sequence_id: str) -> bool:
        wanted = self.said(sequence_id).told.params.prefix_cache
        return self.config.enable_prefix_cache and wanted

    def collect(self, request_id: str) -> None:
        """The request is over: it must have said exactly what it had to, in its chunks too."""
        told = self.live.pop(request_id)
        self.gone.append(request_id)
        chunks = self.engine.requests[request_id].chunks
        output = self.engine.collect(request_id)
        assert [c.index for c in output.completions] == list(range(told.params.n))
        for said, done in zip(told.samples.values(), output.completions, strict=True):
            own = [chunk for chunk in chunks if chunk.index == said.index]
            assert [t for chunk in own for t in chunk.token_ids] == done.token_ids == said.shown
            assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == done.finish_reason
            if told.aborted and done.finish_reason == "abort":
                assert done.token_ids == said.expected[: len(done.token_ids)]
            else:
                assert done.token_ids == said.expected
                assert done.finish_reason == said.reason
            if not told.was_in_flight:
                assert done.metrics.num_preemptions == said.preempted
                assert done.metrics.num_swaps == said.swaps
                assert done.metrics.num_cached_tokens == (said.cached or 0)
            assert done.metrics.num_output_tokens == len(said.shown)
        assert told.aborted or output.finish_reason == next(iter(told.samples.values())).reason
        self.events["finished"] += not told.aborted

    def resync(self, before: Before) -> None:
        """A step that did not happen may have preempted and admitted; nobody got any further."""
        self.before = before
        self.unrecorded_free += self.manager.pool.num_free - before.free
        for sequence_id, sequence in self.sequences().items():
            said, stood = self.said(sequence_id), sequence.num_computed_tokens
            was_running = before.states.get(sequence_id) in ("PREFILLING", "RUNNING")
            is_running = sequence in self.engine.scheduler.running
            if was_running and not is_running:
                said.preempted += 1
                said.on_host = bool(sequence.host_table)
                said.swaps += said.on_host
                said.computed = said.computed if said.on_host else 0
                said.found = 0
            elif is_running and not was_running:
                assert said.computed <= stood < len(said.known)
                said.computed, said.on_host = stood, False
                said.found = sequence.num_cached_tokens
            assert stood == said.computed
        was_waiting = {i for i, state in before.states.items() if state in WAITING}
        running = self.engine.scheduler.running
        self.check_turns([i for s in running if (i := s.sequence_id) in was_waiting], before)

    # --- what must hold ---------------------------------------------------------------------------

    def check(self, record: StepRecord, before: Before) -> None:
        """All that a step that happened has to keep."""
        self.before = before
        here = [i for i in record.preempted if self.is_here(i)]  # others were aborted since
        record = replace(record, preempted=here)
        self.check_budget(record)
        admitted = self.check_progress(record, before)
        self.check_hits(record, before, admitted)
        self.check_remembered(record)
        self.check_watermark(record, admitted)
        self.check_order(record)
        self.check_free_count(record, before)
        self.check_bytes(record)
        self.check_moves(record)
        self.check_blocks()
        self.collect_finished()

    def collect_finished(self) -> None:
        for request_id in [i for i in self.live if self.engine.requests[i].finished]:
            self.collect(request_id)

    def check_blocks(self) -> None:
        """Every reference is in one table, and tables are just as long as they must be."""
        pool, host, size = self.manager.pool, self.manager.host, self.config.block_size
        pool.check(s.block_table for s in self.everybody())
        host.check(s.host_table for s in self.everybody())
        assert self.manager.num_swapped == sum(bool(s.host_table) for s in self.everybody())
        self.runner.check_known_blocks()
        for s in self.engine.scheduler.waiting:
            assert not s.block_table
            assert s.host_table or not s.num_computed_tokens
            assert len(s.host_table) == -(-s.num_computed_tokens // size)
        for s in self.engine.scheduler.running:
            assert not s.host_table
            if not self.uses_cache(s.sequence_id):
                assert not any(pool.is_known(b) for b in s.block_table if b != DROPPED)
            needed = -(-s.num_computed_tokens // size)
            # then a sequence may hold what it was to write
            failed = self.events["failed"] > 0 or self.engine.has_flight
            assert len(s.block_table) >= needed if failed else len(s.block_table) == needed
            self.check_window(s)

    def check_window(self, s: Sequence) -> None:
        """What no later query sees is given back, but for what is heavy."""
        size, window = self.config.block_size, self.config.window
        self.check_table(s.block_table, s.num_computed_tokens)
        if window is not None:
            self.events["dropped"] += DROPPED in s.block_table
            kept = sum(b != DROPPED for b in s.block_table[: -(-s.num_computed_tokens // size)])
            heavy = -(-self.config.heavy_tokens // size)
            assert kept <= (window - 2) // size + 2 + -(-self.config.sink_tokens // size) + heavy

    def check_table(self, block_table: list[int], next_position: int) -> None:
        """Blocks that the query at `next_position`, or a later one, may see, and no others."""
        size, window = self.config.block_size, self.config.window
        for i, block in enumerate(block_table):
            seen = window is None or i * size < self.config.sink_tokens
            seen |= (i + 1) * size - 1 >= next_position - (window or 0) + 1
            assert block != DROPPED or not seen
            assert block == DROPPED or seen or self.runner.heavy, f"block {i} is kept for nothing"

    def check_budget(self, record: StepRecord) -> None:
        config, running = self.config, self.engine.scheduler.running
        assert record.sequences, "there was work and none of it was done"
        assert record.num_tokens <= config.max_num_batched_tokens
        assert sum(1 + len(s.forks) for s in running) <= config.max_num_seqs
        for part in record.sequences:
            if part.forked_from is None:
                drafted = len(part.draft.token_ids) if part.draft else 0
                assert 1 <= part.num_tokens - drafted <= (config.chunk_size or record.num_tokens)

    def check_progress(self, record: StepRecord, before: Before) -> list[SequenceRecord]:
        """Parts continue where the sequence stood, sample at its end only, and decodes all run.

        Returns the parts of those that were admitted.
        """
        assert len(set(record.preempted)) == len(record.preempted)
        for sequence_id in record.preempted:
            self.note_preemption(sequence_id, record, before)
        ran = {part.sequence_id: part for part in record.sequences}
        assert len(ran) == len(record.sequences)
        states = before.states
        assert not any(self.is_paused(i) for i in ran), "somebody ran who was paused"
        awake = {i: state for i, state in states.items() if not self.is_paused(i)}
        self.check_phases(record, awake, ran)
        passed_over = [i for i, state in awake.items() if state == "PREFILLING" and i not in ran]
        own = [part for part in record.sequences if part.forked_from is None]
        admitted = [p for p in own if states[p.sequence_id] in WAITING]
        self.check_turns([part.sequence_id for part in admitted], before)
        disturbed = [i for i in record.preempted if not self.is_paused(i)]
        assert not (admitted and (disturbed or passed_over)), "no room, yet one more came"
        still = [s for s in self.engine.scheduler.running if self.is_paused(s.sequence_id)]
        assert not (disturbed and still), "somebody who ran gave way to a paused one"
        self.events["yielded"] += len(record.preempted) - len(disturbed)
        for part in own:
            self.note_part(part, part in admitted)
        for part in record.sequences:
            if part.forked_from is not None:
                self.note_fork(part, ran[part.forked_from])
        return admitted

    def check_phases(
        self, record: StepRecord, awake: dict[str, str], ran: dict[str, SequenceRecord]
    ) -> None:
        """Mixed steps keep no decode waiting; the others hold one phase, and none waits for long.

        One that was not decoding before counts as a prompt, even if only its newest token is left.
        """
        decoding = [i for i, s in awake.items() if s == "RUNNING" and i not in record.preempted]
        prompts = [i for i, part in ran.items() if part.num_tokens and awake[i] != "RUNNING"]
        kept_waiting = [i for i in decoding if i not in ran]
        if self.config.batching == "mixed":
            assert not kept_waiting, f"{kept_waiting} were decoding and had to wait"
            return
        assert not (prompts and set(decoding) & set(ran)), "a step of two phases"
        self.events["one_phase"] += 1
        self.has_decoded |= bool(set(decoding) & set(ran))
        for name in self.sequences():
            passed = self.said(name).told.passed
            passed[name] = passed.get(name, 0) + 1 if name in kept_waiting else 0
            self.events["kept_waiting"] += passed[name] > 0
            if self.config.batching == "prefill_first":
                assert passed[name] <= self.config.max_phase_steps, f"{name} starves"

    def check_turns(self, admitted: list[str], before: Before) -> None:
        """Each who was admitted was the next: by turn, by policy, or overtaken too often."""
        states = before.states
        runs = [i for i, state in states.items() if state not in WAITING]
        if all(self.is_paused(i) for i in runs):
            self.members, self.has_decoded = set(states) - set(runs), False
        waiting = [i for i, state in states.items() if state in WAITING]
        if self.config.batching == "static":
            assert not (admitted and self.has_decoded), "somebody joined a static batch"
            waiting = [
                i for i in waiting if i in self.members or self.said(i).told.turn is not None
            ]
        for name in sorted(admitted, key=self.turn):
            told = self.said(name).told
            awake = [self.said(i).told for i in waiting if not self.is_paused(i)]
            back = [t.turn for t in awake if t.turn is not None]
            if back:
                assert told.turn == min(back)
            else:
                self.check_choice(told, awake)
                told.turn, self.num_turns = self.num_turns, self.num_turns + 1
                for i in states.keys() - {name}:
                    self.said(i).told.let_by(told, paused=self.is_paused(i) or i not in waiting)
            waiting.remove(name)  # a latecomer is not in it

    def turn(self, sequence_id: str) -> float:
        """Of those who had one; the new come behind them."""
        turn = self.said(sequence_id).told.turn
        return float("inf") if turn is None else turn

    def check_choice(self, told: Told, awake: list[Told]) -> None:
        """A new one is the policy's choice, unless the oldest was overtaken too often."""
        oldest, most = min(awake, key=lambda t: t.arrival), self.config.max_overtakes
        if oldest.overtaken >= most:
            assert told is oldest, "somebody is overtaken without end"
        elif told is not oldest or oldest.overtaken + oldest.forgone < most:
            ranks = [self.rank(t) for t in awake]
            assert None in ranks or self.rank(told) == min(ranks), "not the policy's choice"
        self.events["overtook"] += told is not oldest

    def rank(self, told: Told) -> tuple[float, int] | None:
        """Who of the new is next, the lowest first; None where the policy asks the cache."""
        policy = str(self.config.policy).split("(")[0].lower()
        own = {
            "fcfs": 0.0,
            "sjf": len(told.prompt_ids),
            "priority": told.priority,
            "deadline": told.ttft_slo_s == 0,
            "lastcome": -told.arrival,
        }
        return None if policy == "longest_prefix" else (own[policy], told.arrival)

    def note_preemption(self, sequence_id: str, record: StepRecord, before: Before) -> None:
        said, host = self.said(sequence_id), self.manager.host
        self.events["preempted"] += 1
        said.preempted += 1
        said.found = 0
        said.on_host = sequence_id in record.swapped
        if said.on_host:
            assert self.config.preemption != "recompute"
            said.swaps += 1
            self.events["swapped_out"] += 1
            return
        returned = any(p.sequence_id in before.on_host for p in record.sequences)  # and left room
        must = self.config.preemption == "swap" and self.config.window is None and not returned
        if must and said.computed:
            blocks = -(-said.computed // self.config.block_size)
            full = self.manager.num_swapped == self.manager.max_swapped
            assert full or blocks > host.num_free, f"{sequence_id} could have been swapped out"
        said.computed = 0

    def note_part(self, part: SequenceRecord, admitted: bool) -> None:
        said = self.said(part.sequence_id)
        known = said.known
        if not admitted:
            assert part.start == said.computed
            assert part.num_cached_tokens == said.found
        elif said.on_host and part.num_cached_tokens == 0:
            assert part.start == said.computed
            self.events["swapped_in"] += 1
        else:
            assert part.start == part.num_cached_tokens >= said.computed
            uses = self.uses_cache(part.sequence_id)
            assert uses or part.num_cached_tokens == 0
        if said.cached is None:
            self.num_queries += self.uses_cache(part.sequence_id)
            self.events["hit_tokens"] += part.num_cached_tokens
        said.on_host, said.found = False, 0
        said.cached = part.num_cached_tokens if said.cached is None else said.cached
        assert part.token_ids == (known + part.put_out)[part.start : part.end]
        is_decode = said.shown and len(known) - part.start == 1
        assert part.phase == ("decode" if is_decode else "prefill")
        said.computed = part.end
        self.events["chunks"] += part.end < len(known)
        assert (part.sampled is not None) == (part.end >= len(known))
        assert part.end < len(known) or part.end == len(known) + len(part.put_out) - 1
        self.note_draft(said, part)
        self.note_token(said, part)

    def note_fork(self, part: SequenceRecord, parent: SequenceRecord) -> None:
        said = self.said(part.sequence_id)
        assert not said.shown
        assert said.index > 0
        assert said.told is self.said(parent.sequence_id).told
        assert part.token_ids == part.blocks_taken == []
        assert part.start == parent.end == len(said.told.prompt_ids)
        said.computed, said.cached = part.start, parent.num_cached_tokens
        self.events["forked"] += 1
        self.note_token(said, part)

    def note_draft(self, said: Said, part: SequenceRecord) -> None:
        """As much of a draft stands as is right, up to where the text ends."""
        if part.draft is None:
            return
        drafted, accepted = part.draft.token_ids, part.draft.num_accepted
        assert part.phase == "decode"
        assert drafted
        told, longest = said.told, self.engine.config.max_model_len
        most = min(len(told.prompt_ids) + told.params.max_tokens, longest)
        assert len(said.known) + len(drafted) + 1 <= most, "a draft reaches behind the end"
        left = said.expected[len(said.shown) :]
        right = [a == b for a, b in zip(drafted, left, strict=False)]
        right = right.index(False) if False in right else len(right)
        assert accepted == min(right, len(left) - 1)
        assert len(part.draft.probabilities) == 0  # the fake oracle has none
        self.events["drafted"] += len(drafted)
        self.events["accepted"] += accepted
        self.events["rejected"] += len(drafted) - accepted
        self.events["ended_early"] += accepted < right

    def note_token(self, said: Said, part: SequenceRecord) -> None:
        said.shown += part.put_out
        assert said.shown == said.expected[: len(said.shown)]

    def check_hits(
        self, record: StepRecord, before: Before, admitted: list[SequenceRecord]
    ) -> None:
        """Cached tokens are as many as there were, at least one token less than are known."""
        for part in admitted:
            self.events["hits"] += part.num_cached_tokens > 0
            whole = part.num_tokens == 1 and part.sampled is not None
            self.events["whole_hits"] += whole and part.num_cached_tokens > 0
        undisturbed = self.manager.pool.num_evictions == before.evictions
        if len(admitted) != 1 or not undisturbed:
            return
        part, said = admitted[0], self.said(admitted[0].sequence_id)
        uses = self.uses_cache(part.sequence_id)
        tokens = said.known[: len(said.known) - len(part.put_out)]
        size, on_host = self.config.block_size, before.on_host.get(part.sequence_id, 0)
        ends = prefix_hashes(tokens)[size - 1 :: size] if uses else []
        spared = 0
        for count in range(1, len(ends) + 1):
            reached = min(count * size, len(tokens) - 1)
            needed = [i for i in range(count) if self.is_seen(i, max(reached, on_host))]
            if all(ends[i] in before.known for i in needed):
                spared = reached
        assert part.start == max(spared, on_host)

    def is_seen(self, block: int, position: int) -> bool:
        """Whether the query at a position sees any token of a sequence's block."""
        window, size = self.config.window, self.config.block_size
        first, last = block * size, block * size + size - 1
        return window is None or first < self.config.sink_tokens or last > position - window

    def check_remembered(self, record: StepRecord) -> None:
        """Blocks that this step made full can be found."""
        size, content = self.config.block_size, self.runner.content
        known = {content(prefix)[-1] for prefix in known_blocks(self.manager.pool).values()}
        for part in record.sequences:
            if self.uses_cache(part.sequence_id) and part.num_tokens:
                tokens = self.said(part.sequence_id).known[: part.end]
                ends = range((part.start // size + 1) * size, part.end + 1, size)
                assert {prefix_hashes(tokens[:end])[-1] for end in ends} <= known

    def check_watermark(self, record: StepRecord, admitted: list[SequenceRecord]) -> None:
        """Beside others, one is admitted only if so many blocks stay free."""
        kept = int(self.config.watermark * self.config.num_blocks)
        drafts = sum(len(part.blocks_taken) for part in record.sequences if part.draft)
        free = self.runner.num_free + drafts
        assert not admitted or len(record.residents) == 1 or free >= kept

    def check_order(self, record: StepRecord) -> None:
        """Who runs was admitted before who was preempted; behind them are the new, as they came."""
        scheduler = self.engine.scheduler
        new = [s for s in scheduler.waiting if self.is_new(s)]
        back = [s for s in scheduler.waiting if not self.is_new(s)]
        assert list(scheduler.waiting) == back + new
        for queue in (scheduler.running, back, new):
            order = [self.place(s) for s in queue]
            assert order == sorted(order), "a queue is out of order"
        awake = [s for s in [*scheduler.running, *back] if not self.was_paused(s)]
        order = [self.place(s) for s in awake]
        assert order == sorted(order), "somebody came back before their turn"
        assert record.waiting == [s.sequence_id for s in self.engine.scheduler.waiting]
        phases = [part.phase for part in record.sequences]
        assert phases == sorted(phases), "decodes come first in a batch"

    def is_new(self, sequence: Sequence) -> bool:
        """Whether it has never been admitted."""
        return self.said(sequence.sequence_id).told.turn is None

    def was_paused(self, sequence: Sequence) -> bool:
        return self.said(sequence.sequence_id).told.was_paused

    def place(self, sequence: Sequence) -> tuple[int, int]:
        """Of those who were admitted, by turn; of the new, by arrival."""
        said = self.said(sequence.sequence_id)
        return (said.told.arrival if said.told.turn is None else said.told.turn), said.index

    def check_free_count(self, record: StepRecord, before: Before) -> None:
        """What the record says was taken, found, moved and freed is what changed."""
        pool = self.manager.pool
        taken = [b for part in record.sequences for b in part.blocks_taken]
        brought = [move.target for move in record.moves if move.kind == "swap_in"]
        held = {b for r in record.residents for b in r.block_table if b != DROPPED}
        revived = held - before.held - set(taken) - set(brought)
        assert record.num_free_blocks == pool.num_free
        if any(self.is_paused(i) for i in record.preempted):
            self.unrecorded_free = 0  # blocks may have changed hands twice in this step
            return
        assert revived <= set(before.cached), "somebody holds blocks that were not given"
        self.check_evictions(before, [*taken, *brought], held)
        freed = len(record.blocks_freed) - self.unrecorded_free
        if not self.events["failed"] and not record.wasted:
            gone = len(taken) + len(brought) + len(revived)
            assert record.num_free_blocks == before.free - gone + freed
        self.unrecorded_free = 0
        assert record.cached_blocks == pool.cached_blocks
        assert all(pool.is_known(b) and not pool.ref_count(b) for b in record.cached_blocks)

    def check_evictions(self, before: Before, new: list[int], held: set[int]) -> None:
        """Empty blocks go first, then the least recently used."""
        evicted = [block for block in before.cached if block in new]
        assert not evicted or len(new) - len(evicted) >= before.free - len(before.cached)
        now = set(self.manager.pool.cached_blocks)
        for older, younger in pairwise(before.cached):
            spared = older not in held and older in now
            assert not (spared and younger in evicted), "a block was evicted before its turn"

    def check_bytes(self, record: StepRecord) -> None:
        """KV bytes, recounted slot by slot."""
        cache, size = self.memory.cache, self.config.block_size
        slots = [
            (r.block_table[p // size], p % size)
            for r in record.residents
            for p in range(r.num_computed_tokens)
            if r.block_table[p // size] != DROPPED
        ]
        blocks = {b for r in record.residents for b in r.block_table if b != DROPPED}
        slot_bytes = cache.block_bytes // size
        assert record.kv_used_bytes == len(set(slots)) * slot_bytes
        assert record.kv_used_bytes + record.kv_wasted_bytes == len(blocks) * cache.block_bytes
        assert record.kv_shared_bytes == (len(slots) - len(set(slots))) * slot_bytes
        on_host = {b for table in record.swapped.values() for b in table if b != DROPPED}
        assert record.kv_swapped_bytes == len(on_host) * cache.block_bytes
        others = [s for desk in self.desks if desk is not self for s in desk.sequences().values()]
        theirs = {b for s in others for b in s.block_table if b != DROPPED}
        assert record.blocks_of_others == sorted(theirs - blocks)
        starts = {part.sequence_id: part.start for part in record.sequences}
        for resident in record.residents:
            if resident.sequence_id in starts:
                self.check_table(resident.block_table, starts[resident.sequence_id])
            assert resident.num_computed_tokens == self.said(resident.sequence_id).computed

    def check_moves(self, record: StepRecord) -> None:
        """The record's moves are those carried out, each for somebody it concerns."""
        assert record.moves == self.runner.moves
        taken = {part.sequence_id: part.blocks_taken for part in record.sequences}
        waiting = {s.sequence_id: s.host_table for s in self.engine.scheduler.waiting}
        assert record.swapped == {i: table for i, table in waiting.items() if table}
        for move in filter(lambda move: self.is_here(move.sequence_id), record.moves):
            if move.kind == "copy":
                self.events["copied"] += 1
                assert move.target in taken[move.sequence_id]
            elif move.kind == "swap_out":
                assert move.sequence_id in record.preempted
                assert move.target in record.swapped[move.sequence_id]
            else:
                assert move.sequence_id in taken
