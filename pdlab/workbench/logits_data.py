"""Logits as an engine computes them, for pictures of what is done with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.runner import Runner, StepOutput
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.kvcache import Release
from pdlab.models import Model
from pdlab.sampling.matcher import Matcher
from pdlab.sampling.tally import Tally
from pdlab.trace import BlockMove

MAX_KEPT = 128
"""Texts whose logits are kept: 25 MB for 49,152 tokens."""


class KeptLogits:
    """Stands before an engine's runner and keeps the logits that tokens were drawn from.

    `rows` has one tensor a step that counted, float32 [num_rows, vocab_size].
    """

    def __init__(self, runner: Runner):
        self.rows: list[Tensor] = []
        self._runner = runner
        self._newest: Tensor | None = None

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        self._runner.carry_out(orders)

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        output = self._runner.run(batch, clock, step)
        self._newest = output.logits
        return output

    def commit(self) -> None:
        self._runner.commit()
        if self._newest is not None:
            self.rows.append(self._newest.detach().float().cpu().clone())
        self._newest = None


class NextLogits:
    """The model's logits after any text: each text runs through one engine, once.

    With blocks of one token, the engine's prefix cache has all of a text that went before, so a
    text with one more token is one forward pass of that token, as in decoding.

    Args:
        longest: tokens of the longest text.
        exact: the engine's exact mode; without it the last bits may differ from another run's.

    Raises:
        ValueError: exact mode is asked of a model that is not fp32.
    """

    def __init__(self, model: Model, longest: int, *, exact: bool = False):
        self.num_computed_tokens = 0
        """Tokens that the last forward pass computed; 0 where the logits were still there."""
        config = EngineConfig(
            block_size=1,
            num_blocks=2 * longest,
            max_num_seqs=1,
            exact=exact,
            record_trace=False,
            seed=0,
        )
        self.engine = Engine(model, config)
        self._tap = self.engine.runner = KeptLogits(self.engine.runner)
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def after(self, token_ids: list[int]) -> Tensor:
        """Logits of the next token, float32 [vocab_size] on the CPU.

        Raises:
            ValueError: the text is empty or too long, or holds a token that the model lacks.
        """
        key = tuple(token_ids)
        self.num_computed_tokens = 0
        if key not in self._kept:
            self._tap.rows.clear()
            [output] = self.engine.generate([token_ids], SamplingParams(max_tokens=1))
            if output.error:
                raise output.error
            self._kept[key] = self._tap.rows[-1][0]
            cached = output.completions[0].metrics.num_cached_tokens
            self.num_computed_tokens = len(token_ids) - cached
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def close(self) -> None:
        """Give the engine's memory back; what is kept stays readable."""
        self.engine.close()


@dataclass(frozen=True)
class TextSoFar:
    """A prompt, what was written after it, and who draws the next token: a Drawer of the chain."""

    params: SamplingParams
    seed: int
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    bad_words: Matcher | None = None
    constraint: Matcher | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def tally(self) -> Tally:
        return Tally(len(self.prompt_ids))


def probabilities(logits: Tensor) -> Tensor:
    """Softmax in float64, so that the sum over a vocabulary is 1 to twelve digits."""
    return torch.softmax(logits.double(), dim=-1)


def entropy_bits(chances: Tensor) -> float:
    """Shannon entropy of a distribution, in bits; impossible tokens count nothing."""
    return max(0.0, -float(torch.special.xlogy(chances, chances).sum()) / LN_2)


LN_2 = 0.6931471805599453
