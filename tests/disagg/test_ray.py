"""A local Ray with a router in this process and three actors: one prefills, two decode."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec
from pdlab.disagg.jobs import Stage
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.transport.sockets import new_token
from pdlab.models import Model
from tests.disagg.bit_for_bit import check_both_ways, pair_of
from tests.helpers import ROOT

if TYPE_CHECKING:
    from pdlab.disagg.hosts.ray_cluster import RayCluster

if "CI" not in os.environ and importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

NAME = "random:tiny-llama"
CONFIG = EngineConfig(
    exact=True, block_size=8, num_blocks=96, max_num_seqs=8, max_model_len=128, seed=0
)
PROMPTS = [[3 + (7 * i + n) % 50 for i in range(n)] for n in (1, 8, 17, 33)]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def specs(transport: TransportSpec, **roles: Any) -> list[WorkerSpec]:
    decode = replace(CONFIG, block_size=16)
    return [
        WorkerSpec(
            name, transport, role, NAME, CONFIG if role == "prefill" else decode, num_threads=1
        )
        for name, role in roles.items()
    ]


@pytest.fixture(scope="module")
def model() -> Model:
    return pdlab.load(NAME, progress=False)


@pytest.fixture(scope="module")
def alone(model: Model) -> list[list[int]]:
    """What one engine puts out."""
    with Engine(model, CONFIG) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def cluster(model: Model) -> Iterator[RayCluster]:
    from pdlab.child.ray_room import ActorOptions
    from pdlab.disagg.hosts.ray_cluster import ray_cluster

    path = os.environ.get("PYTHONPATH")
    mine = specs(TransportSpec("ray"), p0="prefill", d0="decode", d1="decode")
    with ray_cluster(model, mine, options=ActorOptions(num_cpus=0.5)) as cluster:
        assert os.environ.get("PYTHONPATH") == path
        yield cluster


@pytest.mark.parametrize("transfer", ["stream", "push", "pull"])
def test_tokens_are_those_of_one_engine(
    cluster: RayCluster, alone: list[list[int]], transfer: str
) -> None:
    cluster.router.config = RouterConfig(transfer=transfer)
    num_before = len(cluster.transfers)
    # In one round as many as there are, in the next those that the prefix caches know.
    for _ in range(2):
        outputs = cluster.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == alone
    transfers = cluster.transfers[num_before:]
    assert len(transfers) == 2 * len(PROMPTS)
    assert {record.target for record in transfers} == {"d0", "d1"}
    assert {record.transport for record in transfers} == {"Ray object store"}
    per_token = cluster.model.config.kv_bytes_per_token(4)
    assert all(record.num_bytes == record.num_tokens * per_token for record in transfers)
    assert {record.kind for record in transfers if record.num_bytes} <= {transfer, "stream"}


def test_traces_and_loads_can_be_asked_for(cluster: RayCluster) -> None:
    assert set(cluster.hosts) == {"p0", "d0", "d1"}
    for host in cluster.hosts.values():
        assert host.trace().steps
        load = host.load()  # type: ignore[attr-defined]
        assert load.num_free_blocks == CONFIG.num_blocks
        assert load.num_held == load.num_reserved == 0


def test_a_request_that_is_aborted_frees_its_actors(cluster: RayCluster) -> None:
    cluster.router.config = RouterConfig(transfer="stream")
    stream = cluster.stream(PROMPTS[2], SamplingParams(max_tokens=90, ignore_eos=True))
    next(stream)
    stream.close()
    cluster.generate(PROMPTS, PARAMS)  # orders are carried out
    assert all(h.load().num_free_blocks == CONFIG.num_blocks for h in cluster.hosts.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("transfer", "name", "stage"),
    [("push", "d1", Stage.DECODING), ("pull", "p0", Stage.MOVING)],
)
def test_what_a_killed_actor_had_goes_on_elsewhere(
    cluster: RayCluster, model: Model, transfer: str, name: str, stage: Stage
) -> None:
    cluster.router.config = RouterConfig(transfer=transfer)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=5, ignore_eos=True)
    prompts = PROMPTS * 2
    with Engine(model, CONFIG) as engine:
        alone = [output.token_ids for output in engine.generate(prompts, params)]
    ids = [cluster.submit(prompt, params) for prompt in prompts]
    jobs = [cluster.router.jobs[request_id] for request_id in ids]
    while not any(job.stage is stage and name in job.workers for job in jobs):
        assert cluster.step()
    cluster.kill(name)
    while cluster.step():
        pass
    assert [cluster.collect(request_id).token_ids for request_id in ids] == alone
    failure = cluster.failures[-1]
    assert (failure.worker, failure.reason) == (name, "it was killed")
    assert failure.request_ids
    assert set(failure.recovered_s) <= set(failure.request_ids)
    assert name not in cluster.hosts
    for host in cluster.hosts.values():
        assert host.load().num_free_blocks == CONFIG.num_blocks  # type: ignore[attr-defined]


def test_what_ray_cannot_place_is_refused(cluster: RayCluster, model: Model) -> None:
    from pdlab.child.ray_room import ActorOptions
    from pdlab.disagg.hosts.ray_cluster import ray_cluster

    mine = specs(TransportSpec("ray"), p0="prefill")
    with pytest.raises(ValueError, match=r"no room for .*'CPU': 999"):
        ray_cluster(model, mine, options=ActorOptions(num_cpus=999), start_timeout_s=0.1)
    with pytest.raises(ValueError, match="strategy='APART'"):
        ray_cluster(model, mine, strategy="APART")
    with pytest.raises(ValueError, match="'in-process' does not join"):
        ray_cluster(model, specs(TransportSpec("in-process"), p0="prefill"))
    with pytest.raises(ValueError, match="options names d7"):
        ray_cluster(model, mine, options={"d7": ActorOptions()})
    with pytest.raises(ValueError, match="another name"):
        ray_cluster(model, mine * 2)


def test_the_command_line_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pdlab.disagg.hosts.on_ray import main

    for args, message in (
        (["--decode", "0", "hello"], "decode=0"),
        (["--prefill", "-1", "hello"], "prefill=-1"),
        (["--threads", "0", "hello"], "num_threads=0"),
        (["--cpus", "-1", "hello"], "amount of CPU=-1"),
    ):
        monkeypatch.setattr("sys.argv", ["on_ray", "--model", NAME, *args])
        assert main() == 1
        assert message in capsys.readouterr().err


def test_a_worker_that_cannot_be_made_says_why(cluster: RayCluster, model: Model) -> None:
    from pdlab.child.ray_room import ActorOptions
    from pdlab.disagg.hosts.host import WorkerDied
    from pdlab.disagg.hosts.ray_cluster import ray_cluster

    [spec] = specs(TransportSpec("ray"), p0="prefill")
    with pytest.raises(WorkerDied, match=r"worker p0 is lost: .*ValueError: .*'no-such-model'"):
        ray_cluster(
            model,
            [replace(spec, model="random:no-such-model")],
            options=ActorOptions(num_cpus=0),
        )


def test_kv_and_logits_are_those_of_one_engine_bit_for_bit(
    cluster: RayCluster, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdlab.child.ray_room import ActorOptions
    from pdlab.disagg.hosts import ray_actor as actors
    from pdlab.disagg.hosts.ray_cluster import ray_cluster

    root = str(ROOT)

    class Watched(actors.WorkerActor):
        def __init__(self, spec: WorkerSpec):
            sys.path.insert(0, root)
            from tests.disagg.watching import watch_all

            watch_all()
            super().__init__(spec)

    monkeypatch.setattr(actors, "WorkerActor", Watched)
    options = ActorOptions(num_cpus=0)
    with ray_cluster(model, pair_of(TransportSpec("ray")), options=options) as other:
        check_both_ways(other)


def test_sockets_join_actors_on_their_nodes_addresses(
    cluster: RayCluster, model: Model, alone: list[list[int]]
) -> None:
    from pdlab.child.ray_room import ActorOptions
    from pdlab.disagg.hosts.ray_cluster import ray_cluster

    options = {"p0": ActorOptions(num_cpus=0.25), "d0": ActorOptions(num_cpus=0)}
    transport = TransportSpec("socket", {"token": new_token(), "family": "tcp"})
    mine = specs(transport, p0="prefill", d0="decode")
    with ray_cluster(model, mine, options=options, strategy="SPREAD") as other:
        assert [o.token_ids for o in other.generate(PROMPTS, PARAMS)] == alone
        assert {record.transport for record in other.transfers} == {"socket (tcp)"}
        where = other.hosts["p0"].hello.address.where
        assert where.startswith(f"tcp:{other.hosts['p0'].home.node_address}:")  # type: ignore[attr-defined]
