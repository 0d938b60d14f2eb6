"""Simulated workers do what real ones do: the same router, in lockstep, on both."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.costmodel import LinearStepTimes
from pdlab.disagg.messages import (
    Arrival,
    Arrived,
    Command,
    Ended,
    Event,
    Failed,
    Hello,
    Load,
    Produced,
    Reserved,
    Started,
)
from pdlab.disagg.router import TRANSFERS, Router, RouterConfig
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.disagg.simulated.worker import SimulatedWorker
from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.worker import Role, Worker
from pdlab.engine.moving import RequestState
from pdlab.engine.output import Chunk
from pdlab.link import Link
from tests.helpers import TINY, random_model
from tests.workload.test_simulation import SilentRunner

MODEL = random_model(replace(TINY, num_layers=2, max_model_len=64, vocab_size=1000))
ROUND_S = 100.0
"""So long that what the machine takes for a run is next to nothing."""
A_ROUND = LinearStepTimes("a round a step", ROUND_S, *[0.0] * 7)
SOON = Link(1e12, 1e-6)
"""What is sent in a round is there in the next."""
Workers = dict[str, tuple[Role, EngineConfig]]


class SizedRunner(SilentRunner):
    """Computes nothing, and sends payloads of the real size with nothing in them."""

    def read_kv(self, block_table, layers, tokens, wire):
        return torch.zeros(wire.num_bytes(len(tokens), len(layers)), dtype=torch.uint8)

    def kv_writer(self, block_table, wire):
        return SimpleNamespace(write=lambda layers, tokens, payload: None)

    def _check(self, *_):
        pass


class RealWorkers:
    def __init__(self, workers: Workers):
        board = Switchboard()
        self.now_s = 0.0
        self.workers = {}
        for name, (_, config) in workers.items():
            engine = Engine(MODEL, config)
            engine.runner = SizedRunner(config.num_blocks, config.block_size, 1, num_layers=2)
            transport = InProcess(board, name, link=SOON, clock=lambda: self.now_s)
            self.workers[name] = Worker(
                name,
                engine,
                transport,
                lease_s=1e8,
                transfer_timeout_s=1e8,
                clock=lambda: self.now_s,
            )

    def hellos(self) -> dict[str, Hello]:
        return {name: worker.hello() for name, worker in self.workers.items()}

    def turn(self, name: str, commands: list[Command]) -> list[Event]:
        return self.workers[name].turn(commands)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


class SimulatedWorkers:
    def __init__(self, workers: Workers, layouts: dict[str, Hello]):
        self.now_s = 0.0
        specs = {
            name: SimulatedSpec(
                role,
                replace(config, max_model_len=config.max_model_len or 64),
                A_ROUND,
                layout=layouts[name].layout,
            )
            for name, (role, config) in workers.items()
        }
        self.workers = {name: SimulatedWorker(name, specs, tells_all=True) for name in specs}
        self.coming = []

    def hellos(self) -> dict[str, Hello]:
        return {name: worker.hello() for name, worker in self.workers.items()}

    def turn(self, name: str, commands: list[Command]) -> list[Event]:
        worker = self.workers[name]
        for shipment in [s for s in self.coming if s.target == name and s.due_s <= self.now_s]:
            self.coming.remove(shipment)
            worker.arrived.append(shipment)
        worker.commands += commands
        end_s = worker.begin(self.now_s)
        early = worker.take_events()
        if end_s is not None:
            worker.interrupt(self.now_s + ROUND_S / 2)
        events, _ = worker.finish()
        sent = worker.take_sent()
        for shipment in sent:  # as over the real ones' link: not in the same round
            last = shipment.parcels[-1]
            shipment.parcels[-1] = last._replace(arrived_s=self.now_s + ROUND_S)
        self.coming += sent
        return early + events

    def close(self) -> None:
        pass


def told(event: Event) -> tuple | None:
    """What must be equal of an event."""
    kind, name = type(event).__name__, getattr(event, "request_id", "")
    match event:
        case Produced(_, Chunk(token_ids=tokens)):
            return (kind, name, len(tokens)) if tokens else None
        case Started(_, _, cached) | Reserved(_, cached):
            return kind, name, cached
        case Arrived(_, t):
            return kind, name, t.num_tokens, t.num_cached_tokens, t.num_bytes, t.source, t.target
        case Failed(_, _, refused):
            return kind, name, refused
        case Ended(_, num_preemptions=preemptions):
            return kind, name, preemptions
    return kind, name


def play(side, hellos: dict[str, Hello], workers: Workers, config: RouterConfig, coming):
    """The commands and events of each round, and the router at the end."""
    router = Router(config)
    for name, hello in hellos.items():
        router.add_worker(hello, workers[name][0])
    log = []
    for number in range(2000):
        now_s = side.now_s = number * ROUND_S
        for arrival_s, state in coming.get(number, []):
            router.submit(f"r{len(router.jobs)}", state, Arrival(arrival_s))
        commands = router.take_commands(now_s)
        if number > max(coming) and not router.has_work and not commands:
            break
        for name in workers:
            mine = commands.get(name, [])
            log += [(number, name, type(c).__name__, getattr(c, "request_id", "")) for c in mine]
            for event in side.turn(name, mine):
                if isinstance(event, Load):
                    continue  # else the router would go by how fast the real ones are
                if said := told(event):
                    log.append((number, name, *said))
                router.on_event(name, event, now_s)
    else:
        raise AssertionError("it does not come to an end")
    return log, router


def random_workers(rng: random.Random) -> Workers:
    """Those that receive come before those that send: so both sides take parcels a round later."""
    workers: Workers = {}
    for role, count in (("decode", rng.randint(1, 3)), ("prefill", rng.randint(1, 3))):
        for i in range(count):
            max_num_seqs = rng.randint(1, 5)
            config = EngineConfig(
                block_size=rng.choice([2, 4]),
                num_blocks=rng.choice([30, 40, 200]),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + rng.choice([0, 5, 40]),
                chunk_size=rng.choice([None, 5]),
                batching=rng.choice(["mixed", "prefill_first", "decode_first"]),
                enable_prefix_cache=rng.random() < 0.8,
                preemption="recompute",
                kv_format=rng.choice(["fp32", "bf16", "int8:token"]),
                record_trace=False,
            )
            workers[f"{role[0]}{i}"] = (role, config)
    return workers


def random_requests(rng: random.Random) -> dict[int, list[tuple[float, RequestState]]]:
    """By the round in which they come."""
    stems = [[rng.randrange(1, 1000) for _ in range(30)] for _ in range(2)]
    coming: dict[int, list[tuple[float, RequestState]]] = {}
    for number in range(rng.randint(3, 12)):
        when = rng.randrange(15)
        own = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 12))]
        prompt = rng.choice(stems)[: rng.choice([0, 8, 17, 30])] + own
        params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True)
        coming.setdefault(when, []).append((when * ROUND_S + number, RequestState(prompt, params)))
    return coming


def both(seed: int, transfer: str, mode: str = "disaggregated", change: Callable | None = None):
    rng = random.Random(seed)
    workers, coming = random_workers(rng), random_requests(rng)
    config = RouterConfig(
        mode=mode,
        transfer=transfer,
        local_prefill_tokens=rng.choice([0, 0, 6]),
        max_backlog_tokens=rng.choice([1, 30, 1000]),
        lease_s=1e8,
        patience_s=1e9,
    )
    real = RealWorkers(workers)
    try:
        simulated = SimulatedWorkers(workers, real.hellos())
        return [play(side, side.hellos(), workers, config, coming) for side in (real, simulated)]
    finally:
        real.close()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_the_same_commands_and_events_round_by_round(transfer, seed):
    (real, _), (simulated, _) = both(seed, transfer)
    assert simulated == real


@pytest.mark.parametrize("seed", range(10))
def test_aggregated_workers_agree(seed):
    (real, _), (simulated, _) = both(seed, "stream", "aggregated")
    assert simulated == real
