"""Drafts from a model: its own paged KV memory, and the runner that the engine has.

For each sequence of the engine (the target's) the drafter keeps a shadow: the same tokens, with K
and V of the draft model. A round brings the shadows up to date with what the target has accepted
since, all of them in one pass, whose last rows give the first drafted token of each; then each pass
adds a token to all that go on. What the target rejects is taken back by counting fewer tokens as
computed: their slots are written again.

    target's tokens   p p p p p p a b c             accepted since: b c
    shadow            p p p p p p a x y             x and y were drafted, and did not stand
    computed before   ^ ^ ^ ^ ^ ^ ^                 so far both agree
    a round           p p p p p p a[b c]d [d]e [e]f    one pass a bracket; d e f is the next draft
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdlab.engine import admission
from pdlab.engine.batch import prepare
from pdlab.engine.config import EngineConfig
from pdlab.engine.drafting import Outcome
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.runner import ModelRunner
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence
from pdlab.engine.sequence import Sequence
from pdlab.engine.timing import StageClock
from pdlab.kvcache import KVMemory
from pdlab.models import Model
from pdlab.sampling import NO_DRAFT, Draft, SamplingParams, draw, mix, run_chain
from pdlab.speculate.length import Length

SHAPING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "logit_bias")
"""What of a request's parameters shapes its drafts. Penalties and constraints do not: they follow
the text, and the target applies them anyhow; a draft that ignores them is accepted less often."""
DRAFT_STREAM = 1 << 40
"""Which of the seeds that come of a request's seed its drafts are drawn with: q must not know the
numbers that decide what stands."""
UP_TO_DATE = 2
"""Tokens that a shadow is behind if it drafted in the last step and all was accepted: the last
drafted one, and the target's own behind it."""


@dataclass(eq=False)
class Shadow(Sequence):
    """A sequence of the target as the draft model has it: its tokens, and drafts behind them."""

    num_agreed: int = 0
    """Tokens that were the target's when the shadow last looked."""

    @classmethod
    def of(cls, sequence: Sequence) -> Shadow:
        """With none of its tokens computed."""
        params = {name: getattr(sequence.params, name) for name in SHAPING}
        shadow = cls(
            sequence_id=sequence.sequence_id,
            request_id=sequence.request_id,
            prompt_ids=sequence.prompt_ids,
            params=SamplingParams(**params),
            uses_prefix_cache=sequence.uses_prefix_cache,
            stop_ids=sequence.stop_ids,
        )
        shadow.follow(sequence)
        return shadow

    def follow(self, sequence: Sequence) -> None:
        """Take over the tokens that the target has now; what came of a draft otherwise is not
        computed any more."""
        ours, theirs, same = self.token_ids, sequence.token_ids, self.num_agreed
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        ours[same:] = theirs[same:]
        self.num_agreed = len(ours)
        # the newest token is computed, again if need be: its logits are what comes next
        self.num_computed_tokens = min(self.num_computed_tokens, same, len(ours) - 1)
        # New numbers for each draft: whether one was used must not be seen in the next.
        self.seed = mix(mix(sequence.seed, DRAFT_STREAM), self.num_output_tokens)


@dataclass(eq=False)
class Ahead:
    """A shadow in a round."""

    shadow: Shadow
    num_tokens: int
    """Tokens to compute in the next pass."""
    wanted: int
    """Tokens still to be drafted; 0 where the known ones are not all computed yet."""
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)
    """Where they were drawn from, float32 [vocab_size] each; none if they were chosen."""

    @property
    def part(self) -> ScheduledSequence:
        """Its part of the next pass."""
        shadow, start = self.shadow, self.shadow.num_computed_tokens
        return ScheduledSequence(
            shadow, start, self.num_tokens, shadow.phase, self.wanted > 0, [], [], 0
        )

    @property
    def draft(self) -> Draft:
        q = torch.stack(self.probabilities) if self.probabilities else None
        return Draft(self.token_ids, q) if self.token_ids else NO_DRAFT


class ModelDrafter:
    """Drafts with a model for the sequences of one engine.

    Args:
        model: of the target's vocabulary.
        config: resolved for this model: its KV memory, its backend, `max_model_len`.
        length: how many tokens.
        chunk_size: most tokens that a round computes to bring shadows up to date. One whose prompt
            takes longer has no draft until it is computed.
    """

    def __init__(self, model: Model, config: EngineConfig, length: Length, chunk_size: int):
        self.model, self.config = model, config
        self.length, self.chunk_size = length, chunk_size
        self.memory = KVMemory(
            model.config,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            kv_format=config.kv_format,
            device=model.decoder.device,
            max_num_seqs=config.max_num_seqs,
        )
        self.runner = ModelRunner.of(model, self.memory, config)
        self.shadows: dict[Sequence, Shadow] = {}
        """By the target's sequence, the least recently used first."""
        self._is_steady = True
        """Whether the last round only drafted, with no prompt to compute first."""

    # --- the engine's side ----------------------------------------------------------------------

    def propose(self, sequences: Several[Sequence], limits: Several[int]) -> list[Draft]:
        lengths = self.length.choose(sequences, limits)
        with undisturbed():
            ahead = self._plan(sequences, lengths)
        self._is_steady = all(each.num_tokens <= UP_TO_DATE for each in ahead.values())
        going, agreed = list(ahead.values()), True
        while going:
            self._pass(going, agreed)
            going, agreed = [each for each in going if each.wanted], False
        return [ahead[s].draft if s in ahead else NO_DRAFT for s in sequences]

    def learn(self, outcomes: Several[Outcome], draft_s: float, step_s: float) -> None:
        self.length.learn(outcomes, draft_s if self._is_steady else None, step_s)

    def forget(self, sequence: Sequence) -> None:
        with undisturbed():
            self.length.forget(sequence)
            if sequence in self.shadows:
                self._drop(sequence)

    def close(self) -> None:
        for sequence in list(self.shadows):
            self.forget(sequence)

    # --- which shadows run, and room for them ---------------------------------------------------

    def _plan(self, sequences: Several[Sequence], lengths: Several[int]) -> dict[Sequence, Ahead]:
        """Who drafts in this round, with blocks for all of it.

        Those with least to compute come first, so nobody waits for another one's prompt. Where
        blocks are short, shadows of sequences that are not here give theirs back, and then those
        here draft less or not at all.
        """
        drafting = {s: n for s, n in zip(sequences, lengths, strict=True) if n}
        for sequence in drafting:
            if shadow := self.shadows.pop(sequence, None):
                self.shadows[sequence] = shadow  # the most recently used
                shadow.follow(sequence)
        budget, ahead = self.chunk_size, {}
        for sequence in sorted(drafting, key=self._num_behind):
            wanted = self._grant(sequence, drafting[sequence], busy=drafting)
            if wanted and budget:
                shadow = self.shadows[sequence]
                num_behind = shadow.num_uncomputed_tokens
                num_tokens = min(num_behind, budget)
                budget -= num_tokens
                whole = num_tokens == num_behind
                ahead[sequence] = Ahead(shadow, num_tokens, wanted if whole else 0)
        self._carry_out()
        return ahead

    def _num_behind(self, sequence: Sequence) -> int:
        shadow = self.shadows.get(sequence)
        return shadow.num_uncomputed_tokens if shadow else sequence.num_tokens

    def _grant(self, sequence: Sequence, length: int, busy: Collection[Sequence]) -> int:
        """Take blocks for a sequence's known tokens and up to `length` drafted ones; how many."""
        manager, size = self.memory.manager, self.config.block_size
        room = min(admission.longest(self.config), self.config.num_blocks * size + 1)
        wanted = min(length, room - sequence.num_tokens)  # the last one is not computed
        if wanted <= 0:
            return 0
        if is_new := sequence not in self.shadows:
            shadow = self.shadows[sequence] = Shadow.of(sequence)
            manager.start(shadow, manager.look_up(shadow))
        shadow = self.shadows[sequence]
        num_behind = shadow.num_uncomputed_tokens
        while wanted and manager.blocks_missing(shadow, num_behind + wanted - 1) > (
            manager.pool.num_free
        ):
            idle = next((s for s in self.shadows if s not in busy), None)
            if idle:
                self._drop(idle)
            else:
                wanted -= 1
        if wanted:
            manager.grow(shadow, num_behind + wanted - 1)
        elif is_new:
            self._drop(sequence)
        return wanted

    def _drop(self, sequence: Sequence) -> None:
        """Forget a shadow; what it computed of a text may still be found by its prefix."""
        self.memory.manager.release(self.shadows.pop(sequence))
        self._carry_out()

    def _carry_out(self) -> None:
        self.memory.carry_out(self.memory.manager.take_orders())

    # --- computing ------------------------------------------------------------------------------

    def _pass(self, going: list[Ahead], agreed: bool) -> None:
        """Compute the next tokens of all, and draft one more behind each that is up to date.

        Args:
            agreed: whether these tokens are the target's, so that others may find them.
        """
        batch = ScheduledBatch(0, [each.part for each in going])
        inputs = prepare(batch, self.config.block_size)
        logits = self.runner.compute(inputs, StageClock(self.model.decoder.device)).logits
        with undisturbed():
            self.runner.commit()
            for each in going:
                each.shadow.num_computed_tokens += each.num_tokens
                each.num_tokens = 1
                if agreed:
                    self.memory.manager.register(each.shadow)
        drafting = [each for each in going if each.wanted]
        if drafting:
            self._draft(logits, drafting)

    def _draft(self, logits: Tensor, drafting: list[Ahead]) -> None:
        """Append a token to each, from logits [len(drafting), vocab_size]."""
        shadows = [each.shadow for each in drafting]
        greedy = [shadow.params.greedy for shadow in shadows]
        processed, _ = run_chain(logits, shadows)
        token_ids = processed.argmax(dim=-1)
        q = None
        if not all(greedy):
            q = processed.softmax(dim=-1)
            chooses = torch.tensor(greedy, device=q.device)
            token_ids = torch.where(chooses, token_ids, draw(q, shadows))
        for row, (each, token_id) in enumerate(zip(drafting, token_ids.tolist(), strict=True)):
            if q is not None and not greedy[row]:
                if not q[row, token_id] > 0:  # the draft model computed no numbers
                    each.wanted = 0
                    continue
                each.probabilities.append(q[row])
            each.token_ids.append(token_id)
            each.shadow.token_ids.append(token_id)
            each.wanted -= 1
            if token_id in each.shadow.stop_ids:  # nothing comes behind it
                each.wanted = 0
