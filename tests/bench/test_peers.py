"""A peer is a process that may do anything: the bench gets its answer, or a reason, in time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdlab.bench.contest import STARTER, Entry, PeerError, PeerProcess, _environment
from pdlab.bench.entries import MODES, PEERS, mode_entry, peer_entry
from pdlab.bench.peers.serve import Clock, files_bytes

from .speed_helpers import peers_folder

PROMPTS = [[1, 2, 3], [10, 20, 30]]
WAIT_S = 30.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PeerProcess]]:
    """Starts a fake peer through the real scripts."""
    starter = peers_folder(tmp_path)
    started = []

    def begin(**options: str) -> PeerProcess:
        entry = Entry("fake", "fake_peer", sys.executable, "none", options)
        peer = PeerProcess(entry, 3, [sys.executable, str(starter), "fake_peer"])
        started.append(peer)
        return peer

    yield begin
    for peer in started:
        peer.close()


def test_a_peer_answers_whatever_its_libraries_print(start: Callable[..., PeerProcess]) -> None:
    peer = start()
    about = peer.open([[1]], 100, WAIT_S)
    assert about["version"] == "1"  # and not what stood on stdout
    assert about["settings"] == "3 threads, 3 for OpenMP"
    answer = peer.generate(PROMPTS, 5, WAIT_S)
    assert answer.token_ids == [[3, 4, 5, 6, 7], [30, 31, 32, 33, 34]]
    assert answer.rest_tokens == 8
    assert answer.first_s > 0
    assert answer.rest_s > 0


def test_a_peer_that_is_at_rest_does_nothing_until_it_is_woken(
    start: Callable[..., PeerProcess],
) -> None:
    peer = start()
    peer.open([[1]], 100, WAIT_S)
    peer.rest()
    status = Path(f"/proc/{peer._process.pid}/stat")
    if status.exists():
        until = time.monotonic() + WAIT_S
        while status.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < until
    peer.wake()
    assert peer.generate(PROMPTS, 2, WAIT_S).rest_tokens == 2


def test_a_peer_that_hangs_is_ended(start: Callable[..., PeerProcess]) -> None:
    peer = start(fails="hangs")
    peer.open([[1]], 100, WAIT_S)
    with pytest.raises(PeerError, match=r"did not answer within 0 s: \.\.\. .*about to: hangs"):
        peer.generate(PROMPTS, 5, 0.3)
    assert peer._process.poll() == -signal.SIGKILL
    with pytest.raises(PeerError, match="is gone"):
        peer.generate(PROMPTS, 5, WAIT_S)


def test_a_peer_that_dies_leaves_its_status_and_its_last_words(
    start: Callable[..., PeerProcess],
) -> None:
    peer = start(fails="dies", at="open")
    with pytest.raises(PeerError, match=r"died with status 7: \.\.\. .*about to: dies"):
        peer.open([[1]], 100, WAIT_S)


def test_a_peer_that_refuses_says_why_and_lives(start: Callable[..., PeerProcess]) -> None:
    peer = start(fails="refuses")
    peer.open([[1]], 100, WAIT_S)
    with pytest.raises(PeerError, match="ValueError: no such model"):
        peer.generate(PROMPTS, 5, WAIT_S)
    assert peer.generate(PROMPTS, 3, WAIT_S).rest_tokens == 4


def test_an_answer_of_another_length_is_none(start: Callable[..., PeerProcess]) -> None:
    peer = start(fails="short")
    peer.open([[1]], 100, WAIT_S)
    with pytest.raises(PeerError, match=r"gave \[4, 4\] tokens where 5 a prompt were asked for"):
        peer.generate(PROMPTS, 5, WAIT_S)


def test_a_python_that_is_not_there_is_named() -> None:
    entry = Entry("gone", "llama_cpp", "/nowhere/python", "none")
    with pytest.raises(PeerError, match="cannot start /nowhere/python: No such file"):
        PeerProcess(entry, 1)


def test_a_library_that_is_not_there_is_named() -> None:
    """Through the shipped scripts, as they are started."""
    entry = Entry("x", "ctranslate2", sys.executable, "none")
    with (
        PeerProcess(entry, 1) as peer,
        pytest.raises(PeerError, match="No module named 'ctranslate2'"),
    ):
        peer.open([[1]], 100, WAIT_S)


def test_an_incomplete_answer_is_noticed(start: Callable[..., PeerProcess], monkeypatch) -> None:
    peer = start()
    monkeypatch.setattr(peer, "_ask", lambda *_, **__: {"version": "1"})
    with pytest.raises(PeerError, match="does not say its kv_element_bytes, settings, weight"):
        peer.open([[1]], 100, WAIT_S)
    with pytest.raises(PeerError, match="answers without 'token_ids'"):
        peer.generate(PROMPTS, 5, WAIT_S)


def test_the_starter_leaves_nothing_of_its_folder_on_the_path(tmp_path: Path) -> None:
    """A module `transformers.py` beside it must not stand for the library."""
    starter = peers_folder(tmp_path)
    (starter.parent / "fake_peer.py").write_text("import sys; raise ValueError(str(sys.path))")
    question = '{"number": 1, "do": "open"}\n'
    command = [sys.executable, str(starter), "fake_peer"]
    result = subprocess.run(command, input=question, capture_output=True, text=True, check=True)
    assert "ValueError" in result.stdout
    assert str(tmp_path) not in result.stdout


def test_a_peer_runs_as_if_it_had_been_started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "GOMP_SPINCOUNT", "KEPT"):
        monkeypatch.setenv(name, "ours")
    ours = _environment(Entry("x", "pdlab_engine", sys.executable, ""), 4)
    assert {"PYTHONPATH", "GOMP_SPINCOUNT", "KEPT"} <= ours.keys()
    assert ours["OMP_NUM_THREADS"] == "4"
    beside = _environment(Entry("x", "transformers", sys.executable, ""), 4)
    assert ours.keys() - beside.keys() == {"GOMP_SPINCOUNT"}
    elsewhere = _environment(Entry("x", "vllm", "/other/python", ""), 4)
    assert {"PYTHONPATH", "GOMP_SPINCOUNT"} <= ours.keys() - elsewhere.keys()
    assert elsewhere["KEPT"] == "ours"


# --- who takes part ------------------------------------------------------------------------------


def test_every_kind_of_peer_has_its_script() -> None:
    for kind in {*PEERS.values(), "pdlab_engine"}:
        assert "def open_peer(" in (STARTER.parent / f"{kind}.py").read_text(encoding="utf-8")


def test_modes_become_entries() -> None:
    assert [mode_entry(mode).name for mode in MODES] == list(MODES)
    entry = mode_entry("cpu int4:gptq int8:head")
    assert entry.is_pdlab
    expected = {"backend": "cpu", "weights": "int4:gptq", "kv_format": "int8:head"}
    assert entry.options == expected


def test_peers_become_entries() -> None:
    entry = peer_entry("ctranslate2 int8=/envs/ct2/bin/python,/models/ct2,compute_type=int8")
    assert (entry.name, entry.kind) == ("ctranslate2 int8", "ctranslate2")
    assert (entry.python, entry.model) == ("/envs/ct2/bin/python", "/models/ct2")
    assert entry.options == {"compute_type": "int8"}
    assert not entry.is_pdlab


def test_a_peer_without_a_model_takes_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlab.bench.entries.fetch_model_file", lambda wheel: Path("/x.gguf"))
    monkeypatch.setattr("pdlab.bench.entries.default_model_directory", lambda: Path("/hf"))
    assert peer_entry("llama.cpp=/p").model == "/x.gguf"
    assert peer_entry("openvino-genai=/p").model == "/x.gguf"
    assert peer_entry("vllm=/p").model == "/hf"
    both = peer_entry("transformers bf16=/p,dtype=bf16")
    assert (both.model, both.options) == ("/hf", {"dtype": "bf16"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama.cpp", r"must be NAME=PYTHON"),
        ("=python", r"must be NAME=PYTHON"),
        ("unheard=/p", r"begins with one of transformers, llama.cpp"),
        ("ctranslate2=/p", r"needs the directory of its converted model"),
        ("llama.cpp=/p,/m,odd", r"'odd' is not OPTION=VALUE"),
    ],
)
def test_a_bad_peer_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peer_entry(text)


@pytest.mark.parametrize("text", ["", "cpu", "cpu int8 int8 int8"])
def test_a_bad_mode_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="must be BACKEND WEIGHTS"):
        mode_entry(text)


# --- the peer's side -----------------------------------------------------------------------------


def test_the_clock_waits_for_the_last_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt 0 decodes while prompt 1 is still computed: its tokens until then are no decoding."""
    times = iter([100.0, 101.0, 102.0, 103.0, 105.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = Clock(2)
    clock.emit(0)
    clock.emit(0)
    clock.emit(0, 1)
    clock.emit(1)
    assert clock.summary() == {"first_s": 3.0, "rest_s": 2.0, "rest_tokens": 1}


def test_bytes_of_files_are_those_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"12345")
    (tmp_path / "b.json").write_bytes(b"1")
    assert files_bytes(str(tmp_path), (".bin",)) == 5
    assert files_bytes(str(tmp_path / "b.json"), (".bin",)) == 1


def test_what_runs_elsewhere_needs_no_pdlab() -> None:
    """Nothing but the standard library, and modules beside it; libraries by `import_module`."""
    for path in STARTER.parent.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import ", "from ")):
                name = line.split()[1].split(".")[0]
                assert not name or name in sys.stdlib_module_names, f"{path.name}: {line}"
