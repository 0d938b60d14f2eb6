"""Widgets hold what the trace holds, follow their traits, and leave a static picture."""

import re

import numpy as np
import pytest
import traitlets

from pdlab import Engine, EngineConfig, Model, SamplingParams, Trace
from pdlab.costmodel import Hardware, load_hardware, mbu, mfu, predict
from pdlab.engine.recorder import cost_of
from pdlab.workbench import (
    AttentionView,
    BlockTableView,
    MemoryLedger,
    RooflineView,
    Stepper,
    stepper,
)
from pdlab.workbench.frames import stepper_frames
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workbench.widget import STATIC

from .handmade import two_requests
from .handmade_memory import memory_moves

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def test_stepper_sends_the_frames_of_its_request(recorded: Trace) -> None:
    widget = Stepper(recorded)
    first, second = recorded.requests
    assert widget.frames == stepper_frames(recorded, first)
    widget.sequence_id = second
    assert widget.frames == stepper_frames(recorded, second)
    assert widget.prompt == recorded.requests[second].prompt


def test_stepper_is_moved_from_python(recorded: Trace) -> None:
    widget = Stepper(recorded)
    widget.step = 2
    assert widget.frame["step"] == recorded.steps[1].step
    widget.step = 10_000
    assert widget.step == len(widget.frames) - 1
    widget.step = -4
    assert widget.frame["kind"] == "tokenize"


def test_stepper_says_when_its_numbers_are_replayed(recorded: Trace) -> None:
    assert Stepper(recorded).header["provenance"] == "recorded"


def test_live_stepper_runs_one_engine_step_at_a_time(smollm2: Model) -> None:
    with Engine(smollm2, EngineConfig(num_blocks=8)) as engine:
        widget = Stepper.live_run(engine, "One, two,", SamplingParams(max_tokens=2))
        assert [f["kind"] for f in widget.frames] == ["tokenize"]
        assert widget.header["provenance"] == "measured"
        widget._on_message(widget, {"type": "advance"}, [])
        assert (widget.frame["kind"], widget.done, widget.busy) == ("prefill", False, False)
        widget.advance()
        assert (widget.frame["kind"], widget.done) == ("decode", True)
        widget.advance()
        assert len(engine.trace.steps) == 2


def test_live_stepper_shows_what_went_wrong() -> None:
    class BrokenEngine:
        trace = two_requests()

        def step(self) -> None:
            raise RuntimeError("engine is closed")

    widget = Stepper(engine=BrokenEngine(), sequence_id="first")
    widget.done = False
    widget.advance()
    assert widget.message == "RuntimeError: engine is closed"
    assert widget.busy is False


def test_long_walks_are_cut_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "MAX_FRAMES", 4)
    widget = Stepper(two_requests(), "first")
    assert (len(widget.frames), widget.header["cut"], widget.done) == (4, 6, True)


def test_stepper_needs_a_trace_or_an_engine() -> None:
    with pytest.raises(ValueError, match="a trace or an engine"):
        Stepper()
    with pytest.raises(ValueError, match="holds no request"):
        Stepper(Trace())


def test_running_a_cell_again_makes_independent_widgets(recorded: Trace) -> None:
    first, second = Stepper(recorded), Stepper(recorded)
    second.step = 3
    assert first.step == 0


def test_attention_view_shows_the_captured_array(recorded: Trace) -> None:
    name = next(iter(recorded.requests))
    widget = AttentionView(recorded, name)
    for capture in (c for c in recorded.captures if c.sequence_id == name):
        widget.layer = capture.layer
        for head in widget.heads:
            widget.head = head
            for i, weights in enumerate(capture.array[head]):
                row = widget.map()[capture.start + i]
                seen = capture.start + i + 1
                assert row[:seen].tolist() == weights[:seen].astype("<f2").tolist()
                assert np.isnan(row[seen:]).all()


def test_attention_view_of_some_heads_names_them(smollm2: Model) -> None:
    with Engine(smollm2) as engine, engine.probe(layers=[3], heads=[2, 7]):
        engine.generate("One, two,", SamplingParams(max_tokens=2, ignore_eos=True))
    widget = AttentionView(engine.trace, head=7)
    assert widget.heads == [2, 7]
    prefill = engine.trace.captures[0]
    assert prefill.array.shape[0] == 2
    row = widget.map()[prefill.array.shape[1] - 1]
    assert row[: prefill.array.shape[2]].tolist() == prefill.array[1, -1].astype("<f2").tolist()
    with pytest.raises(ValueError, match=r"head=3 was not captured; these were: \[2, 7\]"):
        widget.head = 3


def test_attention_view_knows_which_rows_are_decode(recorded: Trace) -> None:
    name = next(iter(recorded.requests))
    widget = AttentionView(recorded, name)
    prompt = len(recorded.requests[name].prompt_ids)
    phases = [row[0] for row in widget.rows]
    assert phases == ["prefill"] * prompt + ["decode"] * (len(phases) - prompt)
    assert "recomputed by the reference path" in widget.footer["source"]


@pytest.mark.parametrize(("trait", "value"), [("layer", 3), ("head", 99), ("query", -1)])
def test_attention_view_refuses_what_was_not_captured(trait: str, value: int) -> None:
    widget = AttentionView(two_requests(), "first")
    with pytest.raises((ValueError, traitlets.TraitError), match=f"{trait}={value}"):
        setattr(widget, trait, value)


def test_attention_view_without_captures_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match=r"with engine\.probe"):
        AttentionView(two_requests(), "second")


def test_roofline_view_numbers_are_the_cost_models(recorded: Trace, hardware: Hardware) -> None:
    widget = RooflineView(recorded, hardware)
    here = widget.machines[0]
    for i, record in enumerate(recorded.steps):
        cost = cost_of(record)
        assert widget.points[i]["flops"] == record.total_flops
        assert here["mfu"][i] == mfu(cost, record.wall_s, hardware, "fp32")
        assert here["mbu"][i] == mbu(cost, record.wall_s, hardware)
        assert here["predicted_s"][i] == predict(cost, hardware, "fp32").time_s
    assert [m["name"] for m in widget.machines[1:]] == [h.name for h in load_hardware().values()]


def test_roofline_view_says_where_each_ceiling_comes_from(
    recorded: Trace, hardware: Hardware
) -> None:
    widget = RooflineView(recorded, hardware)
    assert widget.machines[0]["provenance"] == "measured"
    table = load_hardware().values()
    assert [m["provenance"] for m in widget.machines[1:]] == [h.provenance for h in table]
    widget.machine, widget.selected = 10_000, -1
    assert (widget.machine, widget.selected) == (len(widget.machines) - 1, 0)


def every_widget(trace: Trace, hardware: Hardware) -> list:
    return [
        Stepper(trace),
        AttentionView(trace),
        RooflineView(trace, hardware),
        BlockTableView(memory_moves(), 4),
        MemoryLedger(memory_moves(), 4),
    ]


def test_widgets_leave_text_and_no_picture_in_live_use(
    recorded: Trace, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDLAB_PICTURES", raising=False)
    for widget in every_widget(recorded, hardware):
        data, _ = widget._repr_mimebundle_()
        assert WIDGET_VIEW in data
        assert len(data["text/plain"]) > 20
        assert "image/png" not in data
        assert widget.summary().split(",")[0] in data["text/html"]


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_widgets_leave_a_small_picture_when_asked(
    recorded: Trace, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_PICTURES", "1")
    for widget in every_widget(recorded, hardware):
        data, _ = widget._repr_mimebundle_()
        assert 8_000 < len(data["image/png"]) * 3 / 4 < 80_000
        assert "text/html" not in data  # JupyterLab would show it rather than the picture


def test_widgets_work_without_a_browser(recorded: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_PICTURES", "1")
    monkeypatch.setenv("PDLAB_BROWSER", "/nonexistent/browser")
    data, _ = Stepper(recorded)._repr_mimebundle_()
    assert "image/png" not in data


def test_a_token_cannot_break_out_of_the_page() -> None:
    trace = two_requests()
    trace.tokens[0] = "</script><script>window.hacked = 1</script>"
    assert "</script><script>window" not in widget_page(Stepper(trace))


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.[jc]s*")), ids=lambda p: p.name)
def test_widget_files_fetch_nothing(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(
        r"https?://|\bfetch\(|^import |@import|url\((?!#)|XMLHttpRequest", text, re.M
    )
