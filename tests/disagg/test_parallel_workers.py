"""Workers whose engines have ranks: what travels arrives byte for byte; who loses one is lost.

See `tests/parallel/test_disaggregated_ranks.py` for how near that is to one engine. The file takes
a quarter of a minute.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdlab import Engine, EngineConfig, load
from pdlab.disagg import Cluster, RouterConfig, local_specs, process_cluster
from pdlab.disagg.hosts.processes import ProcessHost
from pdlab.disagg.messages import Produced
from pdlab.disagg.router import TRANSFERS
from pdlab.kvcache import parse_kv_format
from pdlab.models import load_outline
from tests.disagg.bit_for_bit import (
    CONFIG,
    LENGTHS,
    PROCESS_MODEL,
    params,
    prompts_of,
)
from tests.disagg.clusters import engine_of, local_cluster
from tests.disagg.test_bit_for_bit import watch_held
from tests.disagg.watching import watch
from tests.helpers import random_model, relative_error
from tests.kvcache.test_wire import raw_of, same
from tests.parallel.models import ODD

MODEL = random_model(ODD)
TOLERANCE = 2e-5
"""Of K and V under tensor parallel, relative to the largest: sums are made in another order."""


def cut(tensor_parallel: int, pipeline_parallel: int, **knobs: Any) -> EngineConfig:
    return replace(
        CONFIG,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        rank_host="thread",
        **knobs,
    )


@contextmanager
def pair(prefill: EngineConfig, decode: EngineConfig, transfer: str) -> Iterator[Cluster]:
    router = RouterConfig(transfer=transfer, max_attempts=1)  # what fails once is not hidden
    workers = {"p": ("prefill", prefill), "d": ("decode", decode)}
    with local_cluster(MODEL, workers, router) as cluster:
        yield cluster


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(cut(2, 1), cut(3, 2, block_size=16)), (cut(3, 1, block_size=16), cut(1, 1))],
    ids=["2-to-3x2", "3-to-1"],
)
def test_layers_cut_otherwise_keep_kv_within_the_tolerance(
    prefill: EngineConfig, decode: EngineConfig, transfer: str
) -> None:
    """What arrives is what was computed, bit for bit; that, and what follows of it, is near."""
    prompts = prompts_of(MODEL, 0)
    with Engine(MODEL, CONFIG) as engine:
        plain = watch(engine, lambda tensors: tensors)
        expected = engine.generate(prompts, params())
    with pair(prefill, decode, transfer) as cluster:
        sent, received = (
            watch(engine_of(cluster, name), lambda tensors: tensors) for name in ("p", "d")
        )
        outputs = cluster.generate(prompts, params())
    assert len(cluster.transfers) == len(prompts)
    for output, other, length in zip(outputs, expected, LENGTHS, strict=True):
        assert output.token_ids == other.token_ids
        ours, theirs = received[output.request_id], plain[other.request_id]
        assert same(ours.kv[length], sent[output.request_id].kv[length])
        for end, parts in ours.kv.items():
            for a, b in zip(parts, theirs.kv[end], strict=True):
                assert relative_error(a, b) < TOLERANCE
        for end, [row] in ours.logits.items():
            assert relative_error(row, theirs.logits[end][0]) < TOLERANCE


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(
    ("sender", "receiver"), [("fp32", "int8"), ("bf16", "fp8/int4:token:8"), ("int8", "fp32")]
)
def test_formats_that_differ(sender: str, receiver: str, transfer: str) -> None:
    """Each byte is what the receiver stores of the sender's values, whoever has which heads."""
    prefill, decode = cut(2, 2, kv_format=sender), cut(3, 1, kv_format=receiver, block_size=16)
    prompts = prompts_of(MODEL, 1)
    with pair(prefill, decode, transfer) as cluster:
        sent = watch_held(engine_of(cluster, "p"))
        received = watch(engine_of(cluster, "d"), lambda tensors: tensors)
        outputs = cluster.generate(prompts, params())
    formats = parse_kv_format(receiver, ODD.head_dim)
    for output, prompt in zip(outputs, prompts, strict=True):
        x = sent[output.request_id]
        stored = [part for kind, y in zip(formats, x, strict=True) for part in raw_of(kind, y, 16)]
        assert same(received[output.request_id].kv[len(prompt)], stored)


# --- in processes -------------------------------------------------------------------------------


def test_a_replica_that_loses_a_rank_is_lost_and_the_other_goes_on() -> None:
    """Workers and ranks are processes; a worker that ends takes its other ranks with it."""
    model = load_outline(PROCESS_MODEL)
    config = replace(CONFIG, tensor_parallel=2, rank_threads=1)
    specs = local_specs(0, 2, model=PROCESS_MODEL, config=config, role="both")
    prompts = prompts_of(model, 3)
    long = [replace(each, max_tokens=16) for each in params()]
    with Engine(load(PROCESS_MODEL), CONFIG) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, long)]
    with process_cluster(model, specs, RouterConfig(mode="aggregated"), seed=0) as cluster:
        outputs = cluster.generate(prompts, long)
        assert [output.token_ids for output in outputs] == expected
        host = cluster.hosts["d0"]
        assert isinstance(host, ProcessHost)
        first, second = children_of(host.process.pid)
        watched = os.pidfd_open(second)

        hear, killed = cluster.router.on_event, []

        def on_event(name: str, event: Any, *times: float) -> None:
            hear(name, event, *times)
            if name == "d0" and isinstance(event, Produced) and not killed:
                killed.append(first)
                os.kill(first, signal.SIGKILL)

        cluster.router.on_event = on_event  # type: ignore[method-assign]
        outputs = cluster.generate(prompts, long)
        assert [output.token_ids for output in outputs] == expected
        assert killed
        [failure] = cluster.failures
        assert failure.worker == "d0"
        assert "rank 0 of 2 is lost: its process was ended by SIGKILL" in failure.reason
        assert select.select([watched], [], [], 20)[0]
        os.close(watched)
        assert list(cluster.hosts) == ["d1"]


def children_of(process_id: int) -> list[int]:
    """In the order in which they began."""
    path = Path(f"/proc/{process_id}/task/{process_id}/children")
    return sorted(map(int, path.read_text().split()))
