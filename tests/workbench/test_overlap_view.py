"""OverlapView and its figure show what lay beside what, as the records say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, Trace
from pdlab.trace import Span, to_perfetto
from pdlab.workbench import OverlapView, figures
from pdlab.workbench.overlap_data import lanes
from pdlab.workbench.picture import widget_page
from tests.helpers import random_model, random_prompt

from .handmade import two_requests


def beside() -> Trace:
    """Steps of 10 s: plan 1, compute 7 (tell 1 and the caller 2 beside it), wait 4, book 2."""
    trace = two_requests()
    steps = []
    for i, record in enumerate(trace.steps):
        t = 10.0 * i
        spans = [
            Span("host", "schedule", t, 1.0),
            Span("compute", "compute", t + 1, 7.0),
            Span("host", "wait", t + 4, 4.0),
            Span("host", "book", t + 8, 2.0),
            Span("host", "tell", t + 11, 1.0),
        ]
        steps.append(replace(record, start_s=t, wall_s=10.0, spans=spans))
    return replace(trace, steps=steps)


def test_what_lies_beside_a_computation_is_hidden() -> None:
    found = lanes(beside(), first=1, num_steps=1)
    host = [(p.name, p.start_s, p.end_s, p.hidden) for p in found.pieces if p.lane == "host"]
    assert host == [
        ("schedule", 0, 1, False),
        ("tell", 1, 2, True),
        ("caller", 2, 4, True),
        ("wait", 4, 8, True),
        ("book", 8, 10, False),
    ]
    assert (found.wall_s, found.host_s, found.hidden_s) == (10, 6, 3)
    assert found.compute_share == 0.7


def test_what_is_partly_beside_a_computation_is_cut() -> None:
    trace = beside()
    steps = [
        replace(r, spans=[s._replace(wall_s=2.0) if s.lane == "compute" else s for s in r.spans])
        for r in trace.steps
    ]
    found = lanes(replace(trace, steps=steps), first=1, num_steps=1)
    caller = [(p.start_s, p.end_s, p.hidden) for p in found.pieces if p.name == "caller"]
    assert caller == [(2, 3, True), (3, 4, False)]


def test_without_overlap_nothing_is_hidden() -> None:
    trace = two_requests()
    found = lanes(trace, num_steps=len(trace.steps) - 1)
    assert found.hidden_s == pytest.approx(0, abs=1e-9)
    assert {piece.lane for piece in found.pieces} == {"host", "compute"}


def test_an_engine_s_own_records_can_be_shown() -> None:
    traces = {}
    for overlap in (False, True):
        with Engine(random_model(), EngineConfig(overlap=overlap)) as engine:
            engine.generate(random_prompt(5))
        traces[f"overlap={overlap}"] = engine.trace
    view = OverlapView(traces)
    spans = [span for record in traces["overlap=True"].steps for span in record.spans]
    assert all(span.wall_s >= 0 for span in spans)
    names = {piece.name for piece in view.lanes["overlap=True"].pieces}
    assert names == {"schedule", "launch", "compute", "wait", "book", "tell", "caller"}
    assert view.lanes["overlap=False"].hidden_s == pytest.approx(0, abs=1e-6)


def test_the_figure_says_what_it_shows() -> None:
    figure = figures.overlap_timeline({"plain": two_requests(), "with": beside()}, 1, 1)
    assert "3 s of 6 s host time hidden" in figure.layout.title.text.replace("<br>", " ")
    bars = {bar.name: bar for bar in figure.data}
    assert list(bars["tell, hidden"].y) == ["with: host"]
    assert list(bars["tell, hidden"].x) == [1000.0]
    assert bars["tell, hidden"].marker.pattern.shape == "/"


def test_the_view_moves_from_python_and_stops_at_the_ends() -> None:
    view = OverlapView({"with": beside()}, num_steps=1)
    assert "host time hidden" in view.summary()
    view.first = 1
    assert view.runs[0]["hidden_s"] == 3
    view.first = 1000
    assert view.first == view.last_first == len(beside().steps) - 2


@pytest.mark.parametrize(
    ("runs", "knobs", "match"),
    [
        ({}, {}, "runs must be"),
        ({"a": 3}, {}, "runs"),
        ({"a": replace(beside(), steps=beside().steps[:1])}, {}, "at least two steps"),
        ({"a": beside()}, {"num_steps": 0}, "num_steps"),
        ({"a": beside()}, {"first": -1}, "first"),
    ],
)
def test_what_cannot_be_shown_is_refused(runs, knobs, match) -> None:
    with pytest.raises(ValueError, match=match):
        OverlapView(runs, **knobs)


def test_names_cannot_leave_their_script() -> None:
    page = widget_page(OverlapView({"</script><script>window.x": beside()}))
    assert "</script><script>window.x" not in page


def test_perfetto_has_a_lane_for_each() -> None:
    events = to_perfetto(beside())["traceEvents"]
    named = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    computed = [e for e in events if e["tid"] == named["compute"] and e["ph"] == "X"]
    assert [e["dur"] for e in computed if e["pid"] == 1] == [7e6] * len(beside().steps)
    assert "host" not in {
        e["args"]["name"]
        for e in to_perfetto(two_requests())["traceEvents"]
        if e["name"] == "thread_name"
    }
