"""A cluster of Ray actors, from the command line.

python -m pdlab.disagg.hosts.on_ray --prefill 1 --decode 2 "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import sys

from pdlab.child.ray_room import ActorOptions
from pdlab.disagg.hosts.command_line import (
    add_arguments,
    link_of,
    of_roles,
    router_config,
    run,
    worker_spec,
)
from pdlab.disagg.hosts.host import WorkerDied
from pdlab.disagg.hosts.ray_cluster import STRATEGIES, ray_cluster
from pdlab.disagg.hosts.spec import TransportSpec
from pdlab.disagg.transport.sockets import new_token
from pdlab.models import load_outline
from pdlab.requirements import require_int

KINDS = ("ray", "socket", "nixl")


def main() -> int:
    """Serve, and print; 1 if a request failed, or the cluster could not be made."""
    args = _parser().parse_args()
    told = {} if args.transport == "ray" else {"token": new_token()}
    try:
        require_int("prefill", args.prefill, least=0)
        require_int("decode", args.decode, least=1)
        spec = worker_spec(
            args, TransportSpec(args.transport, told, link_of(args)), "cuda" if args.gpus else "cpu"
        )
        specs = of_roles(spec, args.prefill, args.decode)
        options = {
            each.name: ActorOptions(args.cpus, args.gpus, {each.role: 1} if args.by_role else {})
            for each in specs
        }
        model = load_outline(args.model, progress=False)
        with ray_cluster(
            model,
            specs,
            router_config(args),
            address=args.address,
            options=options,
            strategy=args.strategy,
            seed=args.seed,
        ) as cluster:
            return int(run(args, cluster))
    except (ValueError, ConnectionError, RuntimeError, WorkerDied) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdlab.disagg.hosts.on_ray",
        description="Serve prompts, or a trace, with workers in Ray actors.",
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--address", help="of a Ray cluster: auto, or HOST:PORT; a Ray of its own if not given")
    add("--prefill", type=int, default=1, help="actors that prefill; 0: all do both")
    add("--decode", type=int, default=1, help="the other actors")
    add("--cpus", type=float, default=1, help="of each actor")
    add("--gpus", type=float, default=0, help="of each actor")
    add("--by-role", action="store_true", help="each on a node with its role as a resource")
    add("--strategy", choices=STRATEGIES, default="PACK")
    add("--transport", choices=KINDS, default="ray", help="how K and V travel")
    return parser


if __name__ == "__main__":
    sys.exit(main())
