"""What a router knows of a request, and of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from pdlab.disagg.messages import Arrival, Hello, Load, Produced
from pdlab.disagg.worker import Role
from pdlab.engine import Chunk, Completion, RequestMetrics, RequestOutput
from pdlab.engine.moving import RequestState
from pdlab.sampling import TokenLogprobs


class Stage(Enum):
    """Where a request is on its way.

    QUEUED -> (RESERVING ->) PREFILLING -> (RESERVING ->) MOVING -> DECODING -> DONE
    QUEUED -> SERVING -> DONE            on one worker, from beginning to end
    """

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    MOVING = "moving"
    DECODING = "decoding"
    SERVING = "serving"
    DONE = "done"


@dataclass(eq=False)
class Job:
    """A request with one sample, and what has come of it."""

    request_id: str
    state: RequestState
    """Grows with every token that is handed on."""
    arrival: Arrival
    metrics: RequestMetrics
    stage: Stage = Stage.QUEUED
    attempt: int = 0
    prefill_on: str | None = None
    """The worker that computes, or holds, its prompt."""
    decode_on: str | None = None
    """The worker that has, or shall have, its room."""
    is_held: bool = False
    """Whether the prompt is computed and K and V wait."""
    num_cached_tokens: int | None = None
    """Of the room, once there is one."""
    next_id: int | None = None
    """The token drawn from the prompt: the first that the decode worker is told of."""
    num_sent: int = 0
    """Tokens in the state when this attempt began: K and V of these travel."""
    num_transfers: int = 0
    """Of this attempt."""
    refused_by: set[str] = field(default_factory=set)
    """Workers that can never serve it."""
    chunks: list[Chunk] = field(default_factory=list)
    num_read: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    error: ValueError | None = None

    @property
    def name(self) -> str:
        """What workers call it."""
        return f"{self.request_id}~{self.attempt}" if self.attempt else self.request_id

    @property
    def sent_state(self) -> RequestState:
        """As this attempt began."""
        num_output = self.num_sent - len(self.state.prompt_ids)
        return replace(self.state, output_ids=self.state.output_ids[:num_output])

    @property
    def workers(self) -> list[str]:
        """That have something of it."""
        return [n for n in dict.fromkeys((self.prefill_on, self.decode_on)) if n is not None]

    def begin_again(self) -> None:
        """Another attempt, from what has been handed on."""
        self.attempt += 1
        self.stage = Stage.QUEUED
        self.prefill_on = self.decode_on = self.num_cached_tokens = self.next_id = None
        self.is_held = False
        self.num_transfers = 0

    def take(self, event: Produced, clock_offset_s: float = 0.0) -> Chunk:
        """A piece of its output, which goes on to the caller."""
        times_s = event.times_s or [event.time_s] * len(event.chunk.token_ids)
        chunk = replace(event.chunk, times_s=[time_s + clock_offset_s for time_s in times_s])
        self.state.output_ids.extend(chunk.token_ids)
        self.metrics.token_times_s += chunk.times_s
        self.chunks.append(chunk)
        return chunk

    def output(self) -> RequestOutput:
        """The finished request, as the caller sees it."""
        last = self.chunks[-1]
        assert last.finish_reason is not None
        params = self.state.params
        logprobs = [each for chunk in self.chunks for each in chunk.logprobs or []]
        asked = params.prompt_logprobs is not None
        positions = range(len(self.state.prompt_ids))
        completion = Completion(
            index=0,
            token_ids=list(self.state.output_ids),
            text="".join(chunk.text for chunk in self.chunks),
            finish_reason=last.finish_reason,
            metrics=self.metrics,
            stop_reason=last.stop_reason,
            logprobs=None if params.logprobs is None else logprobs,
            error=self.error,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.state.prompt,
            prompt_ids=self.state.prompt_ids,
            completions=[completion],
            prompt_logprobs=[self.prompt_logprobs.get(p) for p in positions] if asked else None,
        )


@dataclass(eq=False)
class Peer:
    """A worker, as the router sees it."""

    hello: Hello
    role: Role
    load: Load
    jobs: dict[str, Job] = field(default_factory=dict)
    """By the name that it knows them by."""
    clock_offset_s: float = 0.0
    """What to add to a time of its clock."""
    is_alive: bool = True
    heard_s: float = 0.0
    """When it last said something, or last had nothing to do."""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def gives(self) -> bool:
        """Whether it computes or holds prompts for others.

        Nobody gives and takes at once: two workers whose seats are taken by prompts that wait for
        room at the other one, or by rooms that wait for prompts from there, would wait for ever.
        """
        return any(job.prefill_on == self.name for job in self.jobs.values())

    @property
    def takes(self) -> bool:
        """Whether it has rooms, or shall have some, for prompts from others."""
        return any(job.prefill_on and job.decode_on == self.name for job in self.jobs.values())
