"""A cluster within this process: the workers take turns, and a run is the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.control import RoleController
from pdlab.disagg.hosts.host import LocalHost, closed_on_error
from pdlab.disagg.router import Router, RouterConfig
from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.worker import Role, Worker
from pdlab.engine import Engine, EngineConfig
from pdlab.link import Link
from pdlab.models import Model
from pdlab.requirements import require_int


def local_cluster(
    model: Model,
    num_prefill: int = 1,
    num_decode: int = 1,
    router: RouterConfig | None = None,
    *,
    config: EngineConfig | None = None,
    prefill_config: EngineConfig | None = None,
    decode_config: EngineConfig | None = None,
    link: Link | None = None,
    control: Callable[[Router], RoleController] | None = None,
    seed: int | None = None,
    **options: Any,
) -> Cluster:
    """Workers `p0`, `p1`, ... for prompts and `d0`, ... for outputs, on one model in memory.

    Nothing runs at the same time: times are those of one after the other. For workers that really
    run beside each other see `process_cluster`.

    Args:
        config: of all engines; `prefill_config` and `decode_config` go before it.
        link: a slower link, simulated, for all.
        control, seed: as for `Cluster`.
        options: of each `Worker`.

    Raises:
        ValueError: there would be no worker, or a configuration does not fit the model.
    """
    require_int("num_prefill", num_prefill, least=0, most=1024)
    require_int("num_decode", num_decode, least=0, most=1024)
    config = config or EngineConfig()
    roles: list[tuple[str, Role, EngineConfig]] = [
        *((f"p{i}", "prefill", prefill_config or config) for i in range(num_prefill)),
        *((f"d{i}", "decode", decode_config or config) for i in range(num_decode)),
    ]
    board = Switchboard()
    hosts: list[LocalHost] = []
    with closed_on_error(hosts):
        for name, _, own in roles:
            transport = InProcess(board, name, link=link)
            hosts.append(LocalHost(Worker(name, Engine(model, own), transport, **options)))
        members = [(host, role) for host, (_, role, _) in zip(hosts, roles, strict=True)]
        return Cluster(model, members, router, control=control, seed=seed)
