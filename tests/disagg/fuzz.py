"""Random clusters on the fake-KV oracle, with workers that die and parcels that go wrong.

One seed is one run. Time is counted in turns, so that leases and timeouts come at the same moment
in each run of a seed.
"""

from __future__ import annotations

import random
from dataclasses import replace

from pdlab import EngineConfig, SamplingParams
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.disagg.transport import Transport
from pdlab.engine.fake import expected_tokens
from tests.disagg.clusters import TurnClock, check_idle, engine_of, local_cluster
from tests.disagg.faults import Faults, FaultyTransport
from tests.engine.fuzz import CONFIG, VOCAB, random_tokens
from tests.helpers import random_model

MODEL = random_model(replace(CONFIG, num_layers=2, max_model_len=64, eos_token_ids=()))


def fuzz(seed: int) -> dict[str, int]:
    """One run; returns how often the interesting things happened.

    Raises:
        Exception: a promise is broken.
    """
    rng = random.Random(seed)
    clock = TurnClock()
    num_p, num_d = rng.randint(1, 3), rng.randint(1, 3)
    workers = {}
    for role, count in (("prefill", num_p), ("decode", num_d)):
        for i in range(count):
            shown = role if rng.random() < 0.9 else "both"
            workers[f"{role[0]}{i}"] = (shown, random_config(rng))
    on_failure = rng.choice(["recompute", "recompute", "fail"])
    router = RouterConfig(
        mode=rng.choice(["disaggregated"] * 5 + ["aggregated"]),
        transfer=rng.choice(TRANSFERS),
        on_failure=on_failure,
        local_prefill_tokens=rng.choice([0, 0, 5]),
        max_backlog_tokens=rng.choice([1, 20, 1000]),
        max_attempts=12,
        lease_s=rng.choice([5.0, 60.0]),
    )
    faults = random_faults(rng)
    events = {"killed": 0, "aborted": 0, "ok": 0, "error": 0, "transfers": 0, "recovered": 0}
    with local_cluster(
        MODEL,
        workers,
        router,
        fake=True,
        wrap=lambda transport: with_faults(transport, faults),
        clock=clock,
        layers_per_parcel=rng.choice([1, 2]),
        lease_s=router.lease_s,
        transfer_timeout_s=rng.choice([3.0, 30.0]),
    ) as cluster:
        told: dict[str, tuple[list[int], SamplingParams]] = {}
        stems = [random_tokens(rng, rng.randint(2, 16)) for _ in range(2)]
        kills = rng.choice([0, 0, 1, 2]) if len(workers) > 1 else 0
        aborted: set[str] = set()
        for _ in range(rng.randint(4, 40)):
            action = rng.random()
            if action < 0.4:
                stem = rng.choice(stems)
                length = rng.randint(0, len(stem))
                prompt = stem[:length] + random_tokens(rng, rng.randint(1, 12))
                params = SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True)
                told[cluster.submit(prompt, params)] = (prompt, params)
            elif action < 0.43 and told:
                request_id = rng.choice(list(told))
                cluster.abort(request_id)
                aborted.add(request_id)
                events["aborted"] += 1
            elif action < 0.46 and kills and len(cluster.hosts) > 1:
                kills -= 1
                cluster.kill(rng.choice(list(cluster.hosts)))
                events["killed"] += 1
            elif action < 0.48:
                cluster.set_role(rng.choice(list(cluster.hosts)), rng.choice(["prefill", "decode"]))
            clock.now_s += 0.1
            cluster.step(0)
        for _ in range(20_000):
            clock.now_s += 0.1
            if not cluster.step(0):
                break
        else:
            raise AssertionError("the cluster does not come to an end")
        for request_id, (prompt, params) in told.items():
            output = cluster.collect(request_id)
            expected = expected_tokens(prompt, params.max_tokens, VOCAB)
            assert output.token_ids == expected[: len(output.token_ids)]
            if output.finish_reason == "length":
                assert output.token_ids == expected
                events["ok"] += 1
            elif output.finish_reason == "abort":
                assert request_id in aborted
            else:
                assert output.finish_reason == "error"
                why = str(output.error)
                may_fail = on_failure == "fail" or "attempts" in why or "no worker" in why
                assert may_fail or "num_blocks" in why or "max_model_len" in why, why
                events["error"] += 1
        events["transfers"] += len(cluster.transfers)
        events["recovered"] += sum(len(f.recovered_s) for f in cluster.failures)
        for _ in range(int(router.lease_s / 0.1) * 3 + 3):  # the last commands, and every lease
            clock.now_s += 0.1
            cluster._post()
            cluster._poll()
        for name in cluster.hosts:
            check_idle(engine_of(cluster, name))
    return events


def random_faults(rng: random.Random) -> Faults | None:
    """None, one kind often, or all kinds now and then."""
    if rng.random() < 0.4:
        return None
    kinds = ("drop", "delay", "corrupt", "duplicate", "reorder", "stall")
    if rng.random() < 0.5:
        return Faults(rng.randrange(10**6), **{rng.choice(kinds): 0.3})
    return Faults(rng.randrange(10**6), **dict.fromkeys(kinds, 0.03))


def with_faults(transport: Transport, faults: Faults | None) -> Transport:
    return transport if faults is None else FaultyTransport(transport, faults)


def random_config(rng: random.Random) -> EngineConfig:
    max_num_seqs = rng.randint(1, 4)
    return EngineConfig(
        block_size=rng.choice([1, 2, 4, 8]),
        num_blocks=rng.choice([6, 12, 24, 64]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 3, 10, 100]),
        chunk_size=rng.choice([None, 3, 8]),
        enable_prefix_cache=rng.random() < 0.8,
        num_swap_blocks=rng.choice([0, 0, 12]),
        preemption="recompute" if rng.random() < 0.5 else "auto",
        batching=rng.choice(["mixed", "mixed", "prefill_first", "decode_first"]),
        record_trace=False,
        seed=0,
    )
