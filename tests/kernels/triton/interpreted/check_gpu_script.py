"""The script for a GPU, as far as it goes without one: its checks, at a tiny shape in fp16."""

from dataclasses import asdict, replace

import pytest
import torch
from pdlab_kernels.triton import gpu_cases, gpu_check
from pdlab_kernels.triton.gpu_cases import Load, cases
from pdlab_kernels.triton.gpu_correct import PARTS, Trial, Verdict
from pdlab_kernels.triton.gpu_inputs import TINY, Draw


@pytest.fixture(scope="module")
def found() -> list[Verdict]:
    torch.manual_seed(0)
    draw = Draw("cpu", torch.float16)
    trial = Trial(draw, TINY, lens=(40, 5), chunks=(3, 1), rows=(3,))
    return [verdict for part in PARTS for verdict in part(trial)]


KINDS = ("decode", "prefill", "rope", "add-rms-norm", "silu-mul", "int8-linear", "int4-linear",
         "sample")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_is_checked_and_right(kind: str, found: list[Verdict]) -> None:
    of_kind = [verdict for verdict in found if verdict.name.startswith(kind)]
    assert of_kind
    assert all(verdict.holds for verdict in of_kind), of_kind


def test_nothing_is_checked_that_is_no_kernel(found: list[Verdict]) -> None:
    assert all(verdict.name.startswith(KINDS) for verdict in found)
    assert len({verdict.name for verdict in found}) == len(found)


def test_a_wrong_kernel_would_be_told() -> None:
    right = Verdict("x", 0.0, 1e-3)
    assert right.holds
    assert not replace(right, error=2e-3).holds
    assert not replace(right, error=float("nan")).holds


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(gpu_check.NoDevice, match="no CUDA device"):
        gpu_check.check()


SMALL = Load(
    decode=((1, 33),), prefill=(([5], [5]), ([3], [9])), tokens=(2,), rows=(1,), sampled=(1,)
)


def test_every_case_can_be_made_run_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the clock."""
    monkeypatch.setattr(gpu_cases, "CACHE_BYTES", 0)
    monkeypatch.setattr(gpu_check, "time_plain", lambda runs, repeats: 2.0)
    monkeypatch.setattr(gpu_check, "time_graph", lambda runs, repeats: 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    draw = Draw("cpu", torch.float16)
    timings = [
        gpu_check.time_case(make(), bandwidth=1e9, peak=1e12) for make in cases(TINY, draw, SMALL)
    ]
    names = [timing.name for timing in timings]
    assert len(set(names)) == len(names)
    assert {kind for kind in KINDS if any(name.startswith(kind) for name in names)} == set(KINDS)
    for timing in timings:
        assert timing.floor_us == max(timing.bytes / 1e9, timing.flops / 1e12) * 1e6 > 0
        assert timing.share_of_floor == timing.floor_us
    results = {"device": "X", "bandwidth_gb_s": 1.0, "peak_tflop_s": 1.0, "correct": [],
               "timings": [asdict(t) | {"share_of_floor": 0.5} for t in timings],
               "failed": [], "not_reached": 0}  # fmt: skip
    lines = gpu_check.report(results).splitlines()
    assert [line.split()[0] for line in lines[2:]] == names
