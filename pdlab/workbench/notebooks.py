"""Execute a lesson so that its outputs can be committed and read anywhere."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

import nbformat

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
MAX_NOTEBOOK_BYTES = 1_000_000
NOT_LIVE = "[interactive: run this cell]"


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
    target = Path(out) if out else path
    text = nbformat.writes(notebook)
    if len(text.encode()) > MAX_NOTEBOOK_BYTES:
        raise ValueError(f"{target} would have {len(text)} bytes, more than {MAX_NOTEBOOK_BYTES}")
    target.write_text(text + "\n", encoding="utf-8")
    return target


def strip_widgets(notebook: nbformat.NotebookNode) -> None:
    """Remove widget views and widget state in place; the static part of each output stays."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if data.pop(WIDGET_VIEW, None) is not None and not data:
                data["text/plain"] = NOT_LIVE
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
