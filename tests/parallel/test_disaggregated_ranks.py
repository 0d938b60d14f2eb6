"""Workers whose engines have several ranks: other grids on the two sides, and whole replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.disagg.router import TRANSFERS, RouterConfig
from tests.disagg.bit_for_bit import CONFIG, check_bit_for_bit, prompts_of
from tests.disagg.clusters import engine_of, local_cluster
from tests.disagg.watching import watch
from tests.helpers import random_model, relative_error
from tests.parallel.models import ODD
from tests.parallel.test_parallel_engine import TOLERANCE

MODEL = random_model(ODD)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def on_ranks(config: EngineConfig, tensor_parallel: int, pipeline_parallel: int) -> EngineConfig:
    return replace(
        config,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        rank_host="thread",
    )


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("sides", [((1, 2), (1, 1)), ((1, 1), (1, 3)), ((1, 5), (1, 2))])
def test_between_pipelines_no_bit_changes(sides, transfer: str) -> None:
    """Layers are put together and dealt out anew, and blocks of 8 tokens become blocks of 16."""
    prefill, decode = sides
    workers = {
        "p": ("prefill", on_ranks(CONFIG, *prefill)),
        "d": ("decode", on_ranks(replace(CONFIG, block_size=16), *decode)),
    }
    with local_cluster(MODEL, workers, RouterConfig(transfer=transfer, max_attempts=1)) as cluster:
        for name in workers:
            watch(engine_of(cluster, name))
        check_bit_for_bit(cluster, "p", "d", rounds=("nowhere", "decode"))


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("formats", [("fp32", "fp32"), ("fp32", "int8"), ("int4", "int8:channel")])
def test_heads_are_dealt_out_anew_between_two_ranks_and_three(transfer: str, formats) -> None:
    """2 + 1 KV heads on the prefill side, 1 + 1 + 1 in two stages on the other."""
    prefill, decode = (replace(CONFIG, exact=False, kv_format=each) for each in formats)
    workers = {
        "p": ("prefill", on_ranks(prefill, 2, 1)),
        "d": ("decode", on_ranks(replace(decode, block_size=16), 3, 2)),
    }
    one = {"p": ("prefill", prefill), "d": ("decode", replace(decode, block_size=16))}
    router = RouterConfig(transfer=transfer, max_attempts=1)
    prompts, stored = prompts_of(MODEL, 0), []
    for each in (workers, one):
        with local_cluster(MODEL, each, router) as cluster:
            kept = watch(engine_of(cluster, "d"), keep=list)
            outputs = cluster.generate(prompts, PARAMS)
            assert sum(record.num_tokens for record in cluster.transfers) == sum(map(len, prompts))
            stored.append([(output.token_ids, kept[output.request_id].kv) for output in outputs])
    lossless = formats == ("fp32", "fp32")
    for (tokens, ours), (expected, theirs) in zip(*stored, strict=True):
        if lossless:
            assert tokens == expected
        first = min(ours)  # on arrival
        for a, b in zip(ours[first], theirs[first], strict=True):
            if lossless:
                assert relative_error(a, b) < TOLERANCE
            else:  # a value at the edge of two codes may take either
                wrong = (a.float() - b.float()).abs().mean()
                assert wrong <= 0.02 * b.float().abs().mean()


def test_replicas_of_several_ranks_answer_as_one_engine() -> None:
    """Data parallel: workers that do both, each tensor and pipeline parallel in itself."""
    replicas = {f"b{i}": ("both", on_ranks(CONFIG, 1, 2)) for i in range(2)}
    replicas["b2"] = ("both", on_ranks(CONFIG, 1, 3))
    prompts = prompts_of(MODEL, 5)
    with Engine(MODEL, CONFIG) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, PARAMS)]
    with local_cluster(MODEL, replicas) as cluster:
        assert [output.token_ids for output in cluster.generate(prompts, PARAMS)] == expected
        served = [len(cluster.hosts[name].trace().requests) for name in replicas]
    assert min(served) >= 1
    assert sum(served) == len(prompts)
