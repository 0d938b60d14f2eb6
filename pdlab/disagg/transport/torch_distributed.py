"""Parcels over torch.distributed: point to point, gloo on CPUs, NCCL between GPUs.

Each two ranks have a gloo group of their own, so that a rank that dies takes nobody else's
connections with it. A frame is one message of fixed size, the head, and if it has a payload a
second one, whose size the head says:

    sender    send(head), send(payload)      receiver    recv(head) -> how many -> recv(payload)

For each peer one thread sends and one waits for the next head. With `device="cuda"` payloads travel
by NCCL from device to device, the heads still by gloo: NCCL cannot say that nothing has come. Each
direction then has a communicator of its own, since NCCL serves those who share one in order.

The ranks are fixed when the groups are made: who dies cannot come back into them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlab.child.gloo import FOREVER, break_off, gloo_group, reason_of
from pdlab.disagg.transport.carrier import CarriedTransport, Carrier, Lost, OnFrame, OnLost
from pdlab.disagg.transport.frames import PREFIX, Frame, decode_header, decode_prefix, encode
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.outbox import Outbox
from pdlab.link import Link

HEAD_BYTES = 2048
HEAD, PAYLOAD = 0, 1
"""Tags of the messages."""
GOODBYE_S = 1.0


class TorchDistributed(CarriedTransport):
    """Moves parcels between the ranks of a job.

    Args:
        store: where the ranks meet (`FileStore`, `TCPStore`, that of a process group).
        rank, world_size: of this process, and how many there are. All must make their transport,
            the same number of times; each waits for the others.
        device: where payloads travel and arrive: "cpu" by gloo, "cuda:0" by NCCL.
        host: the address whose interface gloo uses. The default is reached from this machine only.
        connect_timeout_s: how long to wait for the other ranks.
        link: simulates a link for what is sent and fetched here.

    Raises:
        ValueError: the rank is not below the world size.
        RuntimeError: another rank did not come in time.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        device: str = "cpu",
        host: str = "127.0.0.1",
        connect_timeout_s: float = 60.0,
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be from 0 to {world_size - 1}")
        timeout = timedelta(seconds=connect_timeout_s)
        carrier = TorchCarrier(store, rank, world_size, torch.device(device), host, timeout)
        backend = "gloo" if carrier.device.type == "cpu" else "nccl"
        name = f"torch.distributed ({backend})"
        super().__init__(carrier, name=name, link=link, clock=clock)

    @classmethod
    def join(cls, init_method: str, rank: int, world_size: int, **options: Any) -> TorchDistributed:
        """Meet the other ranks at a URL.

        Args:
            init_method: "file:///path" for one machine, "tcp://host:port" (where rank 0 then
                listens, on all interfaces), "env://" under torchrun.
            options: see the class.
        """
        url = (
            f"{init_method}{'&' if '?' in init_method else '?'}rank={rank}&world_size={world_size}"
        )
        store, rank, world_size = next(iter(dist.rendezvous(url)))
        return cls(store, rank, world_size, **options)

    @classmethod
    def of_default_group(cls, **options: Any) -> TorchDistributed:
        """Between the ranks of the process group that exists already."""
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), dist.get_world_size(), **options)


def address_of_rank(rank: int) -> Address:
    """Where a rank's transport is: known without being told."""
    return Address("torch.distributed", f"rank-{rank}", str(rank))


class TorchCarrier(Carrier):
    """Moves frames between ranks; see `TorchDistributed` for the arguments."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        host: str,
        timeout: timedelta,
    ):
        self.address = address_of_rank(rank)
        self.device = device
        # All ranks count alike, so each transport of theirs has keys of its own in the store.
        count = store.add(f"pdlab/transports/{rank}", 1)
        self._pairs: dict[str, _Pair] = {}
        # In the order of (lower, higher) rank, which is the same for all: nobody waits in a circle.
        for other in range(world_size):
            if other != rank:
                lower, higher = sorted((rank, other))
                prefix = f"pdlab/{count}/{lower}-{higher}"
                scope = dist.PrefixStore(prefix, store)
                peer = address_of_rank(other)
                self._pairs[peer.name] = _Pair(
                    self, peer, scope, int(rank == higher), host, timeout
                )

    def start(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.on_frame, self.on_lost = on_frame, on_lost
        for pair in self._pairs.values():
            pair.start()

    def post(self, to: Address, frame: Frame) -> str | None:
        pair = self._pairs.get(to.name)
        return f"{to} is not another rank of this job" if pair is None else pair.queue(frame)

    def drop(self, transfer_id: str, to: Address | None = None) -> list[Address]:
        pairs = [pair for pair in self._pairs.values() if to in (None, pair.peer)]
        return [pair.peer for pair in pairs if pair.outbox.drop(transfer_id)]

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.leave()
        deadline_s = time.monotonic() + GOODBYE_S
        for pair in self._pairs.values():
            pair.end(deadline_s)
        self._pairs.clear()


class _Pair:
    """The connection with one other rank, and its two threads.

    Args:
        me: 0 or 1: which of the two ranks of its group this one is.
    """

    def __init__(
        self,
        carrier: TorchCarrier,
        peer: Address,
        store: dist.Store,
        me: int,
        host: str,
        timeout: timedelta,
    ):
        self.carrier = carrier
        self.peer = peer
        self._me, self._other = me, 1 - me
        self._group = gloo_group(dist.PrefixStore("gloo", store), me, 2, host, timeout)
        self._lanes = _lanes(store, me, self._group, carrier.device)
        self.outbox = Outbox()
        self._lost = ""
        self._is_leaving = False
        who = f"{carrier.address} and {peer}"
        self._receiver = threading.Thread(target=self._run_receiver, name=f"{who} receives")
        self._sender = threading.Thread(target=self._run_sender, name=f"{who} sends")

    def start(self) -> None:
        self._receiver.start()
        self._sender.start()

    def queue(self, frame: Frame) -> str | None:
        """Queue a frame; or, if the peer is lost, why."""
        if self.outbox.put(frame):
            return None
        return self._lost or "this transport is closed"

    def leave(self) -> None:
        """Drop what is queued and tell the peer that no more comes."""
        self._is_leaving = True
        self.outbox.say_goodbye()

    def end(self, deadline_s: float) -> None:
        """Join both threads; at the deadline break the connection, whatever is being sent."""
        self._sender.join(max(0.0, deadline_s - time.monotonic()))
        self._break()
        self._receiver.join()
        self._sender.join()
        del self._group, self._lanes

    def _run_receiver(self) -> None:
        is_orderly = False
        try:
            while True:
                head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
                self._group.recv([head], self._other, HEAD).wait(FOREVER)
                frame = _decode(head)
                if frame.kind == "goodbye":
                    is_orderly = True
                    break
                if frame.payload is not None:
                    frame.payload = self._receive(frame.payload.numel())
                self.carrier.on_frame(self.peer, frame)
            reason = "it closed"
        except Exception as error:  # whatever it is: the peer is lost, the thread ends in order
            reason = self._lost or reason_of(error)
        self._lost = reason
        unsent = self.outbox.end()
        if not self._is_leaving:
            self.carrier.on_lost(Lost(self.peer, reason, unsent, is_orderly))

    def _run_sender(self) -> None:
        try:
            while (frame := self.outbox.take()) is not None:
                self._group.send([_encode(frame)], self._other, HEAD).wait(FOREVER)
                if frame.payload is not None and frame.payload.numel():
                    self._send(frame.payload)
        except RuntimeError as error:
            self._lost = reason_of(error)
            self._break()  # the receiving thread sees that, and reports it

    def _send(self, payload: Tensor) -> None:
        lane = self._lanes[self._me]
        lane.send([payload.to(self.carrier.device)], self._other, PAYLOAD).wait(FOREVER)
        self._finish_on_device()

    def _receive(self, num_bytes: int) -> Tensor:
        payload = torch.empty(num_bytes, dtype=torch.uint8, device=self.carrier.device)
        self._lanes[self._other].recv([payload], self._other, PAYLOAD).wait(FOREVER)
        self._finish_on_device()
        return payload

    def _finish_on_device(self) -> None:
        """NCCL's `wait` only queues on the stream; the bytes are to be there."""
        if self.carrier.device.type == "cuda":
            torch.cuda.current_stream(self.carrier.device).synchronize()

    def _break(self) -> None:
        """End what the threads wait for."""
        if self._receiver.is_alive():
            break_off(self._group, self._other)


def _encode(frame: Frame) -> Tensor:
    head = encode(frame)
    assert len(head) <= HEAD_BYTES, "an id of 256 bytes, each escaped, and the numbers fit"
    return torch.frombuffer(bytearray(head.ljust(HEAD_BYTES, b" ")), dtype=torch.uint8)


def _decode(head: Tensor) -> Frame:
    data = head.numpy().tobytes()
    prefix = decode_prefix(data)
    return decode_header(data[PREFIX.size : PREFIX.size + prefix.header_bytes], prefix)


def _lanes(store: dist.Store, rank: int, gloo: Any, device: torch.device) -> list[Any]:
    """By who sends: the group that its payloads travel in."""
    if device.type == "cpu":
        return [gloo, gloo]
    nccl: Any = dist.ProcessGroupNCCL
    torch.cuda.set_device(device)
    return [
        nccl(dist.PrefixStore(f"nccl/{sender}", store), rank, 2, nccl.Options())
        for sender in range(2)
    ]
