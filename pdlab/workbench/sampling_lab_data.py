"""What each link of the chain does to one next-token distribution, and the draw at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdlab.engine import SamplingParams
from pdlab.sampling.chain import CHAIN, run_chain
from pdlab.sampling.matcher import Drawer
from pdlab.sampling.sampler import Sampler, draw, uniform
from pdlab.workbench.logits_data import entropy_bits, probabilities

NUM_SHOWN = 25
"""Most probable tokens of the model that are shown."""
NUM_RISEN = 5
"""Most probable tokens after the chain that are shown too, wherever the model has them."""
NARROWEST = 0.002
"""Part of the cumulative bar from which on a token has a segment of its own."""
DIGITS = 12
"""Decimals sent to the browser."""


@dataclass(frozen=True)
class Stage:
    """The distribution after one link of the chain.

    `chances` is float64 [vocab_size] and sums to 1; None where the link does not apply. Then the
    numbers are those of the stage before.
    """

    name: str
    chances: Tensor | None
    num_left: int
    """Tokens that are still possible."""
    entropy: float
    """In bits."""
    removed: float = 0.0
    """Probability that the tokens removed by this link had before it."""
    why_not: str = ""
    """Why the link does not apply."""


@dataclass(frozen=True)
class Draw:
    """One draw: the dart, and where it hit.

    `low` and `high` bound the token's part of 0 to 1, where tokens lie side by side in the order of
    their ids.
    """

    token_id: int
    dart: float | None
    """In [0, 1); None where nothing is drawn, because the most probable token is taken."""
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """A next token's way from logits to a draw.

    `stages` has the model's own distribution first, then each link in order, applied or not.
    `drawn_from` is float32 [vocab_size], the very numbers that the engine's draw uses.
    """

    stages: list[Stage]
    removed_by: dict[int, str]
    """The link that removed a token, for each token that is no longer possible."""
    drawn_from: Tensor
    draw: Draw

    @property
    def own(self) -> Tensor:
        """The model's own distribution, float64 [vocab_size]."""
        return _last([self.stages[0]])

    @property
    def final(self) -> Tensor:
        """The distribution that the token comes from, float64 [vocab_size]."""
        return _last(self.stages)


def _last(stages: Sequence[Stage]) -> Tensor:
    return next(s.chances for s in reversed(stages) if s.chances is not None)


def link_names(params: SamplingParams) -> list[str]:
    """The chain's links in the order in which they are applied, a request's own among them."""
    names = [link.name for link in CHAIN]
    place = names.index("bad_words")
    return names[:place] + [own.name for own in params.logits_processors] + names[place:]


def follow(logits: Tensor, drawer: Drawer) -> Outcome:
    """Take logits, float32 [vocab_size], through the chain, watching, and draw.

    Raises:
        ValueError: nothing is left to draw from, or one's own processor failed.
    """
    watcher = _Watcher(logits, drawer)
    processed, errors = run_chain(logits[None], [drawer], watcher.watch)
    if errors:
        raise errors[0]
    watcher.skip_to(None)
    if not bool((processed > -torch.inf).any()):
        [nothing] = Sampler(0).sample(logits[None], [drawer])
        assert isinstance(nothing, ValueError)
        raise nothing
    if drawer.params.greedy:
        best = int(processed[0].argmax())
        watcher.take_best(best)
        certain = torch.zeros_like(processed[0])
        certain[best] = 1.0
        return Outcome(watcher.stages, watcher.removed_by, certain, Draw(best, None, 0.0, 1.0))
    drawn_from = processed[0].softmax(dim=-1)
    token_id = int(draw(drawn_from[None], [drawer])[0])
    edges = drawn_from.cumsum(dim=-1, dtype=torch.float64)
    high = float(edges[token_id] / edges[-1])
    low = float(edges[token_id - 1] / edges[-1]) if token_id else 0.0
    dart = uniform(drawer.seed, drawer.num_output_tokens)
    return Outcome(watcher.stages, watcher.removed_by, drawn_from, Draw(token_id, dart, low, high))


class _Watcher:
    """Turns what `run_chain` shows into stages, those that did not apply included."""

    def __init__(self, logits: Tensor, drawer: Drawer):
        chances = probabilities(logits)
        possible = logits > -torch.inf
        self.stages = [Stage("model", chances, int(possible.sum()), entropy_bits(chances))]
        self.removed_by: dict[int, str] = {}
        self._possible = possible
        self._drawer = drawer
        self._names = iter(link_names(drawer.params))

    def watch(self, name: str, rows: Tensor) -> None:
        self.skip_to(name)
        self._add(name, probabilities(rows[0]), rows[0] > -torch.inf)

    def skip_to(self, name: str | None) -> None:
        """Note the links before this one as not applied; None for all that are left."""
        for passed in self._names:
            if passed == name:
                return
            before = self.stages[-1]
            reason = why_not(passed, self._drawer)
            self.stages.append(Stage(passed, None, before.num_left, before.entropy, why_not=reason))

    def take_best(self, token_id: int) -> None:
        """What a greedy row does in place of the temperature: all else is out."""
        place = next(i for i, stage in enumerate(self.stages) if stage.name == "temperature")
        later = [s.name for s in self.stages[place + 1 :]]
        del self.stages[place:]
        chances = torch.zeros_like(_last(self.stages))
        chances[token_id] = 1.0
        self._add("temperature", chances, chances > 0)
        self._names = iter(later)
        self.skip_to(None)

    def _add(self, name: str, chances: Tensor, possible: Tensor) -> None:
        gone = self._possible & ~possible
        removed = float(_last(self.stages)[gone].sum())
        self.removed_by |= dict.fromkeys(gone.nonzero()[:, 0].tolist(), name)
        self._possible = possible
        chances = chances.nan_to_num(0.0)  # where nothing is left
        left = int(possible.sum())
        self.stages.append(Stage(name, chances, left, entropy_bits(chances), removed))


def why_not(name: str, drawer: Drawer) -> str:
    """Why a link of the chain leaves a row as it is, in words."""
    params = drawer.params
    if params.greedy and name in ("top_k", "top_p", "min_p", "typical_p"):
        return "greedy: nothing is drawn"
    if name in ("frequency_penalty", "presence_penalty") and getattr(params, name):
        return "no output yet"
    if name == "min_tokens" and params.min_tokens:
        return "long enough"
    return "off"


def draw_many(outcome: Outcome, seeds: Iterable[int], index: int) -> dict[int, int]:
    """How often each token is drawn, one draw for each seed, as the engine draws them."""
    edges = outcome.drawn_from.cumsum(dim=-1, dtype=torch.float64)
    darts = torch.tensor([uniform(seed, index) for seed in seeds], dtype=torch.float64)
    hits = torch.searchsorted(edges, darts * edges[-1], right=True).clamp_(max=len(edges) - 1)
    token_ids, counts = hits.unique(return_counts=True)
    return dict(zip(token_ids.tolist(), counts.tolist(), strict=True))


# --- for the browser -----------------------------------------------------------------------------


def shown_tokens(outcome: Outcome, also: Iterable[int] = ()) -> list[int]:
    """The tokens shown, by the model's own probability: its best, those that the chain raised, the
    one drawn, and those in `also`."""
    own, final = outcome.own, outcome.final
    best = own.topk(min(NUM_SHOWN, len(own))).indices.tolist()
    risen = [i for i in final.topk(min(NUM_RISEN, len(final))).indices.tolist() if final[i] > 0]
    shown = {*best, *risen, outcome.draw.token_id, *(i for i in also if i < len(own))}
    return sorted(shown, key=lambda i: (-float(own[i]), i))


def as_result(outcome: Outcome, shown: list[int], name: Callable[[int], str]) -> dict[str, Any]:
    """What the browser draws: a few tokens one by one, all others in one sum.

    `tokens` have their probability after each stage that applied, the model's own first; `others`
    likewise. `segments` are [token id, from, to] of the tokens that are wide enough on the
    cumulative bar.
    """
    applied = [stage for stage in outcome.stages if stage.chances is not None]
    index = torch.tensor(shown)
    table = torch.stack([s.chances[index] for s in applied if s.chances is not None])
    rest = (1 - table.sum(dim=1)).clamp(min=0)
    return {
        "tokens": [
            {
                "id": token_id,
                "text": name(token_id),
                "chances": _rounded(table[:, column]),
                "removed_by": outcome.removed_by.get(token_id),
            }
            for column, token_id in enumerate(shown)
        ],
        "others": {
            "num": len(outcome.own) - len(shown),
            "chances": _rounded(rest),
        },
        "stages": [_stage(stage, applied) for stage in outcome.stages],
        "draw": {
            "id": outcome.draw.token_id,
            "text": name(outcome.draw.token_id),
            "dart": outcome.draw.dart,
            "low": outcome.draw.low,
            "high": outcome.draw.high,
            "chance": float(outcome.final[outcome.draw.token_id]),
        },
        "segments": segments(outcome, name),
    }


def _stage(stage: Stage, applied: list[Stage]) -> dict[str, Any]:
    """`place` counts the stages that applied; it is None for the others."""
    return {
        "name": stage.name,
        "place": next((i for i, each in enumerate(applied) if each is stage), None),
        "left": stage.num_left,
        "entropy": round(stage.entropy, 4),
        "removed": round(stage.removed, DIGITS),
        "why_not": stage.why_not,
    }


def segments(outcome: Outcome, name: Callable[[int], str]) -> list[list[Any]]:
    """[token id, its text, from, to] for the tokens that fill a visible part of 0 to 1."""
    chances = outcome.final
    edges = chances.cumsum(dim=-1)
    wide = (chances >= NARROWEST).nonzero()[:, 0].tolist()
    return [
        [i, name(i), round(float(edges[i] - chances[i]), 6), round(float(edges[i]), 6)]
        for i in wide
    ]


def _rounded(chances: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in chances.tolist()]
