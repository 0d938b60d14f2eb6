"""What a decode worker has, and makes of it, is bit for bit that of one engine in exact mode.

Over every transport, by push, pull and layer by layer, between blocks of other sizes, with prompts
that end around a block's end, and with prefixes cached on either side.
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdlab import Engine, EngineConfig, load
from pdlab.attention import ExactAttention
from pdlab.child import process as child_process
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.hosts.processes import process_cluster
from pdlab.disagg.hosts.ranks import rank_cluster
from pdlab.disagg.hosts.spec import Kind, TransportSpec
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.disagg.transport.sockets import new_token
from pdlab.disagg.worker import Worker
from pdlab.engine.runner import EXACT_ROW_TILE
from pdlab.kvcache import KVFormat, parse_kv_format
from pdlab.trace import StepRecord
from tests.disagg.bit_for_bit import (
    CONFIG,
    PROCESS_MODEL,
    check_bit_for_bit,
    check_both_ways,
    pair_of,
    params,
    prompts_of,
)
from tests.disagg.bodies import PATIENCE_S, make_pair, need
from tests.disagg.clusters import engine_of
from tests.disagg.watching import BOOT, meeting_at, serve_watched_rank, watch
from tests.engine.guessing import Guess
from tests.helpers import ROOT, random_model
from tests.kvcache.test_wire import raw_of, same

MODEL = random_model()


def pair_over(body: str, prefill: EngineConfig, decode: EngineConfig, transfer: str) -> Cluster:
    """Workers `p` and `d` of this process."""
    engines = [Engine(MODEL, config) for config in (prefill, decode)]
    first, second = (
        LocalHost(Worker(name, engine, transport, transfer_timeout_s=20))
        for name, engine, transport in zip("pd", engines, make_pair(body), strict=True)
    )
    config = RouterConfig(transfer=transfer, max_attempts=1)  # what fails once is not hidden
    return Cluster(MODEL, [(first, "prefill"), (second, "decode")], config)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("blocks", [(8, 16), (16, 8)], ids=["8-to-16", "16-to-8"])
@pytest.mark.parametrize("body", ["in-process", "unix", "torch", "nixl"])
def test_over_every_transport(body: str, blocks: tuple[int, int], transfer: str) -> None:
    prefill, decode = (replace(CONFIG, block_size=size) for size in blocks)
    with pair_over(body, prefill, decode, transfer) as cluster:
        for name in cluster.hosts:
            watch(engine_of(cluster, name))
        check_bit_for_bit(cluster, "p", "d")


# --- other processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["socket", "nixl"])
def test_between_processes(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    need(kind)
    monkeypatch.syspath_prepend(str(ROOT))  # for the children to find these tests
    monkeypatch.setattr(child_process, "BOOT", BOOT)
    transport = TransportSpec(kind, {"token": new_token()})
    with process_cluster(load(PROCESS_MODEL), pair_of(transport)) as cluster:
        check_both_ways(cluster)


def test_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    told = {"init_method": "env://", "rank": 0, "world_size": 2}
    mine = pair_of(TransportSpec("torch", told))
    path = str(tmp_path / "meeting")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=serve_watched_rank, args=(spec, path, rank), daemon=True)
        for rank, spec in enumerate(mine, start=1)
    ]
    for process in ranks:
        process.start()
    try:
        with rank_cluster(load(PROCESS_MODEL), mine, meeting_at(path, 0)) as cluster:
            check_both_ways(cluster)
    finally:
        for process in ranks:
            process.join(PATIENCE_S)
            process.kill()


# --- formats that differ ------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        ("fp32", "int8"),
        ("int8", "fp32"),
        ("bf16", "fp8/int4:token:8"),
        ("fp32", "int8:head"),
        ("int8:head", "bf16"),
    ],
)
@pytest.mark.parametrize("body", ["unix", "torch"])
def test_formats_that_differ(body: str, sender: str, receiver: str, transfer: str) -> None:
    """Each byte is what the receiver stores of the sender's values, and each logit follows.

    Not where scales are those of blocks: then nothing is exact but what has travelled.
    """
    here = replace(CONFIG, kv_format=sender, exact=sender != "int8:head")
    there = replace(CONFIG, kv_format=receiver, exact=receiver != "int8:head", block_size=16)
    prompts = prompts_of(MODEL, 0)
    with pair_over(body, here, there, transfer) as cluster:
        sent = watch_held(engine_of(cluster, "p"))
        received = watch(engine_of(cluster, "d"), lambda tensors: tensors)
        outputs = cluster.generate(prompts, params())
    formats = parse_kv_format(receiver, MODEL.config.head_dim)
    for output, prompt in zip(outputs, prompts, strict=True):
        x, arrived = sent[output.request_id], received[output.request_id]
        expected = [
            part for kind, y in zip(formats, x, strict=True) for part in raw_of(kind, y, 16)
        ]
        assert same(arrived.kv[len(prompt)], expected)
        if there.exact:
            rows = plain_logits(formats, x, output.token_ids[:-1])
            assert same([row for [row] in arrived.logits.values()], rows)


def watch_held(engine: Engine) -> dict[str, Tensor]:
    """The values of K and V of each request from now on, as they stand when it is computed."""
    values: dict[str, Tensor] = {}
    step = engine.step

    def watched() -> StepRecord | None:
        record = step()
        for sequence in engine.scheduler.held:
            values.setdefault(sequence.request_id, engine.read_kv(sequence.request_id))
        return record

    engine.step = watched  # type: ignore[method-assign]
    return values


def plain_logits(
    formats: tuple[KVFormat, KVFormat], x: Tensor, token_ids: list[int]
) -> list[Tensor]:
    """The rows after each of these tokens, by hand.

    Args:
        formats: in which K and V are stored, each token by itself.
        x: what K and V before them are stored of, as `plain_kv` returns it.
    """
    decoder, rows = MODEL.decoder, list[Tensor]()
    for token_id in token_ids:
        layers = list(x.unbind(1))
        attend = partial(_attend, formats, layers)

        inputs = torch.tensor([token_id]), torch.tensor([x.shape[2]])
        rows += decoder.logits(
            decoder(*inputs, attend, row_tile=EXACT_ROW_TILE), row_tile=EXACT_ROW_TILE
        )
        x = torch.stack(layers, dim=1)
    return rows


def _attend(
    formats: tuple[KVFormat, KVFormat],
    layers: list[Tensor],
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Add one token to K and V of a layer, and attend to what is stored of all."""
    layers[layer] = torch.cat((layers[layer], torch.stack((k, v))), dim=1)
    keys, values = (
        kind.decode(kind.encode(x), q.dtype) for kind, x in zip(formats, layers[layer], strict=True)
    )
    return ExactAttention().dense(q, keys, values)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_decode_worker_may_guess_ahead(transfer: str):
    """Speculation there changes no token of what one engine says."""
    prompts = prompts_of(MODEL, 3)
    with Engine(MODEL, CONFIG) as engine:
        plain = engine.generate(prompts, params(12))

    def truth(sequence, length):
        [own] = [o for o in plain if o.prompt_ids == sequence.prompt_ids]
        return own.token_ids[sequence.num_output_tokens :][:length]

    guess = Guess(truth, MODEL.config.vocab_size, random.Random(2), right=0.8)
    decode = replace(CONFIG, block_size=16, speculation=guess)
    with pair_over("in-process", CONFIG, decode, transfer) as cluster:
        outputs = cluster.generate(prompts, params(12))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert len(cluster.transfers) == len(prompts)
    assert sum(outcome.num_accepted for outcome in guess.outcomes) > len(prompts)
    assert not guess.seen
