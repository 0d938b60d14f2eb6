"""Room on a decode worker goes to whom its engine's policy names, real or simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, Policy, SamplingParams
from pdlab.disagg.messages import Abort, Arrival, Event, Failed, Reserve, Reserved
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.disagg.simulated.worker import SimulatedWorker
from pdlab.disagg.transport.in_process import InProcess, Switchboard
from pdlab.disagg.worker import Worker
from pdlab.engine.moving import RequestState
from pdlab.engine.policies import Deadline, Priority
from tests.helpers import TINY, random_model, random_prompt
from tests.workload.test_simulation import ONE_S

CONFIG = EngineConfig(block_size=4, num_blocks=40, max_num_seqs=1, preemption="recompute")
STATE = RequestState(random_prompt(9), SamplingParams(max_tokens=5, ignore_eos=True), seed=0)


class Picky(Policy):
    """Knows no rank for those that came first of all."""

    def rank(self, sequence, view):
        if sequence.priority == 7 and view.num_cached_tokens(sequence) == 0:
            raise KeyError("seven")
        return 0.0


class Turns:
    """A worker, real or simulated, that is told commands and tells events."""

    def __init__(self, kind: str, config: EngineConfig):
        self.simulated = self.real = None
        if kind == "simulated":
            spec = SimulatedSpec("decode", config, ONE_S)
            self.simulated = SimulatedWorker("d0", {"d0": spec})
        else:
            transport = InProcess(Switchboard(), "d0")
            self.real = Worker("d0", Engine(random_model(TINY), config), transport)

    def tell(self, *commands) -> list[Event]:
        if self.real is not None:
            return self.real.turn(list(commands))
        self.simulated.commands += commands
        self.simulated.begin(0.0)
        return self.simulated.finish()[0]

    def order(self, *asked: Arrival) -> list[str]:
        """Who is given the one room there is, one after the other; all ask at once."""
        names = [f"r{i}" for i in range(len(asked))]
        told = self.tell(*map(Reserve, names, [STATE] * len(asked), asked))
        given = []
        while reserved := [e.request_id for e in told if isinstance(e, Reserved)]:
            given += reserved
            told = self.tell(*map(Abort, reserved))
        return given


@pytest.mark.parametrize("kind", ["real", "simulated"])
@pytest.mark.parametrize(
    ("policy", "asked", "order"),
    [
        ("fcfs", [Arrival(-9.0 + i, priority=-i) for i in range(3)], ["r0", "r1", "r2"]),
        (
            Priority(ageing_s=1e9),
            [Arrival(-9.0 + i, priority) for i, priority in enumerate((1, 0, 1, 0))],
            ["r1", "r3", "r0", "r2"],
        ),
        (
            Deadline(),
            [Arrival(-1.0, ttft_slo_s=slo_s) for slo_s in (900.0, 800.0, 850.0)],
            ["r1", "r2", "r0"],
        ),
    ],
    ids=["fcfs", "priority", "deadline"],
)
def test_room_goes_to_whom_the_policy_names(kind, policy, asked, order):
    assert Turns(kind, replace(CONFIG, policy=policy)).order(*asked) == order


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_nobody_is_overtaken_for_ever(kind):
    config = replace(CONFIG, policy=Priority(ageing_s=1e9), max_overtakes=2)
    asked = [Arrival(-9.0, priority=5), *(Arrival(-8.0 + i, priority=0) for i in range(4))]
    assert Turns(kind, config).order(*asked) == ["r1", "r2", "r0", "r3", "r4"]


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_who_has_no_rank_is_refused_and_keeps_nobody_waiting(kind):
    turns = Turns(kind, replace(CONFIG, policy=Picky()))
    events = turns.tell(
        Reserve("r0", STATE, Arrival(-9.0, priority=7)), Reserve("r1", STATE, Arrival(-8.0))
    )
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.request_id, failed.refused) == ("r0", True)
    assert "no rank for r0" in failed.reason
    assert [e.request_id for e in events if isinstance(e, Reserved)] == ["r1"]


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_who_can_never_be_served_is_refused_at_once(kind):
    turns = Turns(kind, replace(CONFIG, num_blocks=2))
    [failed] = [e for e in turns.tell(Reserve("r0", STATE, Arrival(-9.0))) if isinstance(e, Failed)]
    assert failed.refused
