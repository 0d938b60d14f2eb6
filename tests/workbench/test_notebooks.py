"""A committed lesson shows a picture for every widget and figure, and stays small."""

import base64
from pathlib import Path

import nbformat
import pytest

from pdlab import Trace
from pdlab.shipped import shipped
from pdlab.workbench import execute_notebook, figures, notebooks, static_png
from pdlab.workbench.display import PLOTLY, mimebundle
from pdlab.workbench.picture import find_browser, quantise

CELLS = [
    "import pdlab\nfrom pdlab import workbench as wb\ntrace = pdlab.Trace.load('run.json.gz')",
    "wb.Stepper(trace, step=3)",
    "wb.AttentionView(trace)",
    "wb.show(wb.figures.kv_occupancy(trace))",
    "wb.Predictions().predict('Which is slower?', ['prefill', 'decode'], key='k')",
    "import ipywidgets; ipywidgets.IntSlider()",
]
needs_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def write_notebook(path: Path, cells: list[str]) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    nbformat.write(notebook, path)
    return path


@pytest.fixture(scope="module")
def executed(recorded: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lesson")
    recorded.save(folder / "run.json.gz")
    return execute_notebook(write_notebook(folder / "lesson.ipynb", CELLS))


def outputs(path: Path) -> list[dict]:
    cells = nbformat.read(path, as_version=4).cells
    return [o.get("data", {}) for cell in cells for o in cell.outputs]


def test_no_widget_view_or_state_is_stored(executed: Path) -> None:
    text = executed.read_text(encoding="utf-8")
    assert "widget-view" not in text
    assert "widget-state" not in text


def test_saving_drops_widget_views_and_keeps_the_rest() -> None:
    view = {notebooks.WIDGET_VIEW: {"model_id": "gone"}}
    outputs = [{"data": view | {"text/html": "a card"}}, {"data": dict(view)}, {"text": "printed"}]
    content = {
        "nbformat": 4,
        "cells": [{"cell_type": "code", "outputs": outputs}, {"cell_type": "markdown"}],
        "metadata": {"widgets": {}, "kernelspec": {"name": "python3"}},
    }
    notebooks.strip_before_save(model={"type": "notebook", "content": content}, path="a.ipynb")
    assert outputs[0]["data"] == {"text/html": "a card"}
    assert outputs[1]["data"] == {"text/plain": notebooks.NOT_LIVE}
    assert content["metadata"] == {"kernelspec": {"name": "python3"}}
    notebooks.strip_before_save(model={"type": "file", "content": "text"}, path="a.txt")
    notebooks.strip_before_save(model={"type": "notebook", "content": None}, path="a.ipynb")


@needs_browser
def test_every_picture_is_there_without_javascript(executed: Path) -> None:
    stepper, attention, figure = outputs(executed)[:3]
    for data in (stepper, attention, figure):
        png = base64.b64decode(data["image/png"])
        assert png.startswith(b"\x89PNG")
        assert 5_000 < len(png) < 80_000
    assert "Stepper, sequence r0, frame 3, engine step 2" in stepper["text/plain"]


def test_every_output_says_something(executed: Path) -> None:
    question, foreign = outputs(executed)[3:]
    assert question["text/plain"] == "Which is slower? (prefill / decode)"
    assert foreign["text/plain"]


def test_lesson_stays_under_a_megabyte(executed: Path) -> None:
    assert executed.stat().st_size < 400_000


def test_too_large_a_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_notebook(tmp_path / "big.ipynb", ["print('x' * 5000)"])
    monkeypatch.setattr(notebooks, "MAX_NOTEBOOK_BYTES", 2000)
    with pytest.raises(ValueError, match="more than 2000"):
        execute_notebook(path)
    assert not outputs(path)


def test_figure_output_is_small_plotly_json(
    recorded: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PDLAB_PICTURES", raising=False)
    bundle = mimebundle(figures.step_timeline(recorded))
    assert set(bundle) == {PLOTLY, "text/plain"}
    assert len(str(bundle)) < 12_000
    assert "template" not in bundle[PLOTLY]["layout"]
    assert bundle[PLOTLY]["config"] == {"displayModeBar": False, "responsive": False}


# --- demos ----------------------------------------------------------------------------------------

DEMOS = sorted((shipped("notebooks") / "source" / "demos").glob("*.py"))
all_demos = pytest.mark.parametrize("source", DEMOS, ids=lambda path: path.stem)


def test_a_demo_has_its_notebook_beside_the_lessons() -> None:
    assert [path.stem for path in DEMOS] == ["pd_live"]
    lesson, demo = Path("notebooks/source/01_a.py"), Path("notebooks/source/demos/b.py")
    assert notebooks.target_of(lesson) == Path("notebooks/01_a.ipynb")
    assert notebooks.target_of(demo) == Path("notebooks/demos/b.ipynb")


def test_lessons_and_demos_are_built_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "notebooks" / "source"
    (source / "demos").mkdir(parents=True)
    (source / "01_a.py").write_text("# %%\nprint('a lesson')\n", encoding="utf-8")
    (source / "demos" / "b.py").write_text("# %%\nprint('a demo')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    notebooks.main(["b"])
    demo = nbformat.read("notebooks/demos/b.ipynb", as_version=4)
    assert demo.cells[0].outputs[0].text == "a demo\n"
    assert not Path("notebooks/01_a.ipynb").exists()
    with pytest.raises(ValueError, match=r"names=\['c'\] must be of 01_a, b"):
        notebooks.main(["b", "c"])


@all_demos
def test_a_committed_demo_is_what_its_source_builds_and_shows_its_pictures(source: Path) -> None:
    path = shipped("notebooks") / "demos" / f"{source.stem}.ipynb"
    assert path.stat().st_size < notebooks.MAX_NOTEBOOK_BYTES
    assert "widget-view" not in path.read_text(encoding="utf-8")
    found = nbformat.read(path, as_version=4).cells
    built = notebooks.build_notebook(source).cells
    assert [(cell.id, cell.source) for cell in found] == [(cell.id, cell.source) for cell in built]
    codes = [cell for cell in found if cell.cell_type == "code"]
    assert all(len(cell.source.splitlines()) <= 20 for cell in codes)
    [widget] = [cell for cell in codes if "wb.LiveCluster" in cell.source]
    [output] = widget.outputs
    assert "recorded" in output.data["text/plain"]
    assert "image/png" in output.data


def test_a_demo_starts_no_process_by_itself() -> None:
    """Run all cells, as nbval and a reader may: what starts processes is for a hand to do."""
    for source in DEMOS:
        cells = notebooks.build_notebook(source).cells
        lines = [
            line for cell in cells if cell.cell_type == "code" for line in cell.source.split("\n")
        ]
        assert not [line for line in lines if line.startswith("live.start")]


@needs_browser
def test_static_figure_is_a_palette_png(recorded: Trace) -> None:
    png = static_png(figures.block_grid(recorded, 1))
    assert png is not None
    assert 3_000 < len(png) < 40_000


def test_quantised_swatches_keep_their_exact_colour() -> None:
    import io

    from PIL import Image

    from pdlab.workbench.palette import MEANING, rgb

    picture = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 50).convert("RGB")
    for i, color in enumerate(MEANING.values()):
        picture.putpixel((i, 0), rgb(color))
    out = io.BytesIO()
    picture.save(out, "PNG")
    small = Image.open(io.BytesIO(quantise(out.getvalue()))).convert("RGB")
    for i, color in enumerate(MEANING.values()):
        assert small.getpixel((i, 0)) == rgb(color)
