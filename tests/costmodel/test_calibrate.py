"""Calibration: what it reports, and when it measures again."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdlab.costmodel import Hardware, calibrate

module = importlib.import_module("pdlab.costmodel.calibrate")  # the package exports the function


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path))
    return tmp_path / "calibration"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, round_machine: Hardware) -> list[Hardware]:
    """Replaces measuring; holds what was measured, each with another bandwidth."""
    taken: list[Hardware] = []

    def measure(key: dict) -> Hardware:
        hardware = replace(
            round_machine,
            measured=True,
            peak_flops={key["dtype"]: 100.0},
            bandwidth_bytes_s=10.0 + len(taken),
        )
        taken.append(hardware)
        return hardware

    monkeypatch.setattr(module, "_measure", measure)
    return taken


def test_the_second_call_reads_the_cache(measurements: list[Hardware], cache: Path) -> None:
    first, second = calibrate(), calibrate()
    assert first == second
    assert first.provenance == "measured"
    assert len(measurements) == 1
    assert len(list(cache.glob("*.json"))) == len(list(cache.iterdir())) == 1


def test_refresh_measures_again_and_replaces(measurements: list[Hardware]) -> None:
    calibrate()
    assert calibrate(refresh=True) == calibrate() == measurements[1]


def test_each_dtype_and_number_of_threads_has_its_own(
    measurements: list[Hardware], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(dtype="fp32")
    calibrate(dtype="bf16")
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    calibrate(dtype="fp32")
    assert len(measurements) == 3


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": 1}', '{"key": null, "hardware": {}}'],
    ids=["empty", "cut", "list", "null", "other-key", "no-key"],
)
def test_a_file_that_is_no_calibration_is_measured_again(
    measurements: list[Hardware], cache: Path, text: str
) -> None:
    calibrate()
    (path,) = cache.iterdir()
    path.write_text(text)
    assert calibrate() == measurements[1]
    assert json.loads(path.read_text())["hardware"]["bandwidth_bytes_s"] == 11.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bandwidth_bytes_s", 0),
        ("bandwidth_bytes_s", "fast"),
        ("peak_flops", {}),
        ("peak_flops", None),
        ("measured", False),
        ("details", {"processor_share": "all"}),
        ("unknown", 1),
    ],
)
def test_a_damaged_calibration_is_measured_again(
    measurements: list[Hardware], cache: Path, field: str, value: object
) -> None:
    calibrate()
    (path,) = cache.iterdir()
    stored = json.loads(path.read_text())
    stored["hardware"][field] = value
    path.write_text(json.dumps(stored))
    assert calibrate() == measurements[1]


def test_a_busy_machine_is_measured_three_times_and_the_highest_kept(
    measurements: list[Hardware], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = module._measure
    monkeypatch.setattr(
        module, "_measure", lambda key: replace(quiet(key), details={"processor_share": 0.5})
    )
    assert [calibrate().bandwidth_bytes_s for _ in range(5)] == [10, 11, 12, 12, 12]
    assert len(measurements) == 3


def test_a_lower_ceiling_never_replaces_a_higher_one(
    round_machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = replace(round_machine, measured=True, details={"processor_share": 0.5})
    slower = replace(
        busy, peak_flops={"fp32": 50.0}, bandwidth_bytes_s=20.0, details={"processor_share": 1.0}
    )
    results = iter([busy, slower])
    monkeypatch.setattr(module, "_measure", lambda key: next(results))
    calibrate()
    second = calibrate()
    assert (second.peak("fp32"), second.bandwidth_bytes_s) == (100, 20)
    assert calibrate() == second  # idle now, so this reads the cache


def test_a_cache_that_cannot_be_written_costs_only_time(
    measurements: list[Hardware], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path / "file"))
    calibrate()
    calibrate()
    assert len(measurements) == 2


def test_a_real_measurement_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of it runs, on buffers too small to mean anything."""
    monkeypatch.setattr(module, "LAST_SIZE", 256)
    monkeypatch.setattr(module, "STREAM_BYTES", {"cpu": 4 * 2**20})
    monkeypatch.setattr(module, "REPEAT_S", 0.01)
    hardware = calibrate("cpu", "fp32", refresh=True)
    assert hardware.measured
    assert hardware.peak("fp32") > 0
    assert 0 < hardware.details["processor_share"] <= 1
    assert hardware.bandwidth_bytes_s >= hardware.details["gemv_bytes_s"] > 0
    assert hardware.launch_s > 0
    assert torch.__version__ in hardware.source


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "int4", "dtype='int4' is not one of fp32, fp16, bf16"),
        ("tpu", "fp32", "device='tpu' is not one of cpu, cuda, cuda:N"),
        ("cpu:0", "fp32", "device='cpu:0' is not one of cpu, cuda, cuda:N"),
    ],
)
def test_bad_values_are_named(device: str, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(device, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device='cuda', but torch finds no CUDA GPU"):
        calibrate("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_by_its_own_clock() -> None:
    hardware = calibrate("cuda", "bf16")
    assert hardware.kind == "gpu"
    assert hardware.peak("bf16") > 1e12
    assert hardware.bandwidth_bytes_s > 1e11
