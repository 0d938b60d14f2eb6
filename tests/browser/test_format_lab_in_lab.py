"""The FormatLab in JupyterLab: every format can be picked, for K and for V."""

from __future__ import annotations

from .conftest import Lab, run_cells, screenshot

NAMES = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
CELL = """import pdlab
from pdlab import workbench as wb
model = pdlab.load('random:tiny-mistral')
wb.FormatLab(model, list(range(40)), 'int8', max_tokens=4)"""


def test_every_format_can_be_picked(page, lab: Lab) -> None:
    run_cells(page, lab, "format_lab", [CELL])
    page.wait_for_selector(".pd-format-lab[data-shown]", timeout=120_000)
    for half in ("V", "K"):
        for name in NAMES:
            is_picked(page, half, name)
    scales_are_offered_where_there_are_some(page)
    known_formats_answer(page)
    bytes_of_open_blocks_are_shown(page)


def is_picked(page, half: str, name: str) -> None:
    page.get_by_label(f"{half}: numbers").select_option(name)
    is_answered(page)
    title = page.locator(".pd-format-lab .pd-title").text_content()
    k, _, v = title.split(": ")[0].partition("/")
    assert (k if half == "K" else v or k).split(":")[0] == name, title
    assert page.get_by_label(f"{half}: numbers").input_value() == name


def scales_are_offered_where_there_are_some(page) -> None:
    scales = page.get_by_label("K: scales")
    group = page.get_by_label("K: channels that share a scale")
    for name, scale, offered in (
        ("bf16", None, (False, False)),
        ("int8", "token", (True, True)),
        ("int8", "channel", (True, False)),
    ):
        is_picked(page, "K", name)
        if scale:
            scales.select_option(scale)
            is_answered(page)
        assert (scales.is_visible(), group.is_visible()) == offered


def known_formats_answer(page) -> None:
    for name in ("bf16", "fp8", "int8", "int4"):
        button = page.get_by_role("button", name=name, exact=True)
        button.click()
        is_answered(page)
        assert button.get_attribute("aria-pressed") == "true"


def bytes_of_open_blocks_are_shown(page) -> None:
    view = page.locator(".pd-format-lab")
    assert view.get_by_text("open blocks, fp32").count() == 0
    page.get_by_label("K: scales").select_option("channel")
    is_answered(page)
    assert view.get_by_text("open blocks, fp32").is_visible()
    widths = view.locator(".pd-fl-bytes .pd-bar").evaluate_all(
        "(all) => all.map((e) => e.clientWidth)"
    )
    assert view.get_by_text("of the channel's size").count() == 2
    assert widths[0] > 150  # fp32, whatever the names beside it
    screenshot(view, "format-lab")
    page.set_viewport_size({"width": 620, "height": 1100})
    assert view.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1")


def is_answered(page) -> None:
    page.wait_for_selector(".pd-format-lab[aria-busy=false]")
    assert page.locator(".pd-fl-message").is_hidden()
