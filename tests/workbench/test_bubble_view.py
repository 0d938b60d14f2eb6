"""BubbleView shows the lanes that the records have, and both shares. The file takes seconds."""

from __future__ import annotations

import json

import pytest

from pdlab import EngineConfig
from pdlab.workbench import BubbleView, record_pipelines
from pdlab.workbench.picture import find_browser, widget_page
from tests.helpers import random_model
from tests.parallel.models import ODD

from .handmade import two_requests
from .handmade_parallel import SEND_S, SLOT_S, on_ranks

has_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def runs() -> dict:
    return {f"m = {m}": on_ranks(1, 2, m) for m in (1, 2, 4)}


def test_all_runs_are_there_with_both_shares() -> None:
    view = BubbleView(runs())
    assert view.run == 2
    assert [shown["num_micro_batches"] for shown in view.runs] == [1, 2, 4]
    assert [shown["formula_share"] for shown in view.runs] == [1 / 2, 1 / 3, 1 / 5]
    walls = [(m + 1) * SLOT_S + SEND_S for m in (1, 2, 4)]
    assert [shown["wall_s"] for shown in view.runs] == pytest.approx(walls)
    assert [shown["bubble_share"] for shown in view.runs] == pytest.approx(
        [1 - m * SLOT_S / wall for m, wall in zip((1, 2, 4), walls, strict=True)]
    )
    assert view.runs[1]["slots"][2] == [
        1, 0, 4, "prefill", pytest.approx(SLOT_S + SEND_S), pytest.approx(2 * SLOT_S + SEND_S)
    ]  # fmt: skip
    text = view.summary()
    assert "step 0: prefill, 8 tokens. m = 1: 2 stages, 1 micro-batch: 55% bubbles" in text
    assert "measured, 20% predicted; recorded on handmade" in text


def test_steps_and_runs_are_chosen_from_python_and_clipped() -> None:
    view = BubbleView(runs(), step=1, run="m = 1")
    assert (view.step, view.run) == (1, 0)
    view.step = 3
    assert {slot[3] for slot in view.runs[0]["slots"]} == {"decode"}
    view.step, view.run = 999, 999
    assert (view.step, view.run) == (len(view.steps) - 1, 2)
    assert BubbleView(on_ranks(2, 2, 2)).runs[0]["name"] == "this run"


def test_a_model_s_runs_are_recorded_and_do_the_same_work() -> None:
    """One prompt of 12 tokens, then 3 sequences of 4 tokens that decode twice."""
    view = BubbleView(
        random_model(ODD),
        micro_batches=[1, 3],
        prompt_tokens=12,
        batch=3,
        output_tokens=3,
        config=EngineConfig(rank_host="thread"),
    )
    assert [label.partition(": ")[2] for label in view.steps] == [
        "prefill, 12 tokens", "prefill, 12 tokens", "decode, 3 tokens", "decode, 3 tokens"
    ]  # fmt: skip
    assert [shown["name"] for shown in view.runs] == ["1 micro-batch", "3 micro-batches"]
    assert [shown["num_micro_batches"] for shown in view.runs] == [1, 3]
    for step in range(len(view.steps)):
        view.step = step
        for shown in view.runs:
            assert 0 <= shown["bubble_share"] < 1
            assert {slot[0] for slot in shown["slots"]} == {0, 1}


@pytest.mark.parametrize(
    ("source", "knobs", "message"),
    [
        ({}, {}, "runs is empty"),
        ({"a": two_requests()}, {}, "no step that ranks computed"),
        (on_ranks(1, 2), {"run": "b"}, "run='b' is not one of this run"),
        (on_ranks(1, 2), {"batch": 3}, "batch: runs that are recorded already"),
        ({str(i): on_ranks(1, 2) for i in range(9)}, {}, "source has 9 runs"),
    ],
)
def test_what_cannot_be_shown_is_refused(source, knobs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BubbleView(source, **knobs)


def test_what_cannot_be_recorded_is_refused() -> None:
    model = random_model(ODD)
    for knobs, message in (
        ({"micro_batches": []}, "micro_batches is empty"),
        ({"batch": 0}, "batch=0"),
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"pipeline_parallel": 6}, "pipeline_parallel=6"),
    ):
        with pytest.raises(ValueError, match=message):
            record_pipelines(model, **knobs)


def test_data_is_small_and_names_cannot_leave_their_script() -> None:
    name = "</script><script>window.x"
    view = BubbleView({name: on_ranks(2, 2, 4)})
    assert len(json.dumps(view.view_state(), allow_nan=False)) < 5000
    assert name not in widget_page(view)


def show(page, widget) -> None:
    page.set_content(widget_page(widget))
    page.wait_for_selector("[data-run]")


@has_browser
def test_the_slider_shows_another_run(page) -> None:
    show(page, BubbleView(runs()))
    assert page.inner_text(".pd-title").startswith("2 stages, 4 micro-batches: 23% bubbles")
    assert len(page.query_selector_all(".pd-bv-slot")) == 8
    page.focus("input[aria-label=Run]")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("[data-run='m = 2']")
    assert len(page.query_selector_all(".pd-bv-slot")) == 4
    label = page.get_attribute(".pd-bv-lane >> nth=0", "aria-label")
    assert label == "rank 0: 2 micro-batches, idle 38% of the step"
    plot = page.get_attribute(".pd-bv-plot [role=img]", "aria-label")
    assert "2 micro-batches, 38% measured, 33% predicted" in plot


@has_browser
@pytest.mark.parametrize("width", [420, 700, 1080])
def test_nothing_leaves_the_widget(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1200})
    show(page, BubbleView(runs()))
    root = page.query_selector(".pd-bubble-view").bounding_box()
    for node in page.query_selector_all(".pd-bv-row, .pd-bv-table > *, .pd-title, .pd-field"):
        box = node.bounding_box()
        assert box["x"] + box["width"] <= root["x"] + root["width"] + 1
