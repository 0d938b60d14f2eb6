"""`import pdlab` is quick: what only some users need is imported where it is used."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

HEAVY = ("transformers", "plotly", "ipywidgets", "ray", "IPython")


def loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after running `code`."""
    script = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import pdlab; pdlab.Engine, pdlab.load, pdlab.Trace",
        "import pdlab\nwith pdlab.Engine(pdlab.load('random:tiny-llama')) as e: e.generate([1, 2])",
    ],
    ids=["import", "generate"],
)
def test_heavy_packages_stay_out(code):
    loaded = loaded_by(code)
    assert {"pdlab", "torch"} <= loaded
    assert not loaded & set(HEAVY)


def test_the_command_line_starts_without_torch() -> None:
    loaded = loaded_by("from pdlab.cli import app")
    assert "pdlab" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
    ids=["unset", "set", "policy"],
)
def test_waiting_threads_sleep_soon_unless_told_otherwise(
    given: dict[str, str], found: str
) -> None:
    code = "import os, pdlab; print(os.environ.get('GOMP_SPINCOUNT'))"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {k: v for k, v in os.environ.items() if k not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == found
