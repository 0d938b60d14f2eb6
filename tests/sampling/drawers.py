"""Sequences that draw, without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdlab import SamplingParams
from pdlab.engine.sequence import Sequence
from pdlab.sampling import Sampled, Sampler, run_chain

NO_END = frozenset[int]()


def drawer(
    params: SamplingParams | None = None,
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 0,
    **fields: Any,
) -> Sequence:
    """A sequence that has put out some tokens and draws the next one."""
    made = Sequence(
        sequence_id="r0",
        request_id="r0",
        prompt_ids=prompt or [1],
        params=params or SamplingParams(temperature=1.0),
        seed=seed,
        **fields,
    )
    made.token_ids += output or []
    return made


def processed(logits: Tensor, params: SamplingParams, **fields: Any) -> Tensor:
    """What the chain makes of one row, [vocab_size]."""
    return run_chain(logits[None], [drawer(params, **fields)]).logits[0]


def kept(logits: Tensor, **params: Any) -> set[int]:
    """Tokens that can still be drawn from one row at temperature 1."""
    left = processed(logits, SamplingParams(**{"temperature": 1.0} | params))
    return set(torch.nonzero(left > -torch.inf)[:, 0].tolist())


def draws(logits: Tensor, params: SamplingParams, count: int, **fields: Any) -> Tensor:
    """How often each token is drawn by `count` requests with other seeds, [vocab_size]."""
    rows = [drawer(params, seed=seed, **fields) for seed in range(count)]
    drawn = Sampler(0).sample(logits.expand(count, -1), rows)
    ids = [each.token_id for each in drawn if isinstance(each, Sampled)]
    assert len(ids) == count
    return torch.bincount(torch.tensor(ids), minlength=logits.shape[-1]).double()
