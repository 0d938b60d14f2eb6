"""The lessons themselves: built from their sources, small, and with solutions that pass."""

import linecache
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

import pdlab
from pdlab import Engine, Model, SamplingParams
from pdlab import workbench as wb
from pdlab.costmodel import Chunk, Hardware, load_hardware, step_cost
from pdlab.shipped import shipped
from pdlab.workbench.notebooks import MAX_NOTEBOOK_BYTES, SOLUTION, build_notebook

SOURCES = sorted((shipped("notebooks") / "source").glob("*.py"))
MAX_CELL_LINES = 20
all_lessons = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def run_cell(code: str, name: str, names: dict[str, object]) -> None:
    """As a notebook does: what is defined in a cell has a source."""
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    exec(compile(code, name, "exec"), names)


def committed(source: Path) -> Path:
    return source.parents[1] / f"{source.stem}.ipynb"


def test_there_are_lessons() -> None:
    assert [path.stem for path in SOURCES] == [
        "00_start_here",
        "01_prefill",
        "02_decode",
        "03_paged_kv",
        "04_kv_formats",
        "05_windows_and_eviction",
        "06_sampling_and_output",
        "07_scheduling",
        "08_disaggregation",
        "09_kernels_and_speed",
        "10_speculation_and_overlap",
        "11_parallelism",
    ]


@all_lessons
def test_a_committed_lesson_is_what_its_source_builds(source: Path) -> None:
    built = [(cell.id, cell.source) for cell in build_notebook(source).cells]
    found = nbformat.read(committed(source), as_version=4)
    assert [(cell.id, cell.source) for cell in found.cells] == built


@all_lessons
def test_a_committed_lesson_is_small_and_shows_its_pictures(source: Path) -> None:
    path = committed(source)
    assert path.stat().st_size < MAX_NOTEBOOK_BYTES
    text = path.read_text(encoding="utf-8")
    assert "widget-view" not in text
    assert "widget-state" not in text
    for cell in nbformat.read(path, as_version=4).cells:
        draws = any(name in cell.source for name in ("wb.show(", "wb.Stepper", "View("))
        if cell.cell_type == "code" and draws:
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.id


@all_lessons
def test_code_cells_are_short_and_hold_no_engine_code(source: Path) -> None:
    for code in code_cells(build_notebook(source, solved=True)):
        assert len(code.splitlines()) <= MAX_CELL_LINES, code
        assert "class " not in code, code


@pytest.fixture
def lesson_names(smollm2: Model, hardware: Hardware) -> dict[str, object]:
    """What the exercises use of the cells before them."""
    with Engine(smollm2) as engine:
        engine.generate("One, two,", SamplingParams(max_tokens=2))
        return {
            "pdlab": pdlab,
            "torch": torch,
            "wb": wb,
            "Chunk": Chunk,
            "load_hardware": load_hardware,
            "step_cost": step_cost,
            "model": smollm2,
            "shape": smollm2.config,
            "machine": hardware,
            "engine": engine,
            "times": SimpleNamespace(tpot_s=0.1),
            "per_token": engine.trace.engine["kv_bytes_per_token"],
        }


@all_lessons
@pytest.mark.parametrize("solved", [True, False], ids=["solved", "open"])
def test_solutions_pass_their_checks_and_open_exercises_do_not(
    source: Path, solved: bool, lesson_names: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exercise is a cell with a solution; its check is the next cell with `@wb.check`."""
    if solved:
        monkeypatch.setenv("PDLAB_STRICT", "1")
    source_text = source.read_text(encoding="utf-8")
    notebook = build_notebook(source, solved=solved)
    cells = [c for c in code_cells(notebook) if "@wb.check" in c or "your code here" in c]
    if solved:
        cells = [c for c in code_cells(notebook) if "@wb.check" in c or SOLUTION.search(c)]
    assert len(cells) == 2 * len(SOLUTION.findall(source_text)) >= 4
    for number, cell in enumerate(cells):
        run_cell(cell, f"<{source.stem}, {number}>", lesson_names)
    verdicts = [value for name, value in lesson_names.items() if name.endswith("_check")]
    assert verdicts == [solved] * (len(cells) // 2)
