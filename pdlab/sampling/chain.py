"""The chain from a model's logits to the distribution that the next token is drawn from.

Three kinds of links, in this order:

    nudge   move logits:          logit_bias, repetition, frequency, presence, the request's own
    forbid  set them to -inf:     bad_words, min_tokens, constraint
    shape   for a random draw:    temperature, top_k, top_p, min_p, typical_p

A greedy row takes its best token after what is forbidden: shaping never changes which that is.
The order is that of transformers and vLLM where these agree. What a request brings itself stands
before what forbids, so it cannot allow again what a grammar rules out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdlab.sampling.filters import MinP, Temperature, TopK, TopP, TypicalP
from pdlab.sampling.masks import BadWords, Constraint, MinTokens
from pdlab.sampling.matcher import Drawer
from pdlab.sampling.nudges import (
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
)
from pdlab.sampling.processors import LogitsProcessor

NUDGES: tuple[LogitsProcessor, ...] = (
    LogitBias(),
    RepetitionPenalty(),
    FrequencyPenalty(),
    PresencePenalty(),
)
"""A request's own processors come after these."""
MASKS: tuple[LogitsProcessor, ...] = (BadWords(), MinTokens(), Constraint())
SHAPES: tuple[LogitsProcessor, ...] = (Temperature(), TopK(), TopP(), MinP(), TypicalP())
CHAIN = (*NUDGES, *MASKS, *SHAPES)
"""All links that parameters control, in the order in which they are applied."""

Watch = Callable[[str, Tensor], None]


class Processed(NamedTuple):
    """What came out of the chain."""

    logits: Tensor
    """float32 [num_rows, vocab_size]."""
    errors: dict[int, ValueError]
    """Rows that failed, with what went wrong; their logits mean nothing."""


def run_chain(logits: Tensor, drawers: Sequence[Drawer], watch: Watch | None = None) -> Processed:
    """Take the logits of a batch through the chain.

    Args:
        logits: [len(drawers), vocab_size], left as they are.
        watch: called after each link that applied to any row, with its name and all logits, which
            it must not keep without copying.
    """
    run = _Run(logits, drawers, watch)
    for link in NUDGES:
        run.apply(link)
    run.apply_own()
    run.sync_matchers()
    for link in (*MASKS, *SHAPES):
        run.apply(link)
    return Processed(run.logits, run.errors)


class _Run:
    """Logits on their way. The tensor that came in is copied before the first change."""

    def __init__(self, logits: Tensor, drawers: Sequence[Drawer], watch: Watch | None):
        self.logits = logits.float()
        self.errors: dict[int, ValueError] = {}
        self._drawers = drawers
        self._watch = watch
        self._is_ours = self.logits is not logits

    def apply(self, link: LogitsProcessor) -> None:
        rows = [
            row
            for row, drawer in enumerate(self._drawers)
            if row not in self.errors and link.applies_to(drawer)
        ]
        if rows:
            self._replace(rows, link.process)
            self._show(link)

    def sync_matchers(self) -> None:
        """Bring what masks by the text up to date; where that fails, that row has failed."""
        for row, drawer in enumerate(self._drawers):
            for matcher in (drawer.bad_words, drawer.constraint):
                try:
                    if matcher:
                        matcher.sync(drawer.output_ids)
                except ValueError as error:
                    self.errors[row] = error

    def apply_own(self) -> None:
        """The processors that requests bring: each object once for all rows that share it.

        What goes wrong in one is the fault of its requests, and harms no others.
        """
        for place in range(max(len(d.params.logits_processors) for d in self._drawers)):
            groups: dict[int, tuple[LogitsProcessor, list[int]]] = {}
            for row, drawer in enumerate(self._drawers):
                for own in drawer.params.logits_processors[place : place + 1]:
                    groups.setdefault(id(own), (own, []))[1].append(row)
            for own, rows in groups.values():
                self._apply_one_of_theirs(own, [r for r in rows if r not in self.errors])

    def _apply_one_of_theirs(self, own: LogitsProcessor, candidates: list[int]) -> None:
        rows = candidates
        try:
            rows = [row for row in candidates if own.applies_to(self._drawers[row])]
            if rows:
                with torch.no_grad():
                    self._replace(rows, lambda logits, drawers: _checked(own, logits, drawers))
        except Exception as error:
            for row in rows:
                self.errors[row] = ValueError(f"logits_processors: {own!r:.60} failed: {error!r}")
        else:
            if rows:
                self._show(own)

    def _replace(
        self, rows: list[int], process: Callable[[Tensor, Sequence[Drawer]], Tensor]
    ) -> None:
        drawers = [self._drawers[row] for row in rows]
        if len(rows) == len(self._drawers) and not self.errors:
            self.logits = process(self._own(), drawers)
        else:
            index = torch.tensor(rows, device=self.logits.device)
            processed = process(self.logits.index_select(0, index), drawers)
            self.logits = self._own().index_copy_(0, index, processed)
        self._is_ours = True

    def _own(self) -> Tensor:
        """The logits, which may now be changed in place."""
        return self.logits if self._is_ours else self.logits.clone()

    def _show(self, link: LogitsProcessor) -> None:
        if self._watch:
            self._watch(link.name, self.logits)


def _checked(own: LogitsProcessor, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
    """What a user's processor made of the logits, if it is what it must be."""
    result = own.process(logits, drawers)
    if not isinstance(result, Tensor) or result.shape != logits.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"it returned {got}, not a tensor of shape {tuple(logits.shape)}")
    if result.isnan().any() or (result == torch.inf).any():
        raise ValueError("it returned a logit that is NaN or +inf")
    return result.detach().to(logits).contiguous()
