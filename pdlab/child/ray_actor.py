"""An actor of Ray with a thread that works, and the line to it.

Two calls join them, so that neither waits for the other:

    driver  tell(message) ------>  actor      returns at once
            listen() ----------->             returns when there is news; the next one follows

Calls that end with an error are how the driver learns of an actor's or a node's death.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import ray

from pdlab.child.inbox import Ended, Inbox

PATIENCE_S = 30.0
"""How long one `listen` waits for news."""
GROUPS = {"tell": 1, "listen": 1}
"""Threads of an actor's calls."""
MOST_REASON_CHARS = 400


class Home(NamedTuple):
    """Where an actor lives."""

    node_id: str
    node_address: str
    pid: int


# --- in the actor -------------------------------------------------------------------------------


class TalkingActor:
    """The calls by which the driver and the actor's own thread talk. `begin` starts that."""

    def __init__(self, pipe: ActorPipe | None = None):
        self.pipe = pipe or ActorPipe()

    def begin(self, work: Callable[[], None]) -> None:
        """Have a thread do the actor's work; its end, or why it failed, is the last word."""

        def thread() -> None:
            reason = "it was stopped"
            try:
                work()
            except BaseException:
                reason = traceback.format_exc()
            self.pipe.send(Ended(reason))

        threading.Thread(target=thread, name="work", daemon=True).start()

    @ray.method(concurrency_group="tell")
    def tell(self, number: int, message: Any) -> None:
        """Give it a message; those of lower numbers go first."""
        self.pipe.put(number, message)

    @ray.method(concurrency_group="listen")
    def listen(self, patience_s: float) -> list[Any]:
        """What it has said, once it has said anything."""
        return self.pipe.take(patience_s)

    def home(self) -> Home:
        context = ray.get_runtime_context()
        return Home(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())


class ActorPipe:
    """The work's end of the line: the actor's calls put in and take out.

    What is said is pickled later, by Ray: only it can pickle references to its objects.
    """

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._early: dict[int, Any] = {}
        self._num_put = 0
        self._said: list[Any] = []
        self._change = threading.Condition()
        self.fileno = self._inbox.fileno
        self.receive = self._inbox.receive

    def send(self, message: Any) -> None:
        with self._change:
            self._said.append(message)
            self._change.notify()

    def drain(self) -> None: ...

    def put(self, number: int, message: Any) -> None:
        self._early[number] = message
        while self._num_put in self._early:
            self._inbox.put(self._early.pop(self._num_put))
            self._num_put += 1

    def take(self, patience_s: float) -> list[Any]:
        with self._change:
            self._change.wait_for(lambda: self._said, patience_s)
            said, self._said = self._said, []
            return said


# --- in the driver ------------------------------------------------------------------------------


class ActorCalls:
    """A channel of calls. One `listen` is under way whenever the driver has nothing to read."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._inbox = Inbox()
        self._lock = threading.RLock()  # what was heard is put in before the next call can return
        self._num_sent = 0
        self._is_listening = False
        self._was_killed = False
        self.is_over = False
        self.fileno = self._inbox.fileno
        self._listen()

    def send(self, message: Any) -> None:
        """Queue a message. If nobody is there any more, `receive` says so."""
        if not self.is_over:
            self._actor.tell.remote(self._num_sent, message)
            self._num_sent += 1

    def receive(self) -> list[Any]:
        """What it has said; never waits.

        Raises:
            EOFError: there will be no more; it says why.
        """
        with self._lock:
            messages = self._inbox.receive()
            self._listen()
            return messages

    def kill(self) -> None:
        """End its process at once."""
        self._was_killed = True
        ray.kill(self._actor, no_restart=True)

    def close(self, patience_s: float = 0.0) -> None:
        """Hear its end, if it was asked to, for so long; then end it by force."""
        if ray.is_initialized():
            self._await_end(patience_s)
            # One that could not be reached for a moment was given up, and may still live.
            ray.kill(self._actor, no_restart=True)
        self._inbox.close()

    def _await_end(self, patience_s: float) -> None:
        things: list[Any] = [self]
        end_s = time.monotonic() + patience_s
        try:
            while (left_s := end_s - time.monotonic()) > 0:
                self.receive()
                wait(things, left_s)
        except EOFError:
            pass

    def _listen(self) -> None:
        if not self._is_listening and not self.is_over:
            self._is_listening = True
            self._actor.listen.remote(PATIENCE_S).future().add_done_callback(self._heard)

    def _heard(self, future: Future) -> None:
        """A call has returned; this is a thread of Ray's."""
        error = future.exception()
        messages = [] if error is not None else future.result()
        reason = None if error is None else brief(error)
        if messages and isinstance(messages[-1], Ended):
            reason = messages.pop().reason
        with self._lock:
            self.is_over = reason is not None
            self._is_listening = False
            self._inbox.put(*messages)
            if reason is not None:
                self._inbox.end("it was killed" if self._was_killed else reason)


def brief(error: BaseException) -> str:
    """What an error of Ray says at its end: why an actor is dead, or what was raised there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1].partition(" Some common causes")[0] if lines else "no reason is given"
    return f"{type(error).__name__}: {said}"[:MOST_REASON_CHARS]
