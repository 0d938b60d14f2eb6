"""A cluster of torch.distributed ranks, from the command line; see `rank_cluster.py`.

    torchrun --nproc-per-node 3 -m pdlab.disagg.hosts.ranks --prefill 1 "Why is the sky blue?"

torchrun ends the whole job when a rank fails: then the router says which one it was, and all end.
Started by others (srun, mpirun, by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) the job
goes on without that rank, as its router's `on_failure` says.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

import torch

from pdlab.child.job import Meeting
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.command_line import (
    add_arguments,
    link_of,
    of_roles,
    router_config,
    run,
    worker_spec,
)
from pdlab.disagg.hosts.host import WorkerDied
from pdlab.disagg.hosts.rank_cluster import rank_cluster, serve_rank
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec
from pdlab.models import load_outline
from pdlab.parallel.command_line import Terminated, heed_sigterm


def main() -> NoReturn:
    """Be one rank of a job. Exits with 1 if a request ended with an error, or the job early."""
    args = _parser().parse_args()
    status = 1
    try:
        meeting = Meeting.join()
        specs = _specs(args, meeting)
        if meeting.rank:
            serve_rank(specs[meeting.rank - 1], meeting)
            status = 0
        else:
            status = _route(args, specs, meeting)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads there still are


def _route(args: argparse.Namespace, specs: Sequence[WorkerSpec], meeting: Meeting) -> int:
    """Rank 0: serve what was asked for; the exit status."""
    heed_sigterm()
    cluster: Cluster | None = None
    try:
        model = load_outline(args.model, progress=False)
        cluster = rank_cluster(model, specs, meeting, router_config(args), seed=args.seed)
        failed = run(args, cluster)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a worker was lost; the work is done
        cluster.close()
        return int(failed)
    except WorkerDied as death:
        print(f"error: {death}", file=sys.stderr)
    except Terminated:
        print("error: this job was ended (SIGTERM)", file=sys.stderr)
        if cluster is not None:
            _tell_lost(cluster)
    return 1


def _tell_lost(cluster: Cluster) -> None:
    """Say who was lost first: the others are ended together with this rank."""
    if cluster.failures:
        return  # it was told when it was noticed
    things: list[Any] = [host.waitable() for host in cluster.hosts.values()]
    wait(things, 1.0)
    for host in cluster.hosts.values():
        try:
            host.poll()
        except WorkerDied as death:
            print(f"error: {death}", file=sys.stderr)


def _specs(args: argparse.Namespace, meeting: Meeting) -> list[WorkerSpec]:
    """The workers of all ranks, the same on each; devices are those of this rank's machine."""
    num_workers = meeting.world_size - 1
    if not 0 <= args.prefill < num_workers:
        raise ValueError(f"--prefill is {args.prefill}; it must be from 0 to {num_workers - 1}")
    device, kv_device = _devices(args.device, meeting)
    told = {
        "init_method": "env://",
        "rank": meeting.rank - 1,
        "world_size": num_workers,
        "device": kv_device,
    }
    spec = worker_spec(args, TransportSpec("torch", told, link_of(args)), device)
    return of_roles(spec, args.prefill, num_workers - args.prefill)


def _devices(device: str, meeting: Meeting) -> tuple[str, str]:
    """Of this rank's engine, and of the bytes it sends: a GPU each, if the machine has so many."""
    if device != "cuda" or meeting.rank == 0:
        return device, "cpu"
    has_router = os.environ.get("GROUP_RANK", "0") == "0"
    local = int(os.environ.get("LOCAL_RANK", meeting.rank)) - has_router
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", meeting.world_size)) - has_router
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ValueError("--device is cuda; this machine has no GPU")
    mine = f"cuda:{local % num_gpus}"
    return mine, mine if num_local <= num_gpus else "cpu"  # NCCL wants a GPU for each


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m pdlab.disagg.hosts.ranks",
        description="Serve prompts, or a trace, with a router on rank 0 and workers on the others.",
    )
    add_arguments(parser)
    parser.add_argument("--prefill", type=int, default=1, help="ranks that prefill; 0: all do both")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for a GPU each")
    return parser


if __name__ == "__main__":
    main()
