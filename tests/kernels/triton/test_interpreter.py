"""The kernels against their references in Triton's interpreter, without a GPU.

Triton reads TRITON_INTERPRET when it is imported, and other tests import it without. So these run
in one process of their own; here stands a test for each of its files.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from ...helpers import ROOT

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.stem for path in FOLDER.glob("check_*.py"))
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton here")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """By file: each of its tests, and what went wrong in it; empty if nothing did."""
    report = tmp_path_factory.mktemp("interpreter") / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:nbval", "-p", "no:xdist",
        "-p", "no:cacheprovider", f"--confcutdir={FOLDER}", f"--junitxml={report}",
        "--override-ini=addopts=--import-mode=importlib",
        *(str(FOLDER / f"{name}.py") for name in FILES),
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert report.exists(), result.stdout + result.stderr
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.text or "" for child in case if child.tag in ("failure", "error", "skipped")]
        file = next(name for name in FILES if name in f"{case.get('classname')} {case.get('name')}")
        found[file].append((str(case.get("name")), "\n".join(bad)))
    return found


@pytest.mark.parametrize("name", FILES)
def test_kernels_do_what_their_references_do(
    name: str, outcomes: dict[str, list[tuple[str, str]]]
) -> None:
    assert len(outcomes[name]) >= 10, "its tests were not run"
    failed = [f"{test}\n{problem}" for test, problem in outcomes[name] if problem]
    assert not failed, "\n\n".join(failed)
