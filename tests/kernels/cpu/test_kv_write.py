"""What the kernels store of K and V is what pdlab's formats make of them, bit for bit."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pdlab_kernels.cpu import attention_reference
from pdlab_kernels.cpu.attention import attention
from pdlab_kernels.cpu.target import TARGET

from tests.kernels.cpu.attention_cases import Case, check_bytes, config_of, write

FORMATS = ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int8:token:1", "int4:token:2"]
FORMATS += ["fp8:token:32", "int8:head", "int8:channel", "int4:head", "int4:channel", "fp8:channel"]

CORNERS = [0.0, -0.0, 1e-45, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 2.0**-14, 2.0**-10, 2.0**-6]
CORNERS += [3 * 2.0**-11, 0.5, 1.5, 2.5, 448.0, 464.0, 65504.0, 65519.996, 65520.0, 3e38]
CORNERS += [math.inf, -math.inf]


def odd_values(shape: torch.Size, seed: int) -> torch.Tensor:
    """Floats of every size or of few, also those halfway between two codes, infinities, zeros."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, shape.numel(), np.uint32)
    x = bits.view(np.float32).copy()
    x[np.isnan(x)] = 0
    if seed % 3:  # of similar size, and so with many codes
        x = (bits.view(np.int32) / 2**31 * 2.0 ** (5 * (seed % 5) - 12)).astype(np.float32)
    if seed % 2 and seed % 3:
        x = (np.round(x * 256) / 256).astype(np.float16).astype(np.float32)
    if seed % 4 == 0:
        some = random.random(len(x)) < 0.05
        x[some] = random.choice(np.array(CORNERS, np.float32), some.sum())
    return torch.from_numpy(x).view(shape)


def store_both(case: Case) -> None:
    """Store a step's rows by the kernels and by pdlab, in fresh caches, and compare all bytes."""
    ours, theirs = case.cache(), case.cache()
    plan = case.plan(ours, ours.write_plan(case.step_slots))
    for layer in range(case.config.num_layers):
        attention(case.qkv, plan, layer)
    write(theirs, theirs.write_plan(case.step_slots), case.qkv)
    check_bytes(ours, theirs)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_every_value_is_stored_as_pdlab_stores_it(kv_format: str) -> None:
    for seed in range(24):
        tokens, block_size = 5 + seed, (1, 2, 4, 16)[seed % 4]
        case = Case([tokens], [tokens], config_of(2, 2, 32), block_size, kv_format)
        case.rows[0] = odd_values(case.rows[0].shape, seed)
        with np.errstate(all="ignore"):
            store_both(case)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e4, 1e30])
def test_values_of_any_size(kv_format: str, size: float) -> None:
    case = Case([70], [70], config_of(4, 2), 16, kv_format)
    case.rows[0] *= size
    store_both(case)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_rows_between_others_leave_them_alone(kv_format: str) -> None:
    """Steps that begin and end in the middle of blocks, in blocks that are not in order."""
    store_both(Case([37, 50, 16], [5, 11, 1], config_of(6, 2, 96), 8, kv_format, piece=3))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_nan_reaches_only_what_shares_its_scale(kv_format: str) -> None:
    case = Case([40], [40], config_of(2, 2), 8, kv_format)
    clean = case.cache()
    plan = case.plan(clean, clean.write_plan(case.step_slots))
    attention(case.qkv, plan, 0)
    case.rows[0][20, 2 * 64 + 5] = math.nan  # K of token 20, head 0, channel 5
    cache = case.cache()
    plan = case.plan(cache, cache.write_plan(case.step_slots))
    attention(case.qkv, plan, 0)
    k, expected = (c.read(case.tables[0], 40)[0, 0].float() for c in (cache, clean))
    bad = k.isnan().nonzero()
    assert [20, 0, 5] in bad.tolist()
    token_from = 16 if ":head" in kv_format or ":channel" in kv_format else 20
    assert set(bad[:, 0].tolist()) <= set(range(token_from, 24))
    assert set(bad[:, 1].tolist()) == {0}
    same = (k == expected) | k.isnan()
    same[token_from:24, 0] = True
    assert same.all()


def test_the_reference_stores_and_reads_the_same() -> None:
    for kv_format in FORMATS:
        case = Case([37, 50], [5, 11], config_of(4, 2), 8, kv_format, piece=5)
        expected, expected_cache = case.by_torch()
        cache = case.cache()
        plan = case.plan(cache, cache.write_plan(case.step_slots))
        out = attention_reference.attention(case.qkv, plan, 1)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=3e-5)
        check_bytes(cache, expected_cache)


# --- targets -------------------------------------------------------------------------------------

OTHER_TARGET = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from pdlab_kernels.cpu.target import TARGET
from tests.kernels.cpu.attention_cases import Case, config_of
found = {"target": TARGET}
for kv_format in ("fp16", "bf16", "fp8", "int8", "int4", "int8:head", "int4:channel"):
    case = Case([37, 130], [5, 70], config_of(6, 2), 16, kv_format)
    out, cache = case.by_kernels()
    found[kv_format] = [out, *(part for store in cache._each_store() for part in store.parts)]
torch.save(found, sys.argv[1])
"""


@pytest.mark.parametrize("target", ["plain", "torch"])
def test_every_target_stores_the_same_bytes(tmp_path: Path, target: str) -> None:
    if TARGET == "torch" and target == "plain":
        pytest.skip("no compiled kernels here")
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", OTHER_TARGET, str(tmp_path / "found"), str(root)],
        env=os.environ | {"PDLAB_CPU_KERNELS": target, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = torch.load(tmp_path / "found")
    assert found.pop("target") == target
    for kv_format, (out, *parts) in found.items():
        expected, cache = Case([37, 130], [5, 70], config_of(6, 2), 16, kv_format).by_kernels()
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=3e-5)
        ours = [part for store in cache._each_store() for part in store.parts]
        for part, other in zip(ours, parts, strict=True):
            assert torch.equal(part, other)
