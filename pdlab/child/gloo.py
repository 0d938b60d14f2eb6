"""Groups of torch.distributed's gloo that are nobody's default.

They have no name in the process, so that several can be there at the same time.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

FOREVER = timedelta(days=365)
"""gloo takes a wait that times out for the end of the connection, so waits do not time out."""
NEVER = 1 << 30
"""Tag of a message that nobody ever sends."""


def gloo_group(
    store: dist.Store, rank: int, num_ranks: int, host: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group that listens on one interface; waits for the others.

    Args:
        store: where they meet.
        host: the address whose interface it uses.
        timeout: for the others to come; also of waits that give none.

    Raises:
        RuntimeError: another rank did not come in time.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch declares less than it has, and not in all versions
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    group: dist.ProcessGroup = gloo(store, rank, num_ranks, options)
    return group


def break_off(group: Any, other: int) -> None:
    """End what threads wait for: a wait that times out makes gloo close its connection."""
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        group.recv([nothing], other, NEVER).wait(timedelta(milliseconds=1))


def reason_of(error: Exception) -> str:
    """What gloo says, without its advice and without where in its source it says so."""
    return str(error).partition("\n")[0].partition(" This is typically")[0]
