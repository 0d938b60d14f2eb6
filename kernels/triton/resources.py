"""Compile every kernel without a GPU, and say what it takes: registers, spills, shared memory.

    python -m pdlab_kernels.triton.resources [--json] [--sm 80 90] [--only NAME ...]

What is compiled is what the launchers launch: each variant is planned by its own launcher, from
tensors of device "meta", which have shapes and dtypes but no memory. Triton does not complain when
a kernel asks for more shared memory than a card has; `problems` does.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import attention, elementwise, linear, rotary, sampling
from .launch import INTERPRETED, Launch, require

SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that a program may have, by compute capability (CUDA C++ guide, table
"Technical Specifications per Compute Capability": 163, 99 and 227 KiB)."""
MAX_REGISTERS = 255
SMS = (80, 90)

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one kind of card."""

    name: str
    kernel: str
    sm: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread: registers that did not fit and went to memory. cuobjdump calls it STACK; what it
    calls LOCAL stays 0. These kernels have no arrays that would stand there otherwise."""
    shared_bytes: int
    """Of a program."""
    threads: int
    tensor_core: str
    """Which matrix instruction it uses; empty if none."""
    seconds: float
    """To compile it here."""

    @property
    def problems(self) -> list[str]:
        """Why it would run badly or not at all."""
        found = []
        if self.spilled_bytes:
            found.append(f"spills {self.spilled_bytes} bytes a thread")
        if self.shared_bytes > SHARED_LIMITS[self.sm]:
            found.append(f"wants {self.shared_bytes} bytes of {SHARED_LIMITS[self.sm]} shared")
        if self.registers * self.threads > 65_536:
            found.append(f"wants {self.registers * self.threads} registers of 65536")
        return found


# --- variants ------------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kv_parts(
    kv_format: str, head_dim: int, num_kv_heads: int = 8, block_size: int = 16, blocks: int = 1024
) -> tuple[Tensor, ...]:
    """Tensors that K or V is stored in, without memory. int4 has groups of 32."""
    shape = (blocks, block_size, num_kv_heads)
    floats = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if kv_format in floats:
        return (meta(*shape, head_dim, dtype=floats[kv_format]),)
    if kv_format == "int4":
        scales = [meta(*shape, head_dim // 32, 1, dtype=torch.float16) for _ in range(2)]
        return meta(*shape, head_dim // 2, dtype=torch.uint8), *scales
    codes = meta(*shape, head_dim, dtype={"int8": torch.int8, "fp8": torch.uint8}[kv_format])
    return codes, meta(*shape, 1, 1, dtype=torch.float16)


def decode_variant(kv_format: str, head_dim: int, ratio: int = 4, **window: int) -> list[Launch]:
    parts = kv_parts(kv_format, head_dim)
    dtype = torch.float32 if kv_format == "fp32" else torch.bfloat16
    tables, lens = meta(8, 512, dtype=torch.int32), meta(8, dtype=torch.int32)
    q = meta(8, 8 * ratio, head_dim, dtype=dtype)
    return attention.plan_decode_attention(q, parts, parts, tables, lens, **window)[1]


def prefill_variant(
    kv_format: str, head_dim: int, ratio: int = 4, tokens: int = 2048, **window: int
) -> list[Launch]:
    parts = kv_parts(kv_format, head_dim)
    dtype = torch.float32 if kv_format == "fp32" else torch.bfloat16
    tables, lens = meta(8, 512, dtype=torch.int32), meta(8, dtype=torch.int32)
    starts, q = meta(9, dtype=torch.int32), meta(tokens, 8 * ratio, head_dim, dtype=dtype)
    return [attention.plan_prefill_attention(q, parts, parts, tables, starts, lens, **window)[1]]


def rope_variant(kv_format: str, head_dim: int) -> list[Launch]:
    parts = kv_parts(kv_format, head_dim)
    heads = meta(8, 48, head_dim)
    cos, row = meta(4096, head_dim // 2, dtype=torch.float32), meta(8, dtype=torch.int64)
    q, k, v = heads[:, :32], heads[:, 32:40], heads[:, 40:]
    return [rotary.plan_rope_and_write_kv(q, k, v, cos, cos, row, row, parts, parts)[1]]


def norm_variant() -> list[Launch]:
    x = meta(8, 4096)
    return [elementwise.plan_add_rms_norm(x, meta(8, 4096), meta(4096), 1e-5)[2]]


def silu_variant() -> list[Launch]:
    return [elementwise.plan_silu_mul(meta(8, 28672))[1]]


def int8_variant(rows: int) -> list[Launch]:
    codes, scales = meta(4096, 4096, dtype=torch.int8), meta(4096, dtype=torch.float16)
    return linear.plan_int8_linear(meta(rows, 4096), codes, scales)[1]


def q8_0_variant(rows: int) -> list[Launch]:
    codes, scales = meta(4096, 4096, dtype=torch.int8), meta(4096, 128, dtype=torch.float16)
    return linear.plan_int8_linear(meta(rows, 4096), codes, scales)[1]


def int4_variant(rows: int) -> list[Launch]:
    codes = meta(4096, 2048, dtype=torch.uint8)
    scales = [meta(4096, 128, dtype=torch.float16) for _ in range(2)]
    return linear.plan_int4_linear(meta(rows, 4096), codes, *scales)[1]


def sample_variant(chance: str) -> list[Launch]:
    floats = [meta(8, dtype=torch.float32) for _ in range(3)]
    temperature, top_p, min_p = floats
    dtype = torch.float64 if chance == "uniforms" else torch.int64
    logits, top_k = meta(8, 128256, dtype=torch.float32), meta(8, dtype=torch.int32)
    chances: dict[str, Any] = {chance: meta(8, dtype=dtype)}
    return [sampling.plan_sample(logits, temperature, top_k, top_p, min_p, **chances)[1]]


def variants() -> dict[str, Callable[[], list[Launch]]]:
    """Name of each variant, and what plans its launches."""
    found: dict[str, Callable[[], list[Launch]]] = {}
    for kv_format, head_dim in (
        ("bf16", 64), ("bf16", 80), ("bf16", 128), ("fp8", 128), ("int8", 128), ("int4", 128),
        ("int4", 64), ("fp32", 64),
    ):  # fmt: skip
        name = f"{kv_format}-d{head_dim}"
        found[f"decode-{name}"] = partial(decode_variant, kv_format, head_dim)
        found[f"prefill-{name}"] = partial(prefill_variant, kv_format, head_dim)
    window = {"window": 4096, "sinks": 4}
    found["decode-bf16-d64-r3-window"] = partial(decode_variant, "bf16", 64, 3, **window)
    found["prefill-bf16-d64-r3-window"] = partial(prefill_variant, "bf16", 64, 3, **window)
    for kv_format in ("bf16", "fp8", "int8", "int4"):
        name = f"prefill-{kv_format}-d128"
        found[f"{name}-window"] = partial(prefill_variant, kv_format, 128, **window)
        found[f"{name}-short"] = partial(prefill_variant, kv_format, 128, tokens=64)
        found[f"rope-{kv_format}-d128"] = partial(rope_variant, kv_format, 128)
    found["add-rms-norm"] = norm_variant
    found["silu-mul"] = silu_variant
    for rows in (8, 64):
        found[f"int8-linear-m{rows}"] = partial(int8_variant, rows)
        found[f"q8_0-linear-m{rows}"] = partial(q8_0_variant, rows)
        found[f"int4-linear-m{rows}"] = partial(int4_variant, rows)
    found["sample-uniforms"] = partial(sample_variant, "uniforms")
    found["sample-seeds"] = partial(sample_variant, "seeds")
    return found


# --- compiling -----------------------------------------------------------------------------------


def compile_launch(name: str, launch: Launch, sm: int) -> Resources:
    """Compile what a launch would, specialized as Triton does it: aligned pointers and numbers."""
    require(not INTERPRETED, "TRITON_INTERPRET is set: the interpreter compiles nothing")
    names = launch.kernel.arg_names
    general = {p.name for p in launch.kernel.params if p.do_not_specialize}
    anywhere = {p.name for p in launch.kernel.params if p.do_not_specialize_on_alignment}
    constants, signature, aligned = dict(launch.constants), {}, {}
    for index, arg in enumerate(names):
        value = launch.args.get(arg)
        number = isinstance(value, int) and arg not in general
        if arg in constants or value is None or (number and value == 1):
            constants.setdefault(arg, value)
            signature[arg] = "constexpr"
            continue
        if isinstance(value, Tensor):
            signature[arg] = "*" + TYPES[value.dtype]
        else:
            signature[arg] = "i32" if isinstance(value, int) else "fp32"
        placed = isinstance(value, Tensor) and arg not in anywhere
        if placed or (number and value % 16 == 0):
            aligned[(index,)] = [["tt.divisibility", 16]]
    started = time.perf_counter()
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", sm, 32),
        options={
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "enable_fp_fusion": launch.contract,
        },
    )
    seconds = time.perf_counter() - started
    registers, spilled = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    instructions = [name for name in ("wgmma", "mma.sync") if name in ptx]
    return Resources(
        name=name,
        kernel=compiled.metadata.name,
        sm=sm,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
        threads=32 * launch.num_warps,
        tensor_core=" ".join(instructions),
        seconds=round(seconds, 2),
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as cuobjdump reads them off the binary."""
    tool = pathlib.Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2]) + int(found[3])


def table(sms: tuple[int, ...] = SMS, only: tuple[str, ...] = ("",)) -> list[Resources]:
    """Resources of every kernel variant whose name contains one of `only`."""
    rows: list[Resources] = []
    for name, plan in variants().items():
        if any(part in name for part in only):
            for launch in plan():
                rows += [compile_launch(name, launch, sm) for sm in sms]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--sm", type=int, nargs="+", default=list(SMS), choices=SHARED_LIMITS)
    parser.add_argument("--only", nargs="+", default=[""], help="names of variants, or parts")
    options = parser.parse_args()
    rows = table(tuple(options.sm), tuple(options.only))
    if options.json:
        print(json.dumps([asdict(row) | {"problems": row.problems} for row in rows], indent=1))
        return
    print(f"{'variant':28}{'kernel':27} sm  regs spill  shared threads  matrix    s")
    for r in rows:
        print(
            f"{r.name:28}{r.kernel:27} {r.sm} {r.registers:5} {r.spilled_bytes:5} "
            f"{r.shared_bytes:7} {r.threads:7}  {r.tensor_core:9} {r.seconds:.1f} "
            + "; ".join(r.problems)
        )


if __name__ == "__main__":
    main()
