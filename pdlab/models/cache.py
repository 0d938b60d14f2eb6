"""Where pdlab keeps what it fetched: one directory that several processes may use at once.

Two rules keep it sound. Whoever changes it holds a lock; and nothing gets its final name before
it is whole, so a crash, a full disk or Ctrl-C leaves at most a scratch file, which the next run
replaces. Reading needs no lock, and works from a read-only cache that a teacher filled for a class.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
from filelock import FileLock

MANIFEST = "pdlab.json"


class FetchError(RuntimeError):
    """Something could not be fetched or stored; the message says what to do about it."""


class ChecksumError(FetchError):
    """A file is not the one that was expected."""


def cache_dir() -> Path:
    """The directory named by PDLAB_CACHE, else the user's cache directory; may not exist yet."""
    override = os.environ.get("PDLAB_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("pdlab", appauthor=False))


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process at a time run the body; the system frees the lock of one that dies.

    Raises:
        FetchError: the cache cannot be written to.
    """
    lock = FileLock(cache_dir() / f"{name}.lock")
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise FetchError(
            f"cannot write to the cache: {error}. Set PDLAB_CACHE to a directory of yours."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty scratch directory that becomes `target` if the body succeeds.

    The caller holds the lock. A list of the files and their sizes goes in last; `is_complete`
    believes a directory only if it agrees with that list.
    """
    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir())}
        (scratch / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def is_complete(directory: Path) -> bool:
    """Whether `new_directory` finished this directory and its files still have their sizes."""
    try:
        sizes = json.loads((directory / MANIFEST).read_text())["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def require_space(needed_bytes: int, purpose: str) -> None:
    """Raise FetchError if the cache's disk has less than `needed_bytes` free."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(cache_dir()).free
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{purpose} needs {needed_bytes / 1e6:.0f} MB, but {cache_dir()} has "
            f"{free_bytes / 1e6:.0f} MB free. Set PDLAB_CACHE to a directory with more space."
        )


def cache_text(path: Path, text: str) -> None:
    """Write a file of the cache in one move, so that no reader sees half of it.

    One that cannot be written costs only time, when it is missed.
    """
    unfinished = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
