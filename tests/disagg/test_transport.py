"""What every transport promises, tried with two of each in this process."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.transport.interface import Parcel, Transport, checksum_of, make_parcel
from pdlab.disagg.transport.torch_distributed import TorchDistributed
from pdlab.link import Link
from tests.disagg.bodies import (
    BODIES,
    await_failures,
    make_pair,
    parcels_of,
    receive,
    same,
    wait_for,
)

SIZES = [0, 1, 4096, 5_000_000, 3, 0, 70_001]
Pair = tuple[Transport, Transport]


@pytest.fixture(scope="module", params=BODIES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two transports that many tests use: each test has transfers of its own."""
    pair = make_pair(request.param)
    yield pair
    for transport in pair:
        transport.close()


@pytest.fixture(params=BODIES)
def own_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two transports for a test that closes one."""
    pair = make_pair(request.param)
    yield pair
    for transport in pair:
        transport.close()


def test_pushed_parcels_arrive_intact_and_in_order(pair: Pair) -> None:
    a, b = pair
    sent = parcels_of("push", SIZES)
    for parcel in sent:
        a.send(b.address, parcel)
    received = receive(b, len(sent))
    assert same(received, sent)
    assert all(parcel.checksum == checksum_of(parcel.payload) for parcel in received)
    assert all(parcel.sent_s > 0 and parcel.due_s == 0 for parcel in received)


def test_pulled_parcels_arrive_intact_and_in_order(pair: Pair) -> None:
    a, b = pair
    sent = parcels_of("pull", SIZES)
    ticket = pickle.loads(pickle.dumps(a.publish("pull", sent)))
    assert ticket.num_bytes == sum(SIZES)
    b.fetch(ticket)
    assert same(receive(b, len(sent)), sent)
    a.withdraw("pull")


def test_a_publication_grows_and_each_ticket_is_for_what_was_added(pair: Pair) -> None:
    a, b = pair
    sent = parcels_of("grows", [10, 20, 30])
    first, rest = a.publish("grows", sent[:1]), a.publish("grows", sent[1:])
    b.fetch(first)
    assert same(receive(b, 1), sent[:1])
    b.fetch(rest)
    assert same(receive(b, 2), sent[1:])
    b.fetch(a.publish("nothing", []))
    a.withdraw("grows")
    a.withdraw("nothing")


def test_many_small_parcels_arrive_in_order(pair: Pair) -> None:
    a, b = pair
    sent = parcels_of("many", [17] * 300)
    for parcel in sent:
        a.send(b.address, parcel)
    assert same(receive(b, len(sent)), sent)


def test_transfers_both_ways_and_interleaved_keep_their_order(pair: Pair) -> None:
    a, b = pair
    one, two = parcels_of("one", [50_000] * 20, seed=1), parcels_of("two", [9] * 20, seed=2)
    back = parcels_of("back", [200_000] * 10, seed=3)
    for first, second in zip(one, two, strict=True):
        a.send(b.address, first)
        a.send(b.address, second)
    for parcel in back:
        b.send(a.address, parcel)
    received = receive(b, 40)
    assert same([p for p in received if p.transfer_id == "one"], one)
    assert same([p for p in received if p.transfer_id == "two"], two)
    assert same(receive(a, 10), back)


def test_what_the_receiver_withdraws_is_dropped(pair: Pair) -> None:
    a, b = pair
    sent = parcels_of("unwanted", [1000] * 3)
    a.send(b.address, sent[0])
    receive(b, 1)
    b.withdraw("unwanted")
    a.send(b.address, sent[1])
    a.send(b.address, sent[2])
    wanted = parcels_of("wanted", [5])
    a.send(b.address, wanted[0])
    assert same(receive(b, 1), wanted)


def test_what_the_sender_withdraws_fails_at_the_receiver(pair: Pair) -> None:
    a, b = pair
    a.send(b.address, parcels_of("half", [1000, 1000])[0])
    receive(b, 1)
    a.withdraw("half")
    (failure,) = await_failures(b, "half")
    assert failure.peer == a.address
    assert "withdrawn" in failure.reason
    assert a.failures() == []


def test_a_transfer_withdrawn_in_mid_air_leaves_the_next_intact(pair: Pair) -> None:
    a, b = pair
    for parcel in parcels_of("mid-air", [3_000_000] * 9)[:8]:
        a.send(b.address, parcel)
    a.withdraw("mid-air")
    after = parcels_of("after mid-air", [100_000, 5])
    for parcel in after:
        a.send(b.address, parcel)
    received: list[Parcel] = []
    failed: set[str | None] = set()

    def ready() -> bool:
        received.extend(b.receive())
        failed.update(failure.transfer_id for failure in b.failures())
        return len([p for p in received if p.transfer_id == "after mid-air"]) == 2

    wait_for(ready, b, "the next transfer")
    assert failed == {"mid-air"}
    assert same([p for p in received if p.transfer_id == "after mid-air"], after)
    assert all(parcel.checksum == checksum_of(parcel.payload) for parcel in received)


def test_withdrawing_what_is_complete_harms_nobody(pair: Pair) -> None:
    a, b = pair
    sent = parcels_of("complete", [1000, 10])
    b.fetch(a.publish("complete", sent))
    received = receive(b, 2)
    a.withdraw("complete")
    a.withdraw("never heard of")
    after = parcels_of("after it", [1])
    a.send(b.address, after[0])
    assert same(receive(b, 1), after)
    assert same(received, sent)


def test_what_is_not_published_cannot_be_fetched(pair: Pair) -> None:
    a, b = pair
    ticket = a.publish("gone", parcels_of("gone", [100, 200]))
    a.withdraw("gone")
    b.fetch(ticket)
    (failure,) = await_failures(b, "gone")
    assert failure.peer == a.address
    assert a.failures() == []


def test_a_fetch_that_is_withdrawn_brings_nothing(pair: Pair) -> None:
    a, b = pair
    ticket = a.publish("stopped", parcels_of("stopped", [1_000_000] * 8))
    b.fetch(ticket)
    b.withdraw("stopped")
    after = parcels_of("after the stop", [1])
    b.send(a.address, after[0])
    receive(a, 1)
    a.send(b.address, after[0])
    assert same(receive(b, 1), after)
    a.withdraw("stopped")


def test_waiting_ends_with_what_else_is_waited_for(pair: Pair) -> None:
    reader, writer = os.pipe()
    timer = threading.Timer(0.05, os.write, (writer, b"!"))
    timer.start()
    wait_for(lambda: timer.finished.is_set(), pair[0], "the timer")
    pair[0].wait(60.0, [reader])
    timer.join()
    os.close(reader)
    os.close(writer)


def test_parcels_of_another_transfer_are_not_published(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"'other'.*'this'"):
        pair[0].publish("this", parcels_of("other", [1]))


def test_closing_in_order_fails_only_what_is_under_way(own_pair: Pair) -> None:
    a, b = own_pair
    for parcel in parcels_of("whole", [10, 10]):
        a.send(b.address, parcel)
    a.send(b.address, parcels_of("half", [10, 10])[0])
    assert len(receive(b, 3)) == 3
    a.close()
    failures = await_failures(b, "half")
    assert [(failure.transfer_id, failure.peer) for failure in failures] == [("half", a.address)]
    b.send(a.address, parcels_of("too late", [10])[0])
    assert "too late" in {failure.transfer_id for failure in await_failures(b, "too late")}


@pytest.mark.parametrize("body", BODIES)
def test_nothing_is_left_after_close(body: str) -> None:
    for _ in range(2):  # the first time, libraries open files of their own
        threads, num_tasks, num_files = set(threading.enumerate()), _num_tasks(), _num_files()
        _use_and_close(body)
        gc.collect()
    assert set(threading.enumerate()) == threads
    assert _num_tasks() == num_tasks
    assert _num_files() == num_files


def _use_and_close(body: str) -> None:
    a, b = make_pair(body)
    for transport, peer in ((a, b), (b, a)):
        transport.send(peer.address, parcels_of("out", [100_000])[0])
    receive(a, 1)
    receive(b, 1)
    a.send(b.address, parcels_of("left in the box", [10])[0])
    a.close()
    b.close()
    a.close()
    assert a.receive() == []
    assert a.failures() == []
    a.wait(60.0)


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _num_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_killed_peer_in_process_is_lost_to_those_who_know_it() -> None:
    board = Switchboard()
    a, b, stranger = (InProcess(board, name) for name in ("a", "b", "stranger"))
    a.send(b.address, parcels_of("half", [10, 10])[0])
    ticket = a.publish("published", parcels_of("published", [10]))
    a.kill()
    assert [failure[:2] for failure in b.failures()] == [(None, a.address), ("half", a.address)]
    assert stranger.failures() == []
    stranger.fetch(ticket)
    lost = [(failure.transfer_id, failure.reason) for failure in stranger.failures()]
    assert lost == [(None, "killed"), ("published", "killed")]
    b.send(a.address, parcels_of("too late", [10])[0])
    assert [failure.transfer_id for failure in b.failures()] == ["too late"]
    again = InProcess(board, "a")
    assert again.address.name != a.address.name
    for transport in (a, b, stranger, again):
        transport.close()


def test_nixl_lends_its_buffers_again() -> None:
    a, b = make_pair("nixl")
    from pdlab.disagg.transport.nixl_transport import NixlTransport

    assert isinstance(a, NixlTransport)
    for number in range(10):
        a.send(b.address, parcels_of(f"push {number}", [100_000])[0])
        b.fetch(a.publish(f"pull {number}", parcels_of(f"pull {number}", [100_000])))
        receive(b, 2)
        a.withdraw(f"pull {number}")
        wait_for(lambda: not a._loans, a, "the end of the loans")
    assert len(a._memory._all) == 2
    assert all(buffer.num_holders == 0 for buffer in a._memory._all)
    a.close()
    b.close()


def test_torch_takes_over_the_group_that_exists(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    transport = TorchDistributed.of_default_group()
    assert transport.address.name == "rank-0"
    other = replace(transport.address, name="rank-1")
    transport.send(other, parcels_of("nobody", [10])[0])
    (failure,) = await_failures(transport, "nobody")
    assert "not another rank" in failure.reason
    transport.close()
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="rank is 2; it must be from 0 to 1"):
        TorchDistributed(dist.HashStore(), 2, 2)


# --- links ------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES)
def test_a_link_books_one_parcel_behind_the_other(body: str) -> None:
    link = Link(50e6, 0.01)
    a, b = make_pair(body, link=link)
    sent = parcels_of("slow", [500_000, 0, 100_000])
    for parcel in sent:
        a.send(b.address, parcel)
    _check_booked(link, receive(b, 3))
    b.fetch(a.publish("pulled", parcels_of("pulled", [500_000, 0, 100_000])))
    received = receive(b, 3)
    _check_booked(link, received)
    assert len({parcel.sent_s for parcel in received}) == 1
    a.close()
    b.close()


def _check_booked(link: Link, received: list[Parcel]) -> None:
    free_s = 0.0
    for parcel in received:
        free_s = max(free_s, parcel.sent_s) + parcel.num_bytes / link.bandwidth_bytes_s
        assert parcel.due_s == pytest.approx(free_s + link.latency_s, abs=1e-9)


def test_a_parcel_is_held_until_it_is_due() -> None:
    now_s = [100.0]
    a, b = make_pair("in-process", link=Link(1000.0, 0.5), clock=lambda: now_s[0])
    sent = parcels_of("slow", [1000, 2000])
    for parcel in sent:
        a.send(b.address, parcel)
    seen = []
    for step_s in (1.4, 0.1, 1.9, 0.1):
        now_s[0] += step_s
        seen.append(len(b.receive()))
    assert seen == [0, 1, 0, 1]


def test_two_transfers_share_the_sender_s_link() -> None:
    a, b = make_pair("in-process", link=Link(1000.0), clock=lambda: 5.0)
    for name in ("one", "two"):
        a.send(b.address, parcels_of(name, [1000])[0])
    assert [parcel.due_s for parcel in b._mailbox._parcels] == [6.0, 7.0]


# --- parcels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "transfer_id", "message"),
    [
        (torch.zeros(4), "t", r"payload is torch.float32 \[4\]"),
        (torch.zeros(4, 4, dtype=torch.uint8), "t", r"payload is .* \[4, 4\]"),
        (torch.zeros(8, dtype=torch.uint8)[::2], "t", "contiguous"),
        (torch.zeros(8, dtype=torch.uint8), "", "transfer_id has 0 bytes"),
        (torch.zeros(8, dtype=torch.uint8), "é" * 129, "transfer_id has 258 bytes.* 256"),
    ],
)
def test_bad_parcels_are_refused(payload: torch.Tensor, transfer_id: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_parcel(transfer_id, range(1), range(1), payload, is_last=True)


def test_an_id_at_the_limit_of_any_characters_travels(pair: Pair) -> None:
    a, b = pair
    for transfer_id in ("\x01" * 256, '"' * 256, "世" * 85):
        sent = parcels_of(transfer_id, [3])
        a.send(b.address, sent[0])
        assert same(receive(b, 1), sent)
