"""The LiveCluster in JupyterLab: real processes are started, killed, started anew and ended."""

from __future__ import annotations

import os
import select

import nbformat

from .conftest import KERNEL_IDLE, Lab, run_cell, run_cells, screenshot

CELLS = [
    "import pdlab\nfrom pdlab import workbench as wb\nmodel = pdlab.load('random:tiny-llama')",
    "live = wb.LiveCluster(model, max_tokens=100, exact=True, num_threads=1, slowdown=20)\nlive",
    "print('cell 3 ran', len(live.answers) >= 0)",
]
ROOT = "document.querySelector('.pd-live-cluster')"


def test_a_class_starts_kills_and_stops(page, lab: Lab) -> None:
    run_cells(page, lab, "live", CELLS)
    it_waits_to_be_started(page)
    first = it_starts(page)
    a_killed_worker_is_seen_and_its_answers_go_on(page)
    the_kernel_is_free(page)
    it_is_started_anew(page)
    a_document_has_its_row(page)
    it_stops_and_the_saved_page_says_so(page, lab, first)
    processes = it_starts(page)
    running_the_cell_again_ends_it(page, processes)


def view(page):
    return page.locator(".pd-live-cluster")


def until(page, condition: str) -> None:
    page.wait_for_function(f"() => {{ const root = {ROOT}; return {condition}; }}", timeout=60_000)


def press(page, name: str) -> None:
    view(page).get_by_role("button", name=name, exact=True).click()


def log(page) -> str:
    return view(page).locator(".pd-lc-log").inner_text()


def it_waits_to_be_started(page) -> None:
    page.wait_for_selector(".pd-live-cluster[data-state='not started']", timeout=120_000)
    page.wait_for_function(KERNEL_IDLE, timeout=60_000)
    assert "recorded" in view(page).locator(".pd-foot").inner_text()
    assert view(page).locator(".pd-lc-act button:disabled").count() == 3


def it_starts(page) -> list[int]:
    """Returns descriptors of the processes, which are readable when these have ended."""
    view(page).locator(".pd-lc-start").click()
    until(page, "root?.dataset.state === 'running' && root.dataset.alive === '3'")
    until(page, "root.querySelectorAll('.pd-lc-row[data-stage=decoding]').length >= 2")
    assert "measured" in view(page).locator(".pd-foot").inner_text()
    shown = view(page).locator(".pd-lc-act span").all_text_contents()
    return [os.pidfd_open(int(text.removeprefix("process "))) for text in shown]


def have_ended(processes: list[int]) -> bool:
    for descriptor in processes:
        if not select.select([descriptor], [], [], 30)[0]:
            return False
        os.close(descriptor)
    return True


def a_killed_worker_is_seen_and_its_answers_go_on(page) -> None:
    until(page, "root.querySelector('.pd-lc-state b[data-role=decode]')?.textContent")
    screenshot(view(page), "live-cluster-serving")
    press(page, "kill -9 d0")
    until(page, "root.dataset.alive === '2'")
    until(page, "root.querySelector('.pd-lc-log').textContent.includes('d0 is lost')")
    assert "kill -9 d0" in log(page)
    assert view(page).evaluate("(e) => e.clientHeight") <= 720  # a projector shows all of it
    until(
        page,
        "root.querySelector('.pd-lc-log').textContent.includes('goes on')"
        " || root.querySelector('.pd-lc-log').textContent.includes('It had nothing')",
    )
    screenshot(view(page), "live-cluster-killed")


def the_kernel_is_free(page) -> None:
    run_cell(page, 2)
    page.wait_for_function(
        "() => document.querySelectorAll('.jp-Cell')[2].textContent.includes('[4]')",
        timeout=20_000,
    )
    assert view(page).get_attribute("data-state") == "running"


def it_is_started_anew(page) -> None:
    press(page, "start d0 anew")
    until(page, "root.dataset.alive === '3'")
    assert "d0 serves again" in log(page)


def a_document_has_its_row(page) -> None:
    press(page, "Paste a long document")
    until(page, "root.querySelector('.pd-lc-rows').textContent.includes('[600 tokens]')")


def it_stops_and_the_saved_page_says_so(page, lab: Lab, processes: list[int]) -> None:
    press(page, "Stop")
    assert have_ended(processes)
    until(page, "root?.dataset.state === 'stopped'")
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function(
        "() => !window.jupyterapp.shell.currentWidget.context.model.dirty", timeout=20_000
    )
    saved = nbformat.read(lab.folder / "live.ipynb", as_version=4)
    [output] = saved.cells[1].outputs
    assert "d0 (decode) ended" in output.data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" not in output.data
    screenshot(view(page), "live-cluster-stopped")


def running_the_cell_again_ends_it(page, processes: list[int]) -> None:
    run_cell(page, 1)
    page.wait_for_selector(".pd-live-cluster[data-state='not started']", timeout=60_000)
    assert have_ended(processes)
