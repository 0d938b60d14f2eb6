"""A request and everything the engine keeps about it: its sequences, their texts and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdlab.engine.config import SamplingParams
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.output import Chunk, Completion, Detokenizer, RequestOutput
from pdlab.engine.sampler import mix
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.models.tokenizer import Tokenizer
from pdlab.trace import sample_ids


@dataclass(eq=False)
class Sample:
    """One of a request's sequences, with its text and its times."""

    index: int
    sequence: Sequence
    metrics: RequestMetrics
    detokenizer: Detokenizer
    texts: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.sequence.state is SequenceState.FINISHED

    def completion(self) -> Completion:
        """The finished sample, as the caller sees it."""
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return Completion(
            index=self.index,
            token_ids=sequence.output_ids,
            text="".join(self.texts),
            finish_reason=sequence.finish_reason,
            metrics=self.metrics,
        )


@dataclass(eq=False)
class Request:
    """What a caller asked for, and what has come of it so far."""

    request_id: str
    prompt: str
    samples: list[Sample]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    def add_token(self, sample: Sample, token_id: int, now_s: float) -> str:
        """Book one new token; returns the text it released."""
        sample.metrics.token_times_s.append(now_s)
        return self._release(sample, sample.detokenizer.add(token_id), [token_id])

    def close(self, sample: Sample) -> None:
        """Release what the detokenizer held back, once the sequence has finished."""
        self._release(sample, sample.detokenizer.flush(), [])

    def _release(self, sample: Sample, text: str, token_ids: list[int]) -> str:
        reason = sample.sequence.finish_reason
        sample.texts.append(text)
        self.chunks.append(Chunk(text, token_ids, reason, sample.index))
        return text

    def output(self) -> RequestOutput:
        """The finished request, as the caller sees it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_ids=self.samples[0].sequence.prompt_ids,
            completions=[sample.completion() for sample in self.samples],
        )


def new_request(
    request_id: str,
    prompt: str,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    seed: int,
    uses_prefix_cache: bool,
    arrival_s: float,
    tokenizer: Tokenizer | None,
) -> Request:
    """A request with `params.n` sequences: the first runs, the others fork off it.

    The first sample draws with the request's own seed, as it would alone.
    """
    samples = [
        Sample(
            index,
            Sequence(
                sequence_id=name,
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=params,
                seed=seed if index == 0 else mix(seed, -index),
                uses_prefix_cache=uses_prefix_cache,
            ),
            RequestMetrics(arrival_s=arrival_s, num_prompt_tokens=len(prompt_ids)),
            Detokenizer(tokenizer),
        )
        for index, name in enumerate(sample_ids(request_id, params.n))
    ]
    samples[0].sequence.forks = [sample.sequence for sample in samples[1:]]
    return Request(request_id, prompt, samples)
