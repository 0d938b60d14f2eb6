"""Ranks as threads of this process: no torch.distributed, no second copy of what is imported.

They share torch's threads and Python's lock, so this is for looking at what ranks do and for tests,
not for speed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pdlab.child import CLOSE_S
from pdlab.engine.config import EngineConfig
from pdlab.models import Model
from pdlab.models.shard_plan import ShardPlan
from pdlab.parallel.group import RankLost, serve
from pdlab.parallel.rank import Rank
from pdlab.parallel.wires import Mail


class ThreadLine:
    """A rank in a thread; see `Line`.

    Args:
        make: makes the rank, in its thread.
        hang_up: ends its waiting for others: who waits for a rank that is gone, or for one that
            waits for it, would do so in vain.
    """

    def __init__(self, number: int, make: Callable[[], Rank], hang_up: Callable[[], None]):
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hang_up = hang_up
        self._thread = threading.Thread(
            target=serve,
            args=(make, iter(self._inbox.get, None), _Replies(self._outbox)),
            name=f"pdlab-rank-{number}",
            daemon=True,
        )
        self._thread.start()

    def send(self, message: Any) -> None:
        self._inbox.put(message)

    def receive(self, patience_s: float) -> list[Any]:
        messages = list(_taken(self._outbox, patience_s))
        if not messages and not self._thread.is_alive():
            messages = list(_taken(self._outbox, 0.0))
            if not messages:
                raise RankLost("its thread has ended")
        return messages

    def close(self, force: bool) -> None:
        self._inbox.put(None)
        if force:
            self._hang_up()
        self._thread.join(CLOSE_S)


class _Replies:
    def __init__(self, outbox: queue.SimpleQueue[Any]):
        self._outbox = outbox

    def send(self, message: tuple[int | None, Any]) -> None:
        self._outbox.put(message)


def _taken(messages: queue.SimpleQueue[Any], patience_s: float) -> Iterator[Any]:
    """All that is there; waits so long for the first."""
    try:
        yield messages.get(timeout=patience_s) if patience_s else messages.get_nowait()
        while True:
            yield messages.get_nowait()
    except queue.Empty:
        return


def thread_lines(model: Model, config: EngineConfig) -> list[ThreadLine]:
    """A thread for each rank of a resolved configuration."""
    plan = ShardPlan(model.config, config.tensor_parallel, config.pipeline_parallel)
    mail = Mail(plan.num_ranks)
    weights = model.decoder.named_weights().items()
    return [
        ThreadLine(
            number,
            partial(Rank, plan, number, model, weights, config, mail.wires(number)),
            mail.hang_up,
        )
        for number in range(plan.num_ranks)
    ]
