"""Clusters in this process, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdlab import Engine, EngineConfig, Model
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.transport.interface import Transport
from pdlab.disagg.worker import Role, Worker
from pdlab.engine.fake import FakeRunner


class TurnClock:
    """Seconds that pass as the cluster steps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def local_cluster(
    model: Model,
    workers: Mapping[str, tuple[Role, EngineConfig]],
    router: RouterConfig | None = None,
    *,
    fake: bool = False,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    seed: int = 0,
    **options: Any,
) -> Cluster:
    """Workers by name, each with its role and engine.

    Args:
        fake: on the fake-KV oracle instead of the model.
        wrap: puts something around each transport.
        options: of the workers; a `clock` also of transports and cluster.
    """
    board = Switchboard()
    clock = {"clock": options["clock"]} if "clock" in options else {}
    hosts = []
    for name, (role, config) in workers.items():
        engine = Engine(model, config)
        if fake:
            engine.runner = FakeRunner(
                config.num_blocks,
                config.block_size,
                model.config.vocab_size,
                num_layers=model.config.num_layers,
                num_swap_blocks=config.num_swap_blocks,
            )
        transport = wrap(InProcess(board, name, **clock))
        hosts.append((LocalHost(Worker(name, engine, transport, **options)), role))
    return Cluster(model, hosts, router, seed=seed, **clock)


def engine_of(cluster: Cluster, name: str) -> Engine:
    host = cluster.hosts[name]
    assert isinstance(host, LocalHost)
    return host.worker.engine


def check_idle(engine: Engine) -> None:
    """Nothing is left on an engine: no request, no block, no seat."""
    assert not engine.requests
    assert not engine.scheduler.num_seats_taken
    assert not engine.scheduler.has_work
    engine.pool.check([])
    assert engine.pool.num_free == engine.pool.num_blocks
