"""A small trace made by hand, for edge cases that a real run shows only by chance.

Its numbers are invented but consistent: blocks follow the block size, waste follows the blocks.
Anything that claims to be a measurement is tested on a recorded run instead (see conftest.py).
"""

from __future__ import annotations

import numpy as np

from pdlab.trace.records import (
    Candidate,
    Capture,
    RequestRecord,
    Resident,
    SequenceRecord,
    StepRecord,
)
from pdlab.trace.trace import Trace

KV_BYTES = 46080
WORDS = [
    " the",
    " a",
    "Why",
    " does",
    " prefill",
    " read",
    " every",
    " weight",
    " once",
    " but",
    "\n",
    "世界",
    " <b>",
    "é",
    ".",
    ",",
]


class Recorder:
    """Writes steps one after another and keeps the block tables."""

    def __init__(self, block_size: int = 4, num_blocks: int = 12) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.free = list(range(num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.ids: dict[str, list[int]] = {}
        self.trace = Trace(
            machine={"processor": "handmade", "cores": 2, "date": "2025-01-01T00:00:00Z"},
            model={"name": "handmade", "dtype": "float32", "weight_bytes": 538_000_000},
            engine={
                "block_size": block_size,
                "num_blocks": num_blocks,
                "kv_bytes_per_token": KV_BYTES,
            },
            tokens=dict(enumerate(WORDS)),
        )

    def submit(self, name: str, num_tokens: int) -> None:
        ids = [(7 * i + len(name)) % len(WORDS) for i in range(num_tokens)]
        prompt = "".join(WORDS[i] for i in ids)
        self.ids[name], self.computed[name], self.tables[name] = ids, 0, []
        self.trace.requests[name] = RequestRecord(name, prompt, list(ids), {"max_tokens": 8}, 0.0)

    def step(
        self,
        scheduled: dict[str, int],
        waiting: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
    ) -> StepRecord:
        for name in preempted:
            self.free += self.tables[name]
            self.tables[name], self.computed[name] = [], 0
        sequences = [self._advance(name, n, name in finished) for name, n in scheduled.items()]
        residents = [Resident(n, list(t), self.computed[n]) for n, t in self.tables.items() if t]
        taken = {b for r in residents for b in r.block_table}
        used = sum(r.num_computed_tokens for r in residents)
        freed = [b for name in finished for b in self.tables.pop(name)]
        self.free += freed
        tokens = sum(scheduled.values())
        wall = 0.012 + 0.0021 * tokens
        index = len(self.trace.steps)
        record = StepRecord(
            step=index,
            start_s=sum(s.wall_s for s in self.trace.steps),
            wall_s=wall,
            stage_s={
                "schedule": 0.02 * wall,
                "qkv": 0.2 * wall,
                "attention": 0.18 * wall,
                "mlp": 0.4 * wall,
                "logits": 0.15 * wall,
                "sample": 0.03 * wall,
            },
            sequences=sequences,
            residents=residents,
            waiting=list(waiting),
            preempted=list(preempted),
            blocks_freed=freed,
            num_free_blocks=len(self.free),
            kv_used_bytes=used * KV_BYTES,
            kv_wasted_bytes=(len(taken) * self.block_size - used) * KV_BYTES,
            flops={
                "qkv": 40_000_000 * tokens,
                "attention": 2_000_000 * tokens,
                "output": 20_000_000 * tokens,
                "mlp": 150_000_000 * tokens,
                "logits": 56_000_000 * len(sequences),
            },
            bytes_moved={
                "weights": 538_000_000,
                "kv_read": used * KV_BYTES,
                "kv_write": tokens * KV_BYTES,
            },
        )
        self.trace.steps.append(record)
        return record

    def _advance(self, name: str, num_tokens: int, finished: bool) -> SequenceRecord:
        prompt = len(self.trace.requests[name].prompt_ids)
        start, ids = self.computed[name], self.ids[name]
        end = start + num_tokens
        blocks = [
            self.free.pop(0) for _ in range(-(-end // self.block_size) - len(self.tables[name]))
        ]
        self.tables[name] += blocks
        self.computed[name] = end
        sampled = (end * 5) % len(WORDS) if end == len(ids) else None
        record = SequenceRecord(
            sequence_id=name,
            phase="decode" if start >= prompt and num_tokens == 1 else "prefill",
            start=start,
            token_ids=ids[start:end],
            blocks_taken=blocks,
            sampled=sampled,
            top=_candidates(sampled),
            text="" if sampled is None else WORDS[sampled],
            finish_reason="length" if finished else None,
        )
        if sampled is not None:
            ids.append(sampled)
        return record

    def capture(self, name: str, layer: int, num_heads: int = 3) -> None:
        """Attention weights of the newest step, causal and summing to 1."""
        step = self.trace.steps[-1]
        mine = next(s for s in step.sequences if s.sequence_id == name)
        rng = np.random.default_rng(layer)
        logits = rng.normal(size=(num_heads, mine.num_tokens, mine.end)) * 2
        logits[:, :, 0] += 2
        rows = np.arange(mine.start, mine.end)[:, None]
        logits[:, np.arange(mine.end)[None, :] > rows] = -np.inf
        weights = np.exp(logits)
        weights /= weights.sum(-1, keepdims=True)
        self.trace.captures.append(
            Capture(
                step.step,
                name,
                layer,
                "attention",
                "reference",
                mine.start,
                list(range(num_heads)),
                weights.astype(np.float32),
            )
        )


def _candidates(sampled: int | None) -> list[Candidate]:
    if sampled is None:
        return []
    probabilities = (0.41, 0.22, 0.11, 0.06, 0.03)
    return [Candidate((sampled + 3 * i) % len(WORDS), p) for i, p in enumerate(probabilities)]


def two_requests() -> Trace:
    """`first` is prefilled in two chunks, `second` waits, decodes, is preempted and recomputed."""
    run = Recorder()
    run.submit("first", 11)
    run.submit("second", 6)
    run.step({"first": 8}, waiting=("second",))
    run.capture("first", 0)
    run.capture("first", 1)
    run.step({"first": 3, "second": 5})
    run.capture("first", 0)
    run.capture("first", 1)
    run.step({"first": 1, "second": 1})
    run.capture("first", 0)
    run.capture("first", 1)
    for _ in range(3):
        run.step({"first": 1, "second": 1})
    run.step({"first": 1}, waiting=("second",), preempted=("second",))
    run.step({"first": 1}, waiting=("second",))
    run.step({"first": 1}, waiting=("second",), finished=("first",))
    run.step({"second": 10})
    run.step({"second": 1})
    run.step({"second": 1}, finished=("second",))
    return run.trace
