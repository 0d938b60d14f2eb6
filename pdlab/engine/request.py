"""A request and everything the engine keeps about it: its sequence, its text, its times."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.output import Chunk, Detokenizer, RequestOutput
from pdlab.engine.sequence import Sequence, SequenceState


@dataclass(eq=False)
class Request:
    """What a caller asked for, and what has come of it so far."""

    prompt: str
    sequence: Sequence
    metrics: RequestMetrics
    detokenizer: Detokenizer
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.sequence.state is SequenceState.FINISHED

    def add_token(self, token_id: int, now_s: float) -> str:
        """Book one new token; returns the text it released."""
        self.metrics.token_times_s.append(now_s)
        text = self.detokenizer.add(token_id)
        self.chunks.append(Chunk(text, [token_id]))
        return text

    def close(self) -> str:
        """Release what the detokenizer held back, once the sequence has finished."""
        text = self.detokenizer.flush()
        self.chunks.append(Chunk(text, [], self.sequence.finish_reason))
        return text

    def output(self) -> RequestOutput:
        """The finished request, as the caller sees it."""
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return RequestOutput(
            request_id=sequence.request_id,
            prompt=self.prompt,
            prompt_ids=sequence.prompt_ids,
            token_ids=sequence.output_ids,
            text="".join(chunk.text for chunk in self.chunks),
            finish_reason=sequence.finish_reason,
            metrics=self.metrics,
        )
