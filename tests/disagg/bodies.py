"""The transports that one test suite runs against, and a process that runs one of them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.transport.interface import Failure, Parcel, Transport, make_parcel
from pdlab.disagg.transport.sockets import SocketTransport
from pdlab.disagg.transport.torch_distributed import TorchDistributed

TOKEN = "the tests' own token"
PATIENCE_S = 30.0
"""Nothing here takes so long, even on a busy machine."""

BODIES = ("in-process", "unix", "tcp", "torch", "nixl")
PROCESS_BODIES = BODIES[1:]


def need(body: str) -> None:
    """Skip a test whose body's package is missing; in CI it fails instead."""
    if body == "nixl" and "CI" not in os.environ and not importlib.util.find_spec("nixl_cu12"):
        pytest.skip("nixl-cu12 is not installed")


def make_pair(body: str, **options: Any) -> tuple[Transport, Transport]:
    """Two transports of this process that can reach each other."""
    need(body)
    if body == "in-process":
        board = Switchboard()
        return InProcess(board, "a", **options), InProcess(board, "b", **options)
    if body == "torch":
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda r: TorchDistributed(store, r, 2, **options), range(2))
        return first, second
    return make_one(body, **options), make_one(body, **options)


def make_one(body: str, meeting: str = "", rank: int = 0, **options: Any) -> Transport:
    """A transport that peers in other processes can reach."""
    if body == "torch":
        return TorchDistributed.join(f"file://{meeting}", rank, 2, **options)
    if body == "nixl":
        from pdlab.disagg.transport.nixl_transport import NixlTransport

        return NixlTransport(TOKEN, **options)
    return SocketTransport(TOKEN, family="unix" if body == "unix" else "tcp", **options)


def parcels_of(transfer_id: str, sizes: list[int], *, seed: int = 0) -> list[Parcel]:
    """Parcels with random bytes, one a layer; the last is the last."""
    generator = torch.Generator().manual_seed(seed)
    return [
        make_parcel(
            transfer_id,
            range(layer, layer + 1),
            range(7, 23),
            torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator),
            is_last=layer == len(sizes) - 1,
        )
        for layer, size in enumerate(sizes)
    ]


def wait_for(ready: Callable[[], bool], transport: Transport, what: str) -> None:
    """Let a transport wait until something is so."""
    end_s = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < end_s, f"{what} did not come within {PATIENCE_S} s"
        transport.wait(0.1)


def receive(transport: Transport, count: int) -> list[Parcel]:
    """The next parcels, `count` of them; fails on any failure."""
    parcels: list[Parcel] = []

    def ready() -> bool:
        parcels.extend(transport.receive())
        failures = transport.failures()
        assert not failures, failures
        return len(parcels) >= count

    wait_for(ready, transport, f"{count} parcels")
    assert len(parcels) == count
    return parcels


def await_failures(transport: Transport, *transfer_ids: str | None) -> list[Failure]:
    """Failures, once those of these transfers (None: of the peer) have come."""
    failures: list[Failure] = []

    def ready() -> bool:
        transport.receive()
        failures.extend(transport.failures())
        return {failure.transfer_id for failure in failures} >= set(transfer_ids)

    wait_for(ready, transport, f"failures of {transfer_ids}")
    return failures


def same(received: list[Parcel], sent: list[Parcel]) -> bool:
    """Whether parcels are the same in all but the times."""
    return len(received) == len(sent) and all(
        (a.transfer_id, a.layers, a.tokens, a.checksum, a.is_last)
        == (b.transfer_id, b.layers, b.tokens, b.checksum, b.is_last)
        and torch.equal(a.payload, b.payload)
        for a, b in zip(received, sent, strict=True)
    )


def serve(body: str, meeting: str, pipe: Connection) -> None:
    """A process: returns what is pushed to it, and publishes what it is asked to."""
    torch.set_num_threads(1)
    transport = make_one(body, meeting, rank=1)
    pipe.send(transport.address)
    peer = pipe.recv()
    with contextlib.suppress(EOFError):
        while True:
            transport.wait(10.0, [pipe])
            for parcel in transport.receive():
                transport.send(peer, parcel)
            if pipe.poll():
                transfer_id, sizes = pipe.recv()
                pipe.send(transport.publish(transfer_id, parcels_of(transfer_id, sizes)))
    transport.close()
