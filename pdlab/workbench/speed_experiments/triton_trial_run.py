"""The process that tries a kernel: `python triton_trial_run.py FILE`, with TRITON_INTERPRET=1.

It stands alone, so that nothing of pdlab is imported for it. The last line it prints is JSON:
`{"tried": [...]}` or `{"problem": "..."}`.
"""

import importlib.util
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GUARD = 4096
"""Numbers before and behind each tensor that nobody may write."""
UNTOUCHED = 123.0
CASES = (
    # rows, size, block, numbers between the ends of two rows of x, dtype
    (1, 64, 64, 0, torch.float32),
    (1, 256, 64, 0, torch.float32),
    (1, 100, 64, 0, torch.float32),
    (3, 100, 64, 0, torch.float32),
    (3, 100, 64, 24, torch.float32),
    (2, 1536, 1024, 0, torch.float32),
    (2, 1536, 1024, 16, torch.float16),
)


def main(path: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tried = []
    for rows, size, block, gap, dtype in CASES:
        if problem := _try(module.KERNEL, rows, size, block, gap, dtype):
            return {"problem": problem}
        programs = rows * -(-size // block)
        apart = f", rows {2 * size + gap} apart" if gap else ""
        name = str(dtype).removeprefix("torch.")
        line = f"{rows} x {size} {name}{apart}: {programs} programs of {block}, right"
        tried.append(line)
    return {"tried": tried}


def _try(kernel: Any, rows: int, size: int, block: int, gap: int, dtype: torch.dtype) -> str | None:
    """What is wrong, or None."""
    torch.manual_seed(rows * size)
    stride = 2 * size + gap
    whole = torch.randn(rows * stride + 2 * GUARD)
    x = whole[GUARD:-GUARD].to(dtype).view(rows, stride)[:, : 2 * size]
    if dtype is torch.float16:
        x[:, 0] = -12.0  # exp(12) does not fit into fp16
    memory = torch.full((rows * size + 2 * GUARD,), UNTOUCHED, dtype=dtype)
    out = memory[GUARD:-GUARD].view(rows, size)
    grid = (rows, -(-size // block))
    what = f"{rows} rows of {size} in blocks of {block}"
    try:
        kernel[grid](out, x, x.stride(0), size, block)
    except Exception as error:
        return _refused(error, what)
    return _judge(out, x, memory, what, block, gap)


def _refused(error: Exception, what: str) -> str:
    text = f"{error.__cause__ or error}".strip().splitlines()
    reason = text[-1] if text else type(error).__name__
    if "fp16" in reason:
        reason += ". Is all converted to tl.float32 before it is computed with?"
    if "your code here" in f"{error}{error.__cause__}":
        return "write your kernel in the cell above and run it again"
    return f"Triton refuses it ({what}): {reason}"


def _judge(out: Tensor, x: Tensor, memory: Tensor, what: str, block: int, gap: int) -> str | None:
    size = out.shape[1]
    gate, up = x[:, :size].float(), x[:, size:].float()
    right = F.silu(gate) * up
    if not bool((memory[:GUARD] == UNTOUCHED).all() and (memory[-GUARD:] == UNTOUCHED).all()):
        return (
            f"{what}: it wrote beyond the end of `out`. The last block of a row is not full: "
            "tl.store needs a mask"
        )
    if bool((out == UNTOUCHED).all()):
        return f"{what}: nothing was written to `out`"
    error = (out.float() - right).abs() / (right.abs() + 1e-2)
    limit = 1e-5 if out.dtype is torch.float32 else 2e-3
    if bool((error <= limit).all()):
        return None
    return f"{what}: " + _why(out, gate, up, right, error, limit, block, gap)


def _why(
    out: Tensor, gate: Tensor, up: Tensor, right: Tensor, error: Tensor, limit: float, block: int,
    gap: int,
) -> str:  # fmt: skip
    """A guess at the mistake, from what came out."""
    guesses = {
        "gate and up are swapped: the first half of a row is gate": F.silu(up) * gate,
        "this is sigmoid(gate) * up: silu(gate) is gate * sigmoid(gate)": torch.sigmoid(gate) * up,
        "this is gate * up: SiLU is missing": gate * up,
        "this is silu(gate): it is to be multiplied by up": F.silu(gate),
        "the sign in exp is wrong: sigmoid(g) is 1 / (1 + exp(-g))": gate
        * torch.sigmoid(-gate)
        * up,
    }
    for text, values in guesses.items():
        if torch.allclose(out.float(), values, rtol=1e-2, atol=1e-3):
            return text
    wrong = error > limit
    untouched = out == UNTOUCHED
    if bool(untouched.any()):
        return (
            f"{int(untouched.sum())} numbers were never written. Program (i, t) has to take block "
            "t of row i: tl.program_id(1) * BLOCK is where it begins"
        )
    if not bool(wrong[0].any()):
        return (
            f"row 0 is right and row {int(wrong.any(1).nonzero()[0])} is not. Row i of x begins at "
            "i * x_stride, which may be more than 2 * SIZE; row i of `out` at i * SIZE"
        )
    if out.dtype is torch.float16:
        at = int(wrong[0].nonzero()[0])
        return (
            f"in float16 number {at} is {float(out[0, at]):.4g} and should be "
            f"{float(right[0, at]):.4g}: convert to tl.float32 before exp, and only the result back"
        )
    if not bool(wrong[:, :block].any()):
        return "the first block is right and a later one is not: where does up begin? At SIZE"
    at = int(wrong[0].nonzero()[0])
    return (
        f"number {at} of row 0 is {float(out[0, at]):.5g} and should be {float(right[0, at]):.5g} "
        f"(gate {float(gate[0, at]):.4g}, up {float(up[0, at]):.4g})"
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
