"""What the kernels cannot do, they refuse with a ValueError that says why. No GPU, no memory."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("there is no Triton here", allow_module_level=True)

from pdlab_kernels.triton import attention, elementwise, linear, rotary, sampling
from pdlab_kernels.triton.resources import kv_parts, meta

HALF, INT = torch.float16, torch.int32


def decode_args(**changes: Any) -> dict[str, Any]:
    args: dict[str, Any] = {
        "q": meta(2, 8, 64),
        "k_parts": kv_parts("bf16", 64, 2),
        "v_parts": kv_parts("int4", 64, 2),
        "block_tables": meta(2, 9, dtype=INT),
        "context_lens": meta(2, dtype=INT),
    }
    return args | changes


def prefill_args(**changes: Any) -> dict[str, Any]:
    args = decode_args(q=meta(10, 8, 64), query_starts=meta(3, dtype=torch.int64))
    return args | changes


def rope_args(**changes: Any) -> dict[str, Any]:
    args: dict[str, Any] = {
        "q": meta(3, 8, 64),
        "k": meta(3, 2, 64),
        "v": meta(3, 2, 64),
        "cos": meta(99, 32, dtype=torch.float32),
        "sin": meta(99, 32, dtype=torch.float32),
        "positions": meta(3, dtype=torch.int64),
        "slots": meta(3, dtype=torch.int64),
        "k_parts": kv_parts("fp8", 64, 2),
        "v_parts": kv_parts("int8", 64, 2),
    }
    return args | changes


def sample_args(**changes: Any) -> dict[str, Any]:
    args: dict[str, Any] = {
        "logits": meta(2, 50, dtype=torch.float32),
        "temperature": meta(2, dtype=torch.float32),
        "top_k": meta(2, dtype=INT),
        "top_p": meta(2, dtype=torch.float32),
        "seeds": meta(2, dtype=torch.int64),
    }
    return args | changes


def norm_args(**changes: Any) -> dict[str, Any]:
    args = {"x": meta(2, 64), "residual": meta(2, 64), "weight": meta(64), "eps": 1e-5}
    return args | changes


def int8_args(**changes: Any) -> dict[str, Any]:
    args = {"x": meta(2, 64), "codes": meta(9, 64, dtype=torch.int8), "scales": meta(9, dtype=HALF)}
    return args | changes


def int4_args(**changes: Any) -> dict[str, Any]:
    args = {"x": meta(2, 64), "codes": meta(9, 32, dtype=torch.uint8)}
    return args | {"scales": meta(9, 2, dtype=HALF), "minima": meta(9, 2, dtype=HALF)} | changes


PLANS = {
    "decode": (attention.plan_decode_attention, decode_args),
    "prefill": (attention.plan_prefill_attention, prefill_args),
    "rope": (rotary.plan_rope_and_write_kv, rope_args),
    "norm": (elementwise.plan_add_rms_norm, norm_args),
    "silu": (elementwise.plan_silu_mul, lambda **changes: {"gate_up": meta(2, 64)} | changes),
    "int8": (linear.plan_int8_linear, int8_args),
    "int4": (linear.plan_int4_linear, int4_args),
    "sample": (sampling.plan_sample, sample_args),
}


@pytest.mark.parametrize("kernel", PLANS)
def test_what_is_right_is_taken(kernel: str) -> None:
    plan, args = PLANS[kernel]
    plan(**args())


channel = kv_parts("int8", 64, 2)[0], meta(1024, 1, 2, 1, 64, dtype=HALF)
many_groups = kv_parts("int8", 64, 2)[0], meta(1024, 16, 2, 32, 1, dtype=HALF)
strided = meta(1024, 16, 2, 128)[..., :64]
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("decode", {"q": meta(2, 8, 48)}, "head_dim=48, must be one of"),
    ("decode", {"q": meta(2, 8, 256)}, "head_dim=256, must be one of"),
    ("decode", {"q": meta(2, 7, 64)}, "num_heads=7 must be 1 to 16 times num_kv_heads=2"),
    ("decode", {"q": meta(2, 34, 64)}, "num_heads=34"),
    ("decode", {"q": meta(2, 8, 64, dtype=torch.float64)}, "q has dtype torch.float64"),
    ("decode", {"q": meta(2, 64, 8).transpose(1, 2)}, "q has strides"),
    ("decode", {"k_parts": kv_parts("bf16", 128, 2)}, "k_parts codes has shape"),
    ("decode", {"k_parts": kv_parts("bf16", 64, 4)}, "v_parts codes has shape"),
    ("decode", {"k_parts": channel}, "only scales of tokens"),
    ("decode", {"k_parts": many_groups}, "32 groups of channels a head, must be 1 to 16"),
    ("decode", {"k_parts": (strided,)}, "not contiguous"),
    ("decode", {"k_parts": kv_parts("int8", 64, 2)[:1]}, "1 parts with codes in torch.int8"),
    ("decode", {"k_parts": ()}, "0 parts"),
    ("decode", {"block_tables": meta(3, 9, dtype=INT)}, "block_tables has shape"),
    ("decode", {"block_tables": meta(2, 9)}, "block_tables has dtype"),
    ("decode", {"context_lens": meta(3, dtype=INT)}, "context_lens has shape"),
    ("decode", {"window": 0}, "window=0, must be at least 1"),
    ("decode", {"window": 4, "sinks": -1}, "sinks=-1"),
    ("decode", {"window": 4, "reach": 3}, "reach=3 must be at least window=4"),
    ("decode", {"num_splits": 65}, "num_splits=65, must be 1 to 64"),
    ("decode", {"q": torch.zeros(2, 8, 64, dtype=torch.bfloat16)}, "others are on cpu"),
    ("prefill", {"query_starts": meta(2, dtype=INT)}, "query_starts has shape"),
    ("prefill", {"query_starts": meta(3)}, "query_starts has dtype"),
    ("rope", {"k": meta(3, 3, 64)}, "k has shape"),
    ("rope", {"v": meta(3, 2, 64, dtype=HALF)}, "v has dtype"),
    ("rope", {"cos": meta(99, 64, dtype=torch.float32)}, "cos has shape"),
    ("rope", {"sin": meta(99, 32)}, "sin has dtype"),
    ("rope", {"slots": meta(4, dtype=INT)}, "slots has shape"),
    ("rope", {"positions": meta(3)}, "positions has dtype"),
    ("rope", {"k": meta(3, 64, 2).transpose(1, 2)}, "k has strides"),
    ("norm", {"weight": meta(63)}, "weight has shape"),
    ("norm", {"residual": meta(2, 64, dtype=HALF)}, "residual has dtype"),
    ("norm", {"residual": meta(2, 128)[:, :64]}, "residual is not contiguous"),
    ("norm", {"x": meta(2, 20000)}, "hidden_size=20000, must be 1 to 16384"),
    ("silu", {"gate_up": meta(2, 63)}, "63 columns"),
    ("silu", {"gate_up": meta(64, 2).T}, "strides"),
    ("int8", {"x": meta(2, 63)}, "x has shape"),
    ("int8", {"codes": meta(9, 64, dtype=torch.uint8)}, "must be int8"),
    ("int8", {"codes": meta(64, 9, dtype=torch.int8).T}, "codes is not contiguous"),
    ("int8", {"scales": meta(9)}, "scales have dtype torch.bfloat16"),
    ("int8", {"scales": meta(9, 3, dtype=HALF)}, "scales has shape"),
    ("int8", {"bias": meta(8)}, "bias has shape"),
    ("int8", {"num_splits": 17}, "num_splits=17"),
    ("int4", {"x": meta(2, 48), "codes": meta(9, 24, dtype=torch.uint8)}, "size_in=48"),
    ("int4", {"minima": meta(9, 2, dtype=torch.float32)}, "different dtypes"),
    ("int4", {"scales": meta(9, 4, dtype=HALF)}, "scales has shape"),
    ("sample", {"uniforms": meta(2, dtype=torch.float64)}, "not both or none"),
    ("sample", {"seeds": None}, "not both or none"),
    ("sample", {"seeds": meta(2)}, "seeds has dtype"),
    ("sample", {"top_k": meta(2, dtype=torch.float32)}, "top_k has dtype"),
    ("sample", {"top_p": meta(3, dtype=torch.float32)}, "top_p has shape"),
    ("sample", {"logits": meta(2, 50, dtype=torch.int32)}, "logits have dtype"),
    ("sample", {"logits": meta(2, 0, dtype=torch.float32)}, "no columns"),
]


@pytest.mark.parametrize(("kernel", "changes", "message"), CASES)
def test_what_cannot_be_done_is_refused(kernel: str, changes: dict[str, Any], message: str) -> None:
    plan, args = PLANS[kernel]
    with pytest.raises(ValueError, match=message):
        plan(**args(**changes))


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device=cpu: these kernels need a CUDA GPU"):
        elementwise.silu_mul(torch.zeros(2, 64))


def test_the_number_of_splits_depends_on_shapes_alone() -> None:
    """So a captured graph stays right: few sequences are split, a full batch is not."""
    splits = []
    for batch in (1, 8, 256):
        args = decode_args(
            q=meta(batch, 8, 64),
            block_tables=meta(batch, 512, dtype=INT),
            context_lens=meta(batch, dtype=INT),
        )
        _, launches = attention.plan_decode_attention(**args)
        splits.append(launches[0].grid[2])
    assert splits == [64, 32, 1]
