"""Random workloads on the real engine over the fake-KV runner, with every promise checked.

One seed is one run: a random configuration, one engine or two on one KV memory, requests that begin
alike and arrive between steps, aborts at any moment, pools so small that they force preemption or
are smaller than a sequence, and steps that fail half-way. `fuzz(seed)` raises if any promise
breaks. What is expected is worked out here and in `promises.py` from the definitions, not taken
from the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, StepRecord
from pdlab.costmodel import Hardware
from pdlab.engine import Priority
from pdlab.engine.config import BATCHING_MODES
from pdlab.engine.fake import expected_tokens
from pdlab.engine.sequence import Sequence
from tests.engine.guessing import Guess
from tests.engine.promises import (
    Before,
    CheckedRunner,
    Desk,
    Events,
    LastCome,
    Said,
    Told,
    new_events,
)
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


def fuzz(seed: int) -> Events:
    """One run. Returns how often the interesting things happened.

    Raises:
        Exception: a promise is broken (an AssertionError as a rule).
    """
    rng = random.Random(seed)
    with colliding_hashes() if rng.random() < 0.15 else pytest.MonkeyPatch.context():
        return Driver(rng, overlaps=random.Random(~seed).random() < 0.4).run()


@contextmanager
def colliding_hashes() -> Iterator[None]:
    """Hashes of 3 bits: the prefix cache has to tell blocks apart by their tokens."""
    with pytest.MonkeyPatch.context() as patch:
        weak = "pdlab.kvcache.prefix.chain_hash"
        patch.setattr(weak, lambda parent, token_ids: hash((parent, token_ids)) % 8)
        yield


class Driver:
    """Engines on one KV memory, and what happens to them."""

    def __init__(self, rng: random.Random, *, overlaps: bool):
        self.rng = rng
        config = random_config(rng)
        configs = [config] + [other_config(config, rng)] * (rng.random() < 0.25)
        configs = [speculating(each, rng) for each in configs]
        if overlaps and len(configs) == 1:  # two that share memory: see test_overlap
            configs = [replace(configs[0], overlap=True)]
        model, hardware = random_model(CONFIG), random_hardware(rng)
        self.memory = Engine.memory_for(model, config, len(configs))
        self.manager = self.memory.manager
        self.runner = CheckedRunner(self.manager, config, VOCAB, rng)
        self.events = new_events()
        self.desks: list[Desk] = []
        for each in configs:
            engine = Engine(model, each, memory=self.memory, hardware=hardware)
            engine.runner = self.runner
            self.desks.append(Desk(engine, each, self.desks, self.runner, self.events))
        if configs[0].overlap:
            self.desks[0].watch()
            self.runner.rng = random.Random(0)  # the thread's own
        self.stems = [random_tokens(rng, rng.randint(2, 16)) for _ in range(rng.randint(1, 3))]
        self.fails_at = rng.random() * 0.2 if rng.random() < 0.2 else 0.0
        self.arrivals = 0
        self.steps_allowed = 5
        self.blocked = 0

    def run(self) -> Events:
        actions: list[Callable[[], None]] = [self.submit, self.step, self.step]
        actions += [self.abort] if self.rng.random() < 0.5 else []
        actions += [self.pause] if self.rng.random() < 0.3 else []
        for _ in range(self.rng.randint(5, 40)):
            self.rng.choice(actions)()
            if self.rng.random() < 0.01:
                self.desks[0].engine.clear_prefix_cache()
        for told in [told for desk in self.desks for told in desk.live.values()]:
            self.set_paused(told, False)
        while any(desk.engine.scheduler.has_work for desk in self.desks):
            self.step()
        self.check_the_end()
        return self.events

    def check_the_end(self) -> None:
        """Nothing is left, and nothing is lost."""
        pool, host, stats = self.manager.pool, self.manager.host, self.manager.stats
        assert pool.num_free == pool.num_blocks
        assert host.num_free == host.num_blocks
        assert self.manager.num_swapped == 0
        self.events["evicted"] += stats.num_evictions
        if not self.events["failed"] and not self.events["wasted"]:
            assert stats.num_hit_tokens == self.events["hit_tokens"]
            assert stats.num_queries == sum(desk.num_queries for desk in self.desks)
        for desk in self.desks:
            assert not desk.live
            assert not desk.engine.requests
            assert desk.engine.step() is None
            desk.engine.close()
            if drafter := desk.engine.drafter:
                assert not drafter.seen, "the drafter was not told of an end"
                assert drafter.closed
        assert self.memory.num_engines == 0

    # --- what happens ---------------------------------------------------------------------------

    def submit(self) -> None:
        desk, config = self.rng.choice(self.desks), self.desks[0].config
        prompt_ids = self.random_prompt()
        params = SamplingParams(
            max_tokens=(most := self.rng.randint(1, 12)),
            min_tokens=self.rng.choice([0, 0, self.rng.randint(0, most)]),
            ignore_eos=self.rng.random() < 0.5,
            stop_token_ids=self.rng.choice([[], [], random_tokens(self.rng, 2)]),
            n=min(self.desks[0].config.max_num_seqs, self.rng.choice([1, 1, 1, 2, 3]))
            + (self.rng.random() < 0.02),
            prefix_cache=self.rng.random() < 0.85,
        )
        longest = desk.config.max_model_len or MODEL_LEN
        most = min(params.max_tokens, max(1, longest - len(prompt_ids)))
        slots = len(prompt_ids) + most - 1
        sound = 1 <= len(prompt_ids) <= longest and params.n <= desk.config.max_num_seqs
        priority, slo_s = self.rng.randint(-1, 2), self.rng.choice([0, 1e6])
        try:
            request_id = desk.engine.submit(prompt_ids, params, priority=priority, ttft_slo_s=slo_s)
        except ValueError:
            assert not sound or -(-slots // config.block_size) > config.num_blocks
            self.events["refused"] += 1
            return
        assert sound
        assert least_blocks(slots, config) <= config.num_blocks
        self.events["oversized"] += slots > config.num_blocks * config.block_size
        told = Told(self.arrivals, prompt_ids, params, priority=priority, ttft_slo_s=slo_s)
        told.sequences = [s.sequence for s in desk.engine.requests[request_id].samples]
        for index in range(params.n):
            expected, reason = expected_output(prompt_ids, params, longest, index)
            name = f"{request_id}.{index}" if index else request_id
            told.samples[name] = Said(told, index, expected, reason)
            self.steps_allowed += 5 + 2 * (len(prompt_ids) + len(expected))
        desk.live[request_id] = told
        self.arrivals += 1

    def random_prompt(self) -> list[int]:
        """Fresh, or a stem with another end, or an earlier prompt, or that with its answer."""
        size, rng = self.desks[0].config.block_size, self.rng
        near = size * rng.randint(0, 3) + rng.randint(-1, 1)
        length = max(0, near if rng.random() < 0.5 else rng.randint(0, 14))
        kind = rng.random()
        if kind < 0.25:
            return random_tokens(rng, length)
        if kind < 0.55:
            stem = rng.choice(self.stems)
            if rng.random() < 0.4:  # in whole blocks
                return stem[: len(stem) // size * size]
            return stem[: rng.randint(0, len(stem))] + random_tokens(rng, rng.randint(0, 3))
        prompt = rng.choice(self.stems)
        if kind < 0.8:  # a next turn, which may be asked when the answer has only begun
            answer = expected_tokens(prompt, rng.randint(1, 8), VOCAB)
            prompt = prompt + answer + random_tokens(rng, rng.randint(0, 4))
        if rng.random() < 0.3:
            self.stems[rng.randrange(len(self.stems))] = prompt
        return prompt

    def abort(self) -> None:
        desk = self.rng.choice(self.desks)
        waits = [s.request_id for s in desk.engine.scheduler.waiting if s.host_table]
        request_id = self.rng.choice([*desk.live, *waits * 4, *desk.gone, "r-unknown"])
        free, flies = self.manager.pool.num_free, desk.engine.has_flight
        for _ in range(self.rng.randint(1, 2)):  # twice is once
            desk.engine.abort(request_id)
        if request_id in desk.live:
            self.events["aborted"] += 1
            desk.live[request_id].aborted = True
            desk.forget(request_id, flies)
            desk.collect(request_id)
        if not desk.engine.has_flight:
            if flies:  # nobody was left in it
                self.events["failed"] += 1
                desk.engine._moves.clear()  # those that the next record would tell of, too
                desk.resync(desk.before)
            else:
                desk.unrecorded_free += self.manager.pool.num_free - free
        desk.check_blocks()

    def pause(self) -> None:
        """A reader who does not read, or reads again."""
        for told in self.rng.choice(self.desks).live.values():
            if self.rng.random() < 0.4:
                self.set_paused(told, not told.paused)

    def set_paused(self, told: Told, paused: bool) -> None:
        if paused != told.paused:
            self.events["paused"] += paused
            self.steps_allowed += 5 + 2 * (len(told.prompt_ids) + told.params.max_tokens)
        told.paused, told.was_paused = paused, told.was_paused or paused
        for sequence in told.sequences:
            sequence.paused = paused

    def step(self) -> None:
        desk = self.rng.choice(self.desks)
        before = Before(desk)
        if self.rng.random() < self.fails_at:
            self.fail(desk)
            return
        record = self.step_of(desk)
        if record is None:
            self.check_blocked(desk, before)
            return
        self.blocked = 0
        self.events["steps"] += 1
        self.steps_allowed -= 1
        assert self.steps_allowed >= 0, "requests take too many steps: somebody starves"
        if desk.config.overlap:
            desk.check_told(record)
        else:
            desk.check(record, before)

    def step_of(self, desk: Desk) -> StepRecord | None:
        """A step; with overlap one that failed in the thread may come before it."""
        while True:
            try:
                return desk.engine.step()
            except StepFailed:
                assert desk.config.overlap
                self.events["failed"] += 1
                desk.resync(desk.before)

    def check_blocked(self, desk: Desk, before: Before) -> None:
        """Only other engines' blocks may keep an engine from its work, and not for long."""
        if before.states and not desk.all_paused:
            assert len(self.desks) > 1, "there is work and none of it was done"
            self.events["blocked"] += 1
            self.blocked += 1
            assert self.blocked < 50, "the engines block each other"
        desk.resync(before)
        desk.check_blocks()

    def fail(self, desk: Desk) -> None:
        """A step that is interrupted before or after its work; nothing of it may count."""
        before, run, work_first = Before(desk), self.runner.run, self.rng.random() < 0.5

        def broken(batch: Any, clock: Any, step: int) -> None:
            if work_first:
                run(batch, clock, step)
            raise StepFailed

        self.runner.run = broken  # type: ignore[method-assign, assignment]
        if desk.config.overlap:
            self.fail_apart(desk, before)
            self.runner.run = run  # type: ignore[method-assign]
            return
        failed = False
        try:
            desk.engine.step()
        except StepFailed:
            failed = True
        self.runner.run = run  # type: ignore[method-assign]
        assert failed == bool(before.states) or len(self.desks) > 1 or desk.all_paused
        self.events["failed"] += failed
        desk.resync(before)
        desk.check_blocks()

    def fail_apart(self, desk: Desk, before: Before) -> None:
        """The step that the thread begins now is interrupted; the next one tells."""
        try:
            record = desk.engine.step()
        except StepFailed:  # there was none before it
            self.events["failed"] += 1
            desk.resync(desk.before)
        else:
            if record:
                desk.check_told(record)
            else:
                self.check_blocked(desk, before)
        self.memory.settle()


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def random_config(rng: random.Random) -> EngineConfig:
    theme = rng.choice(["any", "any", "swapped windows", "small chunks", "static batches"])
    max_num_seqs, block_size = rng.randint(1, 5), rng.choice([1, 2, 3, 4, 8])
    chunk_size, more = rng.choice([None, 1, 2, 3, 5, 8]), rng.choice([0, 1, 3, 10, 100])
    window = rng.choice([1, 2, 5, 8, 12]) if rng.random() < 0.25 else None
    heavy = rng.choice([0, 0, 0, 3, 8]) if window else 0
    swap_blocks = rng.choice([0, 0, 1, 4, 12, 60])
    preemption = rng.choice(["recompute", "auto", *["swap"] * 2 * bool(swap_blocks)])
    pool = [8, 12, 16] if window else [12, 16, 24, 48]
    if theme == "swapped windows":
        window, heavy, swap_blocks, preemption = rng.randint(2, 8), 0, 60, "swap"
        max_num_seqs, block_size, pool = rng.randint(2, 5), rng.choice([1, 2, 3]), [12, 16, 20]
    elif theme == "small chunks":
        chunk_size, more, max_num_seqs = rng.choice([1, 2, 3]), rng.choice([0, 1, 3]), 4
    batching = rng.choice([*BATCHING_MODES, "mixed", "mixed"])
    policy = rng.choice([*POLICIES, Priority(ageing_s=1e9), LastCome()])
    if theme == "static batches":  # that take several steps to gather
        batching, policy, more, max_num_seqs = "static", LastCome(), rng.choice([0, 2]), 4
    return EngineConfig(
        block_size=block_size,
        num_blocks=max(rng.randint(1, 2), rng.choice(pool) // block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + more,
        chunk_size=chunk_size,
        max_model_len=rng.choice([None, None, None, None, 11, 22]),
        enable_prefix_cache=not heavy and rng.random() < 0.8,
        num_swap_blocks=swap_blocks,
        preemption=preemption,
        watermark=rng.choice([0, 0, 0.01, 0.1, 0.3, 0.5]),
        window=window,
        sink_tokens=rng.choice([0, 0, 1, 3, 4]) if window else 0,
        heavy_tokens=heavy,
        batching=batching,
        policy=policy,
        max_overtakes=rng.choice([0, 1, 2, 100]),
        max_phase_steps=rng.choice([1, 2, 5]),
        record_trace=False,
        seed=0,
    )


POLICIES = ("fcfs", "sjf", "deadline", "longest_prefix")


def other_config(config: EngineConfig, rng: random.Random) -> EngineConfig:
    """For a second engine on the same memory: what does not decide about K and V may differ."""
    other = random_config(rng)
    return replace(
        config,
        chunk_size=other.chunk_size,
        max_num_batched_tokens=config.max_num_seqs + rng.choice([0, 2, 50]),
        watermark=other.watermark,
        enable_prefix_cache=config.enable_prefix_cache and rng.random() < 0.8,
        preemption=rng.choice(["recompute", "auto"]),
        batching=other.batching,
        policy=other.policy,
        max_overtakes=other.max_overtakes,
    )


def speculating(config: EngineConfig, rng: random.Random) -> EngineConfig:
    """As often as not with drafts, which are mostly right, mostly wrong, or both."""
    if config.heavy_tokens or rng.random() < 0.5:
        return config
    right = rng.choice([0.2, 0.8, 0.95, 1.0])
    return replace(config, speculation=Guess(true_tokens, VOCAB, rng, right, rng.choice([1, 3, 9])))


def true_tokens(sequence: Sequence, length: int) -> list[int]:
    return expected_tokens(sequence.token_ids, length, VOCAB)


def random_hardware(rng: random.Random) -> Hardware:
    """With copies so fast, or so slow, or just so fast that `auto` swaps, recomputes, or both."""
    details = {"copy_bytes_s": rng.choice([1.0, 1e5, 1e15])}
    return Hardware("imagined", "cpu", {"fp32": 1e6}, 1e6, 0, "a test", details=details)


def least_blocks(slots: int, config: EngineConfig) -> int:
    """Blocks that a sequence needs at some moment at least, however it is computed."""
    if config.window is None:
        return -(-slots // config.block_size)
    seen = range(max(0, slots - config.window), slots)
    sinks = range(min(slots, config.sink_tokens))
    return len({position // config.block_size for position in [*seen, *sinks]})


def expected_output(
    prompt_ids: list[int], params: SamplingParams, max_model_len: int, index: int
) -> tuple[list[int], str]:
    """Tokens and finish reason of an undisturbed sample."""
    most = min(params.max_tokens, max(1, max_model_len - len(prompt_ids)))
    if not prompt_ids:
        return [], ""
    tokens = expected_tokens(prompt_ids, most, VOCAB, index)
    ends = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    for count, token_id in enumerate(tokens, start=1):
        if token_id in ends and count > params.min_tokens:
            return tokens[:count], "stop"
    return tokens, "length"
