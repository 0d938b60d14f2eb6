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
"""
