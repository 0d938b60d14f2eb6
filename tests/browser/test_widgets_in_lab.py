"""The widgets in JupyterLab: they show, react to the keyboard, follow the theme, and fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.workbench.figures.style import HEIGHT, WIDTH
from pdlab.workbench.palette import STAGE, rgb

from ..workbench.handmade import KV_BYTES
from ..workbench.handmade_memory import memory_moves
from .conftest import SIZE, Lab, change_theme, fresh_page, run_cells, screenshot

PROMPT = "Why does a language model read a long prompt faster than it writes an answer?"
CELLS = [
    "import pdlab\nfrom pdlab import workbench as wb\ntrace = pdlab.Trace.load('run.json.gz')\n"
    "from pdlab.costmodel import load_hardware",
    "stepper = wb.Stepper(trace)\nstepper",
    "wb.Stepper(trace, step=7)",
    "attention = wb.AttentionView(trace)\nattention",
    "roofline = wb.RooflineView(trace, load_hardware()['core-i7-1165g7'])\nroofline",
    "guesses = wb.Predictions()\n"
    "guesses.predict('Which is slower?', ['prefill', 'decode'], key='s')",
    "guesses.compare('s', 'decode', note='One token costs a whole read of the weights.')\n"
    "wb.glossary('prefill', 'KV cache')\n@wb.check('adds up')\ndef _(): assert 1 + 1 == 3, 'add'",
    "model = pdlab.load('smollm2-135m', progress=False)\n"
    "engine = pdlab.Engine(model, pdlab.EngineConfig(num_blocks=8))\n"
    "params = pdlab.SamplingParams(max_tokens=2, ignore_eos=True)\n"
    "live = wb.Stepper.live_run(engine, 'One, two,', params)\nlive",
    "memory = pdlab.Trace.load('memory.json.gz')\nblocks = wb.BlockTableView(memory)\nblocks",
    "wb.MemoryLedger(memory, step=2)",
    "wb.show(wb.figures.step_timeline(trace))\nwb.show(wb.figures.kv_occupancy(trace))",
    "@wb.check('the end')\ndef _(): pass",
]
WIDGETS = ("stepper", "attention", "roofline", "blocks", "ledger")
RESPONSE_MS = """async (slider) => {
  const root = slider.closest('.pdlab');
  const times = [];
  for (let i = 1; i < 9; i++) {
    const start = performance.now();
    slider.value = i;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[4];
}"""


@pytest.fixture(scope="module")
def running(browser, lab: Lab, smollm2: Model) -> Iterator:
    """A notebook over a run recorded here, open, run, and all of its widgets shown."""
    with (
        Engine(smollm2, EngineConfig(num_blocks=48, chunk_size=12)) as engine,
        engine.probe(layers=[0, 8, 16]),
    ):
        engine.submit(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
        engine.submit("The capital of France is", SamplingParams(max_tokens=6, ignore_eos=True))
        while engine.step():
            pass
        engine.trace.save(lab.folder / "run.json.gz")
    memory_moves().save(lab.folder / "memory.json.gz")
    with fresh_page(browser) as page:
        run_cells(page, lab, "widgets", CELLS)
        page.wait_for_selector(".pd-roofline[data-shown]", timeout=60_000)
        page.wait_for_selector(".pd-ledger[data-step='2']", timeout=60_000)
        page.wait_for_selector(".js-plotly-plot .gtitle", timeout=60_000)
        yield page


def test_widgets_and_figures_react(running, capsys: pytest.CaptureFixture) -> None:
    first_render_is_complete(running)
    stepper_answers_the_keyboard(running)
    report_response_time(running, capsys)
    attention_answers_the_keyboard(running)
    roofline_answers_the_mouse(running)
    block_tables_answer_the_keyboard(running)
    ledger_answers_the_keyboard(running)
    figures_are_drawn(running)
    lesson_helpers_answer(running)
    live_stepper_runs_the_engine(running)
    for theme in ("dark", "light"):
        theme_is_followed(running, theme)
    narrow_page_fits(running)


def test_saved_notebook_shows_cards_when_opened_again(running, lab: Lab) -> None:
    """Leaves the page: so it comes last."""
    running.get_by_text("✓ the end").wait_for(timeout=120_000)
    running.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    views = running.locator(".pdlab").count()
    assert views == 7  # what is open stays live
    running.goto(lab.address("widgets.ipynb"))
    running.get_by_text("run this cell to make it live").first.wait_for(timeout=120_000)
    assert running.get_by_text("Error displaying widget").count() == 0
    assert running.locator(".pdlab").count() == 0
    cards = running.locator(".jp-RenderedHTML:has-text('run this cell to make it live')")
    assert cards.count() == views + 1
    assert running.get_by_text("Stepper, sequence r0").count() == 3
    screenshot(running, "saved-notebook")


def stepper_answers_the_keyboard(page) -> None:
    stepper = page.locator(".pd-stepper").first
    title, pool = stepper.locator(".pd-title"), stepper.locator(".pd-pool svg")
    before = (title.text_content(), pool.inner_html())
    assert stepper.locator(".pd-counter").text_content() == "frame 0 · prompt"
    stepper.locator("input[type=range]").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".pd-stepper[data-frame='3']")
    assert (title.text_content(), pool.inner_html()) != before
    assert stepper.locator(".pd-chip[data-state^='now']").count() > 0
    page.keyboard.press("End")
    assert "Decode" in title.text_content()
    stepper.locator(".pd-note").click()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".pd-stepper[data-frame='1']")
    page.keyboard.press("End")
    screenshot(stepper, "stepper-light")


def first_render_is_complete(page) -> None:
    """A Stepper that opens in the middle: its stages are coloured, the newest text is in view."""
    stepper = page.locator(".pd-stepper").nth(1)
    assert stepper.locator(".pd-counter").text_content() == "frame 7 · engine step 6"
    colors = stepper.locator(".pd-stages > span").evaluate_all(
        "(all) => all.map((e) => getComputedStyle(e).backgroundColor)"
    )
    assert set(colors) >= {f"rgb{rgb(STAGE[name])}" for name in ("qkv", "attention", "mlp")}
    text = stepper.locator(".pd-text")
    assert text.evaluate("(e) => e.scrollHeight - e.clientHeight - e.scrollTop") < 2
    screenshot(stepper, "stepper-first-render")


def report_response_time(page, capsys: pytest.CaptureFixture) -> None:
    slider = page.locator(".pd-stepper input[type=range]").first
    milliseconds = slider.evaluate(RESPONSE_MS)
    with capsys.disabled():
        print(f"\nStepper: slider to page in {milliseconds:.1f} ms (median of 8)")


def attention_answers_the_keyboard(page) -> None:
    view = page.locator(".pd-attention")
    canvas = view.locator(".pd-att-map canvas")
    pixels = canvas.evaluate("(c) => c.toDataURL()")
    view.locator("input[aria-label=head]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".pd-attention[data-shown*='/1/']")
    assert canvas.evaluate("(c) => c.toDataURL()") != pixels
    canvas.hover(position={"x": 200, "y": 380})
    assert "weight" in view.locator(".pd-tip").text_content()
    page.mouse.move(0, 0)
    screenshot(view, "attention-light")


def roofline_answers_the_mouse(page) -> None:
    view = page.locator(".pd-roofline")
    view.locator("select").select_option(label="NVIDIA H100 SXM 80 GB")
    assert "predicted" in view.locator(".pd-roof-plot").text_content()
    view.locator("input[type=range]").focus()
    page.keyboard.press("End")
    assert view.locator(".pd-title").text_content().startswith("Decode")
    screenshot(view, "roofline-light")


def block_tables_answer_the_keyboard(page) -> None:
    view = page.locator(".pd-blocks")
    title, inspect = view.locator(".pd-title"), view.locator(".pd-bt-inspect")
    assert title.text_content() == "r0.1 forks from r0 and shares its 4 blocks: nothing copied."
    view.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".pd-blocks[data-step='1']")
    assert "copied to block 4" in view.locator(".pd-note").text_content()
    assert view.locator(".pd-bt-move").count() == 1
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert inspect.text_content().startswith(
        "r0, logical block 1 → physical block 1, shared with r0.1 and r1"
    )
    lit = view.locator(".pd-bt-cell[data-lit]")
    assert lit.count() == 4  # in three tables and in the pool
    view.locator(".pd-bt-pool").first.locator(".pd-bt-cell").nth(9).hover()
    assert "Physical block 9: free" in inspect.text_content()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".pd-blocks[data-step='4']")
    assert view.locator(".pd-bt-move").count() == 4  # r1 goes to host memory
    assert view.evaluate("(e) => e.clientHeight") <= 640
    screenshot(view, "blocks-light")


def ledger_answers_the_keyboard(page) -> None:
    view = page.locator(".pd-ledger")
    view.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".pd-ledger[data-step='4']")
    numbers = view.locator(".pd-lg-table [data-bytes]").evaluate_all(
        "(all) => all.map((e) => +e.dataset.bytes)"
    )
    pool, *parts = numbers[:5]
    assert pool == sum(parts) == 12 * 4 * KV_BYTES
    assert numbers[5] == sum(numbers[6:8]) == 6 * 4 * KV_BYTES
    assert view.locator(".pd-lg-chart path[data-part]").count() == 4
    assert view.evaluate("(e) => e.clientHeight") <= 640
    screenshot(view, "ledger-light")


def figures_are_drawn(page) -> None:
    titles = page.locator(".js-plotly-plot .gtitle")
    room = page.locator(".jp-OutputArea-output.js-plotly-plot").first
    assert room.evaluate("(e) => e.clientWidth") >= WIDTH  # at 1280, beside the file browser
    assert titles.count() == 2
    assert "A prompt token costs" in titles.first.text_content()
    screenshot(page.locator(".jp-OutputArea:has(.js-plotly-plot)").last, "figures-light")


def lesson_helpers_answer(page) -> None:
    page.get_by_role("radio", name="prefill").click()
    page.get_by_text("recorded: prefill").wait_for()
    page.keyboard.press("ArrowRight")
    page.get_by_text("recorded: decode").wait_for()
    assert page.get_by_text("no prediction recorded").count() == 1
    assert page.get_by_text("not yet: add").count() == 1
    assert page.get_by_text("预填充").count() == 1
    screenshot(page.locator(".jp-Cell:has-text('not yet: add')").last, "lesson-light")


def live_stepper_runs_the_engine(page) -> None:
    live = page.locator(".pd-stepper").last
    forward = live.get_by_role("button", name="Forward one step")
    for frame, phase in ((1, "prefill"), (2, "decode")):
        forward.click()
        page.wait_for_selector(f".pd-stepper[aria-busy=false][data-frame='{frame}']:has(.pd-live)")
        assert live.locator(".pd-pill").text_content() == phase
    live.get_by_text("The sequence is finished.").wait_for()
    assert forward.is_disabled()
    assert live.locator(".pd-foot .pd-tag").text_content() == "measured"
    screenshot(live, "stepper-live")


def theme_is_followed(page, theme: str) -> None:
    change_theme(page, theme.capitalize())
    color = page.locator(".pd-stepper .pd-title").first.evaluate("(e) => getComputedStyle(e).color")
    assert color == ("rgb(232, 234, 237)" if theme == "dark" else "rgb(27, 31, 36)")
    page.wait_for_timeout(500)
    sizes = page.locator(".js-plotly-plot").evaluate_all(
        "(all) => all.map((e) => [e.clientHeight, e.querySelector('svg').clientWidth])"
    )
    assert len(sizes) == 2
    assert all(height >= HEIGHT and width == WIDTH for height, width in sizes), sizes
    if theme == "dark":
        for widget in WIDGETS:
            screenshot(page.locator(f".pd-{widget}").first, f"{widget}-dark")


def narrow_page_fits(page) -> None:
    page.set_viewport_size({"width": 620, "height": 1100})
    page.wait_for_timeout(300)
    for widget in WIDGETS:
        root = page.locator(f".pd-{widget}").first
        assert root.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1"), widget
        screenshot(root, f"{widget}-narrow")
    page.set_viewport_size(SIZE)
