"""The SamplingLab and the ConstraintLab in JupyterLab: controls answer, tokens can be clicked."""

from __future__ import annotations

import pytest

from .conftest import Lab, change_theme, run_cells, screenshot

CELLS = [
    "import pdlab\nfrom pdlab import SamplingParams\nfrom pdlab import workbench as wb\n"
    "model = pdlab.load('smollm2-135m', progress=False)",
    "lab = wb.SamplingLab(model, 'The capital of France is',"
    " SamplingParams(temperature=1.0, top_p=0.9), seed=3)\nlab",
    "bound = wb.ConstraintLab(model, 'The first people walked on the moon on ',"
    " regex=r'(19|20)\\d\\d-(0\\d|1[0-2])-[0-3]\\d')\nbound",
]
ANSWER_MS = """async (slider) => {
  const root = slider.closest('.pdlab');
  const times = [];
  for (const value of [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9]) {
    const before = root.dataset.answered;
    const start = performance.now();
    slider.value = value;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    while (root.dataset.answered === before || root.getAttribute('aria-busy') === 'true')
      await new Promise((done) => setTimeout(done, 1));
    await new Promise((done) => requestAnimationFrame(done));
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[4];
}"""


@pytest.fixture
def running(page, lab: Lab):
    """Both labs in a notebook, shown."""
    run_cells(page, lab, "labs", CELLS)
    page.wait_for_selector(".pd-sampling-lab[data-answered]", timeout=180_000)
    page.wait_for_selector(".pd-constraint-lab[data-step]", timeout=180_000)
    return page


def test_labs_answer(running, capsys: pytest.CaptureFixture) -> None:
    a_projector_shows_each_at_once(running)
    sliders_react(running)
    report_answer_time(running, capsys)
    bad_input_is_said(running)
    a_token_is_clicked(running)
    the_text_is_rewound(running)
    a_bias_moves_a_token(running)
    draws_are_shown_as_dots(running)
    a_link_shows_its_own_distribution(running)
    steps_answer_the_keyboard(running)
    another_expression_runs(running)
    an_impossible_one_is_said(running)
    themes_and_widths_fit(running)


def answered(page, widget: str = "sampling") -> None:
    page.wait_for_function(
        "(name) => document.querySelector(`.pd-${name}-lab`).getAttribute('aria-busy') === 'false'",
        arg=widget,
        timeout=60_000,
    )


def numbers(page) -> list[str]:
    return page.locator(".pd-sampling-lab .pd-sl-table > .pd-num").all_text_contents()


def a_projector_shows_each_at_once(page) -> None:
    """1280 x 720 pixels, beside the file browser."""
    for widget in ("sampling", "constraint"):
        view = page.locator(f".pd-{widget}-lab")
        screenshot(view, f"{widget}-lab-light")
        assert view.evaluate("(e) => e.clientHeight") <= 720, widget


def sliders_react(page) -> None:
    view = page.locator(".pd-sampling-lab")
    for name, key in (("temperature", "ArrowLeft"), ("top_k", "End"), ("min_p", "ArrowRight")):
        before = numbers(page)
        view.get_by_label(name, exact=True).focus()
        page.keyboard.press(key)
        page.wait_for_function(
            "(old) => [...document.querySelectorAll('.pd-sl-table > .pd-num')]"
            ".map((e) => e.textContent).join() !== old",
            arg=",".join(before),
        )
        answered(page)
    assert view.get_by_label("temperature", exact=True).input_value() == "0.95"
    assert view.get_by_label("min_p, exact value").input_value() == "0.01"


def report_answer_time(page, capsys: pytest.CaptureFixture) -> None:
    slider = page.locator(".pd-sampling-lab").get_by_label("top_p", exact=True)
    milliseconds = slider.evaluate(ANSWER_MS)
    with capsys.disabled():
        print(f"\nSamplingLab: slider to picture in {milliseconds:.0f} ms (median of 9)")


def bad_input_is_said(page) -> None:
    view = page.locator(".pd-sampling-lab")
    box = view.get_by_label("top_p, exact value")
    box.fill("1.7")
    page.keyboard.press("Enter")
    view.locator(".pd-tb-message:has-text('top_p=1.7')").wait_for()
    box.fill("0.8")
    page.keyboard.press("Enter")
    view.locator(".pd-tb-message").wait_for(state="hidden")
    answered(page)
    assert view.get_by_label("top_p", exact=True).input_value() == "0.8"


def a_token_is_clicked(page) -> None:
    view = page.locator(".pd-sampling-lab")
    chips = view.locator(".pd-sl-chip[data-kind=output]")
    assert chips.count() == 0
    view.locator("button.pd-tb-token").nth(1).click()
    chips.first.wait_for()
    answered(page)
    view.get_by_role("button", name="Take", exact=False).first.click()
    page.wait_for_function(
        "() => document.querySelectorAll('.pd-sl-chip[data-kind=output]').length === 2"
    )
    answered(page)


def the_text_is_rewound(page) -> None:
    view = page.locator(".pd-sampling-lab")
    view.locator(".pd-sl-chip[data-kind=output]").first.click()
    view.locator(".pd-sl-chip[data-kind=chosen]").wait_for()
    answered(page)
    assert view.locator(".pd-sl-chip[data-kind=later]").count() == 1
    screenshot(view, "sampling-lab-rewound")
    view.get_by_role("button", name="Reset text").click()
    view.locator(".pd-sl-chip[data-kind=next]").wait_for()
    answered(page)
    assert view.locator(".pd-sl-chip[data-kind=output]").count() == 0


def a_bias_moves_a_token(page) -> None:
    view = page.locator(".pd-sampling-lab")
    name = view.locator("button.pd-tb-token").nth(4).text_content()
    view.locator("button.pd-sl-pick").nth(4).click()
    page.keyboard.press("End")  # +20
    page.wait_for_function(
        "(name) => document.querySelector('.pd-sampling-lab .pd-tb-hit').textContent === name",
        arg=name,
    )
    answered(page)
    view.get_by_label("logit_bias", exact=True).fill("0")
    answered(page)


def draws_are_shown_as_dots(page) -> None:
    view = page.locator(".pd-sampling-lab")
    title = view.locator(".pd-title").text_content()
    view.get_by_role("button", name="Draw 1000").click()
    view.locator(".pd-tb-bar .pd-tb-dot").first.wait_for()
    assert view.locator(".pd-title").text_content() == title
    screenshot(view, "sampling-lab-draws")
    view.get_by_role("button", name="Draw again").click()
    view.locator(".pd-title:has-text('seed 4')").wait_for()
    answered(page)
    assert view.locator(".pd-tb-bar .pd-tb-dot").count() == 0


def a_link_shows_its_own_distribution(page) -> None:
    view = page.locator(".pd-sampling-lab")
    assert view.locator(".pd-tb-bar[data-gone]").count() > 0
    view.locator(".pd-sl-name:text-is('temperature')").click()
    assert view.locator(".pd-tb-bar[data-gone]").count() == 0
    view.locator(".pd-sl-name:text-is('temperature')").click()
    assert view.locator(".pd-tb-bar[data-gone]").count() > 0


def steps_answer_the_keyboard(page) -> None:
    view = page.locator(".pd-constraint-lab")
    view.locator("input[type=range]").focus()
    for step in (1, 2):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f".pd-constraint-lab[data-step='{step}']")
    assert view.locator("g[data-now=here]").count() == 1
    view.locator(".pd-cl-chip").nth(4).click()
    page.wait_for_selector(".pd-constraint-lab[data-step='4']")
    screenshot(view, "constraint-lab-step")


def another_expression_runs(page) -> None:
    view = page.locator(".pd-constraint-lab")
    view.get_by_label("The constraint").fill("(July|June) [0-9]{1,2}")
    page.keyboard.press("Enter")
    view.locator(".pd-cl-chip:has-text('J')").first.wait_for()
    answered(page, "constraint")
    view.get_by_label("Kind of constraint").select_option("choice")
    view.get_by_label("The constraint").fill("a Monday\na Tuesday")
    view.get_by_role("button", name="Run").click()
    view.locator(".pd-cl-chip[aria-current]:has-text('a')").wait_for()
    answered(page, "constraint")


def an_impossible_one_is_said(page) -> None:
    view = page.locator(".pd-constraint-lab")
    frames = view.locator(".pd-cl-chip").count()
    view.get_by_label("Kind of constraint").select_option("regex")
    view.get_by_label("The constraint").fill("(a")
    page.keyboard.press("Enter")
    view.locator(
        ".pd-tb-message:has-text('not closed'), .pd-tb-message:has-text('unclosed')"
    ).wait_for()
    assert view.locator(".pd-cl-chip").count() == frames


def themes_and_widths_fit(page) -> None:
    change_theme(page, "Dark")
    page.wait_for_timeout(500)
    for widget in ("sampling", "constraint"):
        screenshot(page.locator(f".pd-{widget}-lab"), f"{widget}-lab-dark")
    for width in (800, 620):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_timeout(300)
        for widget in ("sampling", "constraint"):
            root = page.locator(f".pd-{widget}-lab")
            assert root.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1"), (widget, width)
            screenshot(root, f"{widget}-lab-{width}")
