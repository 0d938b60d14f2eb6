"""Whether a decode worker has, and makes of it, what one engine does, bit for bit in exact mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.engine import RequestOutput
from tests.disagg.watching import Watched, watch
from tests.helpers import random_prompt

CONFIG = EngineConfig(
    exact=True,
    block_size=8,
    num_blocks=256,
    max_num_seqs=16,
    max_num_batched_tokens=40,
    max_model_len=64,
    seed=0,
)
LENGTHS = (7, 8, 9, 15, 16, 17, 32)
"""Of prompts: around multiples of both block sizes."""
NUM_TOKENS = 4
ROUNDS = ("nowhere", "both", "prefill", "decode")
"""Where the prompts are cached when they come."""

PROCESS_MODEL = "random:tiny-llama"
"""Of workers in other processes."""


def params(num_tokens: int = NUM_TOKENS) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=num_tokens, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]


def prompts_of(model: Model, seed: int) -> list[list[int]]:
    return [random_prompt(length, model.config.vocab_size, seed) for length in LENGTHS]


@cache
def alone(model: Model, seed: int) -> list[Watched]:
    """Of one engine that serves these prompts."""
    with Engine(model, CONFIG) as engine:
        seen = watch(engine)
        return [seen[o.request_id] for o in engine.generate(prompts_of(model, seed), params())]


def warm(cluster: Cluster, prompts: list[list[int]], where: str) -> None:
    """Have prompts in the prefix cache of one side alone, or of both."""
    config = cluster.router.config
    if where == "both":
        cluster.generate(prompts, params(2))
    elif where == "prefill":  # what ends with its first token does not travel
        cluster.generate(prompts, params(1))
    elif where == "decode":
        cluster.router.config = replace(config, local_prefill_tokens=64)
        cluster.generate(prompts, params(1))
        cluster.router.config = config


def check_bit_for_bit(
    cluster: Cluster, source: str, target: str, seed: int = 0, rounds: Sequence[str] = ROUNDS
) -> None:
    """Serve prompts that are cached nowhere, on one side, or on both.

    Args:
        seed: of prompts that these workers have not seen, nor those of the next, for each round.
    """
    request_ids = {}
    for i, where in enumerate(rounds):
        prompts = prompts_of(cluster.model, seed + i)
        warm(cluster, prompts, where)
        cluster.router.placement.forget(target)  # or what is all there would be prefilled there
        outputs = cluster.generate(prompts, params())
        check_travelled(cluster, source, target, where, outputs)
        request_ids[where] = [output.request_id for output in outputs]
    sent, received = (cluster.hosts[n].trace().machine["seen"] for n in (source, target))
    for i, where in enumerate(rounds):
        both = zip(request_ids[where], alone(cluster.model, seed + i), strict=True)
        for (request_id, one), length in zip(both, LENGTHS, strict=True):
            here, there = sent[request_id], received[request_id]
            ends = range(length, length + NUM_TOKENS)
            assert there.kv == {n: one.kv[n] for n in ends}
            assert there.logits == {n: one.logits[n] for n in ends[1:]}
            assert here.kv[length] == one.kv[length]
            assert here.logits == {length: one.logits[length]}


def check_travelled(
    cluster: Cluster, source: str, target: str, where: str, outputs: list[RequestOutput]
) -> None:
    """All that the target lacked has travelled from the source, and nothing more."""
    transfer = cluster.router.config.transfer
    layouts = {name: cluster.hosts[name].hello.layout for name in (source, target)}
    records = {record.request_id: record for record in cluster.transfers}
    for output, length in zip(outputs, LENGTHS, strict=True):
        record = records[output.request_id]
        whole = {name: length - length % layout.block_size for name, layout in layouts.items()}
        cached = whole[target] if where in ("both", "decode") else 0
        assert (record.num_cached_tokens, record.num_tokens) == (cached, length - cached)
        assert record.num_bytes == record.num_tokens * cluster.model.config.kv_bytes_per_token(4)
        cached = min(whole[source], length - 1) if where in ("both", "prefill") else 0
        assert output.metrics.num_cached_tokens == cached
        assert (record.source, record.target) == (source, target) or not record.parcels
        for parcel in record.parcels:
            num_layers = 1 if transfer == "stream" else layouts[source].num_layers
            assert parcel.end_layer - parcel.first_layer == num_layers
            assert record.kind == transfer


def check_both_ways(cluster: Cluster) -> None:
    """Two watched workers in other processes: each prefills for the other, by each transfer."""
    here, there = cluster.hosts
    seed = 0
    for source, target, rounds in ((here, there, ROUNDS[:2]), (there, here, ROUNDS[2:])):
        cluster.set_role(source, "prefill")
        cluster.set_role(target, "decode")
        for transfer in TRANSFERS:
            cluster.router.config = RouterConfig(transfer=transfer)
            check_bit_for_bit(cluster, source, target, seed, rounds)
            seed += len(rounds)


def pair_of(transport: TransportSpec) -> list[WorkerSpec]:
    """Two workers whose blocks differ in size."""
    return [
        WorkerSpec(
            f"w{size}",
            transport,
            model=PROCESS_MODEL,
            config=replace(CONFIG, block_size=size),
            num_threads=1,
        )
        for size in (8, 16)
    ]
