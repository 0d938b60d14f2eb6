"""Lessons: from a percent-format source to a notebook, executed so that it can be read anywhere.

    python -m pdlab.workbench.notebooks                   # all of notebooks/source
    python -m pdlab.workbench.notebooks 01_prefill        # one of them

The notebook of `notebooks/source/demos/pd_live.py` is `notebooks/demos/pd_live.ipynb`.

A source holds the solved exercises between `# BEGIN SOLUTION` and `# END SOLUTION`. The student's
notebook has a place to write there instead; the solved one is what tests run.

nbformat is imported where it is needed: that takes as long as all the rest, torch included.
"""

from __future__ import annotations

import os
import re
import sys
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.workbench.fallback import NOT_LIVE

if TYPE_CHECKING:
    import nbformat

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MAX_NOTEBOOK_BYTES = 1_000_000
SOURCES = Path("notebooks/source")
SOLUTION = re.compile(r"^([ \t]*)# BEGIN SOLUTION\n.*?^[ \t]*# END SOLUTION$", re.M | re.S)
TO_DO = r'\1raise NotImplementedError("your code here")'
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def build_notebook(source: str | PathLike[str], *, solved: bool = False) -> nbformat.NotebookNode:
    """A lesson's notebook, not executed; with the exercises open, or solved."""
    import jupytext
    import nbformat

    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"{Path(source).stem[:20]}-{index:03d}"  # stable, so that diffs stay small
        if cell.cell_type == "code" and not solved:
            cell.source = SOLUTION.sub(TO_DO, cell.source)
    nbformat.validate(notebook)
    return notebook


def execute_notebook(
    path: str | PathLike[str], out: str | PathLike[str] | None = None, timeout_s: int = 600
) -> Path:
    """Run all cells and write the notebook with outputs that need no kernel and no JavaScript.

    No widget state and no widget view is stored, since a viewer would show "state missing" for
    them; each widget and each figure leaves its static picture and a line of text instead.

    Args:
        out: where to write; by default over `path`.

    Raises:
        ValueError: the result is larger than MAX_NOTEBOOK_BYTES.
        nbclient.exceptions.CellExecutionError: a cell failed; nothing is written.
    """
    import nbformat
    from nbclient import NotebookClient

    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env=os.environ | {"PDLAB_PICTURES": "1"})
    strip_widgets(notebook)
    notebook.metadata["language_info"] = {"name": "python"}
    target = Path(out) if out else path
    text = nbformat.writes(notebook)
    if len(text.encode()) > MAX_NOTEBOOK_BYTES:
        raise ValueError(f"{target} would have {len(text)} bytes, more than {MAX_NOTEBOOK_BYTES}")
    target.write_text(text + "\n", encoding="utf-8")
    return target


def strip_widgets(notebook: dict[str, Any]) -> None:
    """Remove widget views and widget state in place; the static part of each output stays."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(WIDGET_VIEW, None) is not None and not data:
                data["text/plain"] = NOT_LIVE
    notebook["metadata"].pop("widgets", None)


def strip_before_save(model: dict[str, Any], **_: Any) -> None:
    """A `pre_save_hook` of Jupyter's FileContentsManager: `strip_widgets` on every notebook saved.

    The state behind a widget view ends with the kernel, so a saved view could only be an error
    message when the notebook is opened again. The page that is open keeps its live widgets.
    """
    if model.get("type") == "notebook" and (model.get("content") or {}).get("nbformat") == 4:
        strip_widgets(model["content"])


def target_of(source: Path) -> Path:
    """Where the notebook of a source belongs."""
    return SOURCES.parent / source.relative_to(SOURCES).with_suffix(".ipynb")


def main(names: list[str]) -> None:
    """Build and execute the named lessons and demos, or all; run from the repository's root.

    Raises:
        ValueError: there is no source of a name.
    """
    import nbformat

    sources = {source.stem: source for source in sorted(SOURCES.rglob("*.py"))}
    if unknown := set(names) - set(sources):
        raise ValueError(f"names={sorted(unknown)} must be of {', '.join(sources)}")
    for name in names or sources:
        target = target_of(sources[name])
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(build_notebook(sources[name]), target)
        execute_notebook(target)
        print(f"{target}: {target.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
