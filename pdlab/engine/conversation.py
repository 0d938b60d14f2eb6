"""A conversation on an engine: messages for people, token ids for the KV cache.

A chat model remembers nothing. Every turn it reads the whole conversation again, and only the
prefix cache spares it the work: K and V are found where the new prompt *begins with the same token
ids* as an earlier one. The same text is not enough. A model may spell a text with other tokens than
the tokenizer would, and a template may end the answer otherwise than the model did. So a
conversation keeps the ids that were fed and generated, and each prompt is these plus the encoded
rest of what the template renders.

Knows tokens and requests; nothing of screens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from collections.abc import Sequence as Several
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from pdlab.engine import admission
from pdlab.engine.history import continue_tokens
from pdlab.engine.output import Chunk
from pdlab.engine.request import Request
from pdlab.engine.sequence import Sequence
from pdlab.kvcache import KVMemory, blocks_for
from pdlab.models import Tokenizer
from pdlab.sampling import SamplingParams
from pdlab.trace import DROPPED

if TYPE_CHECKING:
    from pdlab.engine.engine import Engine

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""


@dataclass
class Turn:
    """One exchange and what it took. Grows while the answer streams.

    Of the prompt's tokens, `cached_tokens` had their K and V in the prefix cache and `new_tokens`
    were computed. Times are measured by the engine, in seconds.
    """

    text: str
    """What the user said."""
    prompt_tokens: int
    """The whole conversation up to here, as the template renders it."""
    context_limit: int
    """Most tokens of prompt and answer: `max_model_len`, or what the KV pool holds."""
    block_size: int
    block_bytes: int
    forgotten: int = 0
    """Oldest exchanges that had to go before this turn, because it would not have fitted."""
    answer: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The answer's, its end token included if the model chose one."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort` (somebody stopped it); None while it streams."""
    cached_tokens: int = 0
    ttft_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    kept_blocks: int = 0
    """Blocks of the conversation that the prefix cache still has when the turn is over."""

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first; None with fewer than two."""
        times = self.token_times_s
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None

    @property
    def context_tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + len(self.token_ids)

    @property
    def cached_blocks(self) -> int:
        """KV blocks taken over from earlier turns (or from others that began alike)."""
        return self.cached_tokens // self.block_size if self.token_ids else 0

    @property
    def own_blocks(self) -> int:
        """KV blocks filled in this turn. The newest token has no K and V yet.

        With a sliding window some of them are dropped again.
        """
        if not self.token_ids:
            return 0
        return blocks_for(self.context_tokens - 1, self.block_size) - self.cached_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of the blocks that this turn used."""
        return (self.cached_blocks + self.own_blocks) * self.block_bytes

    def add(self, chunk: Chunk, request: Request) -> None:
        """Book what has just been streamed; `request` knows the times."""
        metrics = request.samples[0].metrics
        self.answer += chunk.text
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason
        self.cached_tokens = metrics.num_cached_tokens
        self.ttft_s = metrics.ttft_s
        self.token_times_s = metrics.token_times_s[: len(self.token_ids)]


class Conversation:
    """Turns of user and assistant on one engine, with as much of the KV cache reused as can be.

    Several conversations may take turns on one engine, or run beside each other.

    When prompt and answer would no longer fit (`max_model_len`, the KV pool), the oldest exchanges
    are forgotten: `Turn.forgotten` counts them, `forgotten` keeps them. Because every forgetting
    moves the text and so loses the prefix cache, it goes on until half of the room is free
    (llama.cpp's context shift does the same), not once a turn.

    Args:
        params: how to choose tokens; `params` may be replaced between turns.
        system: what the model is told before all else, and never forgets.

    Raises:
        ValueError: the model has no chat template, or `params.n` is not 1.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams | None = None, system: str | None = None
    ):
        tokenizer = engine.model.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ValueError(f"model {engine.model.name!r} has no chat template: it cannot chat")
        if system is not None:
            tokenizer.encode(system)  # refuses what is no text
        self.engine = engine
        self.params = SamplingParams() if params is None else params
        self.system = system
        self.messages: list[Message] = []
        """User and assistant in turn; the system message is apart."""
        self.turns: list[Turn] = []
        """The turns so far, those undone left out."""
        self.forgotten: list[Message] = []
        """Messages that were dropped because the conversation had become too long."""
        self.token_ids: list[int] = []
        """What the model has seen: the last prompt as it was fed and, once the answer has ended,
        the answer as it was generated."""
        self._tokenizer: Tokenizer = tokenizer
        self._answering: Turn | None = None
        self._check(self.params)

    # --- talking ------------------------------------------------------------------------------

    def say(self, text: str) -> Iterator[Chunk]:
        """Say something; stream the answer.

        When the stream ends or is closed (a stop button, Ctrl-C, `break`), what was said till then
        becomes the assistant's message. When it fails, the exchange is taken back.

        Raises:
            ValueError: the text is empty, or does not fit even with everything else forgotten. The
                conversation is as it was.
            RuntimeError: the answer before is still streaming.
        """
        prepared = self._prepare(text)
        chunks = self.engine.stream(prepared.prompt_ids, prepared.params)
        answer = self._follow(prepared, cast(Generator[Chunk, None, None], chunks))
        next(answer)  # enter its `try`, or closing it unread would not stop it
        return answer

    def _follow(
        self, prepared: _Prepared, chunks: Generator[Chunk, None, None]
    ) -> Generator[Chunk, None, None]:
        with self._answer(prepared) as turn, closing(chunks):
            yield Chunk("", [])  # taken by `say`
            for chunk in chunks:
                turn.add(chunk, self._request(prepared))
                yield chunk

    async def asay(self, text: str) -> AsyncGenerator[Chunk, None]:
        """`say` for an event loop: steps run in a thread, the loop stays free.

        Nothing happens before the first chunk is asked for. Cancelling the task stops the answer.
        """
        prepared = self._prepare(text)
        chunks = self.engine.astream(prepared.prompt_ids, prepared.params)
        with self._answer(prepared) as turn:
            async with aclosing(cast(AsyncGenerator[Chunk, None], chunks)):
                async for chunk in chunks:
                    turn.add(chunk, self._request(prepared))
                    yield chunk

    def retry(self) -> Iterator[Chunk]:
        """Ask the last question again. A fixed seed, and greedy choice, give the same answer again.

        Raises:
            ValueError: nothing was asked yet.
        """
        before = list(self.messages), list(self.turns), self.token_ids

        def restore() -> None:
            self.messages, self.turns, self.token_ids = before

        text = self.undo()
        try:
            return _or_else(self.say(text), restore)
        except Exception:
            restore()
            raise

    def undo(self) -> str:
        """Take the last exchange back; returns what the user had said.

        Raises:
            ValueError: there is no exchange.
            RuntimeError: the answer is still streaming.
        """
        self._require_silence()
        starts = self._starts(self.messages)
        if not starts:
            raise ValueError("the conversation is empty: there is nothing to undo")
        text = self.messages[starts[-1]]["content"]
        del self.messages[starts[-1] :]
        del self.turns[-1:]
        return text

    def reset(self) -> None:
        """Begin anew; the system message stays. Stop a streaming answer first.

        Raises:
            RuntimeError: the answer is still streaming.
        """
        self._require_silence()
        self.messages, self.turns, self.forgotten, self.token_ids = [], [], [], []

    @property
    def turn(self) -> Turn | None:
        """The turn whose answer is streaming, or the last one."""
        return self._answering or (self.turns[-1] if self.turns else None)

    @property
    def answering(self) -> bool:
        """Whether an answer is streaming."""
        return self._answering is not None

    # --- what fits ----------------------------------------------------------------------------

    @property
    def context_limit(self) -> int:
        """Most tokens of prompt and answer: `max_model_len`, or what the KV pool holds."""
        config, limit = self.engine.config, admission.longest(self.engine.config)
        kept = self._memory.manager.retention
        if kept.peak_blocks(limit, config.largest_chunk, config.block_size) <= config.num_blocks:
            return limit
        return min(limit, config.num_blocks * config.block_size + 1)  # the last has no K and V

    def _prepare(self, text: str) -> _Prepared:
        """Choose what to forget, encode, and leave the answer the room there is."""
        self._require_silence()
        self._check(self.params)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text={text!r:.60} is empty: say something")
        messages = [*self.messages, {"role": "user", "content": text}]
        limit = self.context_limit
        room = limit - min(self.params.max_tokens, limit // 2)
        starts, forgotten = self._starts(messages), 0
        prompt_ids = self._encode(messages)
        if len(prompt_ids) > room and len(starts) > 1:
            forgotten = 1 + bisect_left(
                starts[1:-1], True, key=lambda i: len(self._encode(messages[i:])) <= room // 2
            )
            prompt_ids = self._encode(messages[starts[forgotten] :])
        if len(prompt_ids) >= limit:
            raise ValueError(
                f"text has {len(self._tokenizer.encode(text))} tokens, {len(prompt_ids)} as a "
                f"prompt: with one token of answer that is more than the {limit} that fit"
            )
        most = min(self.params.max_tokens, limit - len(prompt_ids))
        params = replace(self.params, max_tokens=most, min_tokens=min(self.params.min_tokens, most))
        cut = starts[forgotten] if forgotten else 0
        return _Prepared(text, prompt_ids, params, messages[cut:], messages[:cut], forgotten, limit)

    def _encode(self, messages: Several[Message]) -> list[int]:
        """The prompt: the tokens seen so far for as long as they spell it, and the rest encoded."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        rendered = self._tokenizer.render_chat([*first, *messages])
        return continue_tokens(self._tokenizer, self.token_ids, rendered)

    @staticmethod
    def _starts(messages: Several[Message]) -> list[int]:
        """Where exchanges begin."""
        return [i for i, message in enumerate(messages) if message["role"] == "user"]

    # --- booking ------------------------------------------------------------------------------

    @contextmanager
    def _answer(self, prepared: _Prepared) -> Iterator[Turn]:
        """The exchange is part of the conversation, unless the body fails.

        GeneratorExit, KeyboardInterrupt and CancelledError are no failures: somebody stopped it.
        """
        before = self.messages, self.forgotten, self.token_ids
        turn = Turn(
            text=prepared.text,
            prompt_tokens=len(prepared.prompt_ids),
            context_limit=prepared.limit,
            block_size=self.engine.config.block_size,
            block_bytes=self._memory.cache.block_bytes,
            forgotten=prepared.num_forgotten,
        )
        self._answering = turn
        self.messages, self.token_ids = prepared.messages, prepared.prompt_ids
        self.forgotten = [*self.forgotten, *prepared.forgotten]
        try:
            yield turn
        except Exception:
            self.messages, self.forgotten, self.token_ids = before
            self._answering = None
            raise
        finally:
            if self._answering is turn:
                self._close(turn)

    def _close(self, turn: Turn) -> None:
        turn.finish_reason = turn.finish_reason or "abort"
        self.messages.append({"role": "assistant", "content": self._content(turn)})
        self.turns.append(turn)
        self.token_ids = self.token_ids + turn.token_ids
        turn.kept_blocks = self.cached_blocks()
        self._answering = None

    def _content(self, turn: Turn) -> str:
        """The answer without its end token, which the template writes itself."""
        last = turn.token_ids[-1:]
        if not last or last[0] not in self._tokenizer.eos_token_ids:
            return turn.answer
        return turn.answer.removesuffix(self._tokenizer.token_text(last[0]))

    def cached_blocks(self) -> int:
        """Blocks of this conversation that the prefix cache has now; the next turn skips them.

        Between turns a conversation holds no block: others may have taken them.
        """
        memory = self.engine.memory
        if memory is None:
            return 0
        holder = Sequence(
            sequence_id="",
            request_id="",
            prompt_ids=self.token_ids,
            params=self.params,
            uses_prefix_cache=self.engine.config.enable_prefix_cache,
        )
        with memory.lock:
            return sum(block != DROPPED for block in memory.manager.look_up(holder).table)

    def _request(self, prepared: _Prepared) -> Request:
        """The engine's request of a turn: no other has the very same `params`."""
        requests = list(self.engine.requests.values())
        return next(r for r in requests if r.samples[0].sequence.params is prepared.params)

    def _require_silence(self) -> None:
        if self._answering is not None:
            raise RuntimeError("the answer is still streaming: read it to its end, or close it")

    @staticmethod
    def _check(params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r:.60} must be SamplingParams")
        if params.n != 1:
            raise ValueError(f"n={params.n}: a conversation goes on from one answer, n must be 1")

    @property
    def _memory(self) -> KVMemory:
        if self.engine.memory is None:
            raise RuntimeError("the engine is closed")
        return self.engine.memory


@dataclass(frozen=True)
class _Prepared:
    """A turn that may begin."""

    text: str
    prompt_ids: list[int]
    params: SamplingParams
    messages: list[Message]
    forgotten: list[Message]
    num_forgotten: int
    limit: int


def _or_else(chunks: Iterator[Chunk], restore: Callable[[], None]) -> Iterator[Chunk]:
    """The stream; where it fails, things are as they were."""
    try:
        yield from chunks
    except Exception:
        restore()
        raise
