"""A workload on a cluster in real time: all of it is served, and nothing of it stays."""

from __future__ import annotations

import pytest

from pdlab.disagg.replay import replay_on_cluster
from pdlab.workload.arrivals import ClosedLoop
from pdlab.workload.traces import TraceRequest
from tests.disagg.clusters import check_idle, engine_of
from tests.disagg.test_cluster import EXACT, pair
from tests.helpers import random_prompt

REQUESTS = [TraceRequest(0.001 * i, 9 + i, 4, priority=i) for i in range(4)]
TOO_LONG = TraceRequest(0.0015, 500, 4, priority=9)


def test_requests_are_told_in_order_of_arrival_with_what_they_asked_for():
    with pair(EXACT, EXACT, "stream") as cluster:
        cluster.generate([random_prompt(9)])  # no part of the run
        run = replay_on_cluster(cluster, [*REQUESTS, TOO_LONG])
        assert [r.priority for r in run.requests] == [0, 1, 9, 2, 3]
        assert [r.finish_reason for r in run.requests] == ["length"] * 2 + ["error"] + [
            "length"
        ] * 2
        assert "500" in run.requests[2].error
        assert [len(r.metrics.token_times_s) for r in run.requests] == [4, 4, 0, 4, 4]
        assert len(run.transfers) == 4
        assert {name: bool(worker.steps) for name, worker in run.workers.items()} == {
            "p0": True,
            "d0": True,
        }
        with pytest.raises(ValueError, match="no request left"):
            replay_on_cluster(cluster, used_up(cluster))


def used_up(cluster) -> ClosedLoop:
    arrivals = ClosedLoop(REQUESTS, 2)
    replay_on_cluster(cluster, arrivals)
    return arrivals


def test_an_interrupted_run_leaves_nothing_behind():
    def interrupt(session):
        if session.live and session.ended:
            raise KeyboardInterrupt

    with pair(EXACT, EXACT, "push") as cluster:
        with pytest.raises(KeyboardInterrupt):
            replay_on_cluster(cluster, REQUESTS, on_step=interrupt)
        assert not cluster.router.jobs
        for name in cluster.hosts:
            check_idle(engine_of(cluster, name))
