"""JupyterLab on loopback, driven in Chromium: the proof that a page really shows and reacts.

Needs Playwright and a Chromium (on Debian: `apt-get install --no-install-recommends chromium`).
Without one the tests are skipped, except in CI (CI=1), where they fail.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from pdlab.cli.lab_server import server_arguments, write_settings
from pdlab.workbench.picture import FLAGS, find_browser

HELP = (
    "needs Chromium or Chrome (Debian: apt-get install --no-install-recommends chromium; "
    "elsewhere set PDLAB_BROWSER) and playwright (pip install -e '.[test]')"
)
SHOTS = Path(__file__).parents[2] / "ci-output"
SIZE = {"width": 1280, "height": 1100}
START_S = 60
KERNEL_IDLE = """() => {
  const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
  const kernel = session?.session?.kernel;
  return session?.isReady && kernel?.connectionStatus === 'connected' && kernel?.status === 'idle';
}"""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CLOSE_ALL = """async () => {
  for (const widget of [...(window.jupyterapp?.shell.widgets('main') ?? [])]) {
    await widget.sessionContext?.shutdown();
    widget.dispose();
  }
}"""
"""Kernels end, too: else they would compute on, what is left of a lesson, beside the next tests."""
OPEN = "(path) => { window.jupyterapp.commands.execute('docmanager:open', { path }) }"
MADE_UP_MACHINE = """import pdlab
from pdlab import workbench as wb
from pdlab.costmodel import LinearStepTimes
model = pdlab.load('random:tiny-llama')
times = LinearStepTimes('measured on a machine made up for a test',
                        .01, .001, 0, .0003, 0, .001, 1e-6, 5e-6)"""
"""The first cell of a lab: a model, and step times that are the same everywhere."""
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
"""Beyond those of `pdlab lab`: every cell is drawn, and nothing is saved unasked."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here, and skip them all where no browser is installed."""
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.browser)
        if find_browser() is None and not os.environ.get("CI"):
            item.add_marker(pytest.mark.skip(reason=HELP))


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab and the folder it serves."""

    url: str
    token: str
    folder: Path

    def address(self, notebook: str) -> str:
        return f"{self.url}/lab/tree/{notebook}?token={self.token}&reset"


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab on a free port, with its own settings, stopped at the end."""
    folder, config = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("lab-config")
    write_settings(config)
    _write_settings(config / "lab-settings")
    lab = Lab(f"http://127.0.0.1:{_free_port()}", secrets.token_hex(16), folder)
    server = _start_server(lab, config)
    try:
        _wait_until_up(lab, server)
        yield lab
    finally:
        _stop(server)


@pytest.fixture(scope="package")
def browser() -> Iterator:
    """Headless Chromium, the system's own, driven by Playwright: what a page has loaded is kept.

    It keeps an event loop running in this thread, where no other can then run: so it ends with this
    folder's tests.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason=HELP)
    path = find_browser()
    assert path is not None, HELP
    flags = [flag for flag in FLAGS if flag != "--headless"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=flags)
        yield chromium.new_context(viewport=SIZE)
        chromium.close()


@pytest.fixture
def page(browser) -> Iterator:
    with fresh_page(browser) as page:
        yield page


@contextmanager
def fresh_page(browser) -> Iterator:
    """JupyterLab's page with nothing open: to load it takes longer than most tests do.

    At the end, a test fails if the page raised an error or fetched from elsewhere.
    """
    page = browser.pages[0] if browser.pages else browser.new_page()
    page.set_viewport_size(SIZE)
    errors: list[str] = []
    listeners = {
        "pageerror": lambda error: errors.append(str(error)),
        "request": lambda r: _is_foreign(r.url) and errors.append(f"fetched {r.url}"),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    yield page
    screenshot(page, "last-page")
    page.evaluate(CLOSE_ALL)
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert not errors


def open_and_run(page, lab: Lab, notebook: str) -> None:
    """Open a notebook of the lab's folder, wait for its kernel, and run all cells."""
    if page.url.startswith(lab.url):
        page.evaluate(OPEN, notebook)
    else:
        page.goto(lab.address(notebook), wait_until="domcontentloaded")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    page.wait_for_function(KERNEL_IDLE, timeout=90_000)
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")


def run_cells(page, lab: Lab, name: str, cells: Sequence[str]) -> None:
    """Write a notebook of these cells to the lab's folder, open it and run all."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = KERNEL
    nbformat.write(book, lab.folder / f"{name}.ipynb")
    open_and_run(page, lab, f"{name}.ipynb")


def run_cell(page, index: int) -> None:
    """Run one cell of the open notebook."""
    page.evaluate(
        "(index) => { const { content } = window.jupyterapp.shell.currentWidget;"
        " content.activeCellIndex = index;"
        " window.jupyterapp.commands.execute('notebook:run-cell') }",
        index,
    )


def change_theme(page, theme: str) -> None:
    """To `Dark` or `Light`; the widgets need a moment more to follow."""
    name = f"JupyterLab {theme}"
    page.evaluate(
        "(theme) => { window.jupyterapp.commands.execute('apputils:change-theme', { theme }) }",
        name,
    )
    page.wait_for_selector(f"body[data-jp-theme-name='{name}']", state="attached")


def screenshot(target, name: str) -> Path:
    """Keep a picture of a page or an element in ci-output/."""
    SHOTS.mkdir(exist_ok=True)
    path = SHOTS / f"{name}.png"
    target.screenshot(path=path)
    return path


def _is_foreign(url: str) -> bool:
    return url.startswith("http") and not url.startswith("http://127.0.0.1")


def _write_settings(folder: Path) -> None:
    for name, values in SETTINGS.items():
        path = folder / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start_server(lab: Lab, config: Path) -> subprocess.Popen:
    own = {
        "JUPYTER_CONFIG_DIR": str(config),
        "JUPYTERLAB_SETTINGS_DIR": str(config / "lab-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(config / "workspaces"),
    }
    port = int(lab.url.rsplit(":", 1)[1])
    options = [
        *server_arguments(lab.folder, "", settings_folder=config, port=port, browser=False),
        "--ServerApp.ip=127.0.0.1",
        f"--IdentityProvider.token={lab.token}",
        "--LabApp.expose_app_in_browser=True",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | own,
        start_new_session=True,
    )


def _wait_until_up(lab: Lab, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"JupyterLab ended with {server.returncode}"
        try:
            urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"JupyterLab did not answer within {START_S} s")


def _stop(server: subprocess.Popen) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        os.killpg(server.pid, number)
        try:
            server.wait(8)
            return
        except subprocess.TimeoutExpired:
            continue
