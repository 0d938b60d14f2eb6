"""Teacher forcing: the logits after every token of a given text, instead of a text of its own.

What the text's own tokens cost is its perplexity, so this is how the price of a lossy knob is
measured: through the same scheduler, blocks, storage and attention as serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from pdlab.engine import admission
from pdlab.engine.attention_mass import AttentionMass
from pdlab.engine.batch import prepare
from pdlab.engine.config import EngineConfig
from pdlab.engine.exactness import check_rows_are_alike
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.probe import LayerObserver
from pdlab.engine.runner import EXACT_ROW_TILE, ModelRunner
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence
from pdlab.engine.timing import StageClock
from pdlab.models import Model
from pdlab.requirements import require_int
from pdlab.sampling import SamplingParams


class ForcedRun:
    """Runs texts through a paged cache, one after the other, chunk by chunk.

    The pool is as small as a text of `longest` tokens allows: blocks behind a window are really
    given back, and taken again. The prefix cache is off. `config` decides the rest (format, window,
    block size, head groups, backend, exact mode).

    A chunk's queries see each other's K and V as they are stored. So block-wise formats quantize
    what fills a block at once, where decoding would still read the newest tokens in full precision,
    and a block's scales know its later tokens, too: the price of such formats depends a little on
    how the text is cut into chunks, as it does in prefill. With `heavy_tokens`, the
    lightest blocks leave after each chunk, not after each token.

    Args:
        longest: tokens of the longest text to come.
        chunk_size: tokens that are computed at once, at most.

    Raises:
        ValueError: the configuration does not fit the model, or `longest` is more than it allows.
    """

    def __init__(self, model: Model, config: EngineConfig, *, longest: int, chunk_size: int = 256):
        require_int("chunk_size", chunk_size, least=1)
        require_int("longest", longest, least=0)
        config = admission.resolve(model, config)
        if not 1 <= longest <= admission.longest(config):
            raise ValueError(
                f"a text has {longest} tokens, it must have 1 to {admission.longest(config)} "
                "(max_model_len)"
            )
        if config.exact:
            check_rows_are_alike(model, EXACT_ROW_TILE)
        self.model = model
        self.longest = longest
        kept = admission.retention(model, config)
        num_blocks = kept.peak_blocks(longest, min(chunk_size, longest), config.block_size)
        self.config = replace(
            config,
            num_blocks=num_blocks,
            num_swap_blocks=0,
            preemption="recompute",
            max_num_seqs=1,
            max_num_batched_tokens=chunk_size,
            chunk_size=None,
            speculation=None,
        )
        self.memory = admission.make_memory(model, self.config)
        self.runner = ModelRunner.of(model, self.memory, self.config)
        self.scheduler = Scheduler(self.memory.manager, self.config)
        self.peak_blocks = 0
        """Most blocks that a text has held at once."""
        self._sequence: Sequence | None = None

    def logits(
        self, token_ids: list[int], observers: Iterable[LayerObserver] = ()
    ) -> Iterator[Tensor]:
        """Float32 logits after each token, [chunk, vocab_size], for one chunk after the other.

        Stopping early, or being interrupted, does no harm: the next text starts from nothing. It
        starts with the first `next`; from then on, the iterator of the text before it is of no use.

        Raises:
            ValueError: no tokens, more than `longest`, or one that is not in the vocabulary.
            RuntimeError: another text was started before this one's end.
        """
        if not 1 <= len(token_ids) <= self.longest:
            raise ValueError(
                f"a text has {len(token_ids)} tokens, longest is {self.longest} (shortest is 1)"
            )
        admission.check_vocabulary(self.model, token_ids)
        self._clear()
        sequence = Sequence("forced", "forced", token_ids, SamplingParams())
        self._sequence = sequence
        self.scheduler.add(sequence)
        num_left = len(token_ids)
        while num_left:
            if self._sequence is not sequence:
                raise RuntimeError(
                    f"another text was started when {num_left} tokens of this one were left: "
                    "a ForcedRun runs one text at a time"
                )
            with undisturbed():
                batch = self.scheduler.schedule()
                self.runner.carry_out(self.memory.manager.take_orders())
            pool = self.memory.manager.pool
            self.peak_blocks = max(self.peak_blocks, pool.num_blocks - pool.num_free)
            hidden = self._compute(batch, list(observers))
            num_left -= len(hidden)
            yield self.model.decoder.logits(hidden, row_tile=self.runner.row_tile)

    def read_kv(self) -> Tensor:
        """K and V of the present text as the cache returns them, as `PagedKVCache.read` does."""
        if self._sequence is None:
            raise ValueError("no text has been run yet: call logits() first")
        sequence = self._sequence
        return self.memory.cache.read(sequence.block_table, sequence.num_computed_tokens)

    def _compute(self, batch: ScheduledBatch, observers: list[LayerObserver]) -> Tensor:
        """Hidden states of a chunk, booked."""
        cache, [part] = self.memory.cache, batch.scheduled
        if self.config.heavy_tokens:
            observers.append(mass := AttentionMass(batch, cache.block_size))
        clock = StageClock(self.model.decoder.device)
        hidden = self.runner.compute(prepare(batch, cache.block_size), clock, observers).hidden
        self.runner.commit()
        if self.config.heavy_tokens:
            part.sequence.add_mass(mass.block_mass[part.sequence.sequence_id])
        self.scheduler.update(batch)
        return hidden

    def _clear(self) -> None:
        if self._sequence is not None:
            self.scheduler.finish(self._sequence, "length")
            self._sequence = None


def forced_logits(
    model: Model, token_ids: list[int], config: EngineConfig, *, chunk_size: int = 256
) -> Iterator[Tensor]:
    """Float32 logits after each token of a text, [chunk, vocab_size] at a time; see `ForcedRun`.

    Raises:
        ValueError: as `ForcedRun`, or a token is not in the vocabulary.
    """
    run = ForcedRun(model, config, longest=len(token_ids), chunk_size=chunk_size)
    return run.logits(token_ids)
