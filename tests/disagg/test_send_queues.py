"""Nothing stays queued for whom it is not wanted by any more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import SamplingParams
from pdlab.disagg.jobs import Stage
from pdlab.disagg.messages import Arrival, Held, Serve
from pdlab.disagg.transport.carrier import CarriedTransport, Carrier
from pdlab.disagg.transport.frames import Frame, frame_of
from pdlab.disagg.transport.interface import Address
from pdlab.engine.moving import RequestState
from tests.disagg.bodies import parcels_of
from tests.disagg.clusters import engine_of
from tests.disagg.faults import Faults, FaultyTransport
from tests.disagg.test_cluster import EXACT, TRANSFERS, pair
from tests.helpers import random_prompt

PEER = Address("spied", "peer", "there")
LONG = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


class Spy(Carrier):
    """Notes what is posted and dropped, and carries nothing."""

    address = Address("spied", "me", "here")

    def __init__(self):
        self.posted, self.dropped = [], []

    def start(self, on_frame, on_lost):
        self.on_frame = on_frame

    def post(self, to, frame):
        self.posted.append((to, frame.kind, frame.transfer_id))

    def drop(self, transfer_id, to=None):
        self.dropped.append((transfer_id, to))
        return []

    def close(self): ...


def test_who_wants_no_more_of_a_push_tells_its_sender():
    spy = Spy()
    transport = CarriedTransport(spy, name="spied")
    first, *_, last = parcels_of("t", [3, 3, 3])
    spy.on_frame(PEER, frame_of(first))
    transport.withdraw("t")
    assert spy.posted == [(PEER, "stop", "t")]
    spy.on_frame(PEER, frame_of(replace(last, transfer_id="whole")))
    transport.withdraw("whole")
    assert len(spy.posted) == 1  # all of it had come
    transport.close()


def test_a_sender_that_is_told_so_drops_what_is_queued():
    spy = Spy()
    transport = CarriedTransport(spy, name="spied")
    spy.on_frame(PEER, Frame("stop", "t"))
    assert spy.dropped == [("t", PEER)]
    transport.close()


class Noted(FaultyTransport):
    """Loses every parcel that arrives; notes which transfers were begun and withdrawn."""

    def __init__(self, inner):
        super().__init__(inner, Faults(0, drop=1.0))
        self.link, self.begun, self.withdrawn = None, set(), set()

    def send(self, to, parcel):
        self.begun.add(parcel.transfer_id)
        super().send(to, parcel)

    def publish(self, transfer_id, parcels):
        self.begun.add(transfer_id)
        return super().publish(transfer_id, parcels)

    def withdraw(self, transfer_id):
        self.withdrawn.add(transfer_id)
        super().withdraw(transfer_id)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_an_abort_takes_back_what_is_queued(transfer):
    with pair(EXACT, EXACT, transfer, wrap=Noted) as cluster:
        request_id = cluster.submit(random_prompt(40), LONG)
        [job] = cluster.router.jobs.values()
        sender = cluster.hosts["p0"].worker.transport
        while job.stage is not Stage.MOVING or not sender.begun:
            assert cluster.step(0)
        cluster.step(0)
        assert not sender.withdrawn
        cluster.abort(request_id)
        cluster._settle()
        assert sender.withdrawn == sender.begun
        assert not engine_of(cluster, "p0").requests


def test_preemptions_of_a_prompt_are_told_when_it_is_held():
    """One that decodes beside a prompt takes its blocks; the router adds up what it is told."""
    tiny = replace(EXACT, num_blocks=4, chunk_size=2, watermark=0.0, enable_prefix_cache=False)
    held = []
    with pair(tiny, EXACT, "push") as cluster:
        router, worker = cluster.router, cluster.hosts["p0"].worker
        beside = RequestState(random_prompt(7), replace(LONG, max_tokens=20), seed=0)
        worker.hear([Serve("beside", beside, Arrival(0.0))])
        request_id = cluster.submit(random_prompt(22), replace(LONG, max_tokens=3))
        on_event = router.on_event
        router.on_event = lambda name, event, now_s: (
            held.append(event) if isinstance(event, Held) else None,
            on_event(name, event, now_s),
        )
        while not cluster.is_finished(request_id):
            assert cluster.step(0)
        [event] = held
        assert event.num_preemptions > 0
        assert cluster.collect(request_id).metrics.num_preemptions == event.num_preemptions
