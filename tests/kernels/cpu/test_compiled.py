"""Machine code is kept on disk, outside of the sources, and never outlives them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pdlab_kernels.cpu import target
from pdlab_kernels.cpu.target import TARGET

pytestmark = pytest.mark.skipif(TARGET == "torch", reason="no compiled kernels here")

PACKAGE = Path(target.__file__).parents[1]
# importing `weights` would import torch, which takes seconds and is not needed here
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from small.helper import kernel_of_helper
from small.compiled import FOLDER
out = np.zeros(8, np.float32)
kernel_of_helper(out)
print(int(out[0]), sum(kernel_of_helper.stats.cache_hits.values()), FOLDER)
"""
HELPER = """
from .compiled import kernel
from .words import value
from .simd import repeated, store_floats
import numpy as np

@kernel
def kernel_of_helper(out):
    store_floats(out, 0, repeated(np.float32(value())))
"""
WORDS = """
from .compiled import inlined

@inlined
def value():
    return {number}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A package with the kernels' ways of compiling, and one kernel with a helper elsewhere."""
    package = tmp_path / "code" / "small"
    package.mkdir(parents=True)
    for name in ("target.py", "compiled.py", "simd.py"):
        shutil.copy(PACKAGE / "cpu" / name, package)
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text(HELPER)
    (package / "words.py").write_text(WORDS.format(number=1))
    return package


def run(package: Path, **environment: str) -> list[str]:
    environment = {"PDLAB_CPU_KERNELS": TARGET} | environment
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package.parent)],
        env=os.environ | {"XDG_CACHE_HOME": str(package.parents[1] / "cache")} | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_code_is_kept_until_any_module_or_the_target_changes(small: Path) -> None:
    value, hits, folder = run(small)
    assert (value, hits) == ("1", "0")
    assert run(small) == ["1", "1", folder]
    # the kernel's own file stays as it is, to the time stamp
    (small / "words.py").write_text(WORDS.format(number=2))
    value, hits, other = run(small)
    assert (value, hits) == ("2", "0")
    assert other != folder
    if TARGET != "plain":
        value, hits, plain = run(small, PDLAB_CPU_KERNELS="plain")
        assert (value, hits) == ("2", "0")
        assert plain == other.removesuffix(f"-{TARGET}") + "-plain"
    assert not list(small.rglob("*.nbi"))


def test_kernels_run_where_nothing_can_be_written(small: Path) -> None:
    (small.parents[1] / "file").write_text("")
    assert run(small, NUMBA_CACHE_DIR=str(small.parents[1] / "file")) == ["1", "0", "None"]
