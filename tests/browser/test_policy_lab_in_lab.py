"""The PolicyLab in JupyterLab: controls answer, policies of one's own, and a run for real."""

from __future__ import annotations

import pytest

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
    "class Newest(pdlab.Policy):\n    def rank(self, sequence, view):\n"
    "        return -sequence.arrival_s\n\n"
    "class Broken(pdlab.Policy):\n    def rank(self, sequence, view):\n        return 1 / 0",
    "lab = wb.PolicyLab(model, step_times=times, policies=[Newest(), Broken()], num_real=12)\nlab",
    "print('cell 4 ran')",
]
ANSWERS_MS = """async ([label, places]) => {
  const root = document.querySelector('.pd-policy-lab');
  const slider = root.querySelector(`input[type=range][aria-label='${label}']`);
  const times = [];
  for (const place of places) {
    const before = root.dataset.answered;
    const start = performance.now();
    slider.value = place;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    while (root.dataset.answered === before || root.getAttribute('aria-busy') === 'true')
      await new Promise((done) => setTimeout(done, 1));
    await new Promise((done) => requestAnimationFrame(done));
    times.push(performance.now() - start);
  }
  return times;
}"""
DRAG = """async ([label, places]) => {
  const root = document.querySelector('.pd-policy-lab');
  const slider = root.querySelector(`input[type=range][aria-label='${label}']`);
  const before = +root.dataset.answered;
  for (const place of places) {
    slider.value = place;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    await new Promise((done) => setTimeout(done, 4));
  }
  while (root.getAttribute('aria-busy') === 'true')
    await new Promise((done) => setTimeout(done, 5));
  return +root.dataset.answered - before;
}"""
PROBED = [
    ("mixed", "mixed", "fcfs"),
    ("long documents", "decode_first", "longest_prefix"),
]
"""Workload, batching and policy: the usual, and the slowest to simulate."""


@pytest.fixture
def running(page, lab: Lab):
    run_cells(page, lab, "policy", CELLS)
    page.wait_for_selector(".pd-policy-lab[data-answered]", timeout=120_000)
    page.wait_for_function(KERNEL_IDLE, timeout=60_000)
    return page


def test_policy_lab_answers(running, capsys: pytest.CaptureFixture) -> None:
    a_projector_shows_it_at_once(running)
    arrow_keys_choose(running)
    the_pinned_run_is_compared(running)
    a_broken_policy_is_said_and_the_picture_stays(running)
    dragging_simulates_less_often_than_it_moves(running)
    the_load_is_shown(running)
    it_runs_for_real_while_the_kernel_is_free(running)
    it_stops(running)
    themes_and_widths_fit(running)
    report_answer_times(running, capsys)


def view(page):
    return page.locator(".pd-policy-lab")


def answered(page) -> None:
    page.wait_for_function(
        "() => document.querySelector('.pd-policy-lab').getAttribute('aria-busy') === 'false'",
        timeout=60_000,
    )


def big_numbers(page) -> list[str]:
    return view(page).locator(".pd-pl-value").all_text_contents()


def choose(page, value: str) -> None:
    view(page).locator(f".pd-pl-bar input[value='{value}']").check(force=True)
    answered(page)


def a_projector_shows_it_at_once(page) -> None:
    """1280 x 720 pixels, beside the file browser."""
    screenshot(view(page), "policy-lab-light")
    assert view(page).evaluate("(e) => e.clientHeight") <= 720


def arrow_keys_choose(page) -> None:
    before = big_numbers(page)
    view(page).locator("input[value=mixed]").focus()
    page.keyboard.press("ArrowLeft")
    answered(page)
    assert view(page).locator("input[value=decode_first]").is_checked()
    assert big_numbers(page) != before
    view(page).get_by_label("token budget").focus()
    page.keyboard.press("ArrowLeft")
    answered(page)
    assert "budget 256" in view(page).get_attribute("data-line")
    assert page.locator(".jp-Cell.jp-mod-selected .pd-policy-lab").count() == 1


def the_pinned_run_is_compared(page) -> None:
    changes = view(page).locator(".pd-pl-change").all_text_contents()
    assert any("worse" in change for change in changes)
    assert "batching mixed, token budget 512" in view(page).locator(".pd-pl-pin").text_content()
    view(page).get_by_role("button", name="Pin this run").click()
    answered(page)
    changes = view(page).locator(".pd-pl-change").all_text_contents()
    assert set(changes) == {"= as pinned"}


def a_broken_policy_is_said_and_the_picture_stays(page) -> None:
    choose(page, "Newest")
    before = big_numbers(page)
    choose(page, "Broken")
    view(page).locator(".pd-pl-message:has-text('ZeroDivisionError')").wait_for()
    assert "return 1 / 0" in view(page).locator(".pd-pl-message").text_content()
    assert big_numbers(page) == before
    assert view(page).locator("input[value=Newest]").is_checked()
    screenshot(view(page), "policy-lab-broken")
    choose(page, "fcfs")
    assert view(page).locator(".pd-pl-message").is_hidden()


def dragging_simulates_less_often_than_it_moves(page) -> None:
    places = list(range(10, 48))
    assert page.evaluate(DRAG, ["rate", places]) < len(places)
    assert view(page).get_by_label("rate", exact=True).input_value() == str(places[-1])
    shown = view(page).locator(".pd-pl-slider:has([aria-label=rate]) b").text_content()
    assert f" at {shown} " in view(page).get_attribute("data-line").replace("/s,", "/s ")


def the_load_is_shown(page) -> None:
    assert view(page).locator(".pd-pl-timeline path[data-kind=prefill]").count() == 1
    choose(page, "load")
    view(page).locator(".pd-pl-batch").wait_for()
    screenshot(view(page), "policy-lab-load")
    choose(page, "requests")


def it_runs_for_real_while_the_kernel_is_free(page) -> None:
    view(page).get_by_role("button", name="Run it for real").click()
    page.wait_for_selector(".pd-policy-lab[data-real=running]", timeout=20_000)
    run_cell(page, 3)
    page.wait_for_function(
        "() => document.querySelectorAll('.jp-OutputArea-output pre').length >= 1"
        " && document.querySelectorAll('.jp-Cell')[3].textContent.includes('[5]')",
        timeout=20_000,
    )
    assert view(page).get_attribute("data-real") == "running"
    screenshot(view(page), "policy-lab-running")
    page.wait_for_selector(".pd-policy-lab[data-real=done]", timeout=120_000)
    table = view(page).locator(".pd-pl-table")
    assert table.locator("tbody tr").count() == 3
    assert "First 12 of 200 requests" in table.text_content()
    assert "measured on random:tiny-llama" in table.text_content()
    assert "simulated with step times measured on a machine made up" in table.text_content()
    screenshot(view(page), "policy-lab-real")


def it_stops(page) -> None:
    view(page).get_by_role("button", name="Run it for real").click()
    page.wait_for_selector(".pd-policy-lab[data-real=running]", timeout=20_000)
    view(page).get_by_role("button", name="Stop").click()
    page.wait_for_selector(".pd-policy-lab[data-real=stopped]", timeout=20_000)
    assert "no numbers" in view(page).locator(".pd-pl-realbar").text_content()


def themes_and_widths_fit(page) -> None:
    for theme in ("Dark", "Light"):
        change_theme(page, theme)
        page.wait_for_timeout(400)
        screenshot(view(page), f"policy-lab-{theme.lower()}-after")
    for width in (1000, 700):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_timeout(400)
        assert view(page).evaluate("(e) => e.scrollWidth <= e.clientWidth + 1"), width
        screenshot(view(page), f"policy-lab-{width}")
    page.set_viewport_size(SIZE)


def report_answer_times(page, capsys: pytest.CaptureFixture) -> None:
    for workload, batching, policy in PROBED:
        view(page).get_by_label("workload", exact=True).select_option(workload)
        answered(page)
        choose(page, batching)
        choose(page, policy)
        moves = [
            ("chunk", [2, 4, 6, 8]),
            ("rate", [20, 28, 32, 24]),
            ("token budget", [2, 4, 7, 5]),
        ]
        times = sorted(t for move in moves for t in page.evaluate(ANSWERS_MS, list(move)))
        with capsys.disabled():
            print(
                f"\nPolicyLab, {workload}, {batching}, {policy}: slider to picture, median "
                f"{times[len(times) // 2]:.0f} ms, worst {times[-1]:.0f} ms of {len(times)}"
            )
