"""Products with packed weights: against torch, on any rows and threads, by every target."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from pdlab_kernels.cpu import reference
from pdlab_kernels.cpu.linear import linear, panels_per_chunk
from pdlab_kernels.cpu.target import TARGET
from pdlab_kernels.cpu.weights import FORMATS, pack, pack_int4, pack_int8, pack_q8_0

SHAPES = [(1, 32), (8, 64), (37, 96), (100, 576), (33, 1536)]
CASES = [("fp32", 2), ("int8", 2), ("q8_0", 2), ("int4", 2), ("int4", 1)]  # format, planes
ROWS = [1, 2, 3, 4, 5, 16, 67]
needs_numba = pytest.mark.skipif(TARGET == "torch", reason="no compiled kernels here")


def rows_of(count: int, width: int) -> torch.Tensor:
    """Activations with an outlier, as models have them."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count + width))
    x[:, 5] *= 30
    return x


@pytest.fixture(scope="module")
def pair() -> Iterator[object]:
    from pdlab_kernels.cpu.team import Team

    with Team(2) as team:
        yield team


@pytest.mark.parametrize(("format", "planes"), CASES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_product_is_what_the_reference_computes(format, planes, out: int, width: int) -> None:
    weight = pack(torch.randn(out, width) * 0.05, format)
    for rows in ROWS:
        x = rows_of(rows, width)
        # float64: the reference's own rounding shall not be in the comparison
        seen = reference.rounded(x, weight, planes).double()
        values = reference.unpack(weight).double()
        limit = 2e-6 * (seen.abs() @ values.abs().T)
        error = linear(x, weight, planes=planes) - seen @ values.T
        assert (error.abs() <= limit).all(), rows


@needs_numba
@pytest.mark.parametrize(("format", "planes"), CASES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_has_the_same_bits_alone_among_others_and_on_two_threads(
    pair, format, planes, out: int, width: int
) -> None:
    weight = pack(torch.randn(out, width) * 0.05, format)
    for rows in (2, 5, 16) if format == "fp32" else ROWS:
        x = rows_of(rows, width)
        alone = torch.cat([linear(row[None], weight, planes=planes) for row in x])
        assert torch.equal(linear(x, weight, planes=planes), alone), rows
        assert torch.equal(linear(x, weight, pair, planes=planes), alone), rows
    assert pair.helper_error is None


@pytest.mark.parametrize("format", ["int8", "q8_0", "int4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_do_not_overflow(format, sign: int) -> None:
    ones, width = np.ones((16, 48), np.float16), 1536
    if format == "int4":
        weight = pack_int4(np.full((16, width), 15, np.uint8), ones, 0 * ones)
    elif format == "q8_0":
        weight = pack_q8_0(np.full((16, width), -128, np.int8), ones)
    else:
        weight = pack_int8(np.full((16, width), -128, np.int8), np.ones(16, np.float32))
    for rows in (1, 4):
        x = torch.full((rows, width), float(sign))
        largest = 15 if format == "int4" else -128
        expected = torch.full((rows, 16), float(sign * largest * width))
        torch.testing.assert_close(linear(x, weight), expected, rtol=1e-6, atol=0)


@needs_numba
def test_activations_are_rounded_to_the_codes_of_the_reference() -> None:
    from pdlab_kernels.cpu.activations import quantize_groups, quantize_row

    x = torch.cat([rows_of(3, 96), torch.zeros(1, 96), torch.full((1, 96), 1e-42)])
    codes, scales = np.empty((2, 5 * 96), np.int8), np.empty((2, 15), np.float32)
    sums, expected_sums = np.empty(15, np.float32), torch.zeros(5, 3)
    flat = x.view(-1).numpy()
    quantize_groups(flat, 0, codes.reshape(-1), scales.reshape(-1), sums, 0, 15, 2, 15)
    rest = x
    for plane in range(2):
        plane_codes, plane_scales, plane_sums = reference.quantize_groups(rest)
        np.testing.assert_array_equal(codes[plane], plane_codes.numpy().reshape(-1))
        np.testing.assert_array_equal(scales[plane], plane_scales.numpy().reshape(-1))
        rest = rest - (plane_codes.view(5, 3, 32) * plane_scales[..., None]).view(5, 96)
        expected_sums += plane_sums
    np.testing.assert_array_equal(sums, expected_sums.numpy().reshape(-1))
    wide, row_scales = np.empty(5 * 96, np.int16), np.empty(5, np.float32)
    for row in range(5):
        quantize_row(x.view(-1).numpy(), 96 * row, wide, row_scales, row, 96)
    expected_codes, expected_scales = reference.quantize_rows(x)
    np.testing.assert_array_equal(wide, expected_codes.numpy().reshape(-1))
    np.testing.assert_array_equal(row_scales, expected_scales.numpy())


@pytest.mark.parametrize(
    ("format", "planes", "limit"),
    [("int8", 2, 2e-4), ("q8_0", 2, 2e-4), ("int4", 2, 1e-4), ("int4", 1, 1.5e-2)],
)
def test_rounding_of_activations_costs_little(format, planes: int, limit: float) -> None:
    """Relative to the output's norm, with an outlier thirty times the others in each row."""
    weight = pack(torch.randn(576, 576) * 0.05, format)
    x = rows_of(64, 576)
    exact = x @ reference.unpack(weight).T
    assert (linear(x, weight, planes=planes) - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_its_row_only(format, value: float) -> None:
    weight = pack(torch.randn(20, 64) * 0.05, format)
    for rows in (1, 4):
        x = rows_of(rows, 64)
        clean = linear(x, weight)
        x[0, 40] = value
        y = linear(x, weight)
        assert not y[0].isfinite().any()
        assert torch.equal(y[1:], clean[1:])


@pytest.mark.parametrize("format", FORMATS)
def test_no_rows_give_no_rows(format) -> None:
    assert linear(torch.empty(0, 64), pack(torch.zeros(3, 64), format)).shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(64), "x: a float32 CPU matrix"),
        (torch.zeros(2, 64, dtype=torch.float64), "x: a float32 CPU matrix"),
        (torch.zeros(2, 64, device="meta"), "on meta"),
        (torch.zeros(2, 96), "x: it has 96 columns, the weight 64"),
    ],
)
def test_bad_input_is_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, pack(torch.zeros(3, 64), "int4"))


@pytest.mark.parametrize("planes", [0, 3])
def test_a_number_of_planes_that_there_is_not_is_refused(planes: int) -> None:
    with pytest.raises(ValueError, match=f"planes={planes}"):
        linear(torch.zeros(1, 64), pack(torch.zeros(3, 64), "int4"), planes=planes)


def test_chunks_are_many_enough_to_share_and_large_enough_to_pay() -> None:
    head, small = pack(torch.zeros(4096, 576), "int4"), pack(torch.zeros(64, 576), "int4")
    assert panels_per_chunk(small, rows=1, num_threads=2) == 1
    assert panels_per_chunk(small, rows=1, num_threads=1) == 4
    assert 16 < panels_per_chunk(head, rows=1, num_threads=2) <= 45
    assert panels_per_chunk(head, rows=1024, num_threads=2) == 1


# --- targets -------------------------------------------------------------------------------------

OTHER_TARGET = """
import sys, numpy as np, torch
from pdlab_kernels.cpu.linear import linear
from pdlab_kernels.cpu.target import TARGET
from pdlab_kernels.cpu.weights import pack
given = np.load(sys.argv[1])
found = {"target": TARGET}
for name in given.files:
    if name.startswith("x"):
        for format in ("fp32", "int8", "q8_0", "int4"):
            weight = pack(torch.from_numpy(given["w" + name[1:]]), format)
            found[f"{format} {name}"] = linear(torch.from_numpy(given[name]), weight).numpy()
np.savez(sys.argv[2], **found)
"""


def run_with(target: str, given: Path, found: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", OTHER_TARGET, str(given), str(found)],
        env=os.environ | {"PDLAB_CPU_KERNELS": target, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("target", ["plain", "torch"])
def test_every_target_computes_the_same(tmp_path: Path, target: str) -> None:
    if TARGET == "torch" and target == "plain":
        pytest.skip("no compiled kernels here")
    given = {}
    for (out, width), rows in product([(37, 96), (16, 576)], [1, 6]):
        name = f"{out} {width} {rows}"
        given |= {"x" + name: rows_of(rows, width).numpy()}
        given |= {"w" + name: (torch.randn(out, width) * 0.05).numpy()}
    np.savez(tmp_path / "given.npz", **given)
    result = run_with(target, tmp_path / "given.npz", tmp_path / "found.npz")
    assert result.returncode == 0, result.stderr
    found = np.load(tmp_path / "found.npz")
    assert found["target"] == target
    for format, name in product(FORMATS, [name[1:] for name in given if name[0] == "x"]):
        weight = pack(torch.from_numpy(given["w" + name]), format)
        expected = linear(torch.from_numpy(given["x" + name]), weight).numpy()
        np.testing.assert_allclose(
            found[f"{format} x{name}"], expected, rtol=1e-5, atol=1e-5, err_msg=f"{format} {name}"
        )


def test_an_unknown_target_is_refused_and_the_known_are_named() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import pdlab_kernels.cpu.target"],
        env=os.environ | {"PDLAB_CPU_KERNELS": "sse9"},
        capture_output=True,
        text=True,
    )
    assert "ValueError: PDLAB_CPU_KERNELS='sse9'" in result.stderr
    assert "known are avx2, plain, torch" in result.stderr
