"""A committed lesson in JupyterLab: pictures before anything runs, widgets that react after."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import Lab, open_and_run, screenshot

LESSON = Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb"


@pytest.fixture
def lesson(lab: Lab) -> str:
    """A copy of the lesson, since JupyterLab may write to what it opens."""
    shutil.copy(LESSON, lab.folder / LESSON.name)
    return LESSON.name


def test_fresh_lesson_shows_its_pictures_before_anything_runs(page, lab: Lab, lesson: str) -> None:
    page.goto(lab.address(lesson))
    page.wait_for_selector(".jp-RenderedImage img, .js-plotly-plot", timeout=120_000)
    assert page.locator(".jp-RenderedImage img").count() >= 3
    assert page.get_by_text("Error displaying widget").count() == 0
    assert page.get_by_text("Loading widget").count() == 0
    screenshot(page.locator(".jp-RenderedImage").first, "lesson-static")


def test_lesson_runs_and_its_stepper_answers_the_keyboard(page, lab: Lab, lesson: str) -> None:
    open_and_run(page, lab, lesson)
    page.wait_for_selector(".pd-stepper[data-frame]", timeout=420_000)
    stepper = page.locator(".pd-stepper").first
    frame = stepper.get_attribute("data-frame")
    stepper.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(f".pd-stepper[data-frame='{int(frame) + 1}']")
    screenshot(stepper, "lesson-stepper")
