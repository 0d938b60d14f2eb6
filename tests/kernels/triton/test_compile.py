"""Every kernel compiles for an A100 (sm_80) and an H100 (sm_90), and fits on it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("there is no Triton here", allow_module_level=True)

from pdlab_kernels.triton.resources import SHARED_LIMITS, Resources

from ...helpers import ROOT

ON_BOTH = [
    "decode-bf16-d128",
    "decode-int4-d128",
    "rope-int4",
    "norm",
    "silu",
    "linear-m8",
    "sample-uniforms",
]
ON_ONE = {
    80: ["prefill-fp8-d128-short", "prefill-int8-d128-window", "prefill-bf16-d128-window"],
    90: ["prefill-bf16-d128-short", "prefill-int4-d128-window", "decode-fp8", "linear-m64",
         "rope-bf16", "sample-seeds"],
}  # fmt: skip
"""Compiling takes a second or two a variant, so not all are compiled here: of prefill, those
that take most registers."""
KERNELS = {
    "decode_attention_kernel", "reduce_splits_kernel", "prefill_attention_kernel",
    "rope_and_write_kv_kernel", "add_rms_norm_kernel", "silu_mul_kernel", "int8_linear_kernel",
    "int4_linear_kernel", "add_splits_kernel", "sample_kernel",
}  # fmt: skip


@pytest.fixture(scope="module", params=[80, 90], ids=["sm_80", "sm_90"])
def compiled(request: pytest.FixtureRequest) -> list[Resources]:
    """Resources of each variant. In a process of its own: TRITON_INTERPRET must not be set."""
    only = ON_BOTH + ON_ONE[request.param]
    command = [
        sys.executable, "-m", "pdlab_kernels.triton.resources", "--json",
        "--sm", str(request.param), "--only", *only,
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.fail(result.stderr)
    rows = json.loads(result.stdout)
    return [Resources(**{k: v for k, v in row.items() if k != "problems"}) for row in rows]


def test_every_kernel_compiles(compiled: list[Resources]) -> None:
    assert {row.kernel for row in compiled} == KERNELS


def test_no_kernel_spills_or_asks_for_more_than_there_is(compiled: list[Resources]) -> None:
    problems = {row.name: row.problems for row in compiled if row.problems}
    assert not problems


def test_matrix_products_are_done_by_tensor_cores(compiled: list[Resources]) -> None:
    for row in compiled:
        multiplies = "attention" in row.kernel or "linear" in row.kernel
        few_rows = "decode" in row.name or "m8" in row.name
        if multiplies:
            wide = row.sm == 90 and not few_rows
            assert row.tensor_core == ("wgmma" if wide else "mma.sync"), row.name


def test_room_is_left_for_a_second_program_where_memory_is_the_limit(
    compiled: list[Resources],
) -> None:
    """Kernels that wait for memory hide it by taking turns on a multiprocessor. Not prefill, which
    computes, nor sampling, which has a program a sequence.
    """
    for row in compiled:
        if "prefill" not in row.name and "sample" not in row.name:
            assert 2 * row.registers * row.threads <= 65_536, row.name
            assert 2 * row.shared_bytes <= SHARED_LIMITS[row.sm], row.name


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"spilled_bytes": 8}, "spills 8"), ({"shared_bytes": 232_449}, "232449 bytes of 232448"),
     ({"registers": 255, "threads": 512}, "130560 registers")],
)  # fmt: skip
def test_what_does_not_fit_is_told(change: dict[str, int], problem: str) -> None:
    fine = {"registers": 32, "spilled_bytes": 0, "shared_bytes": 0, "threads": 128}
    rest = {"name": "x", "kernel": "x", "sm": 90, "tensor_core": ""}
    assert Resources(**rest, **fine, seconds=0.0).problems == []  # type: ignore[arg-type]
    (told,) = Resources(**rest, **(fine | change), seconds=0.0).problems  # type: ignore[arg-type]
    assert problem in told
