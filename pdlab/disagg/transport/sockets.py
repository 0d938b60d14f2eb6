"""Parcels over sockets: between processes of one machine by default, between machines if asked.

One connection joins two transports that have to do with each other, whoever of them opened it. Each
has a thread that sends and one that receives; both spend their time in system calls, which do not
hold Python's lock. A process that dies closes its connections, so its peers know at once.

    send() -> queue -> sending thread ==== socket ==== receiving thread -> mailbox -> receive()

Who connects must prove, before anything else is read, that it knows the cluster's token, and the
other side must prove it too (HMAC of a fresh number; the token does not travel). What travels is
not encrypted: TCP beyond this machine belongs in a network that is trusted.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

from pdlab.disagg.transport.carrier import CarriedTransport, Carrier, Lost, OnFrame, OnLost
from pdlab.disagg.transport.frames import BadFrame, Frame, address_of
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.outbox import Outbox
from pdlab.disagg.transport.socket_io import (
    HANDSHAKE_S,
    connect,
    listen,
    notice_silence,
    prove,
    read_frame,
    write_frame,
)
from pdlab.link import Link

Family = Literal["unix", "tcp"]
MIN_TOKEN_CHARS = 16
GOODBYE_S = 1.0
"""How long a frame that is being sent may hold up `close`."""


def new_token() -> str:
    """A token for a cluster: who has it is let in."""
    return secrets.token_hex(16)


class SocketTransport(CarriedTransport):
    """Moves parcels over Unix or TCP sockets.

    Args:
        token: shared by the cluster, of at least 16 characters.
        name: begins the address's name.
        family: "unix" for this machine only, or "tcp".
        host, port: for TCP, the interface to listen on, by an address that peers can reach; port 0
            takes a free one. The default is reached from this machine only.
        link: simulates a link for what is sent and fetched here.

    Raises:
        ValueError: the token is too short, the family unknown, or the host no single interface.
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        token: str,
        name: str = "worker",
        *,
        family: Family = "unix",
        host: str = "127.0.0.1",
        port: int = 0,
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        carrier = SocketCarrier(token, name, family=family, host=host, port=port)
        super().__init__(carrier, name=f"socket ({family})", link=link, clock=clock)


class SocketCarrier(Carrier):
    """Moves frames over sockets. See `SocketTransport` for the arguments.

    Args:
        kind, metadata: of the address.
    """

    def __init__(
        self,
        token: str,
        name: str,
        *,
        family: Family = "unix",
        host: str = "127.0.0.1",
        port: int = 0,
        kind: str = "socket",
        metadata: str = "",
    ):
        if len(token) < MIN_TOKEN_CHARS:
            raise ValueError(
                f"token has {len(token)} characters; it must have at least {MIN_TOKEN_CHARS}"
            )
        self.token = token.encode()
        self._listener, where = listen(family, host, port)
        name = f"{name}-{secrets.token_hex(4)}"
        self.address = Address(kind, name, where, metadata)
        self._lock = threading.Lock()
        self._routes: dict[str, _Connection] = {}
        """The connection on which frames leave for a peer, by its name."""
        self._connections: list[_Connection] = []
        """All whose threads may still run."""
        self._lost: dict[str, str] = {}
        self._wake, self._alarm = socket.socketpair()
        self._is_closing = False
        self._acceptor = threading.Thread(target=self._accept, name=f"{name} accepts")

    def start(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.on_frame, self.on_lost = on_frame, on_lost
        self._acceptor.start()

    def post(self, to: Address, frame: Frame) -> str | None:
        with self._lock:
            if self._is_closing:
                return "this transport is closed"
            if to.name in self._lost:
                return self._lost[to.name]
            connection = self._routes.get(to.name)
            if connection is None:
                connection = self._routes[to.name] = _Connection(self, to, None)
                self._begin(connection)
            if not connection.outbox.put(frame):
                return "its connection has just ended"
        return None

    def drop(self, transfer_id: str, to: Address | None = None) -> list[Address]:
        with self._lock:
            routes = list(self._routes.values())
        return [
            route.peer
            for route in routes
            if route.peer is not None
            and to in (None, route.peer)
            and route.outbox.drop(transfer_id)
        ]

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            connections = list(self._connections)
        self._alarm.send(b"!")
        self._acceptor.join()
        for connection in connections:
            connection.outbox.say_goodbye()
        deadline_s = time.monotonic() + GOODBYE_S
        for connection in connections:
            connection.end(deadline_s)
        for resource in (self._listener, self._wake, self._alarm):
            resource.close()
        if self.address.where.startswith("unix:/"):
            Path(self.address.where.removeprefix("unix:")).unlink(missing_ok=True)

    # --- connections, on their threads -----------------------------------------------------------

    def _accept(self) -> None:
        while True:
            wait([self._listener, self._wake])
            with self._lock:
                if self._is_closing:
                    return
                try:
                    connected, _ = self._listener.accept()
                except OSError:  # who connected has gone already
                    continue
                if connected.family != socket.AF_UNIX:
                    notice_silence(connected)
                self._begin(_Connection(self, None, connected))

    def _begin(self, connection: _Connection) -> None:
        """Let a connection run, and forget those that have ended."""
        connection.start()
        running = [other for other in self._connections if other.is_running]
        self._connections = [*running, connection]

    def met(self, connection: _Connection, peer: Address) -> None:
        """A peer that connected has said who it is."""
        with self._lock:
            self._routes.setdefault(peer.name, connection)

    def ended(self, connection: _Connection, reason: str, unsent: list[str]) -> None:
        """A connection is no more; its peer, if it was known, is lost."""
        peer = connection.peer
        with self._lock:
            if self._is_closing or peer is None:
                return
            is_news = peer.name not in self._lost
            self._lost.setdefault(peer.name, reason)
            if self._routes.get(peer.name) is connection:
                del self._routes[peer.name]
        # A second connection of the same peer adds only what it still had to send.
        self.on_lost(Lost(peer, reason, unsent, connection.is_orderly or not is_news))


class _Connection:
    """One socket, the thread that sends on it and the one that receives.

    Args:
        peer: who is to be reached; None for who has just connected.
        connected: the socket of who has just connected; None if it is to be opened.
    """

    def __init__(
        self, carrier: SocketCarrier, peer: Address | None, connected: socket.socket | None
    ):
        self.carrier = carrier
        self.peer = peer
        self.is_orderly = False
        """Whether the peer has said that it closes."""
        self._socket = connected
        self.outbox = Outbox()
        self._is_ending = False
        who = f"{carrier.address} and {peer or 'who connects'}"
        self._receiver = threading.Thread(target=self._run_receiver, name=f"{who} receives")
        self._sender = threading.Thread(target=self._run_sender, name=f"{who} sends")

    @property
    def is_running(self) -> bool:
        """Whether a thread of it is; the receiving one ends last."""
        return self._receiver.is_alive()

    def start(self) -> None:
        self._receiver.start()

    def end(self, deadline_s: float) -> None:
        """Close the socket, at the deadline whatever is being sent, and join both threads."""
        if self._sender.ident is not None:
            self._sender.join(max(0.0, deadline_s - time.monotonic()))
        self._is_ending = True
        self._shut()
        self._receiver.join()
        if self._sender.ident is not None:
            self._sender.join()

    # --- the receiving thread, which also opens the connection -----------------------------------

    def _run_receiver(self) -> None:
        try:
            self._open()
            assert self._socket is not None
            assert self.peer is not None
            self._sender.start()
            while True:
                frame = read_frame(self._socket)
                if frame.kind == "goodbye":
                    self.is_orderly = True
                else:
                    self.carrier.on_frame(self.peer, frame)
        except EOFError as error:
            reason = "it closed" if self.is_orderly else str(error)
        except Exception as error:  # whatever it is: the peer is lost, the thread ends in order
            reason = f"{type(error).__name__}: {error}"
        self._finish(reason)

    def _open(self) -> None:
        """Connect, or let in who has connected; know each other."""
        me = asdict(self.carrier.address)
        if self._socket is None:
            assert self.peer is not None
            self._socket = connect(self.peer.where)
            if self._is_ending:
                raise EOFError("closed while it connected")
            prove(self._socket, self.carrier.token, b"connects", b"listens")
            write_frame(self._socket, Frame("hello", fields=me))
        else:
            self._socket.settimeout(HANDSHAKE_S)
            prove(self._socket, self.carrier.token, b"listens", b"connects")
            hello = read_frame(self._socket)
            if hello.kind != "hello":
                raise BadFrame(f"the first frame is of kind {hello.kind!r}; it must be 'hello'")
            self.peer = address_of(hello.fields)
            self.carrier.met(self, self.peer)
        self._socket.settimeout(None)

    # --- the sending thread ----------------------------------------------------------------------

    def _run_sender(self) -> None:
        assert self._socket is not None
        try:
            while (frame := self.outbox.take()) is not None:
                write_frame(self._socket, frame)
        except OSError:
            self._shut()  # the receiving thread sees that, and reports it

    # --- the end ---------------------------------------------------------------------------------

    def _shut(self) -> None:
        """End what both threads wait for."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _finish(self, reason: str) -> None:
        self._shut()
        unsent = self.outbox.end()
        if self._sender.ident is not None:
            self._sender.join()
        if self._socket is not None:
            self._socket.close()
        self.carrier.ended(self, reason, unsent)
