"""Open and closed loops hand out each request once, when it is due."""

from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from pdlab.workload.traces import TraceRequest


def at(*times: float) -> list[TraceRequest]:
    """Requests at these times, told apart by their prompt lengths: 1, 2, 3 ..."""
    return [TraceRequest(time, i, 1) for i, time in enumerate(times, 1)]


def names(requests: list[TraceRequest]) -> list[int]:
    return [request.num_prompt_tokens for request in requests]


# --- open loop -----------------------------------------------------------------------------------


def test_requests_come_at_their_own_times() -> None:
    loop = OpenLoop(at(0.0, 1.5, 1.5, 4.0))
    assert loop.next_s == 0.0
    assert names(loop.take_due(0.0)) == [1]
    assert loop.take_due(1.0) == []
    assert loop.next_s == 1.5
    loop.note_finished(1.0)  # changes nothing
    assert names(loop.take_due(2.0)) == [2, 3]
    assert loop.next_s == 4.0
    assert names(loop.take_due(9.0)) == [4]
    assert loop.next_s is None
    assert loop.take_due(99.0) == []
    assert loop.num_requests == 4


def test_unsorted_requests_are_sorted_and_those_of_one_moment_keep_their_order() -> None:
    requests = at(3.0, 1.0, 3.0, 1.0)
    assert names(OpenLoop(requests).take_due(5.0)) == [2, 4, 1, 3]
    assert names(requests) == [1, 2, 3, 4]  # the caller's list is not touched


@given(
    times=st.lists(st.floats(0, 100), min_size=1, max_size=30),
    clock=st.lists(st.floats(0, 120), max_size=20),
)
def test_each_request_is_handed_out_once_and_not_before_its_time(
    times: list[float], clock: list[float]
) -> None:
    loop, handed_out = OpenLoop(at(*times)), []
    for now_s in sorted(clock):
        due = loop.take_due(now_s)
        assert all(request.arrival_s <= now_s for request in due)
        assert loop.next_s is None or loop.next_s > now_s
        handed_out += due
    handed_out += loop.take_due(100.0)
    assert sorted(names(handed_out)) == list(range(1, len(times) + 1))
    assert handed_out == sorted(handed_out, key=lambda request: request.arrival_s)


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf"), "now", True])
def test_an_arrival_is_a_time(time: float) -> None:
    with pytest.raises(ValueError, match=r"arrival_s=.* must be a number from 0 to 1000000000"):
        OpenLoop(at(0.0, time))


# --- closed loop ---------------------------------------------------------------------------------


def test_a_client_thinks_after_its_answer_and_then_sends_the_next() -> None:
    loop = ClosedLoop(at(7, 7, 7, 7), num_clients=2, think_s=3.0)
    assert loop.next_s == 0.0
    first = loop.take_due(0.0)
    assert names(first) == [1, 2]
    assert [request.arrival_s for request in first] == [0.0, 0.0]  # not the 7 of the list
    assert loop.next_s is None  # both clients wait
    assert loop.take_due(50.0) == []
    loop.note_finished(50.0)
    assert loop.next_s == 53.0
    assert loop.take_due(52.9) == []
    loop.note_finished(51.0)
    [third] = loop.take_due(53.5)
    assert (third.num_prompt_tokens, third.arrival_s) == (3, 53.0)
    [fourth] = loop.take_due(54.0)
    assert (fourth.num_prompt_tokens, fourth.arrival_s) == (4, 54.0)
    loop.note_finished(60.0)
    loop.note_finished(61.0)
    assert loop.next_s is None
    assert loop.take_due(1000.0) == []


def test_more_clients_than_requests_send_each_request_once() -> None:
    loop = ClosedLoop(at(0, 0), num_clients=10**9)
    assert names(loop.take_due(0.0)) == [1, 2]
    loop.note_finished(1.0)
    assert loop.next_s is None
    assert loop.take_due(5.0) == []


def test_a_request_keeps_all_but_its_arrival() -> None:
    asked = TraceRequest(9.0, 600, 5, (4, 5), 512, priority=3)
    [sent] = ClosedLoop([asked], 1).take_due(0.0)
    assert sent == TraceRequest(0.0, 600, 5, (4, 5), 512, priority=3)


def serve(loop: Arrivals, service_s: list[float]) -> tuple[list[TraceRequest], int]:
    """Serve all at once, each for its own time; the requests as sent, and the most at one time."""
    now_s, running, sent, most = 0.0, [], [], 0
    while True:
        for request in loop.take_due(now_s):
            sent.append(request)
            heappush(running, now_s + service_s[request.num_prompt_tokens - 1])
        most = max(most, len(running))
        moments = [t for t in (loop.next_s, running[0] if running else None) if t is not None]
        if not moments:
            return sent, most
        now_s = min(moments)
        while running and running[0] <= now_s:
            loop.note_finished(heappop(running))


@given(
    service_s=st.lists(st.floats(0.1, 10), min_size=1, max_size=30),
    num_clients=st.integers(1, 40),
    think_s=st.floats(0, 5),
)
def test_never_more_outstanding_than_clients(
    service_s: list[float], num_clients: int, think_s: float
) -> None:
    def run() -> tuple[list[TraceRequest], int]:
        return serve(ClosedLoop(at(*service_s), num_clients, think_s), service_s)

    sent, most = run()
    assert names(sent) == list(range(1, len(service_s) + 1))  # in the order of the list
    assert most == min(num_clients, len(service_s))
    arrivals = [request.arrival_s for request in sent]
    assert arrivals == sorted(arrivals)
    assert (sent, most) == run()


def test_one_client_sends_after_service_and_thought() -> None:
    sent, _ = serve(ClosedLoop(at(0, 0, 0), 1, think_s=0.5), [2.0, 1.0, 4.0])
    assert [request.arrival_s for request in sent] == [0.0, 2.5, 4.0]


# --- bad input -----------------------------------------------------------------------------------


def test_a_loop_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="requests is empty: at least 1 is needed"):
        OpenLoop([])
    with pytest.raises(ValueError, match="requests is empty: at least 1 is needed"):
        ClosedLoop([], 1)


@pytest.mark.parametrize("num_clients", [0, -1, 1.5, True, "2", None])
def test_at_least_one_client_is_needed(num_clients: int) -> None:
    with pytest.raises(ValueError, match=r"num_clients=.* must be an integer >= 1"):
        ClosedLoop(at(0), num_clients)


@pytest.mark.parametrize("think_s", [-0.1, float("nan"), float("inf"), "1", None])
def test_think_time_is_not_negative(think_s: float) -> None:
    with pytest.raises(ValueError, match=r"think_s=.* must be a number from 0 to"):
        ClosedLoop(at(0), 1, think_s)


def test_an_answer_that_nobody_waits_for_is_refused() -> None:
    """It would let one more request out than there are clients."""
    loop = ClosedLoop(at(0, 0), 1)
    with pytest.raises(ValueError, match="no request is outstanding"):
        loop.note_finished(0.0)
    loop.take_due(0.0)
    loop.note_finished(1.0)
    with pytest.raises(ValueError, match="no request is outstanding"):
        loop.note_finished(1.0)
