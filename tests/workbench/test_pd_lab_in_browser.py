"""PDLab and WinMap as a page shows them: nothing leaves it, ties and measurements have marks."""

import pytest

from pdlab.workbench import PDLab, WinMap
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workbench.widget import TraceWidget

from .handmade_lab import TIMES, real_lab, workers_here

pytestmark = pytest.mark.skipif(find_browser() is None, reason="needs a Chromium")


def show(page, widget: TraceWidget, selector: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.set_content(widget_page(widget))
    page.wait_for_selector(f"{selector}[data-answered]")


@pytest.mark.parametrize("width", [1000, 860, 700, 480])
def test_no_part_of_it_leaves_the_page(page, width: int) -> None:
    lab = PDLab(None, "a document among chats", 40, step_times=TIMES, num_devices=8)
    show(page, lab, ".pd-disagg-lab", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    root = page.locator(".pd-disagg-lab")
    inside = "(e) => [...e.querySelectorAll('svg, select, input, .pd-dl-card')].every((n) => "
    inside += "n.getBoundingClientRect().right <= e.getBoundingClientRect().right)"
    assert root.evaluate(inside)
    if width == 1000:
        assert root.evaluate("(e) => e.clientHeight") <= 760


def test_measured_and_simulated_are_drawn_in_one_picture(page, monkeypatch) -> None:
    workers_here(monkeypatch)
    lab = real_lab()
    lab.run_for_real()
    lab.wait(60)
    show(page, lab, ".pd-disagg-lab", 1000)
    names = ["1P1D, measured", "1P1D, simulated"]
    assert page.locator(".pd-dl-timeline svg text.pd-strong").all_text_contents() == names
    for key, plot in zip(("TTFT", "TPOT"), page.locator(".pd-dl-ranges svg").all(), strict=False):
        titles = plot.locator("title").all_text_contents()
        assert [title.split(":")[0] for title in titles] == names
        assert all(f"{key} p50" in title for title in titles)
    dashed = page.locator(".pd-dl-ranges [stroke-dasharray]")
    assert dashed.count() == 3, "of three latencies, the simulation's"
    assert "Measured on" in page.locator(".pd-pl-table").text_content()
    assert "simulated with step times" in page.locator(".pd-pl-table").text_content()


@pytest.mark.parametrize("width", [1000, 480])
def test_a_tile_tells_its_mode_without_colour(page, width: int) -> None:
    view = WinMap()
    show(page, view, ".pd-win-map", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    letters = [mode[0].upper() for mode in view.shown["modes"]]
    bests = [best for row in view.shown["best_modes"] for best in row]
    told = page.locator(".pd-wm-tile").evaluate_all(
        "(all) => all.map((t) => [t.querySelector('small')?.textContent ?? t.textContent,"
        " t.hasAttribute('data-tied'), t.scrollWidth <= t.clientWidth])"
    )
    assert told == [
        ["=".join(letters[i] for i in best) or "–", len(best) > 1, True] for best in bests
    ]
    legend = page.locator(".pd-legend").text_content()
    assert "tied, within 8 %" in legend
    assert "none meets them" in legend
    assert "simulated" in page.locator(".pd-foot").text_content()


def test_pace_is_measured_anew_without_a_kernel(page) -> None:
    view = WinMap()
    show(page, view, ".pd-win-map", 1000)
    tiles = page.locator(".pd-wm-tile small")
    counts = {}
    for pace, corner in (("itl", "p99 gap in ms"), ("tpot", "TPOT in ms")):
        page.locator(f".pd-win-map input[value={pace}]").check(force=True)
        page.wait_for_selector(f".pd-win-map[data-pace={pace}]")
        assert corner in page.locator(".pd-wm-corner").text_content()
        counts[pace] = tiles.count()
        bests = view.shown["by_pace"][pace]["best_modes"]
        assert counts[pace] == sum(bool(best) for row in bests for best in row)
    assert counts["itl"] < counts["tpot"]
