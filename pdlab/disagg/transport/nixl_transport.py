"""Parcels by NIXL, NVIDIA's Inference Xfer Library: the receiver reads the sender's memory.

Each agent registers staging buffers with NIXL, and describes to its peers where they stand. A
transfer is a one-sided READ by the receiver: over InfiniBand or NVLink the holder's processor has
no part in it; over TCP (without CUDA, and on a laptop) a thread of the holder answers as long as
somebody may be reading. NIXL's own thread would do that too, at a quarter of a core when idle.

    push  sender: payload -> staging buffer, says where     receiver:            READ, "done"
    pull  holder: payloads -> staging buffers, ticket       receiver: "reading"
                  "lent"                                                         READ ..., "done"

What is told, and that a peer is gone, goes over sockets (`sockets.py`), as in vLLM's NIXL
connector: UCX notices a dead peer late or, in shared memory, not at all.

A buffer that is lent goes back to the pool when nobody reads it any more, not when its transfer is
withdrawn: what is read is never somebody else's.
The first use takes seconds: loading the library, making an agent, connecting. The package is
`nixl-cu12` (Linux; works without a GPU).
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdlab.disagg.transport.carrier import CarriedTransport, Lost
from pdlab.disagg.transport.frames import BadFrame, Frame, frame_of, parcel_of, span_of
from pdlab.disagg.transport.interface import Address, Parcel, Ticket
from pdlab.disagg.transport.nixl_memory import POLL_S, Buffer, Memory, Region, region_of
from pdlab.disagg.transport.sockets import Family, SocketCarrier
from pdlab.link import Link

SLOW_POLL_S = 2e-3
SLOW_AFTER_S = 1.0
"""After which a peer that does not read what it may is served less often."""


class NixlTransport(CarriedTransport):
    """Moves parcels by one-sided reads.

    Args:
        token, name, family, host: of the sockets beside it, as in `SocketTransport`.
        device: where staging buffers are and payloads arrive: "cpu", or "cuda:0".
        tls: UCX's transports (`UCX_TLS`); "" leaves the choice to UCX. None is "tcp,self,sm" on
            the CPU, and UCX's choice on a GPU.
        link: simulates a link for what is sent and fetched here.

    Raises:
        ImportError: NIXL is not installed.
    """

    def __init__(
        self,
        token: str,
        name: str = "worker",
        *,
        device: str = "cpu",
        tls: str | None = None,
        family: Family = "unix",
        host: str = "127.0.0.1",
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        where = torch.device(device)
        if tls is None:
            tls = "tcp,self,sm" if where.type == "cpu" else ""
        self._memory = Memory(where, tls)
        self._staged: dict[str, list[Buffer | None]] = {}
        """What is published."""
        self._loans: list[_Loan] = []
        self._last_loan_s = 0.0
        self._asked: dict[tuple[Address, str, int], list[_Read]] = {}
        """What is to be read once its holder lends it."""
        self._tasks: deque[_Read | _Release | _Part] = deque()
        self._current: _Read | None = None
        self._gone: set[str] = set()
        self._change = threading.Condition()
        self._is_ending = False
        carrier = SocketCarrier(
            token, name, family=family, host=host, kind="nixl", metadata=self._memory.metadata
        )
        self._reader = threading.Thread(target=self._run_reader, name=f"{carrier.address} reads")
        self._reader.start()
        super().__init__(carrier, name="nixl", link=link, clock=clock)

    def _keep(self, transfer_id: str, parcels: Sequence[Parcel]) -> tuple[int, tuple[str, ...]]:
        buffers = [self._memory.stage(parcel.payload) for parcel in parcels]
        with self._lock:
            known = self._staged.setdefault(transfer_id, [])
            known.extend(buffers)
            first = len(known) - len(buffers)
        regions = (
            frame_of(parcel, region=region_of(buffer, parcel.num_bytes)).fields
            for parcel, buffer in zip(parcels, buffers, strict=True)
        )
        return first, tuple(map(json.dumps, regions))

    def fetch(self, ticket: Ticket) -> None:
        transfer_id, source = ticket.transfer_id, ticket.source
        if not ticket.sizes:
            return
        self._book_fetch(ticket)
        reads = [
            _Read(source, Frame("parcel", transfer_id, json.loads(region)), index)
            for index, region in enumerate(ticket.regions, ticket.first)
        ]
        with self._change:
            self._asked[source, transfer_id, ticket.first] = reads
        fields = {"first": ticket.first, "count": len(ticket.sizes)}
        self._post(source, Frame("reading", transfer_id, fields))

    def withdraw(self, transfer_id: str) -> None:
        with self._lock:
            buffers = self._staged.pop(transfer_id, [])
        with self._change:
            readers = {loan.peer for loan in self._loans if loan.transfer_id == transfer_id}
        super().withdraw(transfer_id)
        self._forget_asked(lambda _, asked: asked == transfer_id)
        for buffer in buffers:
            self._memory.release(buffer)
        for peer in readers:
            self._carrier.post(peer, Frame("withdrawn", transfer_id))

    def close(self) -> None:
        if self._is_closed:
            return
        with self._change:
            self._is_ending = True
            self._change.notify()
        self._reader.join()
        super().close()
        self._memory.close()

    # --- the holder ------------------------------------------------------------------------------

    def _post_parcel(self, to: Address, parcel: Parcel, **fields: Any) -> None:
        """Put a parcel where the peer can read it, and say so."""
        buffer = self._memory.stage(parcel.payload)
        frame = frame_of(parcel, region=region_of(buffer, parcel.num_bytes), **fields)
        frame.payload = None
        if buffer is None:
            self._post(to, frame)
            return
        loan = _Loan(to, parcel.transfer_id, buffer)
        self._begin_loans([loan])
        if not self._post(to, frame):
            self._end_loans(lambda other: other is loan)

    def _lend(self, peer: Address, frame: Frame) -> None:
        """Let a peer read what is published."""
        first, count = span_of(frame)
        with self._lock:
            buffers = self._staged.get(frame.transfer_id, [])[first : first + count]
            is_here = len(buffers) == count
            loans = [
                _Loan(peer, frame.transfer_id, buffer, first)
                for buffer in buffers
                if is_here and buffer is not None
            ]
            for loan in loans:
                loan.buffer.num_holders += 1
        self._begin_loans(loans)
        answer = "lent" if is_here else "withdrawn"
        self._carrier.post(peer, Frame(answer, frame.transfer_id, {"first": first, "count": count}))

    def _begin_loans(self, loans: list[_Loan]) -> None:
        with self._change:
            self._loans += loans
            self._last_loan_s = time.monotonic()
            self._change.notify()

    def _end_loans(self, is_over: Callable[[_Loan], bool]) -> None:
        with self._change:
            over = [loan for loan in self._loans if is_over(loan)]
            self._loans = [loan for loan in self._loans if not is_over(loan)]
        for loan in over:
            self._memory.release(loan.buffer)

    # --- both, on the carrier's threads ----------------------------------------------------------

    def _on_frame(self, peer: Address, frame: Frame) -> None:
        transfer_id = frame.transfer_id
        match frame.kind:
            case "parcel":
                self._queue(_Read(peer, frame, None))
            case "reading":
                self._lend(peer, frame)
            case "lent":
                first, _ = span_of(frame)
                with self._change:
                    reads = self._asked.pop((peer, transfer_id, first), [])
                for read in reads:
                    self._queue(read)
                self._queue(_Release(peer, transfer_id, first))
            case "done":
                key, fetched = frame.fields.get("key"), frame.fields.get("first")
                self._end_loans(
                    lambda loan: (
                        (loan.peer, loan.transfer_id) == (peer, transfer_id)
                        and key in (None, loan.buffer.key)
                        and fetched in (None, loan.first)
                    )
                )
            case "withdrawn":
                super()._on_frame(peer, frame)
                self._forget_asked(lambda source, asked: (source, asked) == (peer, transfer_id))
                self._queue(_Release(peer, transfer_id))
            case "stop":
                pass  # the end of its reads is told by "done"
            case _:
                raise BadFrame(f"a frame of kind {frame.kind!r}")

    def _forget_asked(self, is_over: Callable[[Address, str], bool]) -> None:
        with self._change:
            for key in [key for key in self._asked if is_over(key[0], key[1])]:
                del self._asked[key]

    def _on_lost(self, lost: Lost) -> None:
        with self._change:
            self._gone.add(lost.peer.name)
            reads = [task for task in self._tasks if isinstance(task, _Read)]
            if self._current is not None:
                reads.append(self._current)
            unread = {read.frame.transfer_id for read in reads if read.peer == lost.peer}
        self._end_loans(lambda loan: loan.peer == lost.peer)
        self._forget_asked(lambda source, _: source == lost.peer)
        self._queue(_Part(lost.peer))
        super()._on_lost(lost._replace(unsent=sorted({*lost.unsent, *unread})))

    # --- the reader, on its thread ---------------------------------------------------------------

    def _queue(self, task: _Read | _Release | _Part) -> None:
        with self._change:
            self._tasks.append(task)
            self._change.notify()

    def _next_task(self) -> _Read | _Release | _Part | None:
        """What to do next; None if it is to answer those who may be reading our memory."""
        with self._change:
            self._current = None
            if not self._tasks and not self._is_ending:
                self._change.wait(self._pause_s())
            if not self._tasks or self._is_ending:
                return None
            task = self._tasks.popleft()
            if isinstance(task, _Read):
                self._current = task
            return task

    def _pause_s(self) -> float | None:
        """How long to sleep, unless something comes; None is for good."""
        if not self._loans:
            return None
        is_fresh = time.monotonic() - self._last_loan_s < SLOW_AFTER_S
        return POLL_S if is_fresh else SLOW_POLL_S

    def _run_reader(self) -> None:
        while not self._is_ending:
            match self._next_task():
                case None:
                    self._memory.answer()
                case _Read() as read:
                    self._read(read)
                case _Release(peer, transfer_id, first):
                    self._carrier.post(peer, Frame("done", transfer_id, {"first": first}))
                case _Part(peer):
                    self._memory.part(peer)

    def _read(self, read: _Read) -> None:
        """Read a parcel, unless nobody wants it any more, and tell the holder that it is done."""
        peer, frame = read.peer, read.frame
        try:
            region = Region.parse(frame.fields.get("region"))
            if self._is_wanted(read):
                payload = self._memory.read(peer, region, lambda: self._is_given_up(peer))
                self._arrived(peer, parcel_of(frame, payload), read.index)
        except Exception as error:  # NIXL's are many; whichever: this transfer has failed
            with self._lock:
                self._incoming.pop(frame.transfer_id, None)
                self._fetches.pop(frame.transfer_id, None)
            self._mailbox.fail(frame.transfer_id, peer, f"{type(error).__name__}: {error}")
        else:
            if read.index is None and region is not None:
                self._carrier.post(peer, Frame("done", frame.transfer_id, {"key": region.key}))

    def _is_wanted(self, read: _Read) -> bool:
        if self._is_given_up(read.peer) or self._mailbox.is_over(read.frame.transfer_id):
            return False
        if read.index is None:
            return True
        with self._lock:
            fetch = self._fetches.get(read.frame.transfer_id)
            return fetch is not None and read.index in fetch.asked

    def _is_given_up(self, peer: Address) -> bool:
        return self._is_ending or peer.name in self._gone


@dataclass
class _Read:
    """A parcel to be read; `index` if it is fetched."""

    peer: Address
    frame: Frame
    index: int | None


@dataclass
class _Release:
    """The reads of a fetch, or of a transfer (None), are over: the holder gets its buffers back."""

    peer: Address
    transfer_id: str
    first: int | None = None


@dataclass
class _Part:
    """Forget a peer that is lost."""

    peer: Address


@dataclass
class _Loan:
    """A peer may be reading a buffer; `first` is that of its fetch, or None."""

    peer: Address
    transfer_id: str
    buffer: Buffer
    first: int | None = None
