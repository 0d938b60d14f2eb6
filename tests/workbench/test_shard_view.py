"""ShardView shows who holds what, and what the records say travelled. The file takes seconds."""

from __future__ import annotations

import json

import pytest

from pdlab import Engine, SamplingParams, Trace
from pdlab.workbench import ShardView
from pdlab.workbench.picture import find_browser, widget_page
from tests.helpers import random_model, random_prompt
from tests.parallel.models import ODD, on_threads

from .handmade import two_requests
from .handmade_parallel import on_ranks

has_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def test_an_engine_s_own_run_equals_the_formula_in_every_step() -> None:
    with Engine(random_model(ODD), on_threads(3, 2)) as engine:
        engine.generate(random_prompt(9, ODD.vocab_size), SamplingParams(max_tokens=3))
        view = ShardView(engine)
    assert view.header["grid"] == "3 x 2"
    assert [rank["layers"] for rank in view.header["ranks"]] == [[0, 3]] * 3 + [[3, 5]] * 3
    assert len(view.frames) == 3
    for frame in view.frames:
        assert [e["part"] for e in frame["exchanges"]] == [
            "embed", "output", "mlp", "hidden", "logits"
        ]  # fmt: skip
        assert all(e["wire_bytes"] == e["formula_bytes"] for e in frame["exchanges"])
        assert all(e["wall_s"] > 0 for e in frame["exchanges"])
    assert view.frames[0]["micro_batches"] == [5, 4]
    assert "as the formula says" in view.summary()


def test_the_summary_says_what_is_uneven() -> None:
    text = ShardView(on_ranks(1, 2)).summary()
    assert "handmade on 1 x 2 ranks (tensor x pipeline): 3 layers on 2 stages are 2 + 1" in text
    assert "recorded on handmade, 2 cores" in text


def test_one_rank_has_nothing_to_tell() -> None:
    view = ShardView(on_ranks(1, 1))
    assert view.frame["exchanges"] == []
    assert "one rank computed it alone" in view.summary()


def test_steps_are_clipped_and_small() -> None:
    view = ShardView(on_ranks(2, 2, 2), step=99)
    assert view.step == len(view.frames) - 1
    size = len(json.dumps(view.view_state(), allow_nan=False))
    assert size < 1500 * len(view.frames)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (3, "run=3 must be a Trace or an Engine"),
        (Trace(), "run holds no step"),
        (two_requests(), r"trace\.model has no config"),
    ],
)
def test_what_cannot_be_shown_is_refused(run, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardView(run)


def test_names_cannot_leave_their_script() -> None:
    trace = on_ranks(2, 1)
    trace.model["name"] = "</script><script>window.x"
    assert "</script><script>window.x" not in widget_page(ShardView(trace))


def show(page, widget) -> None:
    page.set_content(widget_page(widget))
    page.wait_for_selector("[data-frame]")


@has_browser
def test_the_page_has_each_rank_and_each_exchange(page) -> None:
    show(page, ShardView(on_ranks(2, 1)))
    cells = [node.inner_text().strip() for node in page.query_selector_all(".pd-sh-cell")]
    assert cells[:5] == ["0–2", "0", "0–1", "0–79", "0–127 E H"]
    assert page.inner_text(".pd-title").endswith("as the formula says")
    verdicts = [node.inner_text() for node in page.query_selector_all(".pd-sh-verdict")]
    assert verdicts == ["✓ equal"] * 3
    page.focus(".pd-sh-part >> nth=2")
    assert page.get_attribute(".pd-shard-view", "data-look") == "mlp"
    page.focus("input[aria-label=Step]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-frame='1']")


@has_browser
@pytest.mark.parametrize("width", [420, 700, 1080])
def test_nothing_leaves_the_widget(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1200})
    show(page, ShardView(on_ranks(2, 3)))
    root = page.query_selector(".pd-shard-view").bounding_box()
    for node in page.query_selector_all(".pd-sh-cell, .pd-sh-table > *, .pd-title, .pd-foot > *"):
        box = node.bounding_box()
        if box:
            assert box["x"] + box["width"] <= root["x"] + root["width"] + 1
