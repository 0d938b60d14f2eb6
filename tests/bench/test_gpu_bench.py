"""`pdlab bench --gpu` without a GPU: what it refuses, plans and prints, and a dry run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import pdlab
from pdlab.bench import gpu
from pdlab.bench.contest import Entry, PeerProcess
from pdlab.bench.speed import Case, Ceilings
from pdlab.cli import app, bench_gpu

from .speed_helpers import peers_folder, starting

KERNELS: dict[str, Any] = {
    "device": "H1",
    "bandwidth_gb_s": 1000.0,
    "peak_tflop_s": 100.0,
    "correct": [],
    "timings": [],
    "failed": [],
    "not_reached": 0,
}
SMALL = (Case("b1 c8", 1, 8), Case("b2 c4", 2, 4))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROUNDS", 2)
    monkeypatch.setattr(gpu, "NUM_TOKENS", 6)
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)


def dry_run(tmp_path: Path, **options: Any) -> gpu.GpuBench:
    """All parts on a processor, the models behind a fake peer."""
    given = {"start": starting(peers_folder(tmp_path)), "kernels": lambda seconds: KERNELS}
    return gpu.measure_gpu(
        shapes=("tiny-llama", "tiny-qwen2"), cases=SMALL, device="cpu", **given | options
    )


def test_every_way_of_every_shape_is_measured_and_ended(tmp_path: Path) -> None:
    told: list[str] = []
    found = dry_run(tmp_path, tell=told.append)
    assert list(found.models) == ["tiny-llama", "tiny-qwen2"]
    for bench in found.models.values():
        names = [contestant.name for contestant in bench.contestants]
        assert names == [*gpu.WAYS, "transformers"]
        assert len(bench.samples) == len(names) * len(SMALL) * 2
        column = bench.columns()[0]
        assert bench.floor(bench.contestants[0], column) > 1e4  # of 1 MB at 1 TB/s
    assert told[0] == "kernels ..."
    assert len(told) == 1 + 2 * 4
    assert found.is_right


def test_where_no_time_is_left_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 1e6)
    found = dry_run(tmp_path)
    assert len(found.not_reached) == 8
    assert found.not_reached[0] == "tiny-llama: torch"
    assert not found.models["tiny-llama"].samples
    text = _printed(found)
    assert "no time left for tiny-qwen2: transformers" in text


def test_one_that_hangs_gets_no_more_than_the_time_that_is_left(tmp_path: Path) -> None:
    course = gpu._Course("random:tiny-llama", SMALL, lambda line: None)
    entry = Entry("stuck", "fake_peer", "-", "-", {"fails": "hangs", "at": "open"})
    course.run(entry, starting(peers_folder(tmp_path)), 0.5)
    bench = course.result(Ceilings(1e12, 1e14, 1.0), "H1")
    assert bench.skipped["stuck"].startswith("did not answer within 0 s")


def test_kernels_get_their_part_of_the_time(tmp_path: Path) -> None:
    given: list[float] = []

    def kernels(seconds: float) -> dict[str, Any]:
        given.append(seconds)
        return KERNELS

    dry_run(tmp_path, kernels=kernels, minutes=5.0)
    assert given == [pytest.approx(120.0)]


def test_pdlab_and_transformers_run_side_by_side_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of each, on this processor."""
    monkeypatch.setattr(gpu, "WAYS", {"torch": {"backend": "torch"}})

    def start(entry: Any, threads: int) -> PeerProcess:
        return PeerProcess(entry, 1)

    found = gpu.measure_gpu(
        shapes=("tiny-llama",),
        cases=(Case("b2 c4", 2, 4),),
        device="cpu",
        kernels=lambda seconds: KERNELS,
        start=start,
    )
    bench = found.models["tiny-llama"]
    names = {contestant.name: contestant for contestant in bench.contestants}
    assert names.keys() == {"torch", "transformers"}
    model = pdlab.load("random:tiny-llama")
    unread = model.decoder.embedding.nbytes  # of which a step reads a row
    assert names["torch"].weight_bytes == model.weight_bytes - unread
    assert names["transformers"].weight_bytes == (model.weight_bytes - unread) // 2  # in bf16
    assert names["torch"].kv_element_bytes == 4
    assert len(bench.token_ids["torch"]["b2 c4"]) == 2


def test_transformers_gets_the_same_shape() -> None:
    [*_, entry] = gpu.entries("llama-1b", "cuda")
    config = json.loads(entry.options["config"])
    assert (config["hidden_size"], config["num_key_value_heads"]) == (2048, 8)
    assert config["tie_word_embeddings"]
    assert entry.python == sys.executable


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    result = CliRunner().invoke(app, ["bench", "--gpu"])
    assert result.exit_code == 2
    assert result.stderr == (
        "pdlab: --gpu needs a CUDA GPU, and torch finds none here: nothing was measured\n"
    )


def test_a_wrong_kernel_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = gpu.GpuBench(KERNELS | {"failed": ["decode-bf16"]}, {}, [], 1.0)
    monkeypatch.setattr(bench_gpu, "measure_gpu", lambda **_: wrong)
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["bench", "--gpu", "--save", str(path)])
    assert result.exit_code == 1
    assert "failed: ['decode-bf16']" in result.stdout
    assert json.loads(path.read_text())["kernels"]["failed"] == ["decode-bf16"]


def test_the_report_has_a_table_for_each_shape(tmp_path: Path) -> None:
    text = _printed(dry_run(tmp_path))
    assert "H1: 1000 GB/s, 100 TFLOP/s in bf16; 0 checks, failed: none" in text
    for shape in ("tiny-llama, random weights", "tiny-qwen2, random weights"):
        assert shape in text
    for name in gpu.WAYS:
        assert text.count(f"\n{name}  ") == 2


@pytest.mark.parametrize("minutes", [0, 1000])
def test_minutes_out_of_range_are_named(minutes: float) -> None:
    with pytest.raises(ValueError, match=f"minutes={minutes}"):
        gpu.measure_gpu(minutes=minutes)


def _printed(found: gpu.GpuBench) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        for part in bench_gpu.report(found):
            console.print(part, soft_wrap=isinstance(part, str))
    return capture.get()
