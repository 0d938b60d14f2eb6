"""Room for actors, set aside by Ray all at once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdlab.child.own_ray import OwnRay, is_own
from pdlab.requirements import require_number


@dataclass(frozen=True)
class ActorOptions:
    """What Ray sets aside for an actor.

    Raises:
        ValueError: an amount is negative.
    """

    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of the names that nodes were given: `ray start --resources '{"decode": 1}'`."""

    def __post_init__(self) -> None:
        for name, amount in {"CPU": 0, "GPU": 0, **self.bundle}.items():
            require_number(f"amount of {name}", amount, 0, 1e6)

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray writes it, without what is 0."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


class RayRoom:
    """Places for actors, in the Ray that this process uses already or in one begun for it.

    Args:
        shares: what each actor is given.
        address: of a Ray cluster, where none is used yet; None begins one here, for this process
            alone.
        strategy: how the actors are spread over nodes: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD.
        timeout_s: for Ray to find room.

    Raises:
        ValueError: there is no room.
        ConnectionError: there is no Ray cluster at that address.
        RuntimeError: Ray does not start here.
    """

    def __init__(
        self,
        shares: Sequence[ActorOptions],
        *,
        address: str | None = None,
        strategy: str = "PACK",
        timeout_s: float,
    ):
        bundles = [share.bundle for share in shares]
        self._own = None if ray.is_initialized() else OwnRay(address, bundles)
        self._group: PlacementGroup | None = None
        self._is_left = False
        self._shares = shares
        try:
            # Ray wants something of each
            wanted = [bundle or {"memory": 1} for bundle in bundles]
            name = f"{_our_names()}{secrets.token_hex(4)}"
            self._group = placement_group(wanted, strategy=strategy, name=name)
            if not self._group.wait(timeout_s):
                raise ValueError(_no_room(wanted, strategy, timeout_s))
        except BaseException:
            self.leave()
            raise

    def begin_actor(
        self, index: int, kind: type, *told: Any, name: str, groups: Mapping[str, int]
    ) -> Any:
        """Make an actor in one of the places, and its handle.

        Args:
            kind: its class.
            told: arguments of that.
            name: that no other actor of Ray may have.
            groups: threads of its groups of methods.
        """
        assert self._group
        remote: Any = ray.remote  # whose types know no concurrency groups
        # Started again, it would be one that knows of nothing.
        actors = remote(max_restarts=0, max_task_retries=0, concurrency_groups=dict(groups))(kind)
        share = self._shares[index]
        return actors.options(
            name=name,
            num_cpus=share.num_cpus,
            num_gpus=share.num_gpus,
            resources=dict(share.resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        ).remote(*told)

    def leave(self) -> None:
        """Give it back, and end this process's Ray if it was begun for such rooms and this is the
        last. Leaving again does nothing."""
        if self._is_left:
            return
        self._is_left = True
        if ray.is_initialized():
            if self._group is not None:
                remove_placement_group(self._group)
            if is_own() and not self._others():
                ray.shutdown()
        if self._own is not None:
            self._own.tidy_up()

    def _others(self) -> list[str]:
        """Rooms of this process that are still there."""
        mine = self._group.id.hex() if self._group else ""
        return [
            group
            for group, about in placement_group_table().items()
            if about["name"].startswith(_our_names())
            and about["state"] != "REMOVED"
            and group != mine
        ]


def _our_names() -> str:
    """How the names of this process's rooms begin."""
    return f"pdlab-{ray.get_runtime_context().get_job_id()}-"


def _no_room(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float) -> str:
    known = {"CPU", "GPU", *(name for bundle in bundles for name in bundle)}
    free = {name: ray.available_resources().get(name, 0) for name in sorted(known)}
    return (
        f"Ray found no room for {list(bundles)} ({strategy}) within {timeout_s:g} s; it has {free}"
    )
