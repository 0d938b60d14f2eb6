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
WAITING = "pdlab.engine.waiting"
POLICIES = "pdlab.engine.policies"
BATCH = "pdlab.engine.batch"
SEQUENCE = "pdlab.engine.sequence"
POOL = "pdlab.kvcache.block_pool"
PREFIX = "pdlab.kvcache.prefix"
MANAGER = "pdlab.kvcache.manager"
ENGINE = "pdlab.engine.engine"
RECORDER = "pdlab.engine.recorder"
ADMISSION = "pdlab.engine.admission"
REQUEST = "pdlab.engine.request"
FLIGHT = "pdlab.engine.flight"

OVERLAPS = 2
"""The first seed of a run with overlap."""


@dataclass(frozen=True)
class Mutant:
    """`edits` are (text, replacement), each text standing exactly once in the module.

    `seed` is that of a run that noticed the bug when others before did not: it is tried first.
    """

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]
    seed: int = 0


def mutant(name: str, module: str, *edits: tuple[str, str], seed: int = 0) -> Mutant:
    return Mutant(name, module, edits, seed)


MUTANTS = [
    # --- bugs of pausing and stopping ---
    mutant(
        "a paused sequence runs on",
        SCHEDULER,
        ("if s.state is state and not s.paused]", "if s.state is state]"),
    ),
    mutant(
        "a paused sequence is admitted again",
        WAITING,
        ("return not sequence.paused and (", "return bool("),
    ),
    mutant(
        "a paused sequence at the head of the queue holds up the others",
        WAITING,
        (
            "            if may(sequence):\n                return sequence\n",
            "            return sequence if may(sequence) else None\n",
        ),
        seed=67,
    ),
    mutant(
        "a paused sequence keeps its blocks from those who wait",
        SCHEDULER,
        (
            "            if not paused:\n                return None\n            self._preempt",
            "            return None\n            self._preempt",
        ),
        seed=67,
    ),
    mutant(
        "a paused sequence loses its place",
        SCHEDULER,
        (
            "waiting.remove(sequence)\n            insort_right(self.running, sequence, key=_turn)",
            "waiting.remove(sequence)\n            self.running.append(sequence)",
        ),
    ),
    mutant(
        "those who run are preempted before those who are paused",
        SCHEDULER,
        (
            "return next((s for s in reversed(self.running) if s.paused), self.running[-1])",
            "return self.running[-1]",
        ),
        seed=1078,
    ),
    mutant(
        "a stop token counts before min_tokens are there",
        SEQUENCE,
        (
            "return is_stop and self.num_output_tokens > self.params.min_tokens",
            "return is_stop",
        ),
    ),
    mutant(
        "a stop token counts one token late",
        SEQUENCE,
        (
            "return is_stop and self.num_output_tokens > self.params.min_tokens",
            "return is_stop and self.num_output_tokens > self.params.min_tokens + 1",
        ),
    ),
    mutant(
        "stop tokens of the request are forgotten",
        REQUEST,
        (
            "stop_ids=frozenset((*own_ends, *params.stop_token_ids)),",
            "stop_ids=frozenset(own_ends),",
        ),
    ),
    mutant(
        "ignore_eos ignores the request's stop tokens too",
        REQUEST,
        (
            "stop_ids=frozenset((*own_ends, *params.stop_token_ids)),",
            "stop_ids=frozenset((*own_ends, *params.stop_token_ids) if own_ends else ()),",
        ),
    ),
    # --- bugs of batching and of policies ---
    mutant(
        "a static batch lets others join",
        SCHEDULER,
        ('members = self._to_join if self.batching == "static" else None', "members = None"),
    ),
    mutant(
        "steps of one phase hold both",
        SCHEDULER,
        ('if batch.scheduled and self.batching != "mixed":', "if False:"),
    ),
    mutant(
        "prefill_first has no end",
        SCHEDULER,
        ("self._num_phase_steps + 1 if batch.made_wait else 0", "0"),
    ),
    mutant(
        "prefill_first gives a phase a step too many",
        SCHEDULER,
        (
            "self._num_phase_steps >= self.max_phase_steps",
            "self._num_phase_steps > self.max_phase_steps",
        ),
    ),
    mutant(
        "a static batch takes more after it has begun to decode",
        SCHEDULER,
        ("        self._to_join.clear()  # a", "        # a"),
    ),
    mutant(
        "the wait has no bound",
        WAITING,
        ("if self._num_admitted + num_passed - num_before >= self.max_overtakes:", "if False:"),
    ),
    mutant(
        "one may be overtaken once more",
        WAITING,
        ("num_before >= self.max_overtakes", "num_before > self.max_overtakes"),
    ),
    mutant(
        "who was ahead counts as having overtaken",
        WAITING,
        (
            "self._new[sequence] = self._num_admitted + len(self._new)",
            "self._new[sequence] = self._num_admitted",
        ),
    ),
    mutant(
        "an abort makes others wait longer",
        WAITING,
        ("self._new[later] -= later.arrival > sequence.arrival", "pass"),
    ),
    mutant(
        "new ones go before those who were preempted",
        WAITING,
        ("for sequence in self._preempted:", "for sequence in self._preempted[len(self._new) :]:"),
    ),
    mutant(
        "an abort counts as having overtaken",
        WAITING,
        ("if sequence.turn:", "if True:"),
        seed=90,
    ),
    mutant(
        "one that is preempted while its static batch gathers must wait for the next",
        SCHEDULER,
        (
            "        if self._to_join:\n            self._to_join.add",
            "        if False:\n            self._to_join.add",
        ),
    ),
    mutant(
        "one that left the queue is next",
        WAITING,
        ("del self._ranked[bisect_left(self._ranked, entry)]", "pass"),
    ),
    mutant(
        "the longest prompt is the shortest job",
        POLICIES,
        (
            "        return sequence.num_prompt_tokens\n\n\nclass Priority",
            "        return -sequence.num_prompt_tokens\n\n\nclass Priority",
        ),
    ),
    mutant(
        "the highest number has priority",
        POLICIES,
        ("return sequence.priority + sequence", "return -sequence.priority + sequence"),
    ),
    mutant(
        "those whose deadline has passed go first",
        POLICIES,
        (
            "return view.now_s > deadline_s, deadline_s",
            "return view.now_s <= deadline_s, deadline_s",
        ),
    ),
    mutant(
        "a shared block is taken for one with a slot",
        POOL,
        ("return self._ref_counts[block] == 1 and", "return"),
    ),
    # --- bugs of speculation ---
    mutant(
        "a wrong draft counts as computed",
        SCHEDULER,
        (
            "return max(self.start + 1, self.sequence.num_tokens - 1)",
            "return self.end",
        ),
    ),
    mutant(
        "the last token that stands is not computed",
        SCHEDULER,
        ("max(self.start + 1, self.sequence.num_tokens - 1)", "self.start + 1"),
    ),
    mutant(
        "the token behind the draft counts as computed",
        SCHEDULER,
        ("max(self.start + 1, self.sequence.num_tokens - 1)", "self.sequence.num_tokens"),
    ),
    mutant(
        "blocks of a wrong draft are kept",
        SCHEDULER,
        ("                freed += self.kv.rewind(sequence)\n", "                pass\n"),
    ),
    mutant(
        "a rewind frees the block that is still filling",
        MANAGER,
        (
            "kept = blocks_for(holder.num_computed_tokens, self.pool.block_size)\n        behind",
            "kept = holder.num_computed_tokens // self.pool.block_size\n        behind",
        ),
    ),
    mutant(
        "a rewind leaves freed blocks in the table",
        MANAGER,
        ("        del holder.block_table[kept:]\n", ""),
    ),
    mutant(
        "a draft may be as long as the text that is left",
        SCHEDULER,
        ("min(left - 1, self.kv.draft_room(sequence))", "min(left, self.kv.draft_room(sequence))"),
    ),
    mutant(
        "a draft knows no end of the model's length",
        SCHEDULER,
        ("min(left, self.max_model_len - sequence.num_tokens)", "left"),
    ),
    mutant(
        "drafts share a budget that each may have",
        SCHEDULER,
        ("batch.budget // len(parts) if parts", "batch.budget if parts"),
    ),
    mutant(
        "a draft asks for blocks that are not there",
        SCHEDULER,
        ("part.draft = draft.cut(slots - part.end)", "part.draft = draft"),
    ),
    mutant(
        "a draft's blocks are not in the record",
        SCHEDULER,
        ("part.blocks_taken += self.kv.grow(", "self.kv.grow("),
    ),
    mutant(
        "the tokens behind an end within a draft are said, too",
        ENGINE,
        ("                        del drawn[i:]\n                        break\n", ""),
    ),
    mutant(
        "a drafter is not told of an end",
        ENGINE,
        ("            self.drafter.forget(sequence)\n", "            pass\n"),
    ),
    mutant(
        "drafts are computed at the place of the newest token",
        BATCH,
        ("positions += range(part.start, part.end)", "positions += [part.start] * part.num_tokens"),
    ),
    # --- the scheduler's bugs ---
    mutant(
        "one block too few",
        MANAGER,
        (
            "end = holder.num_computed_tokens + num_tokens\n",
            "end = holder.num_computed_tokens + num_tokens - 1\n",
        ),
    ),
    mutant(
        "a block more than needed",
        MANAGER,
        (
            "end = holder.num_computed_tokens + num_tokens\n",
            "end = holder.num_computed_tokens + num_tokens + 1\n",
        ),
    ),
    mutant(
        "a block is counted only when it is full",
        POOL,
        ("return -(-num_tokens // block_size)", "return num_tokens // block_size"),
    ),
    mutant(
        "preemption keeps num_computed_tokens",
        MANAGER,
        ("        holder.num_computed_tokens = 0\n", ""),
        ("        holder.num_computed_tokens = hits.num_tokens\n", ""),
    ),
    mutant(
        "the block table is not cleared",
        MANAGER,
        ("holder.block_table, holder.prefixes = [], []", "holder.prefixes = []"),
        ("        assert not holder.block_table\n", ""),
    ),
    mutant(
        "preemption does not free",
        SCHEDULER,
        (
            "else self.kv.release(sequence)",
            "else []\n        sequence.block_table, sequence.num_computed_tokens = [], 0",
        ),
    ),
    mutant(
        "finish and abort do not free",
        SCHEDULER,
        ("return self.kv.release(sequence)", "return []"),
    ),
    mutant(
        "a waiting sequence that is aborted stays in the queue",
        SCHEDULER,
        (
            "            if sequence in queue:\n",
            "            if sequence in queue and queue is not self.waiting:\n",
        ),
    ),
    mutant(
        "preemption frees twice",
        SCHEDULER,
        (
            "        self.running.remove(sequence)\n        self.waiting.put_back",
            "        self.kv.pool.free(sequence.block_table)\n"
            "        self.running.remove(sequence)\n        self.waiting.put_back",
        ),
    ),
    mutant(
        "the oldest is preempted",
        SCHEDULER,
        ("if s.paused), self.running[-1])", "if s.paused), self.running[0])"),
    ),
    mutant(
        "the youngest outside the batch is preempted, though a younger one runs",
        SCHEDULER,
        (
            "victim = self._victim()",
            "victim = next(\n"
            "                s for s in reversed(self.running)\n"
            "                if all(p.sequence is not s for p in batch.scheduled)\n"
            "            )",
        ),
        seed=656,
    ),
    mutant(
        "the preempted go to the end of the queue",
        WAITING,
        (
            "insort_left(self._preempted, sequence, key=lambda s: s.turn)",
            "self._preempted.append(sequence)",
        ),
    ),
    mutant(
        "a sequence preempted in this step runs in it",
        SCHEDULER,
        (
            "if sequence.state is SequenceState.PREEMPTED or not batch.budget:",
            "if not batch.budget:",
        ),
    ),
    mutant(
        "a sample is drawn from every chunk",
        SCHEDULER,
        ("samples = num_tokens == sequence.num_uncomputed_tokens", "samples = True"),
    ),
    mutant(
        "nothing is sampled from a long last chunk",
        SCHEDULER,
        (
            "samples = num_tokens == sequence.num_uncomputed_tokens",
            "samples = num_tokens == sequence.num_uncomputed_tokens and num_tokens < 4",
        ),
    ),
    mutant(
        "running sequences ignore the budget",
        SCHEDULER,
        (
            "min(sequence.num_uncomputed_tokens, batch.budget, self.chunk_size)\n"
            "        if self._make_room",
            "min(sequence.num_uncomputed_tokens, self.chunk_size)\n        if self._make_room",
        ),
    ),
    mutant(
        "admission ignores the budget",
        SCHEDULER,
        (
            "min(sequence.num_uncomputed_tokens, batch.budget, self.chunk_size)\n"
            "            self._plan",
            "min(sequence.num_uncomputed_tokens, self.chunk_size)\n            self._plan",
        ),
    ),
    mutant(
        "chunk_size is ignored",
        SCHEDULER,
        (
            "self.chunk_size = config.largest_chunk",
            "self.chunk_size = config.max_num_batched_tokens",
        ),
    ),
    mutant(
        "max_num_seqs is off by one",
        SCHEDULER,
        (
            "+ len(sequence.forks) > self.max_num_seqs",
            "+ len(sequence.forks) > self.max_num_seqs + 1",
        ),
    ),
    mutant(
        "the newest is admitted first",
        WAITING,
        (
            "sequence for _, _, sequence in self._ranked if",
            "sequence for _, _, sequence in reversed(self._ranked) if",
        ),
    ),
    mutant(
        "admission does not ask whether the prompt fits",
        SCHEDULER,
        ("return needed + kept_free <= self.kv.pool.num_free", "return True"),
    ),
    mutant(
        "somebody is admitted past a prompt that waits for room",
        SCHEDULER,
        ("if not batch.starved and not batch.preempted:", "if not batch.preempted:"),
        seed=6663,
    ),
    mutant(
        "somebody is admitted right after another was preempted",
        SCHEDULER,
        ("if not batch.starved and not batch.preempted:", "if not batch.starved:"),
        seed=75,
    ),
    mutant(
        "prompt chunks come before decodes",
        SCHEDULER,
        ('if self.batching in ("mixed", "decode_first")', 'if self.batching == "decode_first"'),
    ),
    mutant(
        "who comes back to decode stands behind the prompt chunks",
        SCHEDULER,
        ("batch.scheduled.sort(key=lambda part: part.phase)", "pass"),
    ),
    mutant(
        "the newest token counts as computed",
        SCHEDULER,
        ("sequence.num_computed_tokens = end\n", "sequence.num_computed_tokens = end + 1\n"),
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
        SCHEDULER,
        ("token_ids[self.start : self.end]", "token_ids[: self.num_tokens]"),
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
        ("block = self._empty.popleft()", "block = self._empty[0]"),
        ("assert self._ref_counts[block] == 0,", "assert True,"),
    ),
    mutant(
        "a freed block is still counted as held",
        POOL,
        ("                    self._empty.append(block)\n", "                    pass\n"),
    ),
    mutant(
        "a block is freed while somebody holds it",
        POOL,
        (
            "            self._ref_counts[block] -= 1\n"
            "            if self._ref_counts[block] == 0:",
            "            if True:",
        ),
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
            "self.chunks.append(chunk)",
            "self.chunks += [chunk] * 2",
        ),
    ),
    # --- the prefix cache's bugs ---
    mutant(
        "a block's name forgets its parent",
        PREFIX,
        ("mine, theirs = mine.parent, theirs.parent", "break"),
        ("return hash((parent_hash, token_ids))", "return hash(token_ids)"),
    ),
    mutant(
        "blocks of equal hash pass for equal",
        PREFIX,
        ("while mine is not theirs:", "while False:"),
        ("return hash((parent_hash, token_ids))", "return hash((parent_hash, token_ids)) % 8"),
    ),
    mutant(
        "chains are compared in their last block only",
        PREFIX,
        ("mine, theirs = mine.parent, theirs.parent", "break"),
        ("return hash((parent_hash, token_ids))", "return hash((parent_hash, token_ids)) % 8"),
    ),
    mutant(
        "no prefix is ever equal to another",
        PREFIX,
        (
            "while mine is not theirs:",
            "if mine is not theirs:\n            return False\n        while False:",
        ),
    ),
    mutant(
        "an evicted block can still be found",
        POOL,
        (
            "            self.forget(block)\n            self.num_evictions += 1",
            "            self._prefixes[block] = None\n            self.num_evictions += 1",
        ),
    ),
    mutant(
        "a block in use is evicted",
        POOL,
        (
            "            block, _ = self._cached.popitem(last=False)\n",
            "            block, _ = self._cached.popitem(last=False)\n"
            "            block = next(iter(self._known.values()))[1]\n",
        ),
        ("assert self._ref_counts[block] == 0,", "assert True,"),
    ),
    mutant(
        "cached blocks are not free",
        POOL,
        ("return len(self._empty) + len(self._cached)", "return len(self._empty)"),
    ),
    mutant(
        "a cached block that is taken up again stays in the list of free ones",
        POOL,
        (
            "                del self._cached[block]  # KeyError: neither taken nor cached\n",
            "                pass\n",
        ),
    ),
    mutant(
        "sharing does not count",
        POOL,
        ("            self._ref_counts[block] += 1", "            self._ref_counts[block] = 1"),
    ),
    mutant(
        "the second block of the same content takes the name over",
        POOL,
        (
            "known, _ = self._known.setdefault(prefix, (prefix, block))",
            "self._known[prefix] = (prefix, block)\n        known = prefix",
        ),
    ),
    mutant(
        "evictions are not counted",
        POOL,
        ("            self.num_evictions += 1\n", ""),
        seed=219,
    ),
    mutant(
        "the least recently used block is evicted last",
        POOL,
        ("popitem(last=False)", "popitem(last=True)"),
    ),
    mutant(
        "a block that is written again keeps its old name",
        MANAGER,
        ("            self.pool.forget(holder.block_table[index])\n", "            pass\n"),
    ),
    mutant(
        "a prompt that is cached as a whole computes nothing",
        MANAGER,
        (
            "min(len(chain) * self.pool.block_size, len(holder.token_ids) - num_left)",
            "len(chain) * self.pool.block_size",
        ),
    ),
    mutant(
        "the last block of a prompt is never looked up",
        MANAGER,
        ("(len(tokens) if self.rewrites else len(tokens) - num_left)", "(len(tokens) - 1)"),
    ),
    mutant(
        "a request that does not want the prefix cache reads it",
        MANAGER,
        (
            "range(full if holder.uses_prefix_cache else 0)",
            "range(full)",
        ),
    ),
    mutant(
        "a request that does not want the prefix cache leaves its blocks there",
        MANAGER,
        ("if first >= end or not holder.uses_prefix_cache:", "if first >= end:"),
    ),
    mutant(
        "params.prefix_cache is ignored",
        ENGINE,
        (
            "self.config.enable_prefix_cache and params.prefix_cache",
            "self.config.enable_prefix_cache",
        ),
    ),
    mutant(
        "a block that is not full can be found",
        MANAGER,
        (
            "first, end = len(holder.prefixes), holder.num_computed_tokens // size",
            "first, end = len(holder.prefixes), len(holder.token_ids) // size",
        ),
    ),
    mutant(
        "blocks can be found before they are computed",
        MANAGER,
        (
            "        holder.block_table += new\n        return taken",
            "        holder.block_table += new\n        before = holder.num_computed_tokens\n"
            "        holder.num_computed_tokens = before + num_tokens\n"
            "        self.register(holder)\n"
            "        holder.num_computed_tokens = before\n        return taken",
        ),
    ),
    mutant(
        "nothing is ever remembered",
        MANAGER,
        (
            "if first >= end or not holder.uses_prefix_cache:",
            "if True:",
        ),
    ),
    mutant(
        "admission takes cached blocks for free and for found",
        MANAGER,
        (" + copies + sum(self.pool.ref_count(block) == 0 for block in held)", " + copies"),
    ),
    mutant(
        "admission forgets the copy of a block that somebody else holds",
        MANAGER,
        ("max(0, need) + copies +", "max(0, need) +"),
    ),
    mutant(
        "hits are not counted",
        MANAGER,
        ("            self._stats.num_hit_tokens += hits.num_tokens\n", ""),
    ),
    mutant(
        "the record forgets cached tokens",
        RECORDER,
        ("            part.num_cached_tokens,\n", "            0,\n"),
    ),
    # --- forks and copy-on-write ---
    mutant(
        "a fork does not hold the blocks it reads",
        MANAGER,
        (
            "        self.pool.share(block for block in parent.block_table if block != DROPPED)\n",
            "",
        ),
    ),
    mutant(
        "a fork shares the table itself",
        MANAGER,
        ("child.block_table = list(parent.block_table)", "child.block_table = parent.block_table"),
    ),
    mutant(
        "a fork starts one token too early",
        MANAGER,
        (
            "child.num_computed_tokens = parent.num_computed_tokens",
            "child.num_computed_tokens = parent.num_computed_tokens - 1",
        ),
    ),
    mutant(
        "a shared block is written without a copy",
        MANAGER,
        ("self.pool.ref_count(table[index]) > 1", "self.pool.ref_count(table[index]) > 99"),
    ),
    mutant(
        "a copy is not made, only planned",
        MANAGER,
        ('            self._move("copy", shared, own, holder)\n', ""),
    ),
    mutant(
        "a copy goes the wrong way",
        MANAGER,
        ('self._move("copy", shared, own, holder)', 'self._move("copy", own, shared, holder)'),
    ),
    mutant(
        "a copied block keeps its reference",
        MANAGER,
        ("            self._free([shared])\n", ""),
    ),
    mutant(
        "copies are made after the step",
        ENGINE,
        (
            "            self.runner.carry_out(orders)\n        moves",
            "            self._late = orders\n        moves",
        ),
        (
            "            flight.compute()\n",
            "            flight.compute()\n            self.runner.carry_out(self._late)\n",
        ),
    ),
    mutant(
        "only the first sample is drawn",
        SCHEDULER,
        ("return [self.sequence, *self.forks] if", "return [self.sequence] if"),
    ),
    mutant(
        "forks take seats that are not free",
        SCHEDULER,
        (
            "return seated + sum([len(s.forks) for s in self.running])",
            "return seated",
        ),
    ),
    mutant(
        "forks go behind those who came later",
        SCHEDULER,
        ("self.running[seat:seat] = forks", "self.running += forks"),
    ),
    mutant(
        "an abort ends the first sample only",
        ENGINE,
        (
            "            if not sample.finished:\n"
            '                self._end(request, sample, "abort")',
            "            if not sample.finished and sample.index == 0:\n"
            '                self._end(request, sample, "abort")',
        ),
    ),
    # --- swapping ---
    mutant(
        "host blocks leak when a swapped sequence is aborted",
        MANAGER,
        (
            "        if holder.host_table:\n"
            "            self._leave_host(holder)\n"
            "        holder.block_table,",
            "        holder.host_table = []\n        holder.block_table,",
        ),
    ),
    mutant(
        "host blocks leak when a sequence comes back",
        MANAGER,
        (
            "            holder.block_table.append(target)\n        self._leave_host(holder)",
            "            holder.block_table.append(target)\n        holder.host_table = []",
        ),
    ),
    mutant(
        "blocks come back from the host in the wrong order",
        MANAGER,
        (
            "for source in holder.host_table[found:]:",
            "for source in holder.host_table[found:][::-1]:",
        ),
    ),
    mutant(
        "blocks that the cache found come back from the host too",
        MANAGER,
        ("for source in holder.host_table[found:]:", "for source in holder.host_table:"),
    ),
    mutant(
        "after a swap the sequence starts where the cache ends",
        MANAGER,
        (
            "                self._swap_in(holder)\n                return 0",
            "                self._swap_in(holder)\n"
            "                holder.num_computed_tokens = hits.num_tokens\n"
            "                return 0",
        ),
    ),
    mutant(
        "blocks go to the host in the wrong order",
        MANAGER,
        (
            "for source, target in zip(table, host_table, strict=True):",
            "for source, target in zip(table, host_table[::-1], strict=True):",
        ),
    ),
    mutant(
        "the host blocks are copied to when they have been freed",
        MANAGER,
        (
            "        holder.host_table, holder.num_computed_tokens = host_table, computed\n",
            "        self.host.free(b for b in host_table if b != DROPPED)\n"
            "        holder.host_table, holder.num_computed_tokens = host_table, computed\n",
        ),
    ),
    mutant(
        "swapping out does not ask for room",
        MANAGER,
        ("return 0 < blocks <= self.host.num_free and", "return 0 < blocks and"),
    ),
    mutant(
        "nobody is swapped out",
        SCHEDULER,
        ("swaps = self.kv.can_swap_out(sequence) and self.swaps(sequence)", "swaps = False"),
    ),
    mutant(
        "preemption='recompute' swaps",
        SCHEDULER,
        (
            "self.kv.can_swap_out(sequence) and self.swaps(sequence)",
            "self.kv.can_swap_out(sequence)",
        ),
    ),
    mutant(
        "swaps are not counted",
        ENGINE,
        ("metrics.num_swaps += bool(sequence.host_table)", "metrics.num_swaps += 0"),
    ),
    mutant(
        "swapped sequences are not recorded",
        RECORDER,
        ("for s in waiting if s.host_table}", "for s in waiting if s.block_table}"),
    ),
    mutant(
        "host blocks are counted with those that were dropped",
        RECORDER,
        ("sum(block != DROPPED for table in", "sum(True for table in"),
    ),
    # --- windows and eviction ---
    mutant(
        "the window is a token too short",
        MANAGER,
        ("> next_position - window + 1", "> next_position - window + 2"),
    ),
    mutant(
        "the window is a token too long",
        MANAGER,
        ("> next_position - window + 1", "> next_position - window"),
    ),
    mutant(
        "sinks are dropped",
        MANAGER,
        ("if window is None or index * size < self.retention.sinks:", "if window is None:"),
    ),
    mutant(
        "a dropped block is not freed",
        MANAGER,
        ("            dropped.append(table[i])\n", ""),
    ),
    mutant(
        "a dropped block stays in the table",
        MANAGER,
        ("            table[i] = DROPPED\n", ""),
    ),
    mutant(
        "peak_blocks is one too few",
        MANAGER,
        ("return min(everything, seen + kept)", "return min(everything, seen + kept - 1)"),
    ),
    mutant(
        "peak_blocks forgets the chunk",
        MANAGER,
        ("span = self.window + chunk - 1", "span = self.window"),
    ),
    mutant(
        "a prompt is refused as if it had no window",
        ADMISSION,
        ("return Retention(window,", "return Retention(None,"),
    ),
    mutant(
        "blocks are dropped before the step reads them",
        SCHEDULER,
        (
            "        batch.scheduled.append(part)\n        batch.budget -= num",
            "        batch.scheduled.append(part)\n"
            "        sequence.num_computed_tokens = part.end\n"
            "        self.kv.drop_unseen(sequence)\n"
            "        sequence.num_computed_tokens = part.start\n"
            "        batch.budget -= num",
        ),
    ),
    mutant(
        "heavy blocks are dropped like others",
        MANAGER,
        ("return old[: max(0, len(old) - heavy)]", "return old[:-1]"),
    ),
    mutant(
        "cached blocks out of the window are held",
        MANAGER,
        ("b if self._stays(i, goes_on) else DROPPED", "b"),
    ),
    mutant(
        "cached blocks are held up to where the cache ends, not where host memory ends",
        MANAGER,
        ("goes_on = max(num_tokens, holder.num_computed_tokens)", "goes_on = num_tokens"),
        seed=1621,
    ),
    # --- admission and several engines ---
    mutant(
        "the watermark is ignored",
        SCHEDULER,
        ("kept_free = self.blocks_kept_free if self.running else 0", "kept_free = 0"),
    ),
    mutant(
        "the watermark keeps out even the only one",
        SCHEDULER,
        (
            "kept_free = self.blocks_kept_free if self.running else 0",
            "kept_free = self.blocks_kept_free",
        ),
    ),
    mutant(
        "two engines wait for each other's blocks",
        SCHEDULER,
        (
            "            self._preempt(self._victim(), batch)\n        batch",
            "            pass\n        batch",
        ),
        seed=220,
    ),
    mutant(
        "sharing saves nothing in the record",
        RECORDER,
        ("_Use(len(blocks), filled, uses - filled)", "_Use(len(blocks), filled, 0)"),
    ),
    mutant(
        "a shared slot counts twice",
        RECORDER,
        ("return _Use(len(blocks), filled,", "return _Use(len(blocks), uses,"),
    ),
    mutant(
        "the record names cached blocks that are held",
        POOL,
        ("return list(self._cached)", "return [b for _, b in self._known.values()]"),
    ),
    # --- overlap ---
    mutant(
        "a step is booked twice",
        ENGINE,
        ("flight, self._flight = self._flight, None\n", "flight = self._flight\n"),
        seed=OVERLAPS,
    ),
    mutant(
        "the second of two tokens is not told",
        ENGINE,
        ("        for word in self.words:\n", "        for word in self.words[:1]:\n"),
    ),
    mutant(
        "what was computed for those who left is booked",
        FLIGHT,
        ("if part.sequence.state is not gone]", "]"),
        seed=OVERLAPS,
    ),
    mutant(
        "copies left to the thread are forgotten",
        FLIGHT,
        ("        if self.orders:\n", "        if False:\n"),
        seed=OVERLAPS,
    ),
    mutant(
        "an end is known when the next step is planned already",
        ENGINE,
        (
            "                self._finish(each.sample.sequence, each.reason)\n",
            "                pass\n",
        ),
        (
            "        if self.reason:\n",
            "        if self.reason:\n"
            "            self.sample.sequence.state = SequenceState.FINISHED\n"
            "            self.sample.sequence.finish_reason = self.reason\n",
        ),
    ),
    mutant(
        "the record is made of how things stand when it is told",
        ENGINE,
        (
            "                stock=booked.stock,",
            "                stock=booked.stock._replace(num_free_blocks=self.pool.num_free),",
        ),
        seed=OVERLAPS,
    ),
    mutant(
        "blocks are told to be freed by the step after, too",
        ENGINE,
        ("        self._freed = []\n        self._step", "        self._step"),
    ),
    mutant(
        "an error of the thread is lost",
        ENGINE,
        ("        flight.raise_error()\n", "        flight.land()\n"),
        seed=OVERLAPS,
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
        for name, new in list(vars(changed).items()):
            if getattr(new, "__module__", None) != bug.module:
                continue
            if isinstance(new, FunctionType):
                _replace_everywhere(patch, name, getattr(module, name), new)
            elif isinstance(new, type):
                _graft(patch, getattr(module, name), new, label)
                changed.__dict__[name] = getattr(module, name)  # as others know it
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
