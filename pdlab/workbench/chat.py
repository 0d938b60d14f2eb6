"""The Chat widget: talk with a model, and watch what each turn finds in the KV cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, cast

import traitlets

from pdlab.engine import Chunk, Engine, EngineConfig, SamplingParams
from pdlab.engine.conversation import Conversation, Turn
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.workbench.chat_data import cached_to, num_forgotten, turn_data
from pdlab.workbench.chat_page import Page
from pdlab.workbench.widget import TraceWidget

MAX_SHOWN = 40
"""Exchanges that stay on the page, the newest; the conversation itself may be longer."""
OWN_ENGINE = EngineConfig(chunk_size=256, record_trace=False)
"""Chunks, so that Stop does not wait for a long prefill; no trace, because a chat has no end."""
STREAMING = "an answer is streaming: wait for its end, or stop it"


class Chat(TraceWidget):
    """A conversation on the page: it streams, can be stopped, and shows tok/s and KV blocks.

    What a turn takes over from the prefix cache is coloured in the text itself. The page stays
    responsive while the model computes: steps run in a thread, and a text already shown is never
    sent again.

        wb.Chat(model)                      # an engine of its own, closed with the widget
        wb.Chat(engine, params=pdlab.SamplingParams(temperature=0.7, seed=1), system="Be brief.")

    From Python: `say` answers before it returns, `start` returns at once, `stop` ends an answer.

    Args:
        model_or_engine: a model, or an engine to share with others.
        params: how to choose tokens.
        system: what the model is told before all else.

    Raises:
        ValueError: the model has no chat template.
    """

    name = "chat"

    header = traitlets.Dict().tag(sync=True)
    """Constants: the model, the limit in tokens, block size, blocks in the pool, the machine."""
    exchanges = traitlets.List().tag(sync=True)
    """The newest exchanges, as `turn_data` makes them; sent when a turn begins and ends."""
    num_hidden = traitlets.Int().tag(sync=True)
    """Older exchanges, not on the page."""
    cached_to = traitlets.List().tag(sync=True)
    """Where the cached part of the prompt ends: message (-1 the system's) and character in it;
    empty while unknown. Messages count from the first that is not forgotten."""
    num_forgotten = traitlets.Int().tag(sync=True)
    """Exchanges, of all there were, that the model no longer sees."""
    busy = traitlets.Bool(False).tag(sync=True)
    """An answer is streaming."""
    message = traitlets.Unicode().tag(sync=True)
    """What went wrong with the last wish, in words."""

    _owns_engine = False  # these three also for `close` of a widget that was refused
    _stopping = False
    _task: asyncio.Task[None] | None = None

    def __init__(
        self,
        model_or_engine: Model | Engine,
        *,
        params: SamplingParams | None = None,
        system: str | None = None,
    ) -> None:
        own = isinstance(model_or_engine, Model)
        if isinstance(model_or_engine, Model):
            engine = Engine(model_or_engine, OWN_ENGINE)
        elif isinstance(model_or_engine, Engine):
            engine = model_or_engine
        else:
            raise ValueError(f"model_or_engine={model_or_engine!r:.60} is neither Model nor Engine")
        try:
            self.conversation = Conversation(engine, params, system)
        except ValueError:
            if own:
                engine.close()
            raise
        self._owns_engine = own
        self._gate = threading.Lock()
        self._thread: threading.Thread | None = None
        self._page: Page | None = None
        self._num_views: int | None = None
        """Views on the page; None if there never was one."""
        super().__init__(header=self._header())
        self.on_msg(self._on_message)

    # --- talking ------------------------------------------------------------------------------

    def say(self, text: str) -> Turn:
        """Say something and wait for the answer, which streams on the page meanwhile.

        Interrupting the kernel stops the answer.

        Raises:
            ValueError: the text is empty or too long.
            RuntimeError: another answer is streaming.
        """
        self._begin()
        try:
            self._follow(text)
        finally:
            self._finish()
        return self.conversation.turns[-1]

    def start(self, text: str) -> None:
        """Say something and return at once; what goes wrong is said in `message`."""
        try:
            self._begin()
        except RuntimeError as error:
            self.message = str(error)
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # plain Python
            self._thread = threading.Thread(target=self._in_thread, args=(text,), daemon=True)
            self._thread.start()
        else:
            self._task = loop.create_task(self._in_loop(text))
            self._task.add_done_callback(lambda _: self._finish())  # also if it never began

    def stop(self) -> None:
        """End the answer; what was said stays. Without an answer, do nothing."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()

    def wait(self, timeout_s: float | None = None) -> None:
        """In plain Python: wait for what `start` began in a thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def reset(self) -> None:
        """Begin a new conversation; refused while an answer streams."""
        self._change(self.conversation.reset)

    def undo(self) -> None:
        """Take the last exchange back; refused while an answer streams."""
        self._change(self.conversation.undo)

    def close(self) -> None:
        """Stop, free the KV memory if it is the widget's own, and leave the page."""
        self.stop()
        if self._owns_engine:
            self._close_engine(self.conversation.engine)
        super().close()

    def summary(self) -> str:
        chat, turn = self.conversation, self.conversation.turn
        name = chat.engine.model.name
        if turn is None:
            return f"Chat with {name}: nothing said yet"
        ttft = "" if turn.ttft_s is None else f", TTFT {turn.ttft_s * 1e3:.0f} ms"
        speed = "" if turn.tokens_per_s is None else f", {turn.tokens_per_s:.1f} tokens/s"
        return (
            f"Chat with {name}, turn {len(chat.turns) + chat.answering}: {turn.cached_tokens} of "
            f"{turn.prompt_tokens} prompt tokens from the prefix cache{ttft}{speed}, "
            f"{turn.cached_blocks + turn.own_blocks} KV blocks. "
            f"User: {turn.text!r:.80} Assistant: {turn.answer!r:.200}"
        )

    # --- an answer ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """One answer at a time."""
        with self._gate:
            if self.busy or self.conversation.answering:
                raise RuntimeError(STREAMING)
            self._reopen()
            self.busy = True
        self.message = ""
        self._stopping = False

    def _follow(self, text: str) -> None:
        """Stream an answer in this thread."""
        self.show(coming=text)
        page = self._page = Page(self)
        with closing(cast(Generator[Chunk, None, None], self.conversation.say(text))) as stream:
            for _ in stream:
                page.update()
                if self._stopping:
                    return

    async def _in_loop(self, text: str) -> None:
        """Stream an answer beside whatever else the kernel is asked for."""
        self.show(coming=text)
        page = self._page = Page(self)
        try:
            async for _ in self.conversation.asay(text):
                page.update()
        except asyncio.CancelledError:
            pass  # stopped
        except Exception as error:
            self.message = _in_words(error)

    def _in_thread(self, text: str) -> None:
        try:
            self._follow(text)
        except Exception as error:
            self.message = _in_words(error)
        finally:
            self._finish()

    def _finish(self) -> None:
        self._page = self._task = None
        self.show()
        self.busy = False
        if self._is_gone:
            self._close_engine(self.conversation.engine)

    def _change(self, action: Callable[[], object]) -> None:
        if self.busy:
            self.message = STREAMING
            return
        try:
            action()
            self.message = ""
        except ValueError as error:
            self.message = str(error)
        else:
            self.show()

    def show(self, coming: str | None = None) -> None:
        """Put the conversation as it stands on the page, and a message that is to be answered."""
        turns = self.conversation.turns
        waiting = [] if coming is None else [{"user": coming, "answer": "", "stats": None}]
        with self.hold_sync():
            self.num_hidden = max(0, len(turns) + len(waiting) - MAX_SHOWN)
            self.exchanges = [*map(turn_data, turns[self.num_hidden :]), *waiting]
            self.num_forgotten = num_forgotten(self.conversation)
            self.cached_to = [] if waiting else list(cached_to(self.conversation) or ())

    # --- the page -----------------------------------------------------------------------------

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        kind = content.get("type")
        if kind == "say":
            self.start(str(content.get("text", "")))
        elif kind in ("stop", "reset", "undo"):
            getattr(self, kind)()
        elif kind == "catch_up" and self._page is not None:
            self._page.send_all()
        elif kind == "view":
            self._count_views(1 if content.get("open") else -1)

    def _count_views(self, change: int) -> None:
        """When the last view is gone (the cell runs again), nobody reads on: free the memory.

        A widget that is shown again goes on with its conversation, on a cold cache.
        """
        self._num_views = (self._num_views or 0) + change
        if not self._is_gone:
            return
        self.stop()
        if not self.busy:
            self._close_engine(self.conversation.engine)

    @property
    def _is_gone(self) -> bool:
        return self._num_views is not None and self._num_views <= 0

    def _close_engine(self, engine: Engine) -> None:
        if self._owns_engine:
            engine.close()

    def _reopen(self) -> None:
        """An engine that was closed with the last view is made anew."""
        engine = self.conversation.engine
        if self._owns_engine and engine.memory is None:
            self.conversation.engine = Engine(engine.model, OWN_ENGINE)

    def _header(self) -> dict[str, Any]:
        engine, machine = self.conversation.engine, describe_machine()
        return {
            "model": engine.model.name,
            "system": self.conversation.system,
            "limit": self.conversation.context_limit,
            "block_size": engine.config.block_size,
            "block_bytes": engine.kv_cache.block_bytes,
            "num_blocks": engine.pool.num_blocks,
            "machine": f"{machine['processor']}, {str(machine['date'])[:10]}",
        }


def _in_words(error: Exception) -> str:
    expected = isinstance(error, ValueError | RuntimeError)
    return str(error) if expected else f"{type(error).__name__}: {error}"
