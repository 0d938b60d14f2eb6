"""Invented measurements and peers, shared by the tests of the speed bench."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pdlab.bench.contest import STARTER, Entry, PeerProcess
from pdlab.bench.speed import CASES, Ceilings, Contestant, Sample, SpeedBench
from pdlab.bench.speed_run import Start
from pdlab.models import load_outline

MODEL = load_outline("random:tiny-llama")
EVEN = Ceilings(1e10, 1e11, 1.0)


def peers_folder(folder: Path) -> Path:
    """The real scripts with the fake peer among them; returns the starter."""
    peers = folder / "peers"
    peers.mkdir()
    (peers / "__init__.py").touch()
    for path in (STARTER, STARTER.with_name("serve.py"), Path(__file__).with_name("fake_peer.py")):
        shutil.copy(path, peers)
    return peers / STARTER.name


def starting(starter: Path) -> Start:
    """Starts the fake peer, whatever the entry asks for."""

    def start(entry: Entry, threads: int) -> PeerProcess:
        return PeerProcess(entry, threads, [sys.executable, str(starter), "fake_peer"])

    return start


def invented() -> SpeedBench:
    """Three rounds of two modes and two peers on one case; the machine halves its pace in round 2.

    pdlab's fast mode does 30, 33, 12 tok/s, the peer that reads half as many bytes 20, 22, 12.
    """
    contestants = [
        Contestant("torch fp32", True, "1", "plain", 4_000_000, 4),
        Contestant("cpu int8", True, "1", "fast", 1_000_000, 4),
        Contestant("llama.cpp", False, "2", "server", 1_000_000, 2),
        Contestant("late", False, "3", "died in round 1", 1_000_000, 2),
    ]
    speeds = {
        "torch fp32": [10.0, 11.0, 5.0],
        "cpu int8": [30.0, 33.0, 12.0],
        "llama.cpp": [20.0, 22.0, 12.0],
        "late": [15.0],
    }
    samples = [
        Sample(round, name, CASES[0].name, 10 / speed, 47 / speed, 47)
        for name, values in speeds.items()
        for round, speed in enumerate(values)
    ]
    return SpeedBench(
        model="random:tiny-llama",
        shape=MODEL.config.to_dict(),
        machine={"processor": "Z80", "cores": 2, "date": "2026-01-01T00:00:00"},
        rounds=3,
        num_tokens=48,
        threads=2,
        cases=list(CASES[:1]),
        contestants=contestants,
        samples=samples,
        ceilings=[EVEN, EVEN, EVEN, Ceilings(5e9, 5e10, 1.0)],
        skipped={"vllm": "RuntimeError: [red]no[/]", "late": "died"},
        token_ids={"torch fp32": {CASES[0].name: [[1, 2, 3, 4]]}},
    )
