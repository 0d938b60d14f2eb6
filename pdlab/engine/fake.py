"""The fake-KV oracle: a runner without a model that checks every read of the cache.

It writes into each KV slot a hash of the tokens up to that position, which is all that K and V
depend on, and before it "attends" it verifies each slot the block table leads to. A block handed
out twice, freed too early, or read past its end shows at once, with the place. Its next token is
also a hash of the prefix, so whatever the scheduler did, the output must be that of
`expected_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from pdlab.engine.batch import prepare
from pdlab.engine.runner import OnLayer, StepOutput
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence
from pdlab.engine.timing import StageClock
from pdlab.kvcache import KVWriter, Release, Wire
from pdlab.sampling import Sampled
from pdlab.trace import DROPPED, BlockMove

EMPTY = 0


class FakeKVError(AssertionError):
    """A slot did not hold what the sequence had written."""


def prefix_hashes(token_ids: list[int]) -> list[int]:
    """Hash of the tokens up to and with each position, never EMPTY."""
    return list(accumulate(token_ids, _extend, initial=1))[1:]


def _extend(previous: int, token_id: int) -> int:
    x = (previous * 6364136223846793005 + token_id + 1442695040888963407) & (2**64 - 1)
    return (x ^ (x >> 29)) or 1


def next_token(prefix_hash: int, vocab_size: int, index: int = 0) -> int:
    """The token after a prefix; the first token of sample `index` is another one."""
    return ((prefix_hash >> 7) + index) % vocab_size


def expected_tokens(
    prompt_ids: list[int], num_tokens: int, vocab_size: int, index: int = 0
) -> list[int]:
    """What a correct engine puts out on a FakeRunner, for sample `index` of a request."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(prefix_hashes(token_ids)[-1], vocab_size, index))
        index = 0
    return token_ids[len(prompt_ids) :]


class _FakeWriter:
    """Fills slots when the hash has come for each layer.

    Raises:
        FakeKVError: the layers do not agree.
    """

    def __init__(self, runner: FakeRunner, block_table: list[int]):
        self.runner = runner
        self.block_table = block_table
        self._seen: dict[int, set[int]] = {}
        self._hashes: dict[int, int] = {}

    def write(self, layers: range, tokens: range, payload: Tensor) -> None:
        data = payload.numpy().tobytes()
        each = iter(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))
        for layer in layers:
            for position in tokens:
                value = next(each)
                if self._hashes.setdefault(position, value) != value:
                    raise FakeKVError(f"position {position} differs in layer {layer}")
                seen = self._seen.setdefault(position, set())
                seen.add(layer)
                if len(seen) == self.runner.num_layers:
                    self.runner.slots[self.runner._slot(self.block_table, position)] = value


class FakeRunner:
    """Executes batches on slots that hold hashes.

    Args:
        num_swap_blocks: blocks of pretended host memory.
        window, sinks: which positions a query must find; what is behind may be gone.
        num_layers: that K and V travel in; all must come before a slot holds its hash.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        num_swap_blocks: int = 0,
        window: int | None = None,
        sinks: int = 0,
        num_layers: int = 1,
    ):
        self.block_size = block_size
        self.num_layers = num_layers
        self.vocab_size = vocab_size
        self.window = window
        self.sinks = sinks
        self.on_layer: OnLayer | None = None
        self.slots = [EMPTY] * (num_blocks * block_size)
        self.host_slots = [EMPTY] * (num_swap_blocks * block_size)

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        """Copy blocks."""
        for order in orders:
            if isinstance(order, Release):
                continue
            source = self.host_slots if order.kind == "swap_in" else self.slots
            target = self.host_slots if order.kind == "swap_out" else self.slots
            target[self._span(order.target)] = source[self._span(order.source)]

    def _span(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def commit(self) -> None:
        """Nothing is left to do."""

    def read_kv(self, block_table: list[int], layers: range, tokens: range, wire: Wire) -> Tensor:
        """The hashes in the slots of these tokens, once for each layer."""
        hashes = [self.slots[self._slot(block_table, position)] for position in tokens]
        raw = b"".join(each.to_bytes(8, "little") for each in hashes) * len(layers)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def kv_writer(self, block_table: list[int], wire: Wire) -> KVWriter:
        return _FakeWriter(self, block_table)

    def _slot(self, block_table: list[int], position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return block_table[block] * self.block_size + offset

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        """Write this batch's slots, check all that its sequences may read, and draw tokens.

        Raises:
            FakeKVError: a slot holds something else than its sequence's prefix.
        """
        inputs = prepare(batch, self.block_size)
        output = StepOutput({})
        rows = enumerate(inputs.slot_mapping)
        texts = [p.sequence.token_ids[: p.start] + p.token_ids for p in batch.scheduled]
        hashes = [prefix_hashes(token_ids) for token_ids in texts]
        for part, token_ids, prefix in zip(batch.scheduled, texts, hashes, strict=True):
            for position in range(part.start, part.end):
                row, slot = next(rows)
                if inputs.positions[row] != position:
                    raise FakeKVError(f"row {row} has position {inputs.positions[row]}")
                if inputs.token_ids[row] != token_ids[position]:
                    raise FakeKVError(f"row {row} has token {inputs.token_ids[row]}")
                self.slots[slot] = prefix[position]
        if self.on_layer:
            for layer in range(self.num_layers):
                self.on_layer(batch, layer)
        for i, (part, prefix) in enumerate(zip(batch.scheduled, hashes, strict=True)):
            self._check(part, inputs.attention.block_tables[i], prefix)
            if inputs.attention.context_lens[i] != part.end:
                raise FakeKVError(f"context of {inputs.attention.context_lens[i]} at {part.end}")
            for index, drawer in enumerate(part.drawers):
                output.sampled[drawer.sequence_id] = self._draw(part, prefix, index)
        return output

    def _draw(self, part: ScheduledSequence, prefix: list[int], index: int) -> list[Sampled]:
        """The tokens after a part: those of its draft that are right, and one more."""
        drawn: list[Sampled] = []
        behind = prefix[len(prefix) - 1 - len(part.draft) :]
        for value, guess in zip(behind, [*part.draft.token_ids, None], strict=True):
            drawn.append(Sampled(next_token(value, self.vocab_size, index), 1.0, []))
            if drawn[-1].token_id != guess:
                break
        return drawn

    def _check(self, part: ScheduledSequence, block_table: list[int], prefix: list[int]) -> None:
        """Every visible position's slot holds the hash of the prefix that ends there."""
        oldest = 0 if self.window is None else part.start - self.window + 1
        for position, expected in enumerate(prefix):
            if self.sinks <= position < oldest:
                continue
            block, offset = divmod(position, self.block_size)
            where = f"{part.sequence.sequence_id}: position {position} in block {block}"
            if block_table[block] == DROPPED:
                raise FakeKVError(f"{where} was dropped")
            if self.slots[block_table[block] * self.block_size + offset] != expected:
                raise FakeKVError(where)
