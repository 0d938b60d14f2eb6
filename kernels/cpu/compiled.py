"""How kernels are compiled and where the machine code is kept.

Numba keeps code beside the source and looks only at the stamp of the file that holds the function:
a kernel would keep running with an old body of a helper from another module. Here the code lies in
the user's cache, in a folder named after the contents of *every* module of this package and after
the target, so that any change of any module compiles all anew.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
from numba import config, njit

from .target import TARGET

_KEPT = 4  # folders of other versions that are left in place

# boundscheck: callers check shapes. fastmath stays off: the order of additions is part of what a
# kernel promises (a row has the same bits in a batch of any size).
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


def sources_digest() -> str:
    """A name for the contents of all modules of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _make_folder() -> Path | None:
    """The folder for machine code; None where nothing can be written."""
    root = os.environ.get("NUMBA_CACHE_DIR") or platformdirs.user_cache_dir(
        "pdlab", appauthor=False
    )
    folder = Path(root) / "kernels" / f"{sources_digest()}-{TARGET}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    _forget_old(folder)
    return folder


def _forget_old(folder: Path) -> None:
    """Remove the folders of versions that have not been used for the longest time."""
    with contextlib.suppress(OSError):
        others = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
        for path in sorted(others, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)


FOLDER = _make_folder()


@contextlib.contextmanager
def _code_in(folder: Path | None) -> Iterator[bool]:
    """Where Numba keeps the code of what is decorated inside; yields whether it does at all."""
    settings: Any = config  # which has no declared names
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(folder or "")
    try:
        yield folder is not None
    finally:
        settings.CACHE_DIR = before


def kernel(function: Callable[..., Any]) -> Any:
    """Compile without the GIL, keeping the machine code on disk; called from Python or a kernel."""
    with _code_in(FOLDER) as kept:
        return njit(cache=kept, **_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A part of kernels, compiled into each of its callers."""
    return njit(forceinline=True, **_OPTIONS)(function)


def pasted(function: Callable[..., Any]) -> Any:
    """A part of kernels, which has a name of its own to be read; never compiled by itself.

    What a kernel calls is compiled again within it, and so on up: a part that is called in one
    place only costs less to compile if it is pasted there before.
    """
    return njit(inline="always", **_OPTIONS)(function)
