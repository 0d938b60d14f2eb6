"""The loop of a worker that lives elsewhere, and what is said to it beside commands.

router                                   worker
            <- Hello
  [commands] ->                          a turn
            <- [events]                  ... and so on, while the engine has work
  Ask ->                                 a turn
            <- Answer
  Stop ->                                the end
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from pdlab.child.pipe import Pipe
from pdlab.disagg.worker import Worker

START_S = 120.0
"""How long a worker may take to begin."""
ANSWER_S = 60.0
"""How long it may take to answer a question: a step of its engine, and what it has to say."""
CLOSE_S = 5.0
"""How long it may take to end in good order, once asked."""
LONGEST_WAIT_S = 60.0
"""Of a worker with nothing to do; what comes wakes it."""
SHORTEST_WAIT_S = 0.01
"""Of one that has something to do, but no room for it."""


@dataclass(frozen=True)
class Ask:
    """A question, which is answered once all commands before it are obeyed."""

    what: Literal["trace", "load", "clock"]
    number: int = 0
    """Tells it from others."""


@dataclass(frozen=True)
class Answer:
    value: Any
    number: int = 0
    """Of the question."""


@dataclass(frozen=True)
class Stop:
    """End in good order."""


def serve(worker: Worker, pipe: Pipe) -> None:
    """Be a worker's process: until a `Stop`, or until the other end is gone.

    While there is nothing to do it sleeps; commands, parcels and the end of a lease wake it. Ends
    with the worker closed.
    """
    try:
        _say(pipe, worker.hello())
        has_news = False
        while True:
            if worker.is_idle:
                worker.transport.wait(_seconds_to_lease_end(worker), [pipe])
            elif not has_news:
                worker.transport.wait(SHORTEST_WAIT_S, [pipe])
            messages = pipe.receive()
            if any(isinstance(message, Stop) for message in messages):
                return
            lists = [message for message in messages if isinstance(message, list)]
            worker.hear([command for commands in lists for command in commands])
            has_news = _tell(worker, pipe)
            worker.step()
            has_news |= _tell(worker, pipe)
            for message in messages:
                if isinstance(message, Ask):
                    _say(pipe, Answer(_answer(worker, message.what), message.number))
    except (EOFError, ConnectionError):
        pass  # nobody is left to tell
    finally:
        worker.close()


def _tell(worker: Worker, pipe: Pipe) -> bool:
    """Whether there was anything to tell. The list is the pipe's then."""
    events = worker.take_events()
    if events:
        _say(pipe, events)
    return bool(events)


def _say(pipe: Pipe, message: Any) -> None:
    pipe.send(message)
    pipe.drain()


def _answer(worker: Worker, what: str) -> Any:
    match what:
        case "trace":
            return worker.engine.trace
        case "load":
            return worker.load()
        case "clock":
            return time.perf_counter()
    raise ValueError(f"what={what!r} cannot be asked")


def _seconds_to_lease_end(worker: Worker) -> float:
    ends_s = [
        *worker.prefill.leases.values(),
        *(incoming.lease_end_s for incoming in worker.decode.incoming.values()),
    ]
    return min([LONGEST_WAIT_S, *(max(0.0, end_s - worker.clock()) for end_s in ends_s)])
