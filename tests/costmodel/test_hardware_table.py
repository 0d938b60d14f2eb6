"""The hardware table: sane rows, dense peaks, and a source for each."""

import pytest

from pdlab.costmodel import Hardware, load_hardware, ridge_point

TABLE = load_hardware()


@pytest.mark.parametrize("short_name", TABLE)
def test_every_row_is_sane(short_name: str) -> None:
    machine = TABLE[short_name]
    assert short_name == short_name.lower()
    assert len(machine.source) > 40
    assert machine.provenance == "published"
    assert 1e9 < machine.memory_bytes < 1e12
    assert 1e10 < machine.bandwidth_bytes_s <= 8e12
    assert "fp32" in machine.peak_flops
    for dtype in machine.peak_flops:
        assert 1 < ridge_point(machine, dtype) < 1000


@pytest.mark.parametrize("short_name", TABLE)
def test_a_narrower_dtype_is_never_slower(short_name: str) -> None:
    order = ("fp32", "tf32", "fp16", "fp8", "int8")
    peaks = [TABLE[short_name].peak_flops.get(dtype) for dtype in order]
    known = [peak for peak in peaks if peak is not None]
    assert known == sorted(known)


def test_rows_stand_in_the_order_of_rising_bandwidth() -> None:
    bandwidths = [machine.bandwidth_bytes_s for machine in TABLE.values()]
    assert bandwidths == sorted(bandwidths)
    assert len({machine.name for machine in TABLE.values()}) == len(TABLE)


@pytest.mark.parametrize(
    ("short_name", "dtype", "tflops", "ridge"),
    [
        ("a10", "fp16", 125, 208),
        ("l4", "fp16", 121, 403),
        ("a100-80gb", "bf16", 312, 153),
        ("h100-sxm", "bf16", 989, 295),
        ("rtx-4090", "bf16", 165, 164),
        ("b200", "bf16", 2250, 281),
    ],
)
def test_peaks_are_dense(short_name: str, dtype: str, tflops: int, ridge: int) -> None:
    """Datasheets print twice these numbers for 2:4 sparse weights, which no model here has."""
    machine = TABLE[short_name]
    assert round(machine.peak(dtype) / 1e12) == tflops
    assert round(ridge_point(machine, dtype)) == ridge


def test_a_dtype_without_a_peak_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype='bf16' has no peak on NVIDIA T4; known are fp32"):
        TABLE["t4"].peak("bf16")


def test_hardware_survives_a_round_trip() -> None:
    for machine in TABLE.values():
        assert Hardware.from_dict(machine.to_dict()) == machine


def test_every_gpu_says_how_fast_host_memory_is_reached() -> None:
    for machine in TABLE.values():
        if machine.kind == "gpu":
            assert machine.link_bytes_s is not None
            assert 1e9 < machine.link_bytes_s <= machine.bandwidth_bytes_s / 2


def test_ceilings_must_be_positive() -> None:
    row = TABLE["a10"].to_dict()
    with pytest.raises(ValueError, match="bandwidth_bytes_s=0 is not above the limit 0"):
        Hardware.from_dict({**row, "bandwidth_bytes_s": 0})
    with pytest.raises(ValueError, match=r"peak_flops\[fp32\]=-1 is not above the limit 0"):
        Hardware.from_dict({**row, "peak_flops": {"fp32": -1}})
