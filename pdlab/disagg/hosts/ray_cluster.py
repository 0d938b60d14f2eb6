"""Workers as Ray actors: on this machine, or wherever a Ray cluster has room for them.

The router stays in the driver. K and V go from actor to actor by Ray's object store, by sockets or
by NIXL: as the specs say.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import VALID_PLACEMENT_GROUP_STRATEGIES

from pdlab.child.ray_room import ActorOptions, RayRoom
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.loop import START_S
from pdlab.disagg.hosts.ray_actor import RayHost
from pdlab.disagg.hosts.spec import WorkerSpec
from pdlab.disagg.router_config import RouterConfig
from pdlab.models import Model
from pdlab.requirements import require_choice

STRATEGIES = tuple(sorted(VALID_PLACEMENT_GROUP_STRATEGIES))


def ray_cluster(
    model: Model,
    specs: Sequence[WorkerSpec],
    router: RouterConfig | None = None,
    *,
    address: str | None = None,
    options: ActorOptions | Mapping[str, ActorOptions] | None = None,
    strategy: str = "PACK",
    seed: int | None = None,
    start_timeout_s: float = START_S,
) -> RayCluster:
    """Start a worker in an actor for each spec, and a cluster that serves with them.

    Leaving the cluster ends the actors, and this process's Ray if it was begun here.

    Args:
        model: for the router, which needs no weights (`pdlab.models.load_outline`); the actors load
            their own, by the specs' name for it, where they are.
        address: of a Ray cluster, "auto" for the one of this machine; None starts a Ray here, for
            this process alone. A Ray that this process uses already is used in any case.
        options: what each actor is given, for all or by worker; one CPU if nothing is said.
        strategy: how the actors are spread over nodes: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD.
        seed: as for `Cluster`.
        start_timeout_s: for Ray to find room, and for a worker to begin.

    Raises:
        ValueError: Ray has no room for the actors, or an argument is out of range.
        ConnectionError: there is no Ray cluster at that address.
        RuntimeError: Ray does not start here.
        WorkerDied: one did not begin; the others are ended.
    """
    require_choice("strategy", strategy, STRATEGIES)
    shares = _shares(specs, options)
    room = RayRoom(shares, address=address, strategy=strategy, timeout_s=start_timeout_s)
    hosts: list[RayHost] = []
    try:
        prefix = f"pdlab-{secrets.token_hex(4)}"
        has_others = sum(node["Alive"] for node in ray.nodes()) > 1
        for index, spec in enumerate(specs):
            spec = _reachable(spec, has_others)
            hosts.append(RayHost(spec, room, index, prefix, start_timeout_s=start_timeout_s))
        pairs = [(host, spec.role) for host, spec in zip(hosts, specs, strict=True)]
        return RayCluster(model, pairs, router, room=room, seed=seed)
    except BaseException:
        for host in hosts:
            host.close()
        room.leave()
        raise


class RayCluster(Cluster):
    """A cluster of actors. See `ray_cluster`.

    Args:
        room: what the actors live in; left at the end.
    """

    def __init__(self, *args: Any, room: RayRoom, **others: Any):
        super().__init__(*args, **others)
        self._room = room

    def close(self) -> None:
        super().close()
        self._room.leave()


def _shares(
    specs: Sequence[WorkerSpec], options: ActorOptions | Mapping[str, ActorOptions] | None
) -> list[ActorOptions]:
    """What each worker is given, in the specs' order."""
    names = [spec.name for spec in specs]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"specs={names} must be at least one worker, each with another name")
    for spec in specs:
        if spec.transport.kind not in ("ray", "socket", "nixl"):
            kind = spec.transport.kind
            raise ValueError(f"transport of {spec.name}: kind {kind!r} does not join Ray's actors")
    if isinstance(options, Mapping):
        if unknown := set(options) - set(names):
            raise ValueError(f"options names {', '.join(sorted(unknown))}; there are {names}")
        return [options.get(name, ActorOptions()) for name in names]
    return [options or ActorOptions()] * len(names)


def _reachable(spec: WorkerSpec, has_others: bool) -> WorkerSpec:
    """A worker whose sockets can be reached from other nodes, if there are any."""
    if spec.transport.kind == "ray" or not has_others or "family" in spec.transport.options:
        return spec
    told = {**spec.transport.options, "family": "tcp"}
    return replace(spec, transport=replace(spec.transport, options=told))
