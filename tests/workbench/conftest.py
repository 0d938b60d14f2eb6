"""A real recorded run for the pictures to be drawn from, and Chromium to show widgets in."""

from collections.abc import Iterator

import pytest

from pdlab import Engine, EngineConfig, Model, SamplingParams, Trace
from pdlab.costmodel import Hardware
from pdlab.workbench.picture import FLAGS, find_browser

LONG = "Why does a language model read a long prompt faster than it writes an answer?"
SHORT = "The capital of France is"


@pytest.fixture(scope="session")
def recorded(smollm2: Model) -> Trace:
    """Two requests on the default model: chunked prefill, mixed steps, decodes; layers probed."""
    config = EngineConfig(block_size=4, num_blocks=24, chunk_size=8)
    with Engine(smollm2, config) as engine, engine.probe(layers=[0, 7]):
        engine.submit(LONG, SamplingParams(max_tokens=6, ignore_eos=True))
        engine.step()
        engine.submit(SHORT, SamplingParams(max_tokens=4, ignore_eos=True))
        while engine.step():
            pass
        return engine.trace


@pytest.fixture
def hardware() -> Hardware:
    """Ceilings with round numbers: 100 GFLOP/s and 10 GB/s, so the ridge point is 10 FLOP/byte."""
    return Hardware(
        name="round numbers",
        kind="cpu",
        peak_flops={"fp32": 100e9},
        bandwidth_bytes_s=10e9,
        memory_bytes=0,
        source="made for this test",
        measured=True,
    )


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Chromium for one file alone: its event loop would trouble tests that run one."""
    sync_api = pytest.importorskip("playwright.sync_api")
    flags = [flag for flag in FLAGS if flag != "--headless"]
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_browser(), args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser) -> Iterator:
    """A fresh page; the test fails if a script on it did."""
    page = browser.new_page(viewport={"width": 1000, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []
