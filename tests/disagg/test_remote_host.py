"""The router's end of a worker elsewhere: answers belong to their questions, leases to workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import Engine, SamplingParams
from pdlab.child.inbox import Inbox
from pdlab.disagg.hosts import remote_host
from pdlab.disagg.hosts.loop import Answer, Ask, Stop, serve
from pdlab.disagg.hosts.remote_host import RemoteHost
from pdlab.disagg.messages import Arrival, Command, Ended, Hello, Produced, Serve
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.worker import Worker
from pdlab.engine.moving import RequestState
from pdlab.kvcache import KVLayout
from tests.disagg.clusters import TurnClock
from tests.disagg.test_cluster import EXACT, MODEL, pair
from tests.helpers import random_prompt


class Keeping:
    """A pipe that keeps what is said until somebody asks, as that of a Ray actor does."""

    def __init__(self):
        self.inbox = Inbox()
        self.fileno, self.receive = self.inbox.fileno, self.inbox.receive
        self.said, self.sizes = [], []

    def send(self, message):
        self.said.append(message)
        self.sizes.append(len(message) if isinstance(message, list) else None)
        if isinstance(message, list) and any(isinstance(event, Ended) for event in message):
            self.inbox.put(Stop())

    def drain(self): ...


def test_what_was_told_stays_as_it_was():
    """A list of events that grew after it was told of told some events twice."""
    pipe = Keeping()
    worker = Worker("w", Engine(MODEL, EXACT), InProcess(Switchboard(), "w"))
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    commands: list[Command] = [
        Serve(f"r{i}", RequestState(random_prompt(9, seed=i), params, seed=0), Arrival(0.0))
        for i in range(2)
    ]
    commands.append(Serve("bad", RequestState(random_prompt(500), params, seed=0), Arrival(0.0)))
    pipe.inbox.put(commands)
    serve(worker, pipe)
    pipe.inbox.close()
    lists = [message for message in pipe.said if isinstance(message, list)]
    assert [len(events) for events in lists] == [size for size in pipe.sizes if size is not None]
    chunks = [e.chunk.token_ids for events in lists for e in events if isinstance(e, Produced)]
    assert sum(map(len, chunks)) == 10


class Late:
    """A channel whose worker answers a question only once the next one is asked."""

    def __init__(self):
        self.inbox, self.asked = Inbox(), []
        self.fileno, self.receive = self.inbox.fileno, self.inbox.receive
        self.inbox.put(Hello("w", Address("", "w", ""), KVLayout(1, 1, 1, 8), 9, 9, 0.0, 0.0))

    def send(self, message):
        assert isinstance(message, Ask)
        self.asked.append(message)
        if len(self.asked) > 1:
            self.inbox.put(*(Answer(ask.what.upper(), ask.number) for ask in self.asked))


def test_an_answer_that_comes_too_late_is_not_taken_for_another(monkeypatch):
    monkeypatch.setattr(remote_host, "ANSWER_S", 0.01)
    channel = Late()
    host = RemoteHost("w", channel, start_timeout_s=9.0, shares_clock=True)
    with pytest.raises(TimeoutError, match=r"said nothing for 0\.01 s"):
        host.load()
    monkeypatch.setattr(remote_host, "ANSWER_S", 20.0)
    assert host.trace() == "TRACE"
    channel.inbox.close()


def test_a_lease_that_is_shorter_than_the_routers_is_renewed_in_time():
    clock = TurnClock()
    slow = replace(EXACT, max_num_batched_tokens=2, max_num_seqs=1)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with pair(slow, slow, "stream", clock=clock, lease_s=3.0) as cluster:
        cluster.router.config = RouterConfig(lease_s=60.0)
        ids = [cluster.submit(random_prompt(40, seed=i), params) for i in range(2)]
        while cluster.step(0):
            clock.now_s += 0.5
        assert not any(job.attempt for job in cluster.router.jobs.values())
        assert all(not cluster.collect(request_id).error for request_id in ids)
