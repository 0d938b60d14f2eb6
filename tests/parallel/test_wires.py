"""Wires carry tensors of any size between any two ranks, in order, and say when one is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from itertools import combinations

import pytest
import torch

from pdlab.link import Link
from pdlab.parallel.sockets import SocketWires
from pdlab.parallel.wires import Mail, SlowWires, Wires

BIG = 1_000_000
"""Numbers: more than a socket's buffers hold."""


@pytest.fixture(params=["threads", "sockets"])
def three(request: pytest.FixtureRequest) -> Iterator[list[Wires]]:
    """The wires of three ranks."""
    if request.param == "threads":
        mail = Mail(3)
        ends: list[Wires] = [mail.wires(rank) for rank in range(3)]
    else:
        sockets: list[dict[int, socket.socket]] = [{}, {}, {}]
        for a, b in combinations(range(3), 2):
            sockets[a][b], sockets[b][a] = socket.socketpair()
        ends = [SocketWires(each) for each in sockets]
    yield ends
    for each in ends:
        each.close()


def test_all_send_much_to_all_before_anybody_listens(three: list[Wires]) -> None:
    heard: dict[tuple[int, int], torch.Tensor] = {}

    def work(rank: int) -> None:
        others = [other for other in range(3) if other != rank]
        for other in others:
            for size in (3, BIG, 0, 5):
                three[rank].send(other, torch.full((size,), float(rank)))
        for other in others:
            pieces = [torch.empty(size) for size in (3, BIG, 0, 5)]
            for piece in pieces:
                three[rank].receive(other, piece)
            heard[rank, other] = torch.cat(pieces)
        three[rank].flush()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(heard) == 6
    for (_, other), numbers in heard.items():
        assert len(numbers) == BIG + 8
        assert (numbers == other).all()


def test_what_was_sent_arrives_while_the_sender_does_something_else(three: list[Wires]) -> None:
    three[0].send(1, torch.arange(BIG))  # and does not flush
    into = torch.empty(BIG, dtype=torch.int64)
    three[1].receive(0, into)
    assert torch.equal(into, torch.arange(BIG))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_travels(three: list[Wires], dtype: torch.dtype) -> None:
    x, into = torch.randn(7, 3).to(dtype), torch.empty(7, 3, dtype=dtype)
    three[2].send(0, x)
    three[0].receive(2, into)
    assert torch.equal(x, into)


def test_who_waits_for_one_that_is_gone_hears_of_it(three: list[Wires]) -> None:
    three[1].close()
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        three[0].receive(1, torch.empty(1))


def test_a_slow_link_holds_back_what_it_could_not_have_carried() -> None:
    mail, link = Mail(2), Link(1e6, latency_s=0.01)
    here, there = SlowWires(mail.wires(0), link), SlowWires(mail.wires(1), link)
    begin_s = time.perf_counter()
    for _ in range(2):
        here.send(1, torch.ones(2500))  # 10,000 bytes: 10 ms each, one after the other
    for _ in range(2):
        there.receive(0, torch.empty(2500))
    assert time.perf_counter() - begin_s >= 0.03
