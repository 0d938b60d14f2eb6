"""The PolicyLab shows what `simulate` gives, and beside it what the engine measured."""

import asyncio
import gc
import json
import re
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import traitlets

import pdlab.workbench.policy_lab as module
import pdlab.workbench.policy_lab_run as real_module
from pdlab import Engine, EngineConfig
from pdlab.costmodel import LinearStepTimes
from pdlab.engine.config import BATCHING_MODES
from pdlab.engine.policies import POLICIES, Deadline, Policy
from pdlab.workbench import PolicyLab
from pdlab.workbench.picture import widget_page
from pdlab.workbench.policy_lab import HERE, THERE
from pdlab.workbench.policy_lab_data import (
    DESCRIPTIONS,
    LONG_TOKENS,
    MINI_ROWS,
    Settings,
    make_requests,
    numbers_of,
)
from pdlab.workload.report import summarize
from pdlab.workload.serving import SLO
from pdlab.workload.simulation import simulate

from ..helpers import TINY, random_model

TIMES = LinearStepTimes(
    "measured on a machine made up for a test", 0.01, 0.001, 0, 0.0003, 0, 0.001, 1e-6, 5e-6
)
FAST = LinearStepTimes(
    "measured on a fast machine made up for a test", 1e-3, 0, 0, 3e-5, 0, 1e-4, 0, 0
)
LONG_ENOUGH = replace(TINY, max_model_len=4096)


class Newest(Policy):
    def rank(self, sequence, view):
        return -sequence.arrival_s


class Broken(Policy):
    def rank(self, sequence, view):
        return 1 / 0


class Failing(Policy):
    def rank(self, sequence, view):
        return int("soon")


class Silent(Policy):
    def rank(self, sequence, view):
        return None


class Counting(Policy):
    """Ranks by how often it was asked: what it gives depends on what it did before."""

    def __init__(self):
        self.count = 0

    def rank(self, sequence, view):
        self.count += 1
        return -self.count


@pytest.fixture
def lab() -> PolicyLab:
    return PolicyLab(num_requests=60, num_real=5, step_times=TIMES)


def real_lab(**settings) -> PolicyLab:
    """One that serves 4 requests in some tenths of a second."""
    model = random_model(LONG_ENOUGH)
    return PolicyLab(
        model, "short chat", 40, step_times=FAST, num_real=4, **{"rate_rps": 40.0} | settings
    )


def crowded(lab: PolicyLab) -> None:
    """So many requests that their order counts."""
    lab.choose(max_num_seqs=4, rate_rps=4 * lab.rate_rps)
    assert not lab.message


# --- simulating ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", BATCHING_MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_shows_what_simulate_gives(lab: PolicyLab, batching: str, policy: str) -> None:
    knobs = {"max_num_batched_tokens": 96, "chunk_size": 32, "max_num_seqs": 6}
    lab.choose(batching=batching, policy=policy, rate_rps=12.0, **knobs)
    assert not lab.message
    used = Deadline(lab.ttft_slo_s) if policy == "deadline" else policy
    config = EngineConfig(record_trace=False, batching=batching, policy=used, **knobs)
    requests = make_requests("mixed", 60, 12.0, 0)
    assert lab.run.requests == simulate(requests, config, TIMES, max_model_len=2048).requests
    assert lab.result["settings"]["policy"] == policy


@pytest.mark.parametrize("workload", DESCRIPTIONS)
@pytest.mark.parametrize("machine", [HERE, THERE])
def test_numbers_are_those_of_the_report(lab: PolicyLab, workload: str, machine: str) -> None:
    lab.choose(workload=workload, machine=machine, rate_rps=6.0)
    summary, numbers = summarize(lab.run, lab.settings.slo), lab.numbers
    expected = {
        "ttft_p50": summary.ttft_s.p50,
        "ttft_p99": summary.ttft_s.p99,
        "tpot_p50": summary.tpot_s.p50,
        "itl_p99": summary.itl_s.p99,
        "goodput": summary.goodput_per_s,
        "attainment": summary.attainment,
        "throughput": summary.output_tokens_per_s,
        "duration": summary.duration_s,
    }
    assert numbers == pytest.approx(expected)
    assert numbers_of(lab.run, lab.settings.slo) == numbers
    assert summary.num_finished == 60
    seconds, parts = lab.result["cdf"]
    assert seconds == sorted(seconds)
    assert parts[-1] == 1
    assert seconds[-1] == pytest.approx(summary.ttft_s.max, rel=1e-3)


def test_policies_and_modes_differ_where_it_is_crowded(lab: PolicyLab) -> None:
    crowded(lab)
    seen = {}
    for name in ("fcfs", "sjf", "priority"):
        lab.policy = name
        seen[name] = lab.numbers
    assert seen["sjf"]["ttft_p50"] < seen["fcfs"]["ttft_p50"]
    assert seen["priority"] != seen["fcfs"]
    lab.choose(policy="fcfs", batching="static")
    assert lab.numbers["ttft_p50"] > seen["fcfs"]["ttft_p50"]


def test_a_seed_gives_the_same_again_and_another_does_not(lab: PolicyLab) -> None:
    first = lab.numbers
    lab.seed = 7
    assert lab.numbers != first
    lab.seed = 0
    assert lab.numbers == first


def test_one_long_prompt_among_twenty() -> None:
    requests = make_requests("short vs. one long", 60, 1.0, 3)
    long = [i for i, r in enumerate(requests) if r.num_prompt_tokens == LONG_TOKENS]
    assert long == [5, 25, 45]
    plain = make_requests("short chat", 60, 1.0, 3)
    assert [r.arrival_s for r in requests] == [r.arrival_s for r in plain]


# --- controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("batching", "both", "static"),
        ("policy", "lifo", "longest_prefix"),
        ("max_num_batched_tokens", 16, "max_num_seqs=32"),
        ("max_num_batched_tokens", 0, ">= 1"),
        ("chunk_size", 0, ">= 1"),
        ("max_num_seqs", 4000, "max_num_batched_tokens=512"),
        ("rate_rps", 0.0, "rate_rps=0.0"),
        ("workload", "chats", "short chat"),
        ("seed", -1, "seed=-1"),
        ("machine", "a phone", THERE),
        ("ttft_slo_s", -1.0, "ttft_s=-1.0"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_changes(
    lab: PolicyLab, name: str, value: object, words: str
) -> None:
    before, shown = lab.settings, lab.result
    with pytest.raises((ValueError, traitlets.TraitError), match=re.escape(words)):
        setattr(lab, name, value)
    lab.choose(**{name: value})
    assert words in lab.message
    assert (lab.settings, lab.result) == (before, shown)
    assert getattr(lab, name) == getattr(before, name)
    lab.choose(seed=1)
    assert lab.message == ""


def test_an_unknown_setting_is_refused(lab: PolicyLab) -> None:
    lab.choose(budget=4)
    assert "budget is not one of batching" in lab.message
    with pytest.raises(ValueError, match="num_blocks is not one of"):
        PolicyLab(step_times=TIMES, num_blocks=3)


def test_another_machine_is_as_busy_and_has_its_own_limits(lab: PolicyLab) -> None:
    usual = lab.header["usual_rates"]
    lab.choose(rate_rps=2 * usual[HERE])
    here = lab.settings.slo
    lab.machine = THERE
    assert lab.rate_rps == pytest.approx(2 * usual[THERE], rel=0.05)
    assert lab.settings.slo != here
    assert "published for OPT-13B" in lab.result["provenance"]
    lab.machine = HERE
    assert lab.settings.slo == here
    assert "measured on a machine made up" in lab.summary()


def test_limits_that_were_given_stay_on_every_machine() -> None:
    lab = PolicyLab(num_requests=30, step_times=TIMES, slo=SLO(0.4, 0.05))
    lab.machine = THERE
    assert lab.settings.slo == SLO(0.4, 0.05)


def test_pinned_numbers_stay(lab: PolicyLab) -> None:
    first = lab.numbers
    crowded(lab)
    assert lab.pinned["numbers"] == first != lab.numbers
    lab.pin()
    assert lab.pinned["numbers"] == lab.numbers
    lab.unpin()
    assert lab.pinned == {}


def test_without_a_model_only_the_published_machine_is_there() -> None:
    lab = PolicyLab(num_requests=30)
    assert lab.header["machines"] == [THERE]
    assert lab.header["here"] == []
    lab.run_for_real()
    assert "there is no model" in lab.message


def test_step_times_are_measured_under_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(model, config, *, progress):
        asked.append((config.record_trace, progress))
        return TIMES

    monkeypatch.setattr(module, "measured_step_times", measured)
    lab = PolicyLab(random_model(), num_requests=30)
    assert asked == [(False, True)]
    assert lab.machine == HERE


# --- policies of one's own -----------------------------------------------------------------------


def test_a_policy_of_ones_own_decides(lab: PolicyLab) -> None:
    crowded(lab)
    fcfs = lab.numbers
    lab.choose(policy=Newest())
    assert lab.policies[-1] == lab.policy == "Newest"
    assert lab.numbers != fcfs
    assert "policy=Newest" not in lab.message
    assert lab.run.config["policy"] == "Newest"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Broken(), "ZeroDivisionError: division by zero, in Broken.rank, line "),
        (Failing(), "ValueError: invalid literal for int() with base 10: 'soon', in Failing.rank"),
        (Silent(), "policy=Silent has no rank for r0: ValueError: None is no number"),
        (Newest, "pass an object, Newest()"),
        (3, "policy=3 must be an object derived from pdlab.Policy"),
    ],
)
def test_a_bad_policy_is_said_and_the_picture_stays(lab: PolicyLab, policy, words: str) -> None:
    shown = lab.result
    lab.choose(policy=policy)
    assert words in lab.message
    assert "\n" not in lab.message
    assert (lab.policy, lab.result) == ("fcfs", shown)
    assert lab.policies == list(POLICIES)


def test_a_policy_that_says_its_name_is_called_by_it(lab: PolicyLab) -> None:
    named = type("Class", (Newest,), {"__str__": lambda self: "mine"})
    lab.choose(policy=named())
    assert lab.policies[-1] == lab.policy == "mine"
    assert lab.run.config["policy"] == "mine"


def test_a_policy_with_the_name_of_a_builtin_is_refused(lab: PolicyLab) -> None:
    with pytest.raises(ValueError, match="rename your class"):
        lab.register(type("sjf", (Newest,), {})())


def test_every_run_finds_a_policy_as_it_was_registered() -> None:
    lab = PolicyLab(num_requests=60, step_times=TIMES, policies=[Counting()])
    crowded(lab)
    lab.policy = "Counting"
    first = lab.numbers
    lab.policy = "fcfs"
    lab.policy = "Counting"
    assert lab.numbers == first


def test_a_class_that_is_written_again_replaces_the_old_one(lab: PolicyLab) -> None:
    crowded(lab)
    lab.choose(policy=Newest())
    newest = lab.numbers
    oldest = type("Newest", (Policy,), {"rank": lambda self, sequence, view: sequence.arrival_s})
    lab.register(oldest())
    assert lab.policies.count("Newest") == 1
    assert lab.numbers != newest
    lab.choose(policy="fcfs")
    fcfs = lab.numbers
    lab.choose(policy="Newest")
    assert lab.numbers == fcfs


# --- what is drawn -------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", BATCHING_MODES)
def test_the_first_requests_are_drawn_as_they_lived(lab: PolicyLab, batching: str) -> None:
    lab.choose(batching=batching, rate_rps=20.0, max_num_seqs=8)
    timeline = lab.result["timeline"]
    assert len(timeline["rows"]) == MINI_ROWS
    for row, request in zip(timeline["rows"], lab.run.requests, strict=False):
        spans = row["spans"]
        assert spans[0][1] == pytest.approx(request.metrics.arrival_s, abs=2e-6)
        assert spans[-1][2] == pytest.approx(request.metrics.token_times_s[-1], abs=2e-6)
        assert all(a[2] <= b[1] + 1e-5 for a, b in pairwise(spans))
        assert row["met"] == request.meets(lab.settings.slo)


def test_the_load_is_that_of_the_whole_run(lab: PolicyLab) -> None:
    crowded(lab)
    lab.view = "load"
    timeline = lab.result["timeline"]
    summary = summarize(lab.run)
    mean = sum(timeline["queue"]) / len(timeline["queue"])
    assert mean == pytest.approx(summary.queue_depth.mean, rel=1e-2)
    assert timeline["end_s"] == lab.run.duration_s
    with pytest.raises(ValueError, match="view='all'"):
        lab.view = "all"


def test_refused_requests_are_counted() -> None:
    config = EngineConfig(num_blocks=20, record_trace=False)
    lab = PolicyLab(None, "long documents", 40, step_times=TIMES, config=config)
    assert lab.result["num_refused"] > 0
    assert "blocks" in lab.result["error"]


def test_what_goes_to_the_page_is_small_and_plain(lab: PolicyLab) -> None:
    for workload in DESCRIPTIONS:
        for batching in BATCHING_MODES:
            lab.choose(workload=workload, batching=batching, max_num_batched_tokens=64)
            assert len(json.dumps(lab.view_state(), allow_nan=False)) < 60_000
    page = widget_page(lab)
    assert "pd-policy-lab" in page
    data, _ = lab._repr_mimebundle_()
    assert "requests within TTFT" in data["text/html"]
    assert "simulated with step times measured on" in data["text/plain"]


# --- the page's questions ------------------------------------------------------------------------


def test_every_question_is_answered(lab: PolicyLab) -> None:
    def ask(number: int, **content) -> None:
        lab._on_message(lab, {"number": number, **content}, [])
        assert lab.answered == number

    ask(1, type="set", values={"batching": "static", "chunk_size": 64})
    assert (lab.batching, lab.chunk_size) == ("static", 64)
    ask(2, type="set", values={"ttft_slo_s": "soon"})
    assert "ttft_s='soon'" in lab.message
    ask(3, type="pin")
    assert lab.pinned["settings"]["batching"] == "static"
    ask(4, type="view", view="load")
    assert lab.result["timeline"]["view"] == "load"
    ask(5, type="unpin")
    ask(6, type="run")
    assert "no model" in lab.message
    ask(7, type="stop")
    lab._on_message(lab, {"type": "views", "change": 1}, [])


# --- for real ------------------------------------------------------------------------------------


def test_measured_stands_beside_the_simulation_of_the_same_requests() -> None:
    lab = real_lab(batching="prefill_first")
    lab.run_for_real()
    lab.wait(60)
    assert lab.message == ""
    real = lab.real
    assert (real["state"], real["num"], real["of"]) == ("done", 4, 40)
    assert "prefill_first" in real["line"]
    lengths = [r.num_prompt_tokens for r in lab.settings.requests()[:4]]
    for run in (lab.measured, lab.simulated):
        assert [r.metrics.num_prompt_tokens for r in run.requests] == lengths
        assert run.config["batching"] == "prefill_first"
    assert (lab.measured.provenance, lab.simulated.provenance) == ("measured", "simulated")
    rows = {row["key"]: row for row in real["rows"]}
    slo = lab.settings.slo
    assert rows["ttft_p50"]["measured"] == summarize(lab.measured, slo).ttft_s.p50
    assert rows["ttft_p50"]["simulated"] == summarize(lab.simulated, slo).ttft_s.p50
    assert real["measured"].startswith("measured on random")
    assert real["simulated"] == f"simulated with step times {FAST.basis}"


def test_the_engine_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(*args):
        made.append(Engine(*args))
        return made[-1]

    monkeypatch.setattr(real_module, "Engine", make)
    lab = real_lab()
    lab.run_for_real()
    lab.wait(60)
    assert [engine.memory for engine in made] == [None]


def test_how_long_it_will_take_is_known_before() -> None:
    lab = real_lab()
    ends = [r.metrics.token_times_s[-1] for r in lab.run.requests[:4]]
    assert lab.result["real_s"] == max(ends)


def test_it_can_be_stopped_and_begun_again() -> None:
    lab = real_lab(rate_rps=0.01)  # the first request is minutes away
    lab.run_for_real()
    assert lab.real["state"] == "running"
    lab.run_for_real()
    assert "under way" in lab.message
    lab.stop()
    lab.wait(60)
    assert lab.real["state"] == "stopped"
    assert "rows" not in lab.real
    lab.choose(rate_rps=40.0)
    lab.run_for_real()
    lab.wait(60)
    assert lab.real["state"] == "done"


def test_with_the_last_view_it_stops() -> None:
    lab = real_lab(rate_rps=0.01)
    lab._on_message(lab, {"type": "views", "change": 1}, [])
    lab.run_for_real()
    lab._on_message(lab, {"type": "views", "change": -1}, [])
    lab.wait(60)
    assert lab.real["state"] == "stopped"


def test_what_a_policy_raises_for_real_is_said() -> None:
    class Late(Policy):
        """Fails only on the engine, which runs in a thread of its own."""

        def rank(self, sequence, view):
            return 0.0 if threading.current_thread() is threading.main_thread() else 1 / 0

    lab = real_lab()
    lab.choose(policy=Late())
    lab.run_for_real()
    lab.wait(60)
    assert lab.real["state"] == "failed"
    assert "4 of 4 requests were refused: policy=Late has no rank" in lab.real["error"]
    assert "ZeroDivisionError: division by zero" in lab.real["error"]
    lab.choose(policy="fcfs")
    lab.run_for_real()
    lab.wait(60)
    assert lab.real["state"] == "done"


def test_the_loop_goes_on_meanwhile() -> None:
    async def use() -> tuple[PolicyLab, int]:
        lab, ticks = real_lab(rate_rps=10.0), 0
        lab.run_for_real()
        while lab.real["state"] == "running" and ticks < 3000:
            await asyncio.sleep(0.02)
            ticks += 1
            if ticks == 2:
                lab.choose(seed=2)
        return lab, ticks

    lab, ticks = asyncio.run(use())
    assert lab.real["state"] == "done"
    assert ticks > 2
    assert lab.real["beside"] == 1
    assert "seed 0" in lab.real["line"]


def test_another_machine_is_not_here() -> None:
    lab = real_lab()
    lab.choose(machine=THERE)
    lab.run_for_real()
    assert "is not here" in lab.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_requests": 1}, "num_requests=1"),
        ({"num_requests": 5000}, "num_requests"),
        ({"num_real": 0}, "num_real=0"),
        ({"workload": "poems"}, "workload='poems'"),
        ({"slo": SLO(-1, 1)}, "ttft_s=-1"),
        ({"policies": [Newest]}, "pass an object"),
        ({"batching": "all"}, "batching='all'"),
        ({"machine": "mine"}, "machine='mine'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PolicyLab(**{"step_times": TIMES, "num_requests": 30} | arguments)


def test_settings_say_themselves_in_a_line() -> None:
    settings = Settings(
        "mixed", "sjf", 256, None, 8, 0.5, "mixed", 200, 1, HERE, ttft_slo_s=1, tpot_slo_s=0.1
    )
    assert settings.line == (
        "mixed, sjf, budget 256, chunk whole budget, 8 seats; mixed at 0.5/s, seed 1"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_it_simulates(lab: PolicyLab, enabled: bool) -> None:
    """One collection among the objects of a notebook took 420 ms, more than the simulation."""
    seen = []

    class Looking(Policy):
        def rank(self, sequence, view):
            seen.append(gc.isenabled())
            return 1 / 0 if len(seen) > 5 else sequence.arrival_s

    (gc.enable if enabled else gc.disable)()
    try:
        lab.choose(policy=Looking())
        assert "ZeroDivisionError" in lab.message
        assert seen == [False] * 6
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
