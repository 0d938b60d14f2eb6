"""Random clusters on the fake-KV oracle, with workers that die and parcels that go wrong.

One seed is one run. Time is counted in turns, so that leases and timeouts come at the same moment
in each run of a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.disagg.transport.in_process import InProcess
from pdlab.disagg.transport.interface import Transport
from pdlab.disagg.worker import ROLES, Role, Worker
from pdlab.engine.fake import FakeRunner, expected_tokens
from pdlab.engine.runner import StepOutput
from pdlab.kvcache import blocks_for
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
    if rng.random() < 0.15:  # everybody does everything
        workers = {name: ("both", config) for name, (_, config) in workers.items()}
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
    interrupts = rng.choice([0.0, 0.0, 0.1])
    switches = rng.choice([0.02, 0.02, 0.2])
    seen = ("killed", "joined", "interrupted", "aborted", "ok", "error", "transfers", "recovered")
    events = dict.fromkeys(seen, 0)
    options: dict[str, Any] = {
        "clock": clock,
        "layers_per_parcel": rng.choice([1, 2]),
        "lease_s": router.lease_s,
        "transfer_timeout_s": rng.choice([3.0, 30.0]),
    }
    with local_cluster(
        MODEL,
        workers,
        router,
        fake=True,
        wrap=lambda transport: with_faults(transport, faults),
        **options,
    ) as cluster:
        for name in workers:
            interrupt_now_and_then(engine_of(cluster, name), rng, interrupts)
        told: dict[str, tuple[list[int], SamplingParams]] = {}
        stems = [random_tokens(rng, rng.randint(2, 16)) for _ in range(2)]
        kills = rng.choice([0, 0, 1, 2]) if len(workers) > 1 else 0
        aborted: set[str] = set()
        has_switched = False
        for _ in range(rng.randint(4, 40)):
            action = rng.random()
            if action < 0.4:
                stem = rng.choice(stems)
                length = rng.randint(0, len(stem))
                prompt = stem[:length] + random_tokens(rng, rng.randint(1, 12))
                params = SamplingParams(
                    max_tokens=rng.randint(1, 9), n=rng.choice([1, 1, 1, 2]), ignore_eos=True
                )
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
            elif action < 0.47 and len(cluster.hosts) < 6:
                dead = [name for name in workers if name not in cluster.hosts]
                name, role = rng.choice([*dead, f"w{len(workers)}"]), rng.choice(ROLES)
                workers[name] = role, random_config(rng)
                join(cluster, name, *workers[name], faults, options)
                interrupt_now_and_then(engine_of(cluster, name), rng, interrupts)
                events["joined"] += 1
            elif action < 0.5 + switches:
                cluster.set_role(rng.choice(list(cluster.hosts)), rng.choice(["prefill", "decode"]))
                has_switched = True
            clock.now_s += 0.1
            events["interrupted"] += step(cluster) is None
        for _ in range(20_000):
            clock.now_s += 0.1
            if (done := step(cluster)) is False:
                break
            events["interrupted"] += done is None
        else:
            raise AssertionError("the cluster does not come to an end")
        for request_id, (prompt, params) in told.items():
            expected = expected_tokens(prompt, params.max_tokens, VOCAB)
            fits = num_fitting(workers.values(), len(prompt) + params.max_tokens - 1, router.mode)
            for sample in cluster.collect(request_id).completions:
                assert sample.token_ids == expected[: len(sample.token_ids)]
                assert len(sample.metrics.token_times_s) == len(sample.token_ids)
                if sample.finish_reason == "length":
                    assert sample.token_ids == expected
                    events["ok"] += 1
                elif sample.finish_reason == "abort":
                    assert request_id in aborted
                else:
                    assert sample.finish_reason == "error"
                    why = str(sample.error)
                    is_calm = not faults and not events["killed"] and router.lease_s > 5
                    if is_calm and options["transfer_timeout_s"] > 3 and not has_switched:
                        assert not fits, why
                    may_fail = on_failure == "fail" or "attempts" in why or "no worker" in why
                    assert may_fail or "num_blocks" in why or "max_model_len" in why, why
                    events["error"] += 1
        events["transfers"] += len(cluster.transfers)
        events["recovered"] += sum(len(f.recovered_s) for f in cluster.failures)
        for _ in range(20):  # the last commands, and every lease
            clock.now_s += router.lease_s / 3
            step(cluster, settles=True)
        for name in cluster.hosts:
            check_idle(engine_of(cluster, name))
            assert not cluster.router.peers[name].jobs
    return events


def step(cluster: Cluster, settles: bool = False) -> bool | None:
    """As `Cluster.step`; None where it was interrupted. What `settles` steps without work, too."""
    try:
        if not settles:
            return cluster.step(0)
        cluster._post()
        cluster._poll()
        return True
    except KeyboardInterrupt:
        return None


def interrupt_now_and_then(engine: Engine, rng: random.Random, share: float) -> None:
    """Have Ctrl-C pressed in a share of its steps, before the model has run or behind it."""
    inner = engine.runner.run

    def run(*args: Any) -> StepOutput:
        point = rng.random() if share else 1.0
        if point < share / 2:
            raise KeyboardInterrupt
        output = inner(*args)
        if point < share:
            raise KeyboardInterrupt
        return output

    engine.runner.run = run  # type: ignore[method-assign]


def join(
    cluster: Cluster,
    name: str,
    role: Role,
    config: EngineConfig,
    faults: Faults | None,
    options: dict[str, Any],
) -> None:
    """Another worker, perhaps of the name of one that is gone."""
    some = next(iter(cluster.hosts.values())).worker.transport  # type: ignore[attr-defined]
    board = getattr(some, "inner", some)._on_board._board
    transport = with_faults(InProcess(board, name, clock=options["clock"]), faults)
    worker = Worker(name, fake_engine(MODEL, config), transport, **options)
    cluster.add_worker(LocalHost(worker), role)


def num_fitting(workers: Iterable[tuple[Role, EngineConfig]], num_slots: int, mode: str) -> int:
    """How many of those that end requests could hold one of this size."""
    enders = [config for role, config in workers if mode == "aggregated" or role != "prefill"]
    return sum(blocks_for(num_slots, each.block_size) <= each.num_blocks for each in enders)


def fake_engine(model: Model, config: EngineConfig) -> Engine:
    """On the fake-KV oracle."""
    engine = Engine(model, config)
    engine.runner = FakeRunner(
        config.num_blocks,
        config.block_size,
        model.config.vocab_size,
        num_layers=model.config.num_layers,
        num_swap_blocks=config.num_swap_blocks,
    )
    return engine


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
