"""What ranks outside this process have in common: what they are told first, and both ends of the
line to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch

from pdlab.child.pipe import Pipe, messages_of
from pdlab.engine.config import EngineConfig
from pdlab.models import Model
from pdlab.models.loading import weights_by_name
from pdlab.models.shard_plan import ShardPlan
from pdlab.parallel.group import RankLost, serve
from pdlab.parallel.rank import Rank
from pdlab.parallel.wires import Wires


@dataclass(frozen=True)
class RankSpec:
    """All that it takes to make a rank, but for its wires."""

    number: int
    plan: ShardPlan
    model: Model
    """Without weights, and without what is not needed to make them."""
    config: EngineConfig

    def make(self, wires: Wires) -> Rank:
        """The rank. It loads the weights by the model's name, and keeps its share."""
        weights = weights_by_name(self.model.name, self.model.dtype, self.model.device)
        return Rank(self.plan, self.number, self.model, weights, self.config, wires)

    def on_gpu(self, place: int) -> RankSpec:
        """The same on one of the GPUs of its machine, if the model is on a GPU."""
        if self.model.device.type != "cuda":
            return self
        device = torch.device("cuda", place % max(1, torch.cuda.device_count()))
        return replace(self, model=replace(self.model, device=device))


def specs_of(model: Model, config: EngineConfig) -> list[RankSpec]:
    """Of all ranks of a resolved configuration; what only its engine needs is left out."""
    plan = ShardPlan(model.config, config.tensor_parallel, config.pipeline_parallel)
    ours = replace(config, policy="fcfs", speculation=None)
    return [RankSpec(number, plan, model.outline, ours) for number in range(plan.num_ranks)]


# --- where the rank is --------------------------------------------------------------------------


def be_rank(make: Callable[[], Rank], pipe: Pipe, first: list[Any]) -> None:
    """Be a rank until it is told to stop, or until the engine is gone.

    Args:
        first: what was heard already.
    """
    serve(make, messages_of(pipe, first), _Replies(pipe))


class _Replies:
    def __init__(self, pipe: Pipe):
        self._pipe = pipe

    def send(self, message: tuple[int | None, Any]) -> None:
        self._pipe.send(message)
        self._pipe.drain()


# --- where the engine is ------------------------------------------------------------------------


class Channel(Protocol):
    """Carries messages to a rank, and those from it into an inbox."""

    def fileno(self) -> int: ...
    def send(self, message: Any) -> None: ...
    def receive(self) -> list[Any]: ...


class ChannelLine:
    """A rank at the other end of a channel; see `Line`. How it is closed, subclasses add."""

    def __init__(self, channel: Channel):
        self._channel = channel

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def receive(self, patience_s: float) -> list[Any]:
        try:
            if messages := self._channel.receive():
                return messages
            if patience_s:
                self._wait(patience_s)
            return self._channel.receive()
        except EOFError as end:
            raise RankLost(self._reason(end)) from None

    def _wait(self, patience_s: float) -> None:
        wait([self._channel.fileno()], patience_s)

    def _reason(self, end: EOFError) -> str:
        return str(end)


class Shared:
    """What several lines use; given back when the last of them is closed."""

    def __init__(self, give_back: Callable[[], None], num_users: int):
        self._give_back = give_back
        self._num_users = num_users

    def leave(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._give_back()
