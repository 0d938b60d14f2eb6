"""A constrained run of the engine, and what its mask did at each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.output import RequestOutput
from pdlab.kvcache import blocks_for
from pdlab.models import Model
from pdlab.sampling.automaton import START, ByteAutomaton
from pdlab.sampling.chain import run_chain
from pdlab.sampling.regex import compile_choice, compile_regex
from pdlab.sampling.sampler import draw
from pdlab.workbench.automaton_data import path_of
from pdlab.workbench.logits_data import KeptLogits, TextSoFar, entropy_bits, probabilities

NUM_SHOWN = 20
"""Most probable tokens before the mask that are shown."""
NUM_ALLOWED_SHOWN = 5
"""Most probable tokens after it that are shown too, wherever they were before."""
DIGITS = 12
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Decision:
    """One step of a constrained run: what the mask let through, and what was taken.

    `before` and `after` are float64 [vocab_size] and sum to 1: the distribution that enters the
    mask, and what is left of it, scaled up. Temperature and filters come later.
    """

    output_ids: list[int]
    """The output before this step."""
    token_id: int | None
    """What the engine took; None where nothing was left to take."""
    before: Tensor
    after: Tensor
    possible: Tensor
    """bool [vocab_size]: the tokens that the mask let through, those that end the text included."""
    num_allowed: int
    """Tokens of text among them."""
    may_end: bool
    chance: float
    """Of the token taken, in the distribution that it was drawn from."""
    unconstrained_id: int
    """What the same parameters and the same dart would have taken without the constraint."""

    @property
    def removed(self) -> float:
        """Probability that the mask took away."""
        return float(self.before[~self.possible].sum())

    @property
    def is_forced(self) -> bool:
        return int(self.possible.sum()) == 1


@dataclass(frozen=True)
class ConstrainedRun:
    """A prompt continued under a constraint by the engine, with the mask of every step."""

    params: SamplingParams
    backend: str
    output: RequestOutput
    decisions: list[Decision]


def own_automaton(params: SamplingParams) -> ByteAutomaton | None:
    """The automaton of our own masker; None where it cannot have one.

    It reads expressions and choices, and of expressions fewer kinds than llguidance.
    """
    try:
        if params.regex is not None:
            return compile_regex(params.regex)
        if params.choice is not None:
            return compile_choice(params.choice)
    except ValueError:
        return None
    return None


def run_constrained(
    model: Model,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    backend: str = "llguidance",
    exact: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> ConstrainedRun:
    """Generate under a constraint, and work out each step's mask from the logits of the run.

    Args:
        params: with a constraint and a seed, for one sample.
        progress: told how many tokens there are, after each step.

    Raises:
        ValueError: the constraint is faulty or impossible, or the prompt does not fit.
    """
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=blocks_for(len(prompt_ids) + params.max_tokens, BLOCK_SIZE),
        max_num_seqs=1,
        exact=exact,
        constraint_backend=backend,
        record_trace=False,
    )
    with Engine(model, config) as engine:
        kept = engine.runner = KeptLogits(engine.runner)
        request_id = engine.submit(prompt_ids, params)
        while engine.step():
            progress(len(kept.rows))
        output = engine.collect(request_id)
        start = engine.compiler.constraint(params)
        bad_words = engine.compiler.bad_words(params)
    assert start is not None
    eos = () if params.ignore_eos else model.config.eos_token_ids
    stop_ids = frozenset((*eos, *params.stop_token_ids))
    decisions = [
        _decision(
            rows[0],
            TextSoFar(
                params=params,
                seed=params.seed or 0,
                prompt_ids=prompt_ids,
                output_ids=output.token_ids[:index],
                stop_ids=stop_ids,
                bad_words=bad_words and bad_words.fork(),
                constraint=start,
            ),
            output.token_ids[index] if index < len(output.token_ids) else None,
        )
        for index, rows in enumerate(kept.rows)
    ]
    return ConstrainedRun(params, backend, output, decisions)


def _decision(logits: Tensor, drawer: TextSoFar, token_id: int | None) -> Decision:
    """One step, worked out again from its logits."""
    seen: dict[str, Tensor] = {"before": logits}

    def watch(name: str, rows: Tensor) -> None:
        if "after" not in seen:
            seen["after" if name == "constraint" else "before"] = rows[0].clone()

    processed, _ = run_chain(logits[None], [drawer], watch)
    matcher = drawer.constraint
    assert matcher is not None
    possible = seen["after"] > -torch.inf
    chances = processed[0].softmax(dim=-1)
    return Decision(
        output_ids=drawer.output_ids,
        token_id=token_id,
        before=probabilities(seen["before"]),
        after=probabilities(seen["after"]).nan_to_num(0.0),
        possible=possible,
        num_allowed=int(matcher.allowed().sum()),
        may_end=matcher.may_end,
        chance=0.0 if token_id is None else float(chances[token_id]),
        unconstrained_id=_unconstrained(logits, drawer),
    )


def _unconstrained(logits: Tensor, drawer: TextSoFar) -> int:
    """What the same row would have taken, had there been no constraint."""
    free = replace(drawer, constraint=None)
    processed, _ = run_chain(logits[None], [free])
    if drawer.params.greedy:
        return int(processed[0].argmax())
    return int(draw(processed.softmax(dim=-1), [free])[0])


# --- for the browser -----------------------------------------------------------------------------


def frames(
    run: ConstrainedRun,
    name: Callable[[int], str],
    spelling: Callable[[int], bytes],
    automaton: ByteAutomaton | None = None,
) -> list[dict[str, Any]]:
    """What the page shows at each step.

    Args:
        name: how a token is shown.
        spelling: the bytes a token adds to the text; nothing for one that ends it.
        automaton: whose states are followed; None for no states.
    """
    state, made = START, []
    for decision in run.decisions:
        frame = _frame(decision, name)
        if automaton is not None:
            taken = decision.token_id
            frame["path"] = path_of(automaton, state, b"" if taken is None else spelling(taken))
            state = frame["path"][-1]
        made.append(frame)
    return made


def _frame(decision: Decision, name: Callable[[int], str]) -> dict[str, Any]:
    before, after, token_id = decision.before, decision.after, decision.token_id
    best = before.topk(min(NUM_SHOWN, len(before))).indices.tolist()
    allowed = after.topk(min(NUM_ALLOWED_SHOWN, len(after))).indices.tolist()
    raised = [i for i in allowed if decision.possible[i]]
    shown = {*best, *raised, decision.unconstrained_id, *([] if token_id is None else [token_id])}
    order = sorted(shown, key=lambda i: (-float(before[i]), i))
    hidden = torch.ones(len(before), dtype=torch.bool)
    hidden[order] = False
    return {
        "taken": None if token_id is None else {"id": token_id, "text": name(token_id)},
        "chance": decision.chance,
        "num_allowed": decision.num_allowed,
        "may_end": decision.may_end,
        "forced": decision.is_forced,
        "removed": decision.removed,
        "entropy": [round(entropy_bits(before), 4), round(entropy_bits(after), 4)],
        "free": {
            "id": decision.unconstrained_id,
            "text": name(decision.unconstrained_id),
            "allowed": bool(decision.possible[decision.unconstrained_id]),
        },
        "tokens": [
            {
                "id": i,
                "text": name(i),
                "before": round(float(before[i]), DIGITS),
                "after": round(float(after[i]), DIGITS),
                "allowed": bool(decision.possible[i]),
            }
            for i in order
        ],
        "others": {
            "num": int(hidden.sum()),
            "allowed": int((hidden & decision.possible).sum()),
            "before": round(float(before[hidden].sum()), DIGITS),
            "after": round(float(after[hidden].sum()), DIGITS),
        },
    }
