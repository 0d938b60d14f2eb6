"""What the lesson on sampling measures between a token and its reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pdlab.engine import BeamOutput, Engine, SamplingParams
from pdlab.engine.stops import StopFinder
from pdlab.models import Model, Tokenizer
from pdlab.trace import DROPPED, StepRecord

LOST = "\ufffd"
"""What a decoder puts where bytes are no character."""


def token_by_token(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token is, decoded alone."""
    return [tokenizer.decode([token_id]) for token_id in token_ids]


def num_lost(texts: Sequence[str]) -> int:
    """Replacement characters in some texts."""
    return sum(text.count(LOST) for text in texts)


class Leak(NamedTuple):
    """What readers had seen when a stop string was complete, if pieces were sent at once."""

    naive: str
    held_back: str
    """The same, with the engine's search in between."""

    @property
    def leaked(self) -> str:
        """What should not have been sent."""
        return self.naive[len(self.held_back) :]


def stop_leak(pieces: Sequence[str], stop: str) -> Leak:
    """Send pieces of text until a stop string is complete, with and without holding back.

    Raises:
        ValueError: the stop string does not come.
    """
    finder, naive, held_back = StopFinder([stop]), "", ""
    for piece in pieces:
        held_back += finder.push(piece)
        if finder.found:
            return Leak(naive, held_back)
        naive += piece
    raise ValueError(f"stop={stop!r:.60} is not in the text")


# --- readers -------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Someone who reads a stream and takes a while over each chunk."""

    name: str
    prompt: str
    delay_s: float = 0.0
    """After each chunk."""
    max_unread: int = 64
    text: str = ""
    times_s: list[float] = field(default_factory=list)
    """When each token was computed, in seconds since the engine was made."""
    read_s: float = 0.0
    """When the last chunk was read, likewise."""

    @property
    def computed_s(self) -> float:
        """When the last token was computed."""
        return self.times_s[-1]

    def num_computed(self, by_s: float) -> int:
        """Tokens that were there at some time."""
        return sum(time_s <= by_s for time_s in self.times_s)


async def read_together(
    model: Model, readers: Sequence[Reader], params: SamplingParams
) -> list[Reader]:
    """Let all read at once on one engine, each at its own pace; returns them when all are done."""
    with Engine(model) as engine:
        start_s = time.perf_counter()
        await asyncio.gather(*(_read(engine, reader, params, start_s) for reader in readers))
    return list(readers)


async def _read(engine: Engine, reader: Reader, params: SamplingParams, start_s: float) -> None:
    reader.text, reader.times_s = "", []
    async for chunk in engine.astream(reader.prompt, params, max_unread=reader.max_unread):
        reader.text += chunk.text
        reader.times_s += chunk.times_s
        reader.read_s = time.perf_counter() - start_s
        if reader.delay_s:
            await asyncio.sleep(reader.delay_s)


# --- several texts -------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """KV blocks that sequences hold."""

    held: int
    """Each counted once."""
    unshared: int
    """Counted for each sequence that holds it."""


def blocks_of(step: StepRecord) -> Blocks:
    """Blocks of all sequences resident in a step."""
    tables = [[b for b in r.block_table if b != DROPPED] for r in step.residents]
    return Blocks(len({b for table in tables for b in table}), sum(map(len, tables)))


def copied_by_reordering(output: BeamOutput) -> int:
    """Blocks that a cache of one tensor a beam would copy to put its beams in a new order.

    Such a cache is gathered anew, all beams whole, after each step but the last.
    """
    return sum(step.num_blocks_unshared for step in output.steps[1:])


def repeated_share(token_ids: Sequence[int], n: int = 3) -> float:
    """Part of a text's runs of n tokens that stood in it before."""
    runs = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


class Written(NamedTuple):
    """A text, how probable the model finds it, and how much it repeats itself."""

    name: str
    text: str
    logprob_per_token: float
    repeated: float


def sampled_texts(
    model: Model, prompt: str, params: Sequence[tuple[str, SamplingParams]]
) -> list[Written]:
    """Continue a prompt with each of these, all in one batch."""
    with Engine(model) as engine:
        outputs = engine.generate(
            [prompt] * len(params), [replace(each, logprobs=0) for _, each in params]
        )
    return [
        Written(
            name,
            output.text,
            output.completions[0].sum_logprob / len(output.token_ids),
            repeated_share(output.token_ids),
        )
        for (name, _), output in zip(params, outputs, strict=True)
    ]


def beam_text(name: str, output: BeamOutput) -> Written:
    """The best hypothesis of a search."""
    best = output.hypotheses[0]
    per_token = best.sum_logprob / len(best.token_ids)
    return Written(name, best.text, per_token, repeated_share(best.token_ids))
