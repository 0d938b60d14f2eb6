"""Workers as data: what is refused, who gets which cores, and that a worker comes of it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from pdlab import EngineConfig, machine
from pdlab.disagg.hosts.spec import (
    TransportSpec,
    WorkerSpec,
    deal_cores,
    local_specs,
    make_worker,
)
from pdlab.disagg.transport.in_process import Switchboard
from pdlab.link import LINKS
from pdlab.machine import physical_cores
from tests.helpers import random_model

TOKEN = "a token of the cluster"
HERE = TransportSpec("in-process")
SPEC = WorkerSpec("p0", HERE, model="random:tiny-llama")


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "p@0"},
        {"name": ""},
        {"name": 7},
        {"transport": "socket"},
        {"role": "router"},
        {"model": ""},
        {"config": {"block_size": 16}},
        {"dtype": "int3"},
        {"weights": 8},
        {"device": 0},
        {"num_threads": 0},
        {"cores": ()},
        {"cores": [0]},
        {"cores": (0, 0)},
        {"cores": (-1,)},
        {"slowdown": 0.5},
        {"layers_per_parcel": 0},
        {"lease_s": 0},
        {"transfer_timeout_s": float("nan")},
    ],
    ids=lambda changes: f"{changes}",
)
def test_a_field_out_of_range_is_named(changes):
    [name] = changes
    with pytest.raises(ValueError, match=f"^{name}"):
        replace(SPEC, **changes)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("carrier pigeon", {}, "kind='carrier pigeon' must be one of in-process, socket"),
        ("socket", {}, "options has no token: 'socket' needs it"),
        ("socket", {"token": "short"}, "token must be text of at least 16"),
        ("socket", {"token": TOKEN, "bandwidth": 1}, "options has bandwidth; 'socket' knows token"),
        ("torch", {"rank": 0}, "options has no init_method, world_size"),
        ("in-process", {"board": 1}, "options has board; 'in-process' knows none"),
        ("in-process", [], "options is a list; it must be a dict"),
    ],
)
def test_a_transport_knows_its_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        TransportSpec(kind, options)


def test_a_link_is_no_name():
    with pytest.raises(ValueError, match="link='1GbE' must be a Link or None"):
        TransportSpec("in-process", link="1GbE")


def test_specs_of_this_machine_travel_and_keep_their_secret():
    config = EngineConfig(block_size=8)
    specs = local_specs(2, 1, model="random:tiny-llama", decode_config=config, link=LINKS["1GbE"])
    assert [(spec.name, spec.role) for spec in specs] == [
        ("p0", "prefill"),
        ("p1", "prefill"),
        ("d0", "decode"),
    ]
    assert [spec.config.block_size for spec in specs] == [16, 16, 8]
    assert pickle.loads(pickle.dumps(specs)) == specs
    assert len({spec.transport.options["token"] for spec in specs}) == 1
    assert specs[0].transport.options["token"] not in repr(specs)
    assert all(
        set(spec.cores or ()) <= {c for core in physical_cores() for c in core} for spec in specs
    )
    assert all(spec.cores is None and spec.num_threads for spec in local_specs(1, 1, pin=False))


def test_without_workers_there_are_no_specs():
    with pytest.raises(ValueError, match="there must be at least 1 worker"):
        local_specs(0, 0)
    with pytest.raises(ValueError, match="num_decode=-1"):
        local_specs(1, -1)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_cores", "shares"),
    [
        (1, 1, 1, [[0], [0]]),
        (1, 1, 2, [[0], [1]]),
        (2, 1, 2, [[0], [0], [1]]),
        (1, 3, 2, [[0], [1], [1], [1]]),
        (1, 1, 3, [[0, 1], [2]]),
        (1, 1, 5, [[1, 2], [3, 4]]),
        (2, 2, 4, [[0], [1], [2], [3]]),
        (3, 1, 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (0, 2, 4, [[0, 1], [2, 3]]),
        (2, 0, 1, [[0], [0]]),
    ],
)
def test_prefill_and_decode_share_no_core_if_there_are_two(
    num_prefill, num_decode, num_cores, shares
):
    cores = [(i, i + 100) for i in range(num_cores)]
    dealt = deal_cores(num_prefill, num_decode, cores)
    assert [[first for first, _ in share] for share in dealt] == shares


def test_processors_of_one_core_stay_together(monkeypatch, tmp_path):
    siblings = {"cpu0": "0,2", "cpu1": "1,3", "cpu2": "0,2", "cpu3": "1,3"}

    class FakePath:
        def __init__(self, text: str):
            self.cpu = text.split("/")[5]

        def read_text(self) -> str:
            if self.cpu not in siblings:
                raise FileNotFoundError(self.cpu)
            return siblings[self.cpu] + "\n"

    monkeypatch.setattr(machine, "Path", FakePath)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4}, raising=False)
    assert physical_cores() == [(0, 2), (1, 3), (4,)]


def test_workers_of_one_process_share_a_board_and_a_model():
    board, model = Switchboard(), random_model()
    config = EngineConfig(num_blocks=8)
    specs = [
        replace(SPEC, name=name, config=config, slowdown=2, layers_per_parcel=3, lease_s=4)
        for name in ("a", "b")
    ]
    workers = [make_worker(spec, model=model, board=board) for spec in specs]
    try:
        assert [worker.hello().name for worker in workers] == ["a", "b"]
        assert workers[0].hello().address != workers[1].hello().address
        for worker in workers:
            assert worker.engine.model is model
            assert worker.hello().num_blocks == 8
            assert worker.slowdown == 2
            assert worker.prefill.layers_per_parcel == 3
            assert worker.prefill.lease_s == worker.decode.lease_s == 4
    finally:
        for worker in workers:
            worker.close()


def test_a_worker_of_one_process_needs_a_board():
    with pytest.raises(ValueError, match="board=None: transport kind 'in-process' needs one"):
        make_worker(SPEC)


def test_no_model_of_that_name():
    with pytest.raises(ValueError, match="no shape is called 'none'"):
        make_worker(replace(SPEC, model="random:none"), board=Switchboard())


def test_a_worker_has_weights_in_the_format_asked_for():
    worker = make_worker(replace(SPEC, weights="int8"), board=Switchboard())
    try:
        assert worker.engine.model.weights == "int8"
    finally:
        worker.close()
