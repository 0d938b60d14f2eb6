"""Prefill/decode disaggregation: workers for prompts, workers for outputs, and K and V between.

with local_cluster(model) as cluster:                       # in this process, deterministic
with process_cluster(model, local_specs(1, 1)) as cluster:  # a process for each, on its cores
    cluster.generate(prompts, params)                       # as of `pdlab.Engine`

Replicas (data parallel) are workers of role `both`, whose engines may have ranks of their own:

specs = local_specs(0, 2, role="both", config=EngineConfig(tensor_parallel=2))
with process_cluster(model, specs, RouterConfig(mode="aggregated")) as cluster: ...
"""

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost, WorkerDied
from pdlab.disagg.hosts.local import local_cluster
from pdlab.disagg.hosts.processes import process_cluster
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec, local_specs
from pdlab.disagg.replay import replay_on_cluster
from pdlab.disagg.router import Router, RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.worker import Worker
from pdlab.link import LINKS, Link

__all__ = [
    "LINKS",
    "Cluster",
    "ClusterRun",
    "Link",
    "LocalHost",
    "Router",
    "RouterConfig",
    "TransportSpec",
    "Worker",
    "WorkerDied",
    "WorkerSpec",
    "local_cluster",
    "local_specs",
    "process_cluster",
    "replay_on_cluster",
]
