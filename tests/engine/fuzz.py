"""Random workloads on the real engine over the fake-KV runner, with every promise checked.

One seed is one run: a random configuration, requests that arrive between steps, aborts at any
moment, pools so small that they force preemption, and steps that fail half-way. `fuzz(seed)` raises
if any promise breaks. What is expected is worked out here from the definitions, not taken from the
engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdlab import Engine, EngineConfig, SamplingParams, StepRecord
from pdlab.engine.fake import FakeRunner, expected_tokens
from tests.helpers import TINY, random_model

VOCAB = 13
EOS = 5
MODEL_LEN = 40
CONFIG = replace(
    TINY,
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
    max_model_len=MODEL_LEN,
    num_layers=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    num_kv_heads=1,
)


class StepFailed(BaseException):
    """Raised in the middle of a step, as a KeyboardInterrupt would be."""


def fuzz(seed: int) -> dict[str, int]:
    """One run. Returns how often the interesting things happened.

    Raises:
        Exception: a promise is broken (an AssertionError as a rule).
    """
    return Driver(random.Random(seed)).run()


@dataclass
class Told:
    """What the driver knows of a request: what it asked for, and what it was shown."""

    arrival: int
    prompt_ids: list[int]
    expected: list[int]
    reason: str
    shown: list[int] = field(default_factory=list)
    computed: int = 0
    preempted: int = 0
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.shown)


class Driver:
    """One engine and the checks around it."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.config = random_config(rng)
        self.max_model_len = self.config.max_model_len or MODEL_LEN
        self.engine = Engine(random_model(CONFIG), self.config)
        self.engine.runner = FakeRunner(self.config.num_blocks, self.config.block_size, VOCAB)
        self.fails_at = rng.random() * 0.2 if rng.random() < 0.2 else 0.0
        self.live: dict[str, Told] = {}
        self.gone: list[str] = []
        self.events = dict.fromkeys(
            ("steps", "preempted", "aborted", "refused", "failed", "chunks", "finished"), 0
        )
        self.arrivals = 0
        self.free_before = self.config.num_blocks
        self.steps_allowed = 5

    def run(self) -> dict[str, int]:
        actions: list[Callable[[], None]] = [self.submit, self.step, self.step]
        actions += [self.abort] if self.rng.random() < 0.5 else []
        for _ in range(self.rng.randint(5, 40)):
            self.rng.choice(actions)()
        while self.engine.scheduler.has_work:
            self.step()
        assert not self.live
        assert self.engine.pool.num_free == self.config.num_blocks
        assert not self.engine.requests
        assert self.engine.step() is None
        self.engine.close()
        return self.events

    # --- what happens ---------------------------------------------------------------------------

    def submit(self) -> None:
        block_size = self.config.block_size
        near = block_size * self.rng.randint(0, 3) + self.rng.randint(-1, 1)
        length = max(0, near if self.rng.random() < 0.5 else self.rng.randint(0, 20))
        prompt_ids = [self.rng.randrange(VOCAB) for _ in range(length)]
        params = SamplingParams(
            max_tokens=self.rng.randint(1, 12), ignore_eos=self.rng.random() < 0.5
        )
        most = min(params.max_tokens, max(1, self.max_model_len - length))
        blocks = (length + most - 1 + block_size - 1) // block_size
        fits = 1 <= length <= self.max_model_len and blocks <= self.config.num_blocks
        try:
            request_id = self.engine.submit(prompt_ids, params)
        except ValueError:
            assert not fits
            self.events["refused"] += 1
            return
        assert fits
        expected, reason = expected_output(prompt_ids, params, self.max_model_len)
        self.live[request_id] = Told(self.arrivals, prompt_ids, expected, reason)
        self.arrivals += 1
        self.steps_allowed += 5 + 2 * (length + len(expected))

    def abort(self) -> None:
        request_id = self.rng.choice([*self.live, *self.gone, "r-unknown"])
        for _ in range(self.rng.randint(1, 2)):  # twice is once
            self.engine.abort(request_id)
        if request_id in self.live:
            self.events["aborted"] += 1
            self.live[request_id].aborted = True
            self.collect(request_id)
        self.check_blocks()

    def step(self) -> None:
        before = {i: s.state.name for i, s in self.sequences().items()}
        if self.rng.random() < self.fails_at:
            self.fail()
            return
        record = self.engine.step()
        if record is None:
            assert not before
            return
        self.events["steps"] += 1
        self.steps_allowed -= 1
        assert self.steps_allowed >= 0, "requests take too many steps: somebody starves"
        self.check_budget(record)
        self.check_progress(record, before)
        self.check_order(record)
        self.check_free_count(record)
        self.check_blocks()
        for request_id in [i for i in self.live if self.engine.requests[i].finished]:
            self.collect(request_id)

    def fail(self) -> None:
        """A step that is interrupted before or after its work; nothing of it may count."""
        run, work_first = self.engine.runner.run, self.rng.random() < 0.5

        def broken(batch, clock, step):
            if work_first:
                run(batch, clock, step)
            raise StepFailed

        had_work = self.engine.scheduler.has_work
        self.engine.runner.run = broken  # type: ignore[method-assign]
        failed = False
        try:
            self.engine.step()
        except StepFailed:
            failed = True
        self.engine.runner.run = run  # type: ignore[method-assign]
        assert failed == had_work
        self.events["failed"] += failed
        for request_id, sequence in self.sequences().items():
            if not sequence.block_table:  # what this step preempted
                self.live[request_id].computed = 0
        self.check_blocks()

    def collect(self, request_id: str) -> None:
        """The request is over: it must have said exactly what it had to, in its chunks too."""
        told = self.live.pop(request_id)
        self.gone.append(request_id)
        chunks = self.engine.requests[request_id].chunks
        output = self.engine.collect(request_id)
        assert [t for chunk in chunks for t in chunk.token_ids] == output.token_ids == told.shown
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == output.finish_reason
        if told.aborted:
            assert output.finish_reason == "abort"
            assert output.token_ids == told.expected[: len(output.token_ids)]
        else:
            assert output.token_ids == told.expected
            assert output.finish_reason == told.reason
            self.events["finished"] += 1
        if not self.events["failed"]:
            assert output.metrics.num_preemptions == told.preempted
        assert output.metrics.num_output_tokens == len(told.shown)

    # --- what must hold ---------------------------------------------------------------------------

    def sequences(self):
        scheduler = self.engine.scheduler
        return {s.request_id: s for s in [*scheduler.running, *scheduler.waiting]}

    def check_blocks(self) -> None:
        """Every block is free or in one table, and tables are just as long as they must be."""
        running, waiting = self.engine.scheduler.running, self.engine.scheduler.waiting
        self.engine.pool.check(s.block_table for s in running)
        held = [block for s in running for block in s.block_table]
        assert len(held) == len(set(held)), "two sequences hold one block"
        assert self.engine.pool.num_free + len(held) == self.config.num_blocks
        assert not any(s.block_table or s.num_computed_tokens for s in waiting)
        for s in running:
            needed = -(-s.num_computed_tokens // self.config.block_size)
            failed = self.events["failed"] > 0  # then a sequence may hold what it was to write
            assert len(s.block_table) >= needed if failed else len(s.block_table) == needed

    def check_budget(self, record: StepRecord) -> None:
        config = self.config
        assert record.sequences, "there was work and none of it was done"
        assert record.num_tokens <= config.max_num_batched_tokens
        assert len(self.engine.scheduler.running) <= config.max_num_seqs
        for part in record.sequences:
            assert 1 <= part.num_tokens <= (config.chunk_size or record.num_tokens)

    def check_progress(self, record: StepRecord, before: dict[str, str]) -> None:
        """Parts continue where the request stood, sample at its end only, and decodes all run."""
        for request_id in record.preempted:
            self.events["preempted"] += 1
            self.live[request_id].preempted += 1
            self.live[request_id].computed = 0
        ran = {part.request_id: part for part in record.sequences}
        assert len(ran) == len(record.sequences)
        for request_id, state in before.items():
            if state == "RUNNING" and request_id not in record.preempted:
                assert request_id in ran, f"{request_id} was decoding and had to wait"
        passed_over = [i for i, state in before.items() if state == "PREFILLING" and i not in ran]
        admitted = [i for i in ran if before[i] in ("WAITING", "PREEMPTED")]
        assert not (admitted and (record.preempted or passed_over)), "no room, yet one more came"
        for request_id, part in ran.items():
            told = self.live[request_id]
            known = told.prompt_ids + told.shown
            assert part.start == told.computed
            assert part.token_ids == known[part.start : part.end]
            is_decode = told.shown and len(known) - part.start == 1
            assert part.phase == ("decode" if is_decode else "prefill")
            told.computed = part.end
            self.events["chunks"] += part.end < len(known)
            assert (part.sampled is not None) == (part.end == len(known))
            if part.sampled is not None:
                told.shown.append(part.sampled)
                assert told.shown == told.expected[: len(told.shown)]

    def check_order(self, record: StepRecord) -> None:
        """First come, first served: who runs came before who waits."""
        arrivals = [self.live[s].arrival for s in self.sequences()]
        assert arrivals == sorted(arrivals), "somebody overtook"
        assert record.waiting == [s.request_id for s in self.engine.scheduler.waiting]
        phases = [part.phase for part in record.sequences]
        assert phases == sorted(phases), "decodes come first in a batch"

    def check_free_count(self, record: StepRecord) -> None:
        """What the record says was taken and freed is what changed."""
        taken = sum(len(part.blocks_taken) for part in record.sequences)
        freed = len(record.blocks_freed)
        assert record.num_free_blocks == self.engine.pool.num_free
        if not self.events["failed"]:
            assert record.num_free_blocks == self.free_before - taken + freed
        self.free_before = record.num_free_blocks


def random_config(rng: random.Random) -> EngineConfig:
    max_num_seqs, block_size = rng.randint(1, 5), rng.choice([1, 2, 3, 4, 8])
    return EngineConfig(
        block_size=block_size,
        num_blocks=max(2, rng.choice([16, 24, 32, 80]) // block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 10, 100]),
        chunk_size=rng.choice([None, 1, 2, 3, 5, 8]),
        max_model_len=rng.choice([None, None, 6, 11, 16]),
        record_trace=False,
        seed=0,
    )


def expected_output(
    prompt_ids: list[int], params: SamplingParams, max_model_len: int
) -> tuple[list[int], str]:
    """Tokens and finish reason of an undisturbed request."""
    most = min(params.max_tokens, max(1, max_model_len - len(prompt_ids)))
    tokens = expected_tokens(prompt_ids, most, VOCAB)
    if EOS in tokens and not params.ignore_eos:
        return tokens[: tokens.index(EOS) + 1], "stop"
    return tokens, "length"
