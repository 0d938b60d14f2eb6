"""What is promised of the project as a whole: packaging, arrows, README, quick imports."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from .helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = [*(ROOT / "pdlab").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]


# --- packaging -----------------------------------------------------------------------------------


def test_every_package_is_named_in_pyproject() -> None:
    names = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    names = {re.sub(r"^kernels", "pdlab_kernels", name) for name in names}
    assert names | {"pdlab_data", "pdlab_notebooks"} == set(SETUPTOOLS["packages"])


def test_every_other_file_of_a_package_is_package_data() -> None:
    globs = SETUPTOOLS["package-data"]
    for package in SETUPTOOLS["packages"]:
        top, *rest = package.split(".")
        folder = ROOT.joinpath(SETUPTOOLS["package-dir"][top], *rest)
        patterns = [pattern.replace("**/", "*") for pattern in globs.get(package, [])]
        for path in _other_files(folder):
            name = path.relative_to(folder).as_posix()
            assert any(fnmatch(name, pattern) for pattern in patterns), f"{package}: {name}"


def _other_files(folder: Path) -> Iterator[Path]:
    """Files that are no modules, in this package and not in one below it."""
    for path in folder.rglob("*"):
        inside = path.parent
        while inside != folder and not (inside / "__init__.py").exists():
            inside = inside.parent
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if inside == folder and path.is_file() and path.suffix != ".py" and not hidden:
            yield path


def test_every_import_is_a_declared_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *extras["cluster"], *extras["test"]]
    declared = {_normal(re.match(r"[\w.-]+", line)[0]) for line in lines}  # type: ignore[index]
    owners = packages_distributions()
    known = {*sys.stdlib_module_names, "pdlab", "pdlab_kernels"}
    for path in SOURCES:
        for name in _imports(path) - known:
            distributions = {_normal(owner) for owner in owners.get(name, [])}
            # these come with jupyterlab and ipywidgets, and never without them
            distributions |= (
                {"jupyterlab"} if name in ("IPython", "nbclient", "nbformat") else set()
            )
            distributions |= {"ipywidgets"} if name in ("IPython", "traitlets") else set()
            assert distributions & declared, f"{path.relative_to(ROOT)} imports {name}"


def _imports(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- arrows --------------------------------------------------------------------------------------


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_arrows_go_one_way() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "planted", "contract"),
    [
        ("pdlab/engine/scheduler.py", "import pdlab.workbench", "Arrows go one way"),
        ("pdlab/models/config.py", "from pdlab.kvcache import BlockPool", "Arrows go one way"),
        ("pdlab/attention/exact.py", "def f(): from pdlab import costmodel", "Arrows go one way"),
        ("pdlab/newcomer.py", "", "Arrows go one way"),
        ("kernels/__init__.py", "import pdlab.models", "Kernels know tensors"),
        ("pdlab/engine/engine.py", "def f(): import plotly.io", "knows nothing of screens"),
        ("pdlab/workbench/frames.py", "import transformers", "computes the forward pass itself"),
        ("pdlab/costmodel/cost.py", "import torch", "plain data"),
    ],
)
def test_an_arrow_the_wrong_way_is_caught(
    tmp_path: Path, module: str, planted: str, contract: str
) -> None:
    for folder in ("pdlab", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    (tmp_path / "pdlab_kernels").symlink_to("kernels")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{planted}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert re.search(rf"{contract}.* BROKEN", result.stdout), result.stdout


# --- imports -------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` ran in a fresh interpreter."""
    code += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_pdlab_loads_nothing_heavy_but_torch() -> None:
    loaded = loaded_by("import pdlab; pdlab.Engine, pdlab.load, pdlab.Trace")
    assert "torch" in loaded
    assert not loaded & {"transformers", "plotly", "ipywidgets", "anywidget", "IPython", "ray"}


def test_importing_the_workbench_loads_nothing_that_only_builds_notebooks() -> None:
    loaded = loaded_by("import pdlab.workbench")
    assert "ipywidgets" in loaded
    assert not loaded & {"transformers", "nbformat", "nbclient", "jupytext", "jsonschema"}


# --- README --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["pip install -e . && pdlab lab", 'pip install -e ".[test]" && pytest']
)
def test_readme_has_the_two_commands(command: str) -> None:
    assert f"\n    {command}\n" in README


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert """test_command='pip install -e ".[test]" && pytest'""" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_example_in_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
    assert (tmp_path / "run.json.gz").exists()
    assert (tmp_path / "run.perfetto.json").exists()


def test_links_in_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link


def test_readme_names_every_room_and_command() -> None:
    rooms = {path.parent.name for path in (ROOT / "pdlab").glob("*/__init__.py")}
    for name in rooms | {"pdlab run", "pdlab lab", "pdlab models", "pdlab doctor"}:
        assert name in README
