"""Roles follow the load: which side is behind, and who is given to it."""

from __future__ import annotations

import pytest

from pdlab import EngineConfig, SamplingParams
from pdlab.costmodel import LinearStepTimes
from pdlab.disagg.control import RoleController, prefill_wait_s
from pdlab.disagg.messages import Arrival, Reserve, Reserved, Started
from pdlab.disagg.router import Router, RouterConfig
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.disagg.simulated.worker import SimulatedWorker
from pdlab.engine.moving import RequestState

ONE_S = LinearStepTimes("a second a step", 1.0, *[0.0] * 7)
CONFIG = EngineConfig(num_blocks=100, max_num_seqs=4)


def router_of(**roles: str) -> Router:
    specs = {name: SimulatedSpec(role, CONFIG, ONE_S) for name, role in roles.items()}
    router = Router(RouterConfig(max_backlog_tokens=10**6))
    for name, role in roles.items():
        router.add_worker(SimulatedWorker(name, specs).hello(), role)
    return router


def submit(router: Router, count: int, now_s: float = 0.0) -> None:
    for _ in range(count):
        state = RequestState([1, 2, 3], SamplingParams(max_tokens=5))
        router.submit(f"r{len(router.jobs)}", state, Arrival(now_s))


def give_rooms(router: Router) -> None:
    """All that ask for room have it."""
    for name, commands in router.take_commands(0.0).items():
        for command in commands:
            if isinstance(command, Reserve):
                router.on_event(name, Reserved(command.request_id, 0), 0.0)


def roles(router: Router) -> str:
    return " ".join(f"{name}:{peer.role[0]}" for name, peer in router.peers.items())


def test_prompts_that_wait_are_given_an_idle_decoder():
    router = router_of(p="prefill", d0="decode", d1="decode", d2="decode")
    controller = RoleController(router, most_wait_s=1.0)
    submit(router, 3)
    give_rooms(router)
    assert controller.look(0.9) is None
    switch = controller.look(1.5)
    assert (switch.role, switch.time_s) == ("prefill", 1.5)
    assert "prompts wait 1.50 s" in switch.reason
    assert list(router.peers[switch.worker].jobs) == ["r0"], "the first of those with the least"


def test_a_prompt_that_runs_does_not_wait():
    router = router_of(p="prefill", d0="decode", d1="decode")
    submit(router, 1)
    give_rooms(router)
    router.on_event("p", Started("r0", 0.5, 0), 0.5)
    assert RoleController(router).look(10.0) is None


def test_full_seats_are_given_an_idle_prefiller():
    router = router_of(p0="prefill", p1="prefill", d="decode")
    controller = RoleController(router, most_wait_s=100.0)
    submit(router, 4)
    give_rooms(router)
    assert controller.look(0.0).role == "decode"
    assert roles(router).split().count("p0:d") + roles(router).split().count("p1:d") == 1


def test_prompts_that_wait_for_room_are_no_work_for_a_prefiller():
    """They waited long, but more who prefill would not help them: the seats are full."""
    router = router_of(p0="prefill", p1="prefill", d="decode")
    submit(router, 8)
    router.take_commands(0.0)
    assert prefill_wait_s(router, router.peers.values(), 60.0) == 0
    assert RoleController(router).look(60.0).role == "decode"


def test_one_stays_on_each_side():
    router = router_of(p="prefill", d="decode")
    controller = RoleController(router)
    submit(router, 1)
    give_rooms(router)
    assert controller.look(60.0) is None
    submit(router, 8, 60.0)
    assert controller.look(60.0) is None
    assert roles(router) == "p:p d:d"


def test_the_next_switch_waits_for_the_effect_of_the_last():
    router = router_of(p="prefill", d0="decode", d1="decode", d2="decode")
    controller = RoleController(router, cool_down_s=5.0)
    submit(router, 1)
    give_rooms(router)
    assert controller.look(2.0)
    assert controller.look(6.9) is None
    assert controller.look(7.0)
    assert [s.time_s for s in controller.switches] == [2.0, 7.0]


def test_the_dead_are_not_switched():
    router = router_of(p="prefill", d0="decode", d1="decode")
    submit(router, 1)
    give_rooms(router)
    name = next(n for n in ("d0", "d1") if not router.peers[n].jobs)
    router.lose_worker(name, "gone", 1.0)
    assert RoleController(router).look(60.0) is None, "one is left to decode"


@pytest.mark.parametrize("options", [{"most_wait_s": 0}, {"most_fill": 1.5}, {"cool_down_s": -1}])
def test_what_makes_no_sense_is_named(options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        RoleController(router_of(p="prefill"), **options)
