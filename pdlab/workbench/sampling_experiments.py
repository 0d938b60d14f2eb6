"""What the lesson on sampling measures between a model's logits and the token that is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.models import Model
from pdlab.sampling import Compiler, LogitsProcessor, run_chain, uniform
from pdlab.sampling.matcher import Drawer
from pdlab.workbench.constraint_lab_data import ConstrainedRun, Decision
from pdlab.workbench.logits_data import KeptLogits, NextLogits, TextSoFar, probabilities
from pdlab.workbench.sampling_lab_data import Outcome, draw_many, follow

MAX_TRIES = 10_000_000
"""Draws after which a step counts as hopeless."""
TRIES_AT_ONCE = 4096


@dataclass(frozen=True)
class Place:
    """A prompt, and the model's logits for the token after it, float32 [vocab_size]."""

    prompt: str
    prompt_ids: list[int]
    logits: Tensor

    @property
    def chances(self) -> Tensor:
        """The model's own distribution, float64 [vocab_size]."""
        return probabilities(self.logits)

    def follow(self, **params: Any) -> Outcome:
        """Through the chain, with these `SamplingParams`, at temperature 1 unless they say else."""
        knobs = SamplingParams(**{"temperature": 1.0, **params})
        return follow(self.logits, TextSoFar(knobs, knobs.seed or 0, self.prompt_ids))


def places(model: Model, prompts: Sequence[str]) -> list[Place]:
    """Run each prompt through the engine, up to its first logits."""
    ids = [_encode(model, prompt) for prompt in prompts]
    source = NextLogits(model, max(map(len, ids)) + 1)
    try:
        return [Place(p, i, source.after(i)) for p, i in zip(prompts, ids, strict=True)]
    finally:
        source.close()


def _encode(model: Model, prompt: str) -> list[int]:
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer")
    return model.tokenizer.encode(prompt)


# --- the draw ------------------------------------------------------------------------------------


class BestDrawn(NamedTuple):
    """How often the most probable token came, of `num` draws, beside what was stated."""

    temperature: float
    stated: float
    """Its probability after the chain."""
    drawn: int
    num: int

    @property
    def spread(self) -> float:
        """Standard deviation of the count, in draws, if the statement is true (binomial)."""
        return (self.num * self.stated * (1 - self.stated)) ** 0.5


def best_token_draws(
    place: Place, temperatures: Sequence[float], num: int = 1000
) -> list[BestDrawn]:
    """Draw as the engine does, with `num` seeds, at each temperature."""
    best = int(place.logits.argmax())
    found = []
    for temperature in temperatures:
        outcome = place.follow(temperature=temperature)
        counts = draw_many(outcome, range(num), 0)
        stated = float(outcome.final[best])
        found.append(BestDrawn(temperature, stated, counts.get(best, 0), num))
    return found


class Cut(NamedTuple):
    """What a filter leaves of a distribution."""

    name: str
    num_left: int
    mass_left: float
    """Probability that the tokens left had before."""


def cuts(place: Place, settings: Mapping[str, Mapping[str, Any]]) -> list[Cut]:
    """What each of these parameters, alone, leaves of the model's own distribution."""
    found = []
    for name, params in settings.items():
        left = place.follow(**params).final > 0
        found.append(Cut(name, int(left.sum()), float(place.chances[left].sum())))
    return found


# --- repetition ----------------------------------------------------------------------------------


class Moved(NamedTuple):
    """What a repetition penalty makes of one token's logit."""

    token_id: int
    text: str
    logit: float
    divided: float
    """By the penalty, whatever its sign."""
    penalized: float
    """By the engine's rule."""


def repetition_moves(model: Model, place: Place, penalty: float) -> list[Moved]:
    """Each token of the prompt under a repetition penalty, the highest logit first.

    Raises:
        ValueError: the penalty is out of range, or the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer")
    drawer = TextSoFar(SamplingParams(repetition_penalty=penalty), 0, place.prompt_ids)
    after = run_chain(place.logits[None], [drawer]).logits[0]
    ids = sorted(set(place.prompt_ids), key=lambda i: -float(place.logits[i]))
    return [
        Moved(
            token_id=i,
            text=model.tokenizer.token_text(i),
            logit=float(place.logits[i]),
            divided=float(place.logits[i]) / penalty,
            penalized=float(after[i]),
        )
        for i in ids
    ]


# --- constraints ---------------------------------------------------------------------------------


class Tries(NamedTuple):
    """One step of a constrained text, if the mask came after the draw."""

    text: str
    """The token taken."""
    mass_left: float
    """Probability of all tokens that are allowed."""
    tries: int
    """Draws until one of them came."""


def tries_without_mask(run: ConstrainedRun, model: Model, seed: int = 0) -> list[Tries]:
    """Draw from the unmasked distribution of each step until the token is an allowed one.

    Draws are made from what the mask would have received, at temperature 1 and without filters.

    Raises:
        ValueError: a step needs more than MAX_TRIES draws, or the model has no tokenizer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer")
    found = []
    for place, step in enumerate(run.decisions):
        name = "" if step.token_id is None else tokenizer.token_text(step.token_id)
        found.append(Tries(name, 1 - step.removed, _tries(step, seed + place * MAX_TRIES)))
    return found


def _tries(step: Decision, first_seed: int) -> int:
    """Draws until the mask accepts one."""
    edges = step.before.cumsum(dim=-1)
    for done in range(0, MAX_TRIES, TRIES_AT_ONCE):
        seeds = range(first_seed + done, first_seed + done + TRIES_AT_ONCE)
        darts = torch.tensor([uniform(seed, 0) for seed in seeds], dtype=torch.float64)
        hits = torch.searchsorted(edges, darts * edges[-1], right=True)
        accepted = step.possible[hits.clamp_(max=len(edges) - 1)].nonzero()
        if len(accepted):
            return done + int(accepted[0]) + 1
    raise ValueError(f"no allowed token came in {MAX_TRIES} draws")


def allowed_at_start(model: Model, params: SamplingParams, backend: str) -> list[int]:
    """The tokens that a constraint allows first, as one of the maskers has it."""
    compiler = Compiler(model.tokenizer, model.config.vocab_size, backend)
    matcher = compiler.constraint(params)
    if matcher is None:
        raise ValueError("params have no constraint")
    ids: list[int] = matcher.allowed().nonzero()[0].tolist()
    return ids


# --- seeds ---------------------------------------------------------------------------------------


class Company(NamedTuple):
    """One request alone, and the same one beside others."""

    alone: list[int]
    """Its tokens."""
    beside: list[int]
    logit_difference: float
    """The largest there was before the first token that differs."""
    flip_chance: float
    """Part of 0 to 1 where a dart would have hit another token, in the worst of these steps."""


def in_company(
    model: Model,
    prompt: str,
    others: Sequence[str],
    params: SamplingParams,
    *,
    exact: bool = False,
) -> Company:
    """Run a prompt alone and then at the head of a batch, with the same parameters."""
    alone, own_rows = _logits_of_first(model, [prompt], params, exact)
    beside, rows = _logits_of_first(model, [prompt, *others], params, exact)
    same = next((i for i, (a, b) in enumerate(zip(alone, beside, strict=False)) if a != b), None)
    last = min(len(alone), len(beside)) if same is None else same + 1
    pairs = list(zip(own_rows[:last], rows[:last], strict=True))
    return Company(
        alone,
        beside,
        max(float((a - b).abs().max()) for a, b in pairs),
        max(flip_chance(a, b, params.temperature) for a, b in pairs),
    )


def _logits_of_first(
    model: Model, prompts: list[str], params: SamplingParams, exact: bool
) -> tuple[list[int], list[Tensor]]:
    """The first prompt's tokens, and the logits that each came from."""
    config = EngineConfig(exact=exact, enable_prefix_cache=False, record_trace=False)
    with Engine(model, config) as engine:
        kept = engine.runner = KeptLogits(engine.runner)
        output = engine.generate(prompts, params)[0]
    return output.token_ids, [step[0] for step in kept.rows[: len(output.token_ids)]]


def flip_chance(first: Tensor, second: Tensor, temperature: float = 1.0) -> float:
    """Part of all darts that hit another token under the second logits than under the first."""
    edges = [probabilities(x / temperature).cumsum(dim=-1) for x in (first, second)]
    starts = [torch.nn.functional.pad(each, (1, 0))[:-1] for each in edges]
    common = torch.minimum(*edges) - torch.maximum(*starts)
    return max(0.0, 1 - float(common.clamp_(min=0).sum()))


# --- one's own link of the chain -----------------------------------------------------------------


class OwnProcessor(LogitsProcessor):
    """A LogitsProcessor made of a function of one row, for those who do not want to write a class.

    Args:
        change: called with the row's logits, float32 [vocab_size], the prompt's token ids and the
            output's; returns the new logits.
    """

    def __init__(self, name: str, change: Callable[[Tensor, list[int], list[int]], Tensor]):
        self.name = name
        self._change = change

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        rows = [
            self._change(row.clone(), list(drawer.prompt_ids), list(drawer.output_ids))
            for row, drawer in zip(logits, drawers, strict=True)
        ]
        return torch.stack(rows)
