"""Download one file whose size and SHA-256 are known: with progress, resumable, checked."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm.auto import tqdm

from pdlab.models.cache import ChecksumError, FetchError

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 20.0
ATTEMPTS = 5
NETWORK_ERRORS = (OSError, http.client.HTTPException)  # OSError covers URLError and timeouts


@dataclass(frozen=True)
class Connection:
    """How to reach a server, beyond what the environment says (HTTPS_PROXY, SSL_CERT_FILE, ...).

    Attributes:
        ca_file: certificates to trust besides the system's, or "".
        proxy: URL of a proxy for http and https, or "".
    """

    ca_file: str = ""
    proxy: str = ""


DIRECT = Connection()


def open_url(
    url: str, connection: Connection = DIRECT, headers: dict[str, str] | None = None
) -> Any:
    """Open a URL; the caller closes what it gets.

    Raises:
        urllib.error.HTTPError, OSError: as urllib does.
    """
    trusted = (
        connection.ca_file
        or os.environ.get("REQUESTS_CA_BUNDLE")
        or os.environ.get("CURL_CA_BUNDLE")
    )
    context = ssl.create_default_context()
    if trusted and Path(trusted).is_file():
        context.load_verify_locations(trusted)
    handlers: list[Any] = [urllib.request.HTTPSHandler(context=context)]
    if connection.proxy:
        proxies = dict.fromkeys(("http", "https"), connection.proxy)
        handlers.append(urllib.request.ProxyHandler(proxies))
    request = urllib.request.Request(url, headers=headers or {})
    return urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S)


def download(
    url: str,
    target: Path,
    *,
    size_bytes: int,
    sha256: str,
    progress: bool = True,
    connection: Connection = DIRECT,
    retry_wait_s: float = 1.0,
) -> None:
    """Fetch `url` into `target`, going on from `target`.part where an earlier try stopped.

    A connection that breaks is taken up again a few times. The part file survives a failure of the
    network, but not a wrong checksum: going on from it could never come right.

    Raises:
        ChecksumError: what arrived is not the file; it is deleted.
        FetchError: the server refuses or the connection keeps breaking; what arrived is kept.
    """
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(
        total=size_bytes, desc=target.name, unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for attempt in range(ATTEMPTS):
            try:
                _fetch_rest(url, part, size_bytes, bar, connection)
                break
            except NETWORK_ERRORS as error:
                if attempt == ATTEMPTS - 1 or _is_final(error):
                    raise FetchError(f"download stopped at {_size(part)} bytes: {error}") from error
                time.sleep(retry_wait_s * 2**attempt)
    check_sha256(part, sha256, delete_if_wrong=True)
    os.replace(part, target)


def _fetch_rest(url: str, part: Path, size_bytes: int, bar: tqdm, connection: Connection) -> None:
    """Append the bytes that `part` lacks; start over if the server cannot resume."""
    if _size(part) > size_bytes:
        part.unlink()
    start = _size(part)
    _show(bar, start)
    if start == size_bytes:
        return
    headers = {"Range": f"bytes={start}-"} if start else None
    with open_url(url, connection, headers) as response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        _show(bar, start if resumed else 0)
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))
    if _size(part) < size_bytes:
        raise ConnectionError(f"the connection closed after {_size(part)} of {size_bytes} bytes")


def check_sha256(path: Path, expected: str, *, delete_if_wrong: bool = False) -> None:
    """Raise ChecksumError, naming both sums, unless the file has the expected SHA-256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == expected:
        return
    if delete_if_wrong:
        path.unlink()
    raise ChecksumError(
        f"{path.name} is corrupted{' and was deleted' if delete_if_wrong else ''}: "
        f"its SHA-256 is {found}, expected {expected}"
    )


def copy_checked(source: IO[bytes], target: Path, sha256: str) -> None:
    """Copy a stream to `target` under a scratch name, check it, then give it its name."""
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as file:
        while chunk := source.read(CHUNK_BYTES):
            file.write(chunk)
    check_sha256(part, sha256, delete_if_wrong=True)
    os.replace(part, target)


def _is_final(error: Exception) -> bool:
    """Whether trying again cannot help: the server says no, or the disk is full."""
    refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
    return refused or getattr(error, "errno", None) == errno.ENOSPC


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _show(bar: tqdm, position_bytes: int) -> None:
    bar.n = position_bytes
    bar.refresh()
