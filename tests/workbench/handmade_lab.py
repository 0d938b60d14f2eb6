"""PDLabs that answer in tenths of a second: made-up step times, a tiny model, workers here."""

from dataclasses import replace

import pytest

import pdlab.workbench.pd_lab_run as run_module
from pdlab.costmodel import LinearStepTimes
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.hosts.spec import TransportSpec, make_worker
from pdlab.disagg.transport.in_process import Switchboard
from pdlab.models import load
from pdlab.workbench import PDLab

TIMES = LinearStepTimes(
    "measured on a machine made up for a test", 0.01, 0.001, 0, 0.0003, 0, 0.001, 1e-6, 5e-6
)
FAST = LinearStepTimes(
    "measured on a fast machine made up for a test", 1e-3, 0, 0, 3e-5, 0, 1e-4, 0, 0
)
TINY = "random:tiny-llama"


def workers_here(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    """Workers in this process instead of processes of their own; the clusters that were made."""
    made: list[Cluster] = []

    def cluster_of(model, specs, router=None, *, seed=None):
        board = Switchboard()
        local = TransportSpec("in-process")
        hosts = [
            (LocalHost(make_worker(replace(s, transport=local), model=model, board=board)), s.role)
            for s in specs
        ]
        made.append(Cluster(model, hosts, router, seed=seed))
        return made[-1]

    monkeypatch.setattr(run_module, "process_cluster", cluster_of)
    return made


def real_lab(**settings) -> PDLab:
    """One that serves 4 requests in some tenths of a second."""
    lab = PDLab(
        load(TINY),
        "short chat",
        30,
        step_times=FAST,
        num_real=4,
        **{"rate_rps": 20.0, "num_devices": 2} | settings,
    )
    lab._num_cores = 8  # whatever the machine has
    return lab
