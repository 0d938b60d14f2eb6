"""Kernels for NVIDIA GPUs, written in Triton. They know tensors and nothing of pdlab.

    decode_attention, prefill_attention   attention over the paged KV cache, in any KV format
    rope_and_write_kv                     rotary embedding, KV write and quantization in one pass
    add_rms_norm, silu_mul                what stands between the matrix products
    int8_linear, int4_linear              matrix products with weights read in 8 or 4 bits
    sample                                temperature, top-k, top-p and the draw, without a sort

Each stands beside a short torch reference of the same signature in `reference.py`, checks what it
is given, and raises ValueError for what it cannot do. `work.py` counts the bytes and FLOPs of each.
`python -m pdlab_kernels.triton.resources` compiles all of them without a GPU;
`python -m pdlab_kernels.triton.gpu_check` measures them on one.

Triton itself, which there is for Linux only, is imported with the first kernel; `reference` and
`work` do without.
"""

from importlib import import_module
from typing import Any

MODULES = {
    "decode_attention": "attention",
    "prefill_attention": "attention",
    "rope_and_write_kv": "rotary",
    "add_rms_norm": "elementwise",
    "silu_mul": "elementwise",
    "int8_linear": "linear",
    "int4_linear": "linear",
    "sample": "sampling",
}

__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{MODULES[name]}", __name__), name)
