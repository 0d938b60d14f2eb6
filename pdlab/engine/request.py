"""A request and everything the engine keeps about it: its sequences, their texts and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pdlab.engine.detokenizer import Detokenizer
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.output import (
    CONSTRAINT_OVER,
    Chunk,
    Completion,
    FinishReason,
    RequestOutput,
    StopReason,
)
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.engine.stops import StopFinder
from pdlab.models import Model
from pdlab.requirements import require_int, require_number
from pdlab.sampling import Matcher, Sampled, SamplingParams, TokenLogprobs, mix
from pdlab.trace import sample_ids

MOST_PRIORITY = 10**9


class Urgency(NamedTuple):
    """What a policy may go by; see `Engine.submit`."""

    priority: int = 0
    ttft_slo_s: float | None = None
    arrival_s: float | None = None

    def checked(self, now_s: float) -> Urgency:
        """Itself.

        Raises:
            ValueError: a value is of another kind, out of range, or in the future.
        """
        require_int("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        if self.ttft_slo_s is not None:
            require_number("ttft_slo_s", self.ttft_slo_s, 0, 1e9)
        if self.arrival_s is not None:
            require_number("arrival_s", self.arrival_s, -1e9, now_s)
        return self


NO_URGENCY = Urgency()


class Word(NamedTuple):
    """A token that is part of the output, and whose text has not been told yet."""

    sampled: Sampled
    time_s: float
    """When it was there."""
    shows: bool
    """Whether it is part of the text."""
    searches: bool
    """Whether a stop string may end with it."""


@dataclass(eq=False)
class Sample:
    """One of a request's sequences, with its text and its times."""

    index: int
    sequence: Sequence
    metrics: RequestMetrics
    detokenizer: Detokenizer
    stops: StopFinder
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: StopReason = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.sequence.state is SequenceState.FINISHED

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self.texts)

    @property
    def is_told_at_once(self) -> bool:
        """Whether its text may end it, so that nobody knows if it goes on before it was told."""
        return bool(self.sequence.params.stop)

    def book(self, sampled: Sampled, now_s: float) -> Word:
        """Book the sequence's newest token, which has just been appended to it."""
        sequence, params = self.sequence, self.sequence.params
        self.metrics.token_times_s.append(now_s)
        if sampled.logprobs:
            self.logprobs.append(sampled.logprobs)
        shows = params.include_stop or not sequence.is_stopped_by_token
        return Word(sampled, now_s, shows, sequence.may_stop)

    def tell(self, word: Word) -> Chunk:
        """The text of the token that was booked first and has not been told yet."""
        sampled = word.sampled
        text = self.detokenizer.add(sampled.token_id) if word.shows else ""
        return self._release(
            self.stops.push(text, searches=word.searches),
            token_ids=[sampled.token_id],
            logprobs=[sampled.logprobs] if sampled.logprobs else None,
            times_s=[word.time_s],
        )

    def take(self, sampled: Sampled, now_s: float) -> Chunk:
        """Book the newest token and tell its text."""
        return self.tell(self.book(sampled, now_s))

    def catch_up(self, token_ids: list[int]) -> None:
        """Append tokens that another engine drew; what text they released was released there."""
        for token_id in token_ids:
            self.sequence.token_ids.append(token_id)
            self.take(Sampled(token_id, 1.0, []), 0.0)
        self.texts.clear()
        self.metrics.token_times_s.clear()

    def ending(self, max_model_len: int) -> FinishReason | None:
        """Whether, and how, the text ends with its newest token; see `stop_reason` and `error`."""
        sequence, params = self.sequence, self.sequence.params
        newest = sequence.token_ids[-1]
        if sequence.is_stopped_by_token:
            self.stop_reason = newest if newest in params.stop_token_ids else None
            return "stop"
        if self.stops.found is not None:
            self.stop_reason = self.stops.found
            return "stop"
        if sequence.constraint and sequence.may_stop:
            try:
                sequence.constraint.sync(sequence.output_ids)
            except ValueError as error:  # it allowed the token, and now it cannot follow
                self.error = error
                return "error"
            if sequence.constraint.is_over:
                self.stop_reason = CONSTRAINT_OVER
                return "stop"
        if sequence.num_output_tokens >= params.max_tokens:
            return "length"
        return "length" if sequence.num_tokens >= max_model_len else None

    def close(self) -> Chunk:
        """Release what was held back, once the sequence has finished."""
        text = self.stops.push(self.detokenizer.flush())
        if self.stops.found is not None and self.sequence.finish_reason in ("stop", "length"):
            self.sequence.finish_reason, self.stop_reason = "stop", self.stops.found
        last = self._release(text + self.stops.flush(), token_ids=[])
        last.finish_reason, last.stop_reason = self.sequence.finish_reason, self.stop_reason
        return last

    @property
    def held(self) -> str:
        """What is held back: text that may begin a stop string, bytes of half a character."""
        unfinished = self.detokenizer.held_bytes
        return self.stops.held + (f"<{unfinished.hex(' ').upper()}>" if unfinished else "")

    def _release(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        times_s: list[float] | None = None,
    ) -> Chunk:
        self.texts.append(text)
        return Chunk(
            text,
            token_ids,
            index=self.index,
            logprobs=logprobs,
            times_s=times_s or [],
        )

    def completion(self) -> Completion:
        """The finished sample, as the caller sees it."""
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return Completion(
            index=self.index,
            token_ids=sequence.output_ids,
            text=self.text,
            finish_reason=sequence.finish_reason,
            metrics=self.metrics,
            stop_reason=self.stop_reason,
            logprobs=None if sequence.params.logprobs is None else self.logprobs,
            error=self.error,
        )


@dataclass(eq=False)
class Request:
    """What a caller asked for, and what has come of it so far."""

    request_id: str
    prompt: str
    samples: list[Sample]
    chunks: list[Chunk] = field(default_factory=list)
    """All pieces so far, in the order in which they were released."""
    num_read: int = 0
    """Chunks that the reader of its stream has taken."""
    max_unread: int | None = None
    """Chunks that may wait for their reader before the request pauses; None for no limit."""
    num_untold: int = 0
    """Tokens that are booked and whose chunks are still to come."""
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By position in the prompt."""
    num_closed: int = 0
    """Samples whose last chunk is there."""

    @property
    def finished(self) -> bool:
        """Whether all is there that there will be."""
        return self.num_closed == len(self.samples)

    @property
    def num_unread(self) -> int:
        return len(self.chunks) - self.num_read

    def pause_if_unread(self) -> None:
        """Pause its sequences while too much of its stream waits to be read."""
        if self.max_unread is None:
            return
        paused = self.num_unread + self.num_untold >= self.max_unread
        for sample in self.samples:
            sample.sequence.paused = paused

    @property
    def is_drained(self) -> bool:
        """Whether it has finished and all of it has been read."""
        return self.finished and not self.num_unread

    def raise_error(self) -> None:
        """Raise what kept one of the samples from going on, if anything did."""
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error

    def release(self, chunk: Chunk) -> str:
        """Hand a piece of one of the samples to the reader; returns its text."""
        self.chunks.append(chunk)
        self.num_closed += chunk.finish_reason is not None
        return chunk.text

    def read(self) -> Chunk:
        """The next chunk that has not been read."""
        chunk = self.chunks[self.num_read]
        self.num_read += 1
        self.pause_if_unread()
        return chunk

    def output(self) -> RequestOutput:
        """The finished request, as the caller sees it."""
        sequence = self.samples[0].sequence
        wanted = sequence.params.prompt_logprobs is not None
        positions = range(sequence.num_prompt_tokens)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_ids=sequence.prompt_ids,
            completions=[sample.completion() for sample in self.samples],
            prompt_logprobs=[self.prompt_logprobs.get(p) for p in positions] if wanted else None,
        )


def new_request(
    request_id: str,
    prompt: str,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    seed: int,
    uses_prefix_cache: bool,
    now_s: float,
    model: Model,
    constraint: Matcher | None,
    bad_words: Matcher | None,
    urgency: Urgency = NO_URGENCY,
) -> Request:
    """A request with `params.n` sequences: the first runs, the others fork off it.

    The first sample draws with the request's own seed, as it would alone.

    Args:
        constraint, bad_words: their start states.
    """
    ends = [i for i in model.config.eos_token_ids if i < model.config.vocab_size]
    arrival_s = now_s if urgency.arrival_s is None else urgency.arrival_s
    own_ends = [] if params.ignore_eos else ends
    samples = [
        Sample(
            index,
            Sequence(
                sequence_id=name,
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=params,
                seed=seed if index == 0 else mix(seed, -index),
                uses_prefix_cache=uses_prefix_cache and params.prompt_logprobs is None,
                stop_ids=frozenset((*own_ends, *params.stop_token_ids)),
                constraint=constraint and constraint.fork(),
                bad_words=bad_words and bad_words.fork(),
                arrival_s=arrival_s,
                priority=urgency.priority,
                ttft_slo_s=urgency.ttft_slo_s,
            ),
            RequestMetrics(arrival_s=arrival_s, num_prompt_tokens=len(prompt_ids)),
            Detokenizer(model.tokenizer, params.skip_special_tokens),
            StopFinder(params.stop, params.include_stop),
        )
        for index, name in enumerate(sample_ids(request_id, params.n))
    ]
    samples[0].sequence.forks = [sample.sequence for sample in samples[1:]]
    return Request(request_id, prompt, samples)
