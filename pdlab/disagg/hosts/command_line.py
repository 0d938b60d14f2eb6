"""What the commands that start a cluster elsewhere have in common: what they take and print."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec
from pdlab.disagg.replay import replay_on_cluster
from pdlab.disagg.router import ON_FAILURE, TRANSFERS, RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.worker import Role
from pdlab.engine import EngineConfig, RequestOutput, SamplingParams
from pdlab.link import LINKS, Link
from pdlab.models.catalog import DEFAULT_MODEL
from pdlab.models.loading import AUTO
from pdlab.parallel.command_line import outputs_as_json, print_outputs, prompt_of
from pdlab.workload.traces import find_trace, read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve, and how the engines and the router are set."""
    add = parser.add_argument
    add("prompts", nargs="*", help="text; token ids as 3,14,15 for a model without a tokenizer")
    add("--replay", metavar="TRACE", help="a trace file, or the name of one that is shipped")
    add("--first", type=int, default=None, help="how many of its requests; all, if not given")
    add("--transfer", choices=TRANSFERS, default="stream")
    add("--on-failure", choices=ON_FAILURE, default="recompute")
    add("--model", default=DEFAULT_MODEL)
    add("--dtype", default=None, help="the device's usual one, if not given")
    add("--weights", default=AUTO, help="their format, such as file, int8 or int4")
    add("--threads", type=int, default=1, help="of each worker")
    add("--max-tokens", type=int, default=32)
    add("--temperature", type=float, default=0.0)
    add("--ignore-eos", action="store_true")
    add("--seed", type=int, default=None)
    add("--exact", action="store_true", help="bit-identical whatever the batch")
    add("--block-size", type=int, default=EngineConfig.block_size)
    add("--num-blocks", type=int, default=EngineConfig.num_blocks)
    add("--kv-format", default=EngineConfig.kv_format)
    add("--link", choices=tuple(LINKS), help="a slower link, simulated, for K and V")
    add("--stream", action="store_true", help="print tokens as they come")
    add("--json", action="store_true", help="print one line of JSON")


def router_config(args: argparse.Namespace) -> RouterConfig:
    return RouterConfig(transfer=args.transfer, on_failure=args.on_failure)


def link_of(args: argparse.Namespace) -> Link | None:
    return Link.named(args.link) if args.link else None


def worker_spec(args: argparse.Namespace, transport: TransportSpec, device: str) -> WorkerSpec:
    """A worker as the arguments say, still without its role.

    Raises:
        ValueError: an argument is out of range.
    """
    config = EngineConfig(
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_format=args.kv_format,
        exact=args.exact,
        seed=args.seed,
    )
    return WorkerSpec(
        "w",
        transport,
        model=args.model,
        config=config,
        dtype=args.dtype,
        weights=args.weights,
        device=device,
        num_threads=args.threads,
    )


def of_roles(spec: WorkerSpec, num_prefill: int, num_others: int) -> list[WorkerSpec]:
    """`p0`, `p1`, ... prefill and `d0`, ... decode; or `b0`, ... do both, if none is to prefill."""
    others: Role = "decode" if num_prefill else "both"
    first = [replace(spec, name=f"p{i}", role="prefill") for i in range(num_prefill)]
    return first + [replace(spec, name=f"{others[0]}{i}", role=others) for i in range(num_others)]


def run(args: argparse.Namespace, cluster: Cluster) -> bool:
    """Serve what was asked for and print what came of it; whether a request failed.

    Raises:
        ValueError: there is nothing to serve, or a prompt or the trace is malformed.
    """
    if bool(args.replay) == bool(args.prompts):
        raise ValueError("give prompts, or a trace with --replay")
    return _replay(args, cluster) if args.replay else _generate(args, cluster)


def _tell_failures(cluster: Cluster, num_told: int) -> int:
    """Say at once which workers were lost; how many that were so far."""
    for failure in cluster.failures[num_told:]:
        print(f"worker {failure.worker} is lost: {failure.reason}", file=sys.stderr, flush=True)
    return len(cluster.failures)


def _generate(args: argparse.Namespace, cluster: Cluster) -> bool:
    """Run the prompts and print what came of them; whether one failed."""
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=args.ignore_eos
    )
    ids = [cluster.submit(prompt_of(text, cluster.model), params) for text in args.prompts]
    num_told = 0
    printed = dict.fromkeys(ids, 0)
    while cluster.step():
        num_told = _tell_failures(cluster, num_told)
        if args.stream:
            _print_chunks(cluster, printed)
    _tell_failures(cluster, num_told)
    outputs = [cluster.collect(request_id) for request_id in ids]
    if args.json:
        print(json.dumps(_as_json(cluster, outputs)))
    else:
        print_outputs(outputs)
        _print_transfers(cluster)
    return any(output.error is not None for output in outputs)


def _print_chunks(cluster: Cluster, printed: dict[str, int]) -> None:
    """Print what has come since the last call, one line for each piece."""
    for request_id, job in cluster.router.jobs.items():
        for chunk in job.chunks[printed[request_id] :]:
            print(request_id, chunk.token_ids, chunk.text, flush=True)
        printed[request_id] = len(job.chunks)


def _as_json(cluster: Cluster, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    return {
        "outputs": outputs_as_json(outputs),
        "transfers": [
            {
                "request_id": record.request_id,
                "source": record.source,
                "target": record.target,
                "kind": record.kind,
                "transport": record.transport,
                "num_tokens": record.num_tokens,
                "num_bytes": record.num_bytes,
                "wall_s": record.wall_s,
            }
            for record in cluster.transfers
        ],
        "failures": [asdict(failure) for failure in cluster.failures],
    }


def _print_transfers(cluster: Cluster) -> None:
    for record in cluster.transfers:
        print(
            f"{record.request_id}: {record.source} -> {record.target}, {record.kind}, "
            f"{record.num_tokens} tokens, {record.num_bytes / 1024:.1f} KiB in "
            f"{record.wall_s * 1e3:.2f} ms ({record.bandwidth_bytes_s / 1e6:.1f} MB/s)"
        )


def _replay(args: argparse.Namespace, cluster: Cluster) -> bool:
    """Serve a trace and print its latencies; whether a request failed."""
    requests = read_trace(find_trace(args.replay))[: args.first]
    num_told = 0

    def on_step(_: object) -> None:
        nonlocal num_told
        num_told = _tell_failures(cluster, num_told)

    run = replay_on_cluster(cluster, requests, on_step=on_step)
    print(_summary(run))
    if not args.json:
        _print_transfers(cluster)
    return any(request.error for request in run.requests)


def _summary(run: ClusterRun) -> str:
    """What was measured, on a few lines."""
    served = [request.metrics for request in run.requests if not request.error]
    ttfts = [m.ttft_s for m in served if m.ttft_s is not None]
    tpots = [m.tpot_s for m in served if m.tpot_s is not None]
    num_bytes = sum(transfer.num_bytes for transfer in run.transfers)
    lines = [
        f"{run.provenance} on {run.basis}",
        f"{len(served)} of {len(run.requests)} requests served, {len(run.transfers)} transfers, "
        f"{num_bytes / 2**20:.1f} MiB",
    ]
    for name, values in (("TTFT", ttfts), ("TPOT", tpots)):
        if values:
            worst = max(values)
            lines.append(f"{name} median {statistics.median(values):.4f} s, most {worst:.4f} s")
    if error := next((request.error for request in run.requests if request.error), ""):
        lines.append(f"the first that was not served: {error}")
    return "\n".join(lines)
