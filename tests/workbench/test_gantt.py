"""The Gantt chart's spans are the run's own times, whatever the batching; its data is bounded."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import traitlets
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.workbench import Gantt, gantt_data
from pdlab.workbench.gantt_data import KINDS, MAX_ROWS, MAX_SEGMENTS, Span, lives
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workload.serving import SLO, ServedRequest, ServingRun
from tests.helpers import random_model, random_prompt

from .handmade_serving import SLO_OF_TESTS, nothing, served, story

BATCHING = ("static", "prefill_first", "decode_first", "mixed")


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A real run of a tiny random model: chunks, mixed steps, a preemption, a request of two."""
    config = EngineConfig(block_size=4, num_blocks=20, chunk_size=8, max_num_batched_tokens=32)
    with Engine(random_model(), config) as engine:
        for i in range(4):
            engine.submit(random_prompt(14 + i), SamplingParams(max_tokens=12, ignore_eos=True))
            engine.step()
        engine.submit(random_prompt(9), SamplingParams(max_tokens=3, n=2, ignore_eos=True))
        while engine.step():
            pass
        return engine.trace


def of_kind(spans: list[Span], *kinds: str) -> list[Span]:
    return [s for s in spans if s.kind in kinds]


# --- lives ----------------------------------------------------------------------------------------


def test_a_life_by_hand() -> None:
    found = lives(story())
    assert found["a"] == [
        Span("waiting", 0, 1),
        Span("prefill", 1, 2, 4),
        Span("prefill", 2, 3, 2),
        Span("stalled", 3, 4),
        Span("decode", 4, 5, 1),
        Span("decode", 5, 6, 1),
        Span("preempted", 6, 9),
        Span("prefill", 9, 10, 9),
        Span("decode", 10, 11, 1),
    ]
    assert found["b"][:2] == [Span("waiting", 1, 3), Span("prefill", 3, 4, 2)]
    assert found["b"][-1] == Span("decode", 6, 9, 3)


def test_who_is_refused_has_no_life_and_who_waits_waits_to_the_end() -> None:
    found = lives(story())
    assert found["c"] == []
    assert found["d"] == [Span("waiting", 9.5, 10), Span("prefill", 10, 11, 5)]
    assert found["e"] == [Span("waiting", 11, 12)]


def test_a_pause_of_the_caller_is_no_stall() -> None:
    """Nobody else ran between the two steps."""
    run = story()
    for step in run.steps[1:]:
        step.start_s += 0.25
    first, second = of_kind(lives(run)["a"], "prefill")[:2]
    assert (first.end_s, second.start_s) == (2, 2.25)
    assert of_kind(lives(run)["a"], "stalled") == [Span("stalled", 3.25, 4.25)]


def test_lives_of_a_real_run_are_its_records(trace: Trace) -> None:
    run = ServingRun.of_trace(trace)
    found = lives(run)
    start_s = min(r.arrival_s for r in trace.requests.values())
    assert any(r.metrics.num_preemptions for r in run.requests)
    for request in run.requests:
        recorded = [
            (s.phase, r.start_s - start_s, s.num_tokens)
            for r, s in trace.sequence_steps(request.request_id)
        ]
        mine = of_kind(found[request.request_id], "prefill", "decode")
        assert [(s.kind, s.start_s, s.tokens) for s in mine] == recorded


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(BATCHING), st.integers(0, 1000), st.integers(18, 60))
def test_spans_follow_each_other_and_agree_with_the_metrics(
    batching: str, seed: int, num_blocks: int
) -> None:
    run = served(batching, 12, seed, num_blocks=num_blocks)
    for request in run.requests:
        _check_life(request, lives(run)[request.request_id])


def _check_life(request: ServedRequest, spans: list[Span]) -> None:
    m = request.metrics
    if request.error:
        assert spans == []
        return
    assert spans[0].start_s == m.arrival_s
    for before, after in pairwise(spans):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-9)
    assert all(s.end_s > s.start_s for s in spans)
    assert spans[-1].end_s == pytest.approx(m.token_times_s[-1])
    waited = sum(s.wall_s for s in of_kind(spans, "waiting"))
    assert waited == pytest.approx(m.queue_s)
    lost = len(of_kind(spans, "preempted"))
    assert lost <= m.num_preemptions  # one at the end of a step that begins at once is no span
    assert bool(lost) == bool(m.num_preemptions)
    decoded = sum(s.tokens for s in of_kind(spans, "decode"))
    assert decoded + 1 + m.num_preemptions >= m.num_output_tokens > decoded
    if not m.num_preemptions:
        computed = sum(s.tokens for s in of_kind(spans, "prefill"))
        assert computed == m.num_prompt_tokens - m.num_cached_tokens


def test_prefill_first_stalls_those_who_decode() -> None:
    stalled = {
        batching: sum(
            s.wall_s
            for spans in lives(served(batching, num_blocks=200)).values()
            for s in of_kind(spans, "stalled")
        )
        for batching in BATCHING
    }
    assert stalled["prefill_first"] > 0
    assert stalled["mixed"] < stalled["prefill_first"]


# --- data of bounded size -------------------------------------------------------------------------


def spans_of(data: dict) -> dict[str, list]:
    return {row["id"]: row["spans"] for row in data["rows"]}


def test_rows_carry_the_times_of_their_requests() -> None:
    run = story()
    data = gantt_data.gantt_data(run, slo=SLO_OF_TESTS)
    rows = {row["id"]: row for row in data["rows"]}
    assert list(rows) == ["a", "b", "c", "d", "e"]
    assert rows["a"]["ttft_s"] == 3
    assert rows["a"]["tpot_s"] == 2
    assert rows["a"]["preemptions"] == 1
    assert [rows[n]["end"] for n in "abcde"] == ["length", "length", "refused", "abort", "running"]
    assert [rows[n]["met"] for n in "abcde"] == [r.meets(SLO_OF_TESTS) for r in run.requests]
    assert (rows["a"]["met"], rows["b"]["met"]) == (False, False)
    assert gantt_data.gantt_data(run, slo=SLO(3, 2))["rows"][0]["met"] is True
    assert gantt_data.gantt_data(run)["rows"][0]["met"] is None


def test_decodes_in_a_row_are_one_span_with_all_their_tokens() -> None:
    spans = spans_of(gantt_data.gantt_data(story()))
    decode = KINDS.index("decode")
    assert [s for s in spans["b"] if s[0] == decode] == [[decode, 4, 9, 5]]
    assert [s for s in spans["a"] if s[0] == decode] == [[decode, 4, 6, 2], [decode, 10, 11, 1]]


def test_steps_say_what_they_held() -> None:
    data = gantt_data.gantt_data(story())
    first, last = data["steps"][0], data["steps"][7]
    assert (first["at"], first["prompt"], first["decodes"]) == ([1, 2], 4, 0)
    assert (last["mix"], last["held"], last["decodes"]) == (2, [("d", 5)], 1)
    assert data["steps"][5]["steps"] == 3
    assert data["steps"][5]["preempted"] == ["a"]
    assert (data["budget"], data["most_tokens"]) == (9, 9)


def test_many_requests_are_cut_and_said_so() -> None:
    run = served(count=100)
    data = gantt_data.gantt_data(run)
    assert (len(data["rows"]), data["num_requests"], data["first"]) == (MAX_ROWS, 100, 0)
    later = gantt_data.gantt_data(run, first=90)
    assert [row["id"] for row in later["rows"]] == [r.request_id for r in run.requests[90:]]
    assert all(s["at"][1] >= later["start_s"] for s in later["steps"])
    assert len(later["steps"]) < len(data["steps"])


def test_many_spans_are_drawn_together_and_said_so() -> None:
    run = served("prefill_first", 60)
    whole = gantt_data.gantt_data(run)
    thin = gantt_data.gantt_data(run, max_segments=MAX_ROWS + 40)
    assert whole["joined_s"] == 0
    assert thin["joined_s"] > 0
    assert sum(len(s) for s in spans_of(thin).values()) <= MAX_ROWS + 40
    assert len(thin["steps"]) <= MAX_ROWS + 40
    for name, spans in spans_of(whole).items():
        drawn = spans_of(thin)[name]
        assert (drawn[0][1], drawn[-1][2]) == (spans[0][1], spans[-1][2])  # none is lost


def test_joined_steps_keep_the_tokens() -> None:
    run = served(count=60)
    total = sum(s.num_prompt_tokens * s.num_steps for s in run.steps)
    data = gantt_data.gantt_data(run, max_segments=MAX_ROWS)
    shown = sum(s["prompt"] * s.get("steps", 1) for s in data["steps"])
    assert shown == pytest.approx(total, rel=0.01)


def test_data_is_small_plain_json() -> None:
    data = gantt_data.gantt_data(served(count=300, num_blocks=400))
    text = json.dumps(data, allow_nan=False)
    assert len(text) < 400_000
    assert len(json.loads(text)["rows"]) == MAX_ROWS


def test_nothing_served_is_no_error() -> None:
    data = gantt_data.gantt_data(nothing(), slo=SLO(1, 1))
    assert (data["rows"], data["steps"], data["facts"]["met"]) == ([], [], 0)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"first": -1}, "first=-1"),
        ({"max_rows": 81}, "max_rows=81 must be at most 80"),
        ({"max_segments": 3}, "max_segments=3"),
    ],
)
def test_bad_bounds_are_named(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gantt_data.gantt_data(story(), **knobs)


# --- the widget -----------------------------------------------------------------------------------


def test_one_run_or_several() -> None:
    one = Gantt(story())
    assert (one.run, len(one.runs)) == ("mixed", 1)
    several = Gantt({"first": story(), "second": served()}, run="second")
    assert several.data["num_requests"] == 30
    several.run = "first"
    assert several.data["num_requests"] == 5
    with pytest.raises((ValueError, traitlets.TraitError), match="run='third' must be one of"):
        several.run = "third"


def test_several_runs_share_the_room() -> None:
    widget = Gantt({name: served(name, 80) for name in BATCHING})
    total = sum(len(s) for data in widget.runs for s in spans_of(data).values())
    assert total <= MAX_SEGMENTS


def test_the_chart_can_be_moved_from_python() -> None:
    widget = Gantt(served(count=100))
    widget.view = (0.5, 1.0)
    assert widget.view == [0.5, 1.0]
    widget.first = 95
    assert (len(widget.data["rows"]), widget.view) == (5, [])
    widget.first = 10_000
    assert widget.first == 99
    with pytest.raises((ValueError, traitlets.TraitError), match="a later end"):
        widget.view = (2.0, 1.0)


@pytest.mark.parametrize(
    ("runs", "knobs", "message"),
    [
        ({}, {}, "runs has 0 runs"),
        ({str(i): story() for i in range(9)}, {}, "runs has 9 runs, it must have from 1 to 8"),
        ({"a": 3}, {}, "runs={'a': 3} must be a ServingRun"),
        (None, {}, "runs=None"),
        (story(), {"run": "x"}, "run='x' must be one of mixed"),
        (story(), {"first": -2}, "first=-2"),
        (story(), {"slo": SLO(-1, 1)}, "ttft_s=-1"),
    ],
)
def test_bad_runs_are_named(runs: object, knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gantt(runs, **knobs)  # type: ignore[arg-type]


def test_the_source_is_always_said() -> None:
    assert Gantt(story()).data["line"] == "measured on a made-up machine"
    assert "measured on a made-up machine" in Gantt(story()).summary()
    simulated = Gantt(served(), slo=SLO(1, 1))
    assert simulated.data["line"] == "simulated: round numbers, made for a test"
    assert "of 30 requests finished" in simulated.summary()
    assert "within their limits" in simulated.summary()


def test_a_request_cannot_break_out_of_the_page() -> None:
    run = story()
    run.requests[4].request_id = "</script><script>window.hacked = 1</script>"
    assert "</script><script>window" not in widget_page(Gantt(run))


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_a_saved_notebook_gets_a_small_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_PICTURES", "1")
    data, _ = Gantt({"static": served("static"), "mixed": served()})._repr_mimebundle_()
    assert 8_000 < len(data["image/png"]) * 3 / 4 < 80_000
    assert "simulated" in data["text/plain"]
