"""Beam search: the likeliest texts that a breadth-first search of fixed width finds.

Each step extends every beam by every token, and the best continuations of all beams together are
the next beams. A beam with several children is forked: the children share all its KV blocks, and
only the block that is still filling is copied, when a second child writes to it (Kwon et al. 2023,
PagedAttention, section 4.4). Caches that are one tensor a beam are copied whole in every step.

What is kept and when it ends is as in transformers' `generate(num_beams=..., do_sample=False)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tqdm.auto import tqdm

from pdlab.engine import admission
from pdlab.engine.admission import Prompt
from pdlab.engine.batch import prepare
from pdlab.engine.beam_records import BeamNode, BeamOutput, BeamStep, Hypothesis
from pdlab.engine.beam_rules import BeamRules, Continuation, best_continuations
from pdlab.engine.config import EngineConfig
from pdlab.engine.exactness import check_rows_are_alike
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.runner import EXACT_ROW_TILE, ModelRunner
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.engine.timing import StageClock
from pdlab.kvcache import Retention, blocks_for
from pdlab.models import Model
from pdlab.requirements import require_bool, require_int, require_number
from pdlab.sampling import SamplingParams
from pdlab.trace import DROPPED, BlockMove

LARGEST_PENALTY = 10.0


class BeamSearch:
    """A beam search that is carried out step by step: `beam_search`, for those who look on.

    Its pool has exactly the blocks that the beams can need, so no beam is ever preempted.
    `scheduler.running` are the beams, the best first. A step that is interrupted counts for nothing
    and may be made again.

    Args, and what is raised: as `beam_search`.
    """

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        *,
        beam_width: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        ignore_eos: bool = False,
        config: EngineConfig | None = None,
    ):
        config = admission.resolve(model, config or EngineConfig())
        _check_knobs(beam_width, max_tokens, length_penalty, early_stopping, ignore_eos)
        _check_beams(model, config, beam_width)
        if config.exact:
            check_rows_are_alike(model, EXACT_ROW_TILE)
        self.model = model
        self.prompt, self.prompt_ids = admission.tokenize(model, prompt)
        self.config = _private(model, config, self.prompt_ids, beam_width, max_tokens)
        self.rules = BeamRules(
            beam_width,
            _most_tokens(config, self.prompt_ids, max_tokens),
            length_penalty,
            early_stopping,
            frozenset() if ignore_eos else frozenset(model.config.eos_token_ids),
        )
        self.memory = admission.make_memory(model, self.config)
        self.runner = ModelRunner.of(model, self.memory, self.config)
        self.scheduler = Scheduler(
            self.memory.manager,
            replace(self.config, batching="mixed", max_num_seqs=beam_width, watermark=0.0),
        )
        self.steps: list[BeamStep] = []
        self.is_over = False
        self._copies: list[BlockMove] = []
        self._num_blocks = self._num_blocks_unshared = 0
        self._numbers = itertools.count()
        self.scheduler.add(self._new_beam())

    def step(self) -> BeamStep | None:
        """Run the next chunk of the prompt, or all beams; None while there is nothing to choose."""
        if self.is_over:
            return None
        with undisturbed():
            batch = self.scheduler.schedule()
            orders = self.memory.manager.take_orders()
            self.runner.carry_out(orders)
            self._copies += [order for order in orders if isinstance(order, BlockMove)]
        assert batch.scheduled
        assert not batch.preempted
        best = self._compute(batch)
        with undisturbed():
            return self._book(batch, best)

    def steps_left(self) -> Iterator[BeamStep]:
        """Search to the end, one step after the other."""
        while not self.is_over:
            if step := self.step():
                yield step

    def output(self) -> BeamOutput:
        """What was found, once the search is over."""
        assert self.is_over
        hypotheses = [self._hypothesis(*kept) for kept in self.rules.kept]
        return BeamOutput(
            self.prompt,
            self.prompt_ids,
            hypotheses,
            self.steps,
            self.config.block_size,
        )

    def _compute(self, batch: ScheduledBatch) -> list[Continuation]:
        """The best continuations of the beams; none while the prompt goes on."""
        inputs = prepare(batch, self.config.block_size)
        clock = StageClock(self.model.decoder.device)
        logits = self.runner.compute(inputs, clock).logits
        if not inputs.sample_rows:
            return []
        sums = [node.sum_logprob for node in self.steps[-1].beams] if self.steps else [0.0]
        return best_continuations(logits, sums, self.rules.num_candidates)

    def _book(self, batch: ScheduledBatch, best: list[Continuation]) -> BeamStep | None:
        """Make what was computed part of the beams, and choose the next ones."""
        beams = self.scheduler.running
        self._count_blocks(beams)
        self.runner.commit()
        self.scheduler.update(batch)
        if not best:
            return None
        num_tokens = len(self.steps) + 1
        going, ended = self.rules.split(best, num_tokens)
        self.rules.keep([([*beams[c.parent].output_ids, c.token_id], c.sum_logprob) for c in ended])
        step = BeamStep(
            [self._node(c, num_tokens) for c in going],
            [self._node(c, num_tokens) for c in ended],
            self._copies,
            self._num_blocks,
            self._num_blocks_unshared,
        )
        self.steps.append(step)
        self._copies, self._num_blocks, self._num_blocks_unshared = [], 0, 0
        self.is_over = self.rules.is_over(going, num_tokens)
        self._succeed([] if self.is_over else going)
        return step

    def _count_blocks(self, beams: list[Sequence]) -> None:
        """Note what is held now; a prompt's chunk may hold more than the one after it."""
        pool = self.memory.manager.pool
        unshared = sum(block != DROPPED for beam in beams for block in beam.block_table)
        self._num_blocks = max(self._num_blocks, pool.num_blocks - pool.num_free)
        self._num_blocks_unshared = max(self._num_blocks_unshared, unshared)

    def _node(self, chosen: Continuation, num_tokens: int) -> BeamNode:
        return BeamNode(
            chosen.parent,
            chosen.token_id,
            chosen.logprob,
            chosen.sum_logprob,
            self.rules.score(chosen.sum_logprob, num_tokens),
            list(self.scheduler.running[chosen.parent].block_table),
        )

    def _succeed(self, chosen: list[Continuation]) -> None:
        """Let the chosen take the beams' places; those without a child give their blocks back.

        A beam's first child is the beam itself, one token on; further ones fork off it. None of
        them copies a byte here: the blocks are shared until somebody writes.
        """
        parents = list(self.scheduler.running)
        going_on: list[Sequence] = []
        for c in chosen:
            parent = parents[c.parent]
            going_on.append(self._fork(parent) if parent in going_on else parent)
        for parent in parents:
            if parent not in going_on:
                self.scheduler.finish(parent, "abort")
        for beam, c in zip(going_on, chosen, strict=True):
            beam.token_ids.append(c.token_id)
        self.scheduler.running = going_on

    def _fork(self, parent: Sequence) -> Sequence:
        child = self._new_beam()
        child.token_ids = list(parent.token_ids)
        child.state = SequenceState.RUNNING
        self.memory.manager.fork(parent, child)
        return child

    def _new_beam(self) -> Sequence:
        return Sequence(
            sequence_id=f"beam{next(self._numbers)}",
            request_id="beams",
            prompt_ids=self.prompt_ids,
            params=SamplingParams(),
        )

    def _hypothesis(self, score: float, token_ids: list[int], sum_logprob: float) -> Hypothesis:
        tokenizer = self.model.tokenizer
        text = tokenizer.decode(token_ids, skip_special_tokens=True) if tokenizer else ""
        reason = "stop" if token_ids[-1] in self.rules.end_ids else "length"
        return Hypothesis(token_ids, text, sum_logprob, score, reason)


def beam_search(
    model: Model,
    prompt: Prompt,
    *,
    beam_width: int = 4,
    max_tokens: int = 64,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    ignore_eos: bool = False,
    config: EngineConfig | None = None,
    progress: bool = False,
) -> BeamOutput:
    """Find the likeliest continuations of a prompt, as `generate(num_beams=...)` of transformers.

    With one beam this is greedy decoding (but for "never", which looks on for a longer text). The
    beams have KV memory of their own, of the size they need at most, and share what they have in
    common. A search that is interrupted leaves nothing behind.

    Args:
        beam_width: beams that go on from step to step, and hypotheses in the output.
        max_tokens: most tokens of a hypothesis; fewer where `max_model_len` ends it.
        length_penalty: exponent of the length that a sum of log probabilities is divided by: 0
            compares probabilities, 1 those of the average token. Above 0 favours long texts.
        early_stopping: True, False or "never": when to stop looking for better hypotheses, see
            `BeamRules`.
        ignore_eos: go on past end tokens.
        config: the engine's knobs; None for the default. All apply but those of preemption, prefix
            cache, overlap and sampling; `num_blocks` and `max_num_seqs` are limits.
        progress: show a bar, counting tokens.

    Raises:
        ValueError: an argument is out of range, the configuration does not fit the model or has
            `heavy_tokens` or `speculation`, or the prompt is empty, too long, or needs more than
            `num_blocks`.
    """
    require_bool("progress", progress)
    search = BeamSearch(
        model,
        prompt,
        beam_width=beam_width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        ignore_eos=ignore_eos,
        config=config,
    )
    with tqdm(total=search.rules.max_tokens, unit="token", disable=not progress) as bar:
        for _ in search.steps_left():
            bar.update()
    return search.output()


def most_blocks(
    kept: Retention, num_prompt: int, num_slots: int, beam_width: int, chunk: int, block_size: int
) -> int:
    """Most KV blocks that beams of `num_slots` tokens hold at once.

    The prompt's full blocks are never written again, so they are there once; all others once a
    beam. A window makes it less where every beam's own peak comes to less.
    """
    shared = num_prompt // block_size
    everything = shared + beam_width * (blocks_for(num_slots, block_size) - shared)
    prompt = kept.peak_blocks(num_prompt, chunk, block_size)
    apart = beam_width * kept.peak_blocks(num_slots, 1, block_size)
    return min(everything, max(prompt, apart))


def _private(
    model: Model, config: EngineConfig, prompt_ids: list[int], beam_width: int, max_tokens: int
) -> EngineConfig:
    """The configuration with just the blocks and seats that this search needs.

    Raises:
        ValueError: the prompt is empty or too long, or `num_blocks` is not enough.
    """
    kept = admission.retention(model, config)
    most = _most_tokens(config, prompt_ids, max_tokens)
    admission.check_fits(config, kept, prompt_ids, SamplingParams(max_tokens=most))
    num_slots = len(prompt_ids) + most - 1  # the last token is never fed back
    needed = most_blocks(
        kept, len(prompt_ids), num_slots, beam_width, config.largest_chunk, config.block_size
    )
    if needed > config.num_blocks:
        raise ValueError(
            f"beam_width={beam_width} beams after a prompt of {len(prompt_ids)} tokens, with "
            f"max_tokens={max_tokens}, may need {needed} KV blocks of {config.block_size} tokens, "
            f"num_blocks is {config.num_blocks}"
        )
    return replace(
        config,
        num_blocks=needed,
        num_swap_blocks=0,
        preemption="recompute",
        max_num_seqs=beam_width,
    )


def _most_tokens(config: EngineConfig, prompt_ids: list[int], max_tokens: int) -> int:
    """Length of the longest hypothesis: one token at least, as the engine gives."""
    return min(max_tokens, max(1, admission.longest(config) - len(prompt_ids)))


def _check_knobs(
    beam_width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | str,
    ignore_eos: bool,
) -> None:
    require_int("beam_width", beam_width, least=1)
    require_int("max_tokens", max_tokens, least=1)
    require_number("length_penalty", length_penalty, -LARGEST_PENALTY, LARGEST_PENALTY)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping={early_stopping!r} must be True, False or 'never'")
    require_bool("ignore_eos", ignore_eos)


def _check_beams(model: Model, config: EngineConfig, beam_width: int) -> None:
    """Refuse more beams than can be told apart or run at once, and what forks cannot share."""
    limits = {"vocab_size": model.config.vocab_size, "max_num_seqs": config.max_num_seqs}
    for name, limit in limits.items():
        if beam_width > limit:
            raise ValueError(f"beam_width={beam_width} is more than {name}={limit}")
    if config.heavy_tokens:
        raise ValueError(
            f"heavy_tokens={config.heavy_tokens} must be 0 in beam search: which blocks stay would "
            "depend on what each beam looked at, and beams share their blocks"
        )
    if config.speculation:
        raise ValueError(
            f"speculation={config.speculation!r:.60} must be None in beam search: a draft guesses "
            "the most probable text, and beams go the others"
        )
