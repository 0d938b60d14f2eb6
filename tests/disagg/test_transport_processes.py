"""Transports between processes, of which one is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pdlab.disagg.transport.interface import Address, Transport
from tests.disagg.bodies import (
    PROCESS_BODIES,
    await_failures,
    make_one,
    need,
    parcels_of,
    receive,
    same,
    serve,
)
from tests.helpers import ROOT


@dataclass
class Other:
    """The process at the other end."""

    process: BaseProcess
    pipe: Connection
    address: Address
    transport: Transport
    """Ours."""


@pytest.fixture(params=PROCESS_BODIES)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Other]:
    need(request.param)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    meeting = str(tmp_path / "meeting")
    process = context.Process(target=serve, args=(request.param, meeting, theirs), daemon=True)
    with pytest.MonkeyPatch.context() as patch:  # the child has to find these tests
        patch.syspath_prepend(str(ROOT))
        process.start()
    theirs.close()
    transport = make_one(request.param, meeting, rank=0)
    pipe.send(transport.address)
    yield Other(process, pipe, pipe.recv(), transport)
    process.kill()
    process.join()
    transport.close()
    pipe.close()


def test_parcels_cross_processes_and_a_killed_peer_is_noticed(other: Other) -> None:
    ours = other.transport
    sent = parcels_of("there and back", [0, 1, 4096, 5_000_000])
    for parcel in sent:
        ours.send(other.address, parcel)
    assert same(receive(ours, len(sent)), sent)

    other.pipe.send(("pulled", [3, 5_000_000]))
    ours.fetch(other.pipe.recv())
    assert same(receive(ours, 2), parcels_of("pulled", [3, 5_000_000]))
    other.pipe.send(("never comes", [20_000_000]))
    ticket = other.pipe.recv()

    # Stopped, it takes nothing out of the connection: it is killed in the middle of the transfer.
    pid = other.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for parcel in parcels_of("into the void", [4_000_000] * 5)[:4]:
        ours.send(other.address, parcel)
    os.kill(pid, signal.SIGKILL)
    failures = await_failures(ours, None, "into the void")
    assert [failure.transfer_id for failure in failures] == [None, "into the void"]
    assert {failure.peer for failure in failures} == {other.address}

    ours.send(other.address, parcels_of("too late", [10])[0])
    ours.fetch(ticket)
    failures = await_failures(ours, "too late", "never comes")
    assert None not in {failure.transfer_id for failure in failures}
    assert ours.receive() == []

    ours.close()
    mine = [t for t in threading.enumerate() if str(ours.address) in t.name]
    assert not mine
