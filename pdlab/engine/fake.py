"""The fake-KV oracle: a runner without a model that checks every read of the cache.

It writes into each KV slot a hash of the tokens up to that position, which is all that K and V
depend on, and before it "attends" it verifies each slot the block table leads to. A block handed
out twice, freed too early, or read past its end shows at once, with the place. Its next token is
also a hash of the prefix, so whatever the scheduler did, the output must be that of
`expected_tokens`.
"""

from __future__ import annotations

from itertools import accumulate

from pdlab.engine.batch import prepare
from pdlab.engine.runner import StepOutput
from pdlab.engine.sampler import Sampled
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock

EMPTY = 0


class FakeKVError(AssertionError):
    """A slot did not hold what the sequence had written."""


def prefix_hashes(token_ids: list[int]) -> list[int]:
    """Hash of the tokens up to and with each position, never EMPTY."""
    return list(accumulate(token_ids, _extend, initial=1))[1:]


def _extend(previous: int, token_id: int) -> int:
    x = (previous * 6364136223846793005 + token_id + 1442695040888963407) & (2**64 - 1)
    return (x ^ (x >> 29)) or 1


def next_token(prefix_hash: int, vocab_size: int) -> int:
    return (prefix_hash >> 7) % vocab_size


def expected_tokens(prompt_ids: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a correct engine puts out on a FakeRunner."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(prefix_hashes(token_ids)[-1], vocab_size))
    return token_ids[len(prompt_ids) :]


class FakeRunner:
    """Executes batches on slots that hold hashes."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int):
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots = [EMPTY] * (num_blocks * block_size)

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        """Write this batch's slots, check all that its sequences may read, and draw tokens.

        Raises:
            FakeKVError: a slot holds something else than its sequence's prefix.
        """
        inputs = prepare(batch, self.block_size)
        sampled: list[Sampled | None] = []
        rows = enumerate(inputs.slot_mapping)
        hashes = [prefix_hashes(part.sequence.token_ids[: part.end]) for part in batch.scheduled]
        for part, prefix in zip(batch.scheduled, hashes, strict=True):
            for position in range(part.start, part.end):
                row, slot = next(rows)
                if inputs.positions[row] != position:
                    raise FakeKVError(f"row {row} has position {inputs.positions[row]}")
                if inputs.token_ids[row] != part.sequence.token_ids[position]:
                    raise FakeKVError(f"row {row} has token {inputs.token_ids[row]}")
                self.slots[slot] = prefix[position]
        for i, (part, prefix) in enumerate(zip(batch.scheduled, hashes, strict=True)):
            self._check(part.sequence.request_id, inputs.attention.block_tables[i], prefix)
            if inputs.attention.context_lens[i] != part.end:
                raise FakeKVError(f"context of {inputs.attention.context_lens[i]} at {part.end}")
            token = Sampled(next_token(prefix[-1], self.vocab_size), 1.0, [])
            sampled.append(token if part.samples else None)
        return StepOutput(sampled)

    def _check(self, request_id: str, block_table: list[int], prefix: list[int]) -> None:
        """Every position's slot holds the hash of the prefix that ends there."""
        for position, expected in enumerate(prefix):
            block, offset = divmod(position, self.block_size)
            if self.slots[block_table[block] * self.block_size + offset] != expected:
                raise FakeKVError(f"{request_id}: position {position} in block {block}")
