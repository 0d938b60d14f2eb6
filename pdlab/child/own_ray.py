"""This process's Ray, where it has none yet."""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

NAMESPACE = "pdlab-own"
"""By which a Ray that was begun here, or joined from here, is known."""
OBJECT_STORE_BYTES = 2**30
"""Of a Ray that is started here. Memory is taken as it is used."""


class OwnRay:
    """This process's Ray, begun here: a cluster that is joined, or one of its own.

    Args:
        bundles: what a Ray of its own must have room for.

    Raises:
        ConnectionError: there is no Ray cluster at that address.
        RuntimeError: Ray's processes did not begin in time.
    """

    def __init__(self, address: str | None, bundles: Sequence[Mapping[str, float]]):
        self._aside: tempfile.TemporaryDirectory | None = None
        handler = signal.getsignal(signal.SIGTERM)
        if address is None:
            self._begin(bundles)
        else:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it for itself

    def _begin(self, bundles: Sequence[Mapping[str, float]]) -> None:
        self._aside = _aside()
        own = {name: os.environ.get(name) for name in _environment(self._aside.name)}
        os.environ.update(_environment(self._aside.name))
        try:
            for is_last_try in (False, True):
                try:
                    ray.init("local", **_own_cluster(bundles))
                    return
                except Exception as error:  # Ray has no class of its own for this
                    ray.shutdown()
                    if is_last_try:
                        self.tidy_up()
                        raise RuntimeError(f"Ray did not start on this machine: {error}") from error
                # The first time, its processes may have to compile what they import.
        finally:
            for name, value in own.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def tidy_up(self) -> None:
        """Remove what only Ray's beginning needs."""
        if self._aside is not None:
            self._aside.cleanup()


def is_own() -> bool:
    """Whether the Ray that this process uses is one that `OwnRay` has begun or joined."""
    namespace: str = ray.get_runtime_context().namespace
    return namespace == NAMESPACE


def _own_cluster(bundles: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What `ray.init` is told of a Ray that has room for these."""
    totals: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            totals[name] = totals.get(name, 0) + amount
    totals.pop("GPU", None)  # Ray finds those that are there
    return {
        "num_cpus": max(os.cpu_count() or 1, math.ceil(totals.pop("CPU", 0))),
        "resources": totals,
        "object_store_memory": OBJECT_STORE_BYTES,
        "namespace": NAMESPACE,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }


def _environment(aside: str) -> dict[str, str]:
    """For Ray's own processes, which the actors descend from."""
    paths = [aside, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_AUTH_MODE": "disabled",  # otherwise it leaves a token in the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def _aside() -> tempfile.TemporaryDirectory:
    """A directory for the path of Ray's processes, that hides a package from them.

    Each of the ten imports jsonschema, and that, where it is installed (JupyterLab brings it),
    `rfc3987_syntax`, which takes seconds to build a grammar of web addresses. Ray's daemons die if
    they have not begun after 15 s.
    """
    directory = tempfile.TemporaryDirectory(prefix="pdlab-ray-")
    hidden = Path(directory.name, "rfc3987_syntax.py")
    hidden.write_text('raise ImportError("hidden from the processes of Ray")\n')
    return directory
