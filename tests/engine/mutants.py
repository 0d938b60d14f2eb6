"""Bugs planted one at a time, to see whether the fuzzer would notice them.

A mutant is the source of one module with some text replaced. Its functions and methods are put in
the place of the real ones while a test runs; no file changes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

import pytest

SCHEDULER = "pdlab.engine.scheduler"
BATCH = "pdlab.engine.batch"
SEQUENCE = "pdlab.engine.sequence"
POOL = "pdlab.kvcache.block_pool"
REQUEST = "pdlab.engine.request"


@dataclass(frozen=True)
class Mutant:
    """`edits` are (text, replacement), each text standing exactly once in the module."""

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]


def mutant(name: str, module: str, *edits: tuple[str, str]) -> Mutant:
    return Mutant(name, module, edits)


MUTANTS = [
    mutant(
        "one block too few",
        SCHEDULER,
        (
            "needed = blocks_for(sequence.num_computed_tokens + num_tokens,",
            "needed = blocks_for(sequence.num_computed_tokens + num_tokens - 1,",
        ),
    ),
    mutant(
        "a block more than needed",
        SCHEDULER,
        (
            "needed = blocks_for(sequence.num_computed_tokens + num_tokens,",
            "needed = blocks_for(sequence.num_computed_tokens + num_tokens + 1,",
        ),
    ),
    mutant(
        "a block is counted only when it is full",
        POOL,
        ("return -(-num_tokens // block_size)", "return num_tokens // block_size"),
    ),
    mutant(
        "preemption keeps num_computed_tokens",
        SCHEDULER,
        ("        sequence.num_computed_tokens = 0\n", ""),
    ),
    mutant(
        "the block table is not cleared", SCHEDULER, ("        sequence.block_table = []\n", "")
    ),
    mutant(
        "preemption does not free",
        SCHEDULER,
        (
            "batch.blocks_freed += self._release(sequence)",
            "sequence.block_table, sequence.num_computed_tokens = [], 0",
        ),
    ),
    mutant(
        "finish and abort do not free", SCHEDULER, ("return self._release(sequence)", "return []")
    ),
    mutant(
        "a waiting sequence that is aborted stays in the queue",
        SCHEDULER,
        ("            self.waiting.remove(sequence)\n", "            pass\n"),
    ),
    mutant(
        "preemption frees twice",
        SCHEDULER,
        (
            "        self.running.remove(sequence)\n        self.waiting.appendleft",
            "        self.pool.free(sequence.block_table)\n"
            "        self.running.remove(sequence)\n        self.waiting.appendleft",
        ),
    ),
    mutant("the oldest is preempted", SCHEDULER, ("self.running[-1]", "self.running[0]")),
    mutant(
        "the youngest outside the batch is preempted, though a younger one runs",
        SCHEDULER,
        (
            "victim = self.running[-1]",
            "victim = next(s for s in reversed(self.running) if s not in scheduled)",
        ),
    ),
    mutant(
        "the preempted go to the end of the queue",
        SCHEDULER,
        ("self.waiting.appendleft(sequence)", "self.waiting.append(sequence)"),
    ),
    mutant(
        "a sequence preempted in this step runs in it",
        SCHEDULER,
        ("if sequence.state is SequenceState.PREEMPTED or budget == 0:", "if budget == 0:"),
    ),
    mutant(
        "a sample is drawn from every chunk",
        SCHEDULER,
        ("samples=num_tokens == sequence.num_uncomputed_tokens", "samples=True"),
    ),
    mutant(
        "nothing is sampled from a long last chunk",
        SCHEDULER,
        (
            "samples=num_tokens == sequence.num_uncomputed_tokens",
            "samples=num_tokens == sequence.num_uncomputed_tokens and num_tokens < 4",
        ),
    ),
    mutant(
        "running sequences ignore the budget",
        SCHEDULER,
        (
            "min(sequence.num_uncomputed_tokens, budget, self.chunk_size)\n"
            "            if self._make_room",
            "min(sequence.num_uncomputed_tokens, self.chunk_size)\n            if self._make_room",
        ),
    ),
    mutant(
        "admission ignores the budget",
        SCHEDULER,
        (
            "min(sequence.num_uncomputed_tokens, budget, self.chunk_size)\n            self._plan",
            "min(sequence.num_uncomputed_tokens, self.chunk_size)\n            self._plan",
        ),
    ),
    mutant(
        "chunk_size is ignored",
        SCHEDULER,
        ("self.chunk_size = chunk_size or", "self.chunk_size = 10**9 or"),
    ),
    mutant(
        "max_num_seqs is off by one",
        SCHEDULER,
        ("len(self.running) < self.max_num_seqs", "len(self.running) <= self.max_num_seqs"),
    ),
    mutant(
        "the newest is admitted first",
        SCHEDULER,
        ("sequence = self.waiting[0]", "sequence = self.waiting[-1]"),
        ("self.waiting.popleft()", "self.waiting.pop()"),
    ),
    mutant(
        "admission does not ask whether the prompt fits",
        SCHEDULER,
        (
            "if blocks_for(sequence.num_tokens, self.pool.block_size) > self.pool.num_free:",
            "if False:",
        ),
    ),
    mutant(
        "somebody is admitted past a prompt that waits for room",
        SCHEDULER,
        ("if not starved and not batch.preempted:", "if not batch.preempted:"),
    ),
    mutant(
        "prompt chunks come before decodes",
        SCHEDULER,
        ("for sequence in decodes + prefills:", "for sequence in prefills + decodes:"),
    ),
    mutant(
        "the newest token counts as computed",
        SCHEDULER,
        ("sequence.num_computed_tokens = part.end", "sequence.num_computed_tokens = part.end + 1"),
    ),
    mutant(
        "slots are off by one",
        BATCH,
        (
            "table[p // block_size] * block_size + p",
            "table[p // block_size] * block_size + (p + 1)",
        ),
    ),
    mutant(
        "slots of a second chunk start at the block table's beginning",
        BATCH,
        (
            "table[p // block_size] * block_size + p % block_size",
            "table[(p - part.start) // block_size] * block_size + p % block_size",
        ),
    ),
    mutant(
        "positions of a second chunk start at 0",
        BATCH,
        ("positions += range(part.start, part.end)", "positions += range(part.num_tokens)"),
    ),
    mutant(
        "a second chunk feeds the prompt's first tokens again",
        BATCH,
        ("token_ids[part.start : part.end]", "token_ids[: part.num_tokens]"),
    ),
    mutant(
        "the context length is that before the step",
        BATCH,
        ("[part.end for part in", "[part.start for part in"),
    ),
    mutant(
        "the neighbour's block table is attended to",
        BATCH,
        (
            "[part.sequence.block_table for part in batch.scheduled]",
            "[part.sequence.block_table for part in reversed(batch.scheduled)]",
        ),
    ),
    mutant(
        "allocate hands out a block twice",
        POOL,
        ("[self._free.popleft() for _ in range(count)]", "[self._free[0] for _ in range(count)]"),
        ("assert self._ref_counts[block] == 0,", "assert True,"),
    ),
    mutant(
        "a freed block is still counted as held",
        POOL,
        ("                self._free.append(block)\n", ""),
    ),
    mutant(
        "a block is freed while somebody holds it",
        POOL,
        ("            if self._ref_counts[block] == 0:", "            if True:"),
        ("self._ref_counts[block] -= 1", "self._ref_counts[block] -= 0"),
    ),
    mutant(
        "a second token counts as a prompt chunk",
        SEQUENCE,
        ("self.num_output_tokens > 0", "self.num_output_tokens > 1"),
    ),
    mutant(
        "a recomputed sequence forgets what it said",
        SEQUENCE,
        (
            "return len(self.token_ids) - self.num_computed_tokens",
            "return len(self.prompt_ids) - self.num_computed_tokens or 1",
        ),
    ),
    mutant(
        "each token is streamed twice",
        REQUEST,
        (
            "self.chunks.append(Chunk(text, [token_id]))",
            "self.chunks += [Chunk(text, [token_id])] * 2",
        ),
    ),
]


@contextmanager
def planted(bug: Mutant) -> Iterator[None]:
    """Run the `with` block on the mutated code."""
    module = importlib.import_module(bug.module)
    source = inspect.getsource(module)
    for text, replacement in bug.edits:
        assert source.count(text) == 1, f"{bug.name}: {text!r} is not once in {bug.module}"
        source = source.replace(text, replacement)
    changed = ModuleType(bug.module)
    label = f"<{bug.name}>"
    exec(compile(source, label, "exec", dont_inherit=True), changed.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        for name, new in vars(changed).items():
            if getattr(new, "__module__", None) != bug.module:
                continue
            if isinstance(new, FunctionType):
                _replace_everywhere(patch, name, getattr(module, name), new)
            elif isinstance(new, type):
                _graft(patch, getattr(module, name), new, label)
        yield


def _replace_everywhere(patch: pytest.MonkeyPatch, name: str, old: object, new: object) -> None:
    """Wherever `from ... import name` has put the old function."""
    for user in [m for key, m in sys.modules.items() if key.startswith("pdlab")]:
        if getattr(user, name, None) is old:
            patch.setattr(user, name, new)


def _graft(patch: pytest.MonkeyPatch, old: type, new: type, label: str) -> None:
    """Give the old class the new one's methods, so that `isinstance` and enums stay the same."""
    for name, member in vars(new).items():
        function = member.fget if isinstance(member, property) else member
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType) and code.co_filename == label:
            patch.setattr(old, name, member)
