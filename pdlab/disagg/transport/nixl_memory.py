"""Memory that NIXL may read: an agent, its registered buffers, and reads of a peer's.

What NIXL is, see `nixl_transport.py`. An agent is not safe to use from several threads at once; all
that is here is.
"""

from __future__ import annotations

import base64
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pdlab.disagg.transport.frames import BadFrame
from pdlab.disagg.transport.interface import Address

SMALLEST_BUFFER_BYTES = 1 << 16
POLL_S = 50e-6
"""Between two questions whether a read is done."""


@dataclass(eq=False)
class Buffer:
    """Registered memory.

    Args:
        key: tells it from all others of its agent.
        tensor: uint8 [size].
        registration: NIXL's.
        metadata: what a peer's agent needs to read it, in base 64.
        num_holders: for how many it must stay as it is.
    """

    key: str
    tensor: Tensor
    registration: Any
    metadata: str
    num_holders: int = 1


@dataclass
class Region:
    """Where a parcel stands, as it is told to a peer."""

    key: str
    address: int
    num_bytes: int
    device: int
    metadata: str

    @staticmethod
    def parse(fields: Any) -> Region | None:
        """None for a parcel without bytes.

        Raises:
            BadFrame: this is no region.
        """
        if fields is None:
            return None
        try:
            return Region(**fields)
        except TypeError as error:
            raise BadFrame(f"a region has the fields {fields}") from error


def region_of(buffer: Buffer | None, num_bytes: int) -> dict[str, Any] | None:
    if buffer is None:
        return None
    tensor = buffer.tensor
    device = max(0, tensor.get_device())
    return asdict(Region(buffer.key, tensor.data_ptr(), num_bytes, device, buffer.metadata))


class Memory:
    """A NIXL agent and its buffers, which are kept for reuse. Sizes are powers of two."""

    def __init__(self, device: torch.device, tls: str):
        api = _nixl()
        self._device = device
        self._kind = "VRAM" if device.type == "cuda" else "DRAM"
        with _environment({"UCX_TLS": tls} if tls else {}):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = api.nixl_agent(f"pdlab-{secrets.token_hex(8)}", config)
        self.metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._lock = threading.Lock()  # of the agent
        self._pool_lock = threading.Lock()
        self._free: dict[int, list[Buffer]] = {}
        self._all: list[Buffer] = []
        self._met: dict[str, str] = {}
        """Peers' agents, by the name of the peer."""
        self._known: set[tuple[str, str]] = set()
        """Peers' buffers that our agent knows: the peer's name and the buffer's key."""

    def stage(self, payload: Tensor) -> Buffer | None:
        """A buffer with a copy of a payload; None if it has no bytes."""
        if not payload.numel():
            return None
        buffer = self._take(payload.numel())
        buffer.tensor[: payload.numel()].copy_(payload)
        self._wait_for_device()
        return buffer

    def release(self, buffer: Buffer | None) -> None:
        """One holder less; without any, the buffer is free."""
        if buffer is not None:
            with self._pool_lock:
                buffer.num_holders -= 1
                if buffer.num_holders == 0:
                    self._free.setdefault(buffer.tensor.numel(), []).append(buffer)

    def read(self, peer: Address, region: Region | None, is_given_up: Callable[[], bool]) -> Tensor:
        """Bytes of a peer's memory, copied to memory of our own.

        Raises:
            RuntimeError: the peer is gone, or NIXL cannot read it.
        """
        if region is None:
            return torch.empty(0, dtype=torch.uint8)
        agent = self._meet(peer, region)
        buffer = self._take(region.num_bytes)
        ours = [(buffer.tensor.data_ptr(), region.num_bytes, max(0, buffer.tensor.get_device()))]
        theirs = [(region.address, region.num_bytes, region.device)]
        with self._lock:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(ours, self._kind),
                self._agent.get_xfer_descs(theirs, self._kind),
                agent,
            )
            state = self._agent.transfer(handle)
        while state == "PROC" and not is_given_up():
            time.sleep(POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        with self._lock:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":  # the buffer may still be written to: it is not used again
            raise RuntimeError(f"the read of {region.num_bytes} bytes ended in state {state}")
        payload = buffer.tensor[: region.num_bytes].clone()
        self._wait_for_device()
        self.release(buffer)
        return payload

    def answer(self) -> None:
        """Let UCX do what peers ask of it. There are no notifications: sockets carry them."""
        with self._lock, suppress(Exception):  # of a peer that is gone, the sockets tell
            self._agent.get_new_notifs()

    def part(self, peer: Address) -> None:
        """Forget a peer."""
        with self._lock:
            agent = self._met.pop(peer.name, None)
            self._known = {known for known in self._known if known[0] != peer.name}
            if agent is not None:
                with suppress(Exception):  # it is gone: whatever NIXL says of that
                    self._agent.remove_remote_agent(agent)

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            for agent in self._met.values():
                with suppress(Exception):
                    self._agent.remove_remote_agent(agent)
            for buffer in self._all:
                with suppress(Exception):
                    self._agent.deregister_memory(buffer.registration)
            self._all.clear()
            self._free.clear()
            del self._agent

    def _take(self, num_bytes: int) -> Buffer:
        size = max(SMALLEST_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        with self._pool_lock:
            if self._free.get(size):
                buffer = self._free[size].pop()
                buffer.num_holders = 1
                return buffer
        with self._lock:
            with torch.inference_mode(False):  # it is written again, also outside of a step
                tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
            registration = self._agent.register_memory(tensor)
            metadata = self._agent.get_partial_agent_metadata(registration, False, ["UCX"])
            key = str(len(self._all))
            buffer = Buffer(key, tensor, registration, base64.b64encode(metadata).decode())
            self._all.append(buffer)
            return buffer

    def _meet(self, peer: Address, region: Region) -> str:
        """The peer's agent, known to ours together with the region."""
        with self._lock:
            if peer.name not in self._met:
                name = self._agent.add_remote_agent(base64.b64decode(peer.metadata))
                self._met[peer.name] = name.decode() if isinstance(name, bytes) else name
            if (peer.name, region.key) not in self._known:
                self._agent.add_remote_agent(base64.b64decode(region.metadata))
                self._known.add((peer.name, region.key))
            return self._met[peer.name]

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _nixl() -> Any:
    """NIXL's Python interface, of whichever of its packages is installed.

    Raises:
        ImportError: none is.
    """
    for package in ("nixl_cu12", "nixl_cu13", "nixl"):
        with suppress(ImportError), _environment({"NIXL_LOG_LEVEL": "WARN"}):
            return import_module(f"{package}._api")
    raise ImportError("NIXL is not installed: pip install nixl-cu12 (Linux)")


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """With these environment variables, unless they are set: UCX reads them when it starts."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
