"""PDLab and WinMap in JupyterLab: controls answer or show progress, processes run, tiles tell."""

from __future__ import annotations

import pytest

from pdlab.workbench.pd_lab_machines import THERE

from .conftest import (
    KERNEL_IDLE,
    MADE_UP_MACHINE,
    SIZE,
    Lab,
    change_theme,
    run_cell,
    run_cells,
    screenshot,
)

CELLS = [
    MADE_UP_MACHINE,
    f"lab = wb.PDLab(model, step_times=times, machine={THERE!r})\nlab",
    "print('cell 3 ran')",
    "wb.WinMap()",
]
ANSWERS_MS = """async ([label, places]) => {
  const root = document.querySelector('.pd-disagg-lab');
  const slider = root.querySelector(`input[type=range][aria-label='${label}']`);
  const found = [];
  for (const place of places) {
    const before = root.dataset.answered;
    const start = performance.now();
    let progress = null;
    slider.value = place;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    while (root.dataset.answered === before || root.getAttribute('aria-busy') === 'true') {
      const pill = root.querySelector('.pd-pill');
      if (progress === null && !pill.hidden) progress = performance.now() - start;
      await new Promise((done) => setTimeout(done, 1));
    }
    await new Promise((done) => requestAnimationFrame(done));
    found.push([performance.now() - start, progress]);
  }
  return found;
}"""


@pytest.fixture
def running(page, lab: Lab):
    run_cells(page, lab, "pd", CELLS)
    page.wait_for_selector(".pd-disagg-lab[data-answered]", timeout=120_000)
    page.wait_for_selector(".pd-win-map[data-answered]", timeout=120_000)
    page.wait_for_function(KERNEL_IDLE, timeout=60_000)
    return page


def test_pd_lab_answers(running, capsys: pytest.CaptureFixture) -> None:
    a_projector_shows_it_at_once(running)
    arrow_keys_choose(running)
    the_advice_is_taken(running)
    what_is_wrong_is_said(running)
    the_whole_run_is_shown(running)
    a_slow_answer_shows_progress(running, capsys)
    it_runs_for_real_while_the_kernel_is_free(running)
    it_stops(running)
    tiles_tell(running)
    a_map_is_computed_and_stopped(running)
    themes_and_widths_fit(running)


def view(page):
    return page.locator(".pd-disagg-lab")


def answered(page) -> None:
    page.wait_for_function(
        "() => document.querySelector('.pd-disagg-lab').getAttribute('aria-busy') === 'false'",
        timeout=60_000,
    )


def big_numbers(page) -> list[str]:
    return view(page).locator(".pd-pl-value").all_text_contents()


def a_projector_shows_it_at_once(page) -> None:
    """1280 x 720 pixels, beside the file browser."""
    screenshot(view(page), "pd-lab-light")
    assert len(big_numbers(page)) == 3
    assert view(page).locator(".pd-dl-timeline path[data-kind=prefill]").count() == 3
    assert view(page).evaluate("(e) => e.clientHeight") <= 760


def arrow_keys_choose(page) -> None:
    before = big_numbers(page)
    view(page).get_by_label("P:D ratio").focus()
    page.keyboard.press("ArrowRight")
    answered(page)
    assert "3P1D" in view(page).get_attribute("data-line")
    assert big_numbers(page)[:2] == before[:2]
    view(page).get_by_label("chunk on P").focus()
    page.keyboard.press("ArrowLeft")
    answered(page)
    assert "prompt chunks: 2048" in view(page).get_attribute("data-line")
    assert page.locator(".jp-Cell.jp-mod-selected .pd-disagg-lab").count() == 1


def the_advice_is_taken(page) -> None:
    advice = view(page).locator(".pd-dl-advice")
    if advice.is_enabled():
        advice.click()
        answered(page)
    assert advice.text_content() == "✓ advised"


def what_is_wrong_is_said(page) -> None:
    before = big_numbers(page)
    box = view(page).get_by_label("ttft limit in seconds")
    box.fill("soon")
    box.press("Enter")
    view(page).locator(".pd-pl-message:has-text('soon')").wait_for()
    assert big_numbers(page) == before
    box.fill("0.4")
    box.press("Enter")
    answered(page)
    assert view(page).locator(".pd-pl-message").is_hidden()


def the_whole_run_is_shown(page) -> None:
    view(page).locator(".pd-pl-bar input[value='whole run']").check(force=True)
    answered(page)
    screenshot(view(page), "pd-lab-whole")
    view(page).locator(".pd-pl-bar input[value='beginning']").check(force=True)
    answered(page)


def a_slow_answer_shows_progress(page, capsys: pytest.CaptureFixture) -> None:
    moves = [("rate", [20, 28, 32]), ("P:D ratio", [0, 1, 2]), ("chunk on D", [1, 2, 0])]
    for label, places in moves:
        found = page.evaluate(ANSWERS_MS, [label, places])
        with capsys.disabled():
            told = ", ".join(
                f"{ms:.0f} ms" + (f" (progress after {p:.0f})" if p else "") for ms, p in found
            )
            print(f"\nPDLab, {label}: {told}")
        for ms, progress in found:
            assert ms < 300 or progress is not None, label


def it_runs_for_real_while_the_kernel_is_free(page) -> None:
    view(page).get_by_label("times of").select_option(index=0)
    answered(page)
    view(page).get_by_label("devices", exact=True).select_option("2")
    answered(page)
    button = view(page).get_by_role("button", name="for real")
    if not button.is_enabled():
        pytest.skip("needs two cores")
    button.click()
    page.wait_for_selector(".pd-disagg-lab[data-real=running]", timeout=20_000)
    run_cell(page, 2)
    page.wait_for_function(
        "() => document.querySelectorAll('.jp-Cell')[2].textContent.includes('[5]')",
        timeout=20_000,
    )
    screenshot(view(page), "pd-lab-running")
    page.wait_for_selector(".pd-disagg-lab:not([data-real=running])", timeout=180_000)
    assert view(page).get_attribute("data-real") == "done", view(page).text_content()
    table = view(page).locator(".pd-pl-table")
    assert table.locator("tbody tr").count() == 3
    assert "1P1D, measured" in table.text_content()
    assert "Measured on random:tiny-llama" in table.text_content()
    names = view(page).locator(".pd-dl-of").all_text_contents()
    assert all(kind in name for kind, name in zip(("measured", "simulated"), names, strict=True))
    plots = view(page).locator(".pd-dl-timeline svg text.pd-strong").all_text_contents()
    assert plots == ["1P1D, measured", "1P1D, simulated"]
    screenshot(view(page), "pd-lab-real")


def it_stops(page) -> None:
    button = view(page).get_by_role("button", name="for real")
    button.click()
    page.wait_for_selector(".pd-disagg-lab[data-real=running]", timeout=20_000)
    view(page).get_by_role("button", name="Stop").click()
    page.wait_for_selector(".pd-disagg-lab[data-real=stopped]", timeout=30_000)
    assert "no process is left" in view(page).locator(".pd-pl-realbar").text_content()


def tiles_tell(page) -> None:
    win = page.locator(".pd-win-map")
    win.scroll_into_view_if_needed()
    screenshot(win, "win-map-light")
    tiles = win.locator(".pd-wm-tile")
    count = tiles.count()
    assert count == 64
    tiles.nth(count - 1).hover()
    assert win.get_attribute("data-at") == "7,7"
    assert win.locator(".pd-wm-way").count() == 3
    tiles.nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert win.get_attribute("data-at") == "1,1"
    assert page.locator(".jp-Cell.jp-mod-selected .pd-win-map").count() == 1
    before = tiles.all_text_contents()
    win.locator("input[value=itl]").check(force=True)
    page.wait_for_selector(".pd-win-map[data-pace=itl]", timeout=20_000)
    assert "p99 gap" in win.locator(".pd-wm-corner").text_content()
    assert tiles.all_text_contents() != before
    assert win.get_attribute("data-at") == "1,1"
    screenshot(win, "win-map-itl")
    win.locator("input[value=tpot]").check(force=True)
    page.wait_for_selector(".pd-win-map[data-pace=tpot]", timeout=20_000)
    assert tiles.all_text_contents() == before


def a_map_is_computed_and_stopped(page) -> None:
    win = page.locator(".pd-win-map")
    line = win.get_attribute("data-line")
    win.get_by_label("workers").select_option("2")
    win.get_by_role("button", name="Compute").click()
    page.wait_for_function(
        "() => document.querySelector('.pd-win-map progress').value >= 1", timeout=60_000
    )
    screenshot(win, "win-map-running")
    win.get_by_role("button", name="Stop").click()
    page.wait_for_selector(".pd-win-map[data-work=stopped]", timeout=30_000)
    assert win.get_attribute("data-line") == line


def themes_and_widths_fit(page) -> None:
    both = ((view(page), "pd-lab"), (page.locator(".pd-win-map"), "win-map"))
    for theme in ("Dark", "Light"):
        change_theme(page, theme)
        page.wait_for_timeout(400)
        for widget, name in both:
            screenshot(widget, f"{name}-{theme.lower()}-after")
    for width in (1000, 700):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_timeout(400)
        for widget, name in both:
            assert widget.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1"), (name, width)
            screenshot(widget, f"{name}-{width}")
    page.set_viewport_size(SIZE)
