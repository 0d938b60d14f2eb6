"""The Gantt chart and LatencyView in a browser: what is pressed changes what is shown."""

from __future__ import annotations

import re

import pytest

from pdlab.workbench import Gantt, LatencyView
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workload.report import summarize
from pdlab.workload.serving import SLO

from .handmade_serving import nothing, served, story

pytestmark = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def show(page, widget, theme: str = "light") -> None:
    page.set_content(widget_page(widget, theme))
    page.wait_for_selector("[data-shown]")


def shown(page) -> str:
    return page.get_attribute("[data-shown]", "data-shown")


def seconds_shown(page) -> tuple[float, float]:
    start, end = re.search(r"/([-\d.]+)-([\d.]+)$", shown(page)).groups()
    return float(start), float(end)


def test_the_gantt_chart_shifts_zooms_and_chooses(page) -> None:
    runs = {"static": served("static"), "mixed": served()}
    show(page, Gantt(runs, slo=SLO(0.5, 0.05)))
    whole = seconds_shown(page)
    assert "static: 30 of 30 requests finished" in page.inner_text(".pd-title")
    page.click("[data-run=mixed]")
    assert "mixed: 30 of 30 requests finished" in page.inner_text(".pd-title")
    assert seconds_shown(page) == whole  # one time axis

    page.focus(".pd-gt-plot")
    page.keyboard.press("+")
    start, end = seconds_shown(page)
    assert end - start == pytest.approx((whole[1] - whole[0]) / 2, rel=1e-2)
    page.keyboard.press("ArrowRight")
    assert seconds_shown(page)[0] > start
    page.keyboard.press("0")
    assert seconds_shown(page) == whole
    page.keyboard.press("ArrowDown")
    first = runs["mixed"].requests[0]
    assert page.inner_text(".pd-gt-inspect").startswith(f"{first.request_id}: finished")


def test_the_wheel_zooms_only_with_a_modifier(page) -> None:
    show(page, Gantt(served()))
    whole = shown(page)
    page.hover(".pd-gt-plot")
    page.mouse.wheel(0, -200)
    assert shown(page) == whole
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.wait_for_function(f"document.querySelector('[data-shown]').dataset.shown !== '{whole}'")


def test_rows_and_steps_tell_what_they_are(page) -> None:
    show(page, Gantt(story(), slo=SLO(2.5, 1.5)))
    box = page.query_selector(".pd-gt-plot").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 14)
    tip = page.inner_text(".pd-tip")
    assert "a: finished, limits missed" in tip
    assert "queue 1 s, TTFT 3 s" in tip
    assert "preempted 1×" in tip
    strip = page.query_selector(".pd-gt-base").bounding_box()
    page.mouse.move(strip["x"] + strip["width"] * 1.5 / 12, strip["y"] - 10)
    assert "a: 4 prompt tokens" in page.inner_text(".pd-tip")
    for mark, count in ((".pd-gt-missed", 2), (".pd-gt-ended", 2)):
        assert len(page.query_selector_all(f".pd-gt-plot {mark}")) == count


def test_prefill_chunks_name_their_tokens(page) -> None:
    show(page, Gantt(story()))
    assert page.eval_on_selector_all(
        ".pd-gt-count", "nodes => nodes.map((n) => n.textContent)"
    ) == [
        "4",
        "2",
        "9",
        "2",
        "5",
    ]


def test_a_limit_changes_attainment_and_goodput(page) -> None:
    runs = {"static": served("static"), "mixed": served()}
    show(page, LatencyView(runs, slo=SLO(0.5, 0.05)))
    assert tiles(page) == expected(runs, SLO(0.5, 0.05))
    page.focus("input[aria-label='TTFT limit']")
    page.keyboard.press("End")
    ttft_s, tpot_s = map(float, shown(page).split("/")[2:])
    assert (ttft_s > 1, tpot_s) == (True, 0.05)
    assert tiles(page) == expected(runs, SLO(ttft_s, tpot_s))


def test_the_line_of_the_limit_can_be_dragged(page) -> None:
    show(page, LatencyView(served(), slo=SLO(0.5, 0.05)))
    handle = page.query_selector(".pd-lv-handle").bounding_box()
    x, y = handle["x"] + handle["width"] / 2, handle["y"] + 150
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 80, y, steps=4)
    page.mouse.up()
    assert float(shown(page).split("/")[2]) < 0.5


def test_the_metric_and_its_axis_can_be_chosen(page) -> None:
    show(page, LatencyView(served(), slo=SLO(0.5, 0.05)))
    page.click("[data-metric=itl]")
    assert shown(page).startswith("itl/")
    assert page.query_selector(".pd-lv-limit") is None  # no limit is about single gaps
    before = shown(page).split("/")[1]
    page.click("text=log axis")
    assert {before, shown(page).split("/")[1]} == {"linear", "log"}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 700, 1000])
def test_nothing_sticks_out_and_the_source_is_seen(page, width: int, theme: str) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    runs = {name: served(name) for name in ("static", "prefill_first", "decode_first", "mixed")}
    for widget in (Gantt(runs, slo=SLO(0.5, 0.05)), LatencyView(runs)):
        show(page, widget, theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert "simulated round numbers" in " ".join(page.inner_text(".pd-foot").split())


def test_nothing_served_is_said(page) -> None:
    show(page, Gantt(nothing()))
    assert page.inner_text(".pd-title") == "No request was served"
    show(page, LatencyView(nothing()))
    assert page.inner_text(".pd-title") == "No request has finished"
    assert "no request has got so far" in page.inner_text(".pd-lv-plot")


def tiles(page) -> dict[str, tuple[str, str]]:
    """By run, attainment and goodput as the tiles show them."""
    found = {}
    for tile in page.query_selector_all(".pd-lv-tile"):
        part, rate = (node.inner_text() for node in tile.query_selector_all(".pd-lv-big > b"))
        found[tile.get_attribute("data-run")] = (part, rate.replace(" req/s", ""))
    return found


def expected(runs: dict, slo: SLO) -> dict[str, tuple[str, str]]:
    summaries = {name: summarize(run, slo) for name, run in runs.items()}
    return {
        name: (f"{int(100 * s.attainment + 0.5)} %", f"{s.goodput_per_s:.3g}")
        for name, s in summaries.items()
    }
