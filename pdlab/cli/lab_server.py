"""`pdlab lab`: JupyterLab on the first lesson."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import typer

from pdlab.shipped import shipped

LESSONS = "[0-9][0-9]_*.ipynb"
WORKING_FOLDER = "pdlab-lessons"
"""Where an installed pdlab, which has no clone to work in, puts the lessons."""

LAB_SETTINGS = {
    # the lessons carry static pictures instead, and stay small
    "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": False},
    # a lesson opens without asking, and works without a network
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
"""Defaults only: what a user sets in JupyterLab goes before them."""

SAVE_HOOK = "pdlab.workbench.notebooks.strip_before_save"
"""Keeps dead widgets out of the notebooks that a reader saves."""


def open_lab(port: int, *, browser: bool) -> None:
    """Fetch the default model if need be, and serve the lessons until the user stops it.

    Raises:
        FetchError: the model has to be fetched and cannot be.
        FileNotFoundError: there are no lessons in this installation.
    """
    from pdlab.models import default_model_directory

    folder = lessons_folder()
    lesson = first_lesson(folder)
    typer.echo(f"model: {default_model_directory(progress=True)}")
    typer.echo(f"lessons: {folder}")
    from jupyterlab.labapp import LabApp

    with tempfile.TemporaryDirectory(prefix="pdlab-lab-") as settings:
        write_settings(Path(settings))
        LabApp.launch_instance(
            argv=server_arguments(
                folder, lesson, settings_folder=Path(settings), port=port, browser=browser
            )
        )


def lessons_folder() -> Path:
    """The clone's own notebooks, or else a working copy of the installed ones.

    The copy is made in the current directory; files that are there already are the reader's work
    and stay as they are.
    """
    notebooks = shipped("notebooks")
    if (notebooks.parent / "pyproject.toml").is_file():
        return notebooks
    folder = Path.cwd() / WORKING_FOLDER
    copy_missing(notebooks, folder)
    return folder


def copy_missing(source: Path, target: Path) -> None:
    """Copy the notebooks under `source` that `target` does not have."""
    for path in sorted(source.rglob("*.ipynb")):
        copy = target / path.relative_to(source)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def first_lesson(folder: Path) -> str:
    """Name of the first lesson in reading order."""
    names = sorted(path.name for path in folder.glob(LESSONS))
    if not names:
        raise FileNotFoundError(f"there are no lessons ({LESSONS}) in {folder}")
    return names[0]


def write_settings(folder: Path) -> None:
    """Write LAB_SETTINGS where a JupyterLab with this settings folder reads them."""
    (folder / "overrides.json").write_text(json.dumps(LAB_SETTINGS))


def server_arguments(
    folder: Path, lesson: str, *, settings_folder: Path, port: int, browser: bool
) -> list[str]:
    """Command line of a JupyterLab that shows `lesson`, on `port` or a free one near it."""
    arguments = [
        f"--ServerApp.root_dir={folder}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=50",
        f"--ServerApp.open_browser={browser}",
        f"--LabApp.default_url=/lab/tree/{lesson}",
        f"--LabApp.app_settings_dir={settings_folder}",
        f"--FileContentsManager.pre_save_hook={SAVE_HOOK}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--allow-root")  # it listens on this machine only, and asks for a token
    return arguments
