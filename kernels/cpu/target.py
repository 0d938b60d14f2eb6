"""Which bodies the kernels of this process get; decided once, when this module is imported.

| `TARGET` | where | what |
|---|---|---|
| `"avx2"` | x86 with AVX2, FMA and F16C | Numba, three operations by their own instruction |
| `"plain"` | any other processor | Numba, the same kernels in LLVM's portable vector arithmetic |
| `"torch"` | without Numba | the torch references |

The environment variable `PDLAB_CPU_KERNELS` forces one of them.
"""

import importlib.util
import os
from typing import Final, Literal, get_args

Target = Literal["avx2", "plain", "torch"]
VARIABLE: Final = "PDLAB_CPU_KERNELS"
_NEEDED = {"avx2", "fma", "f16c"}


def _decide() -> Target:
    """The best target this machine can run, or the one that the environment names."""
    possible = _possible()
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        known = "" if wanted in get_args(Target) else f"; known are {', '.join(get_args(Target))}"
        raise ValueError(
            f"{VARIABLE}={wanted!r}: this machine can run {', '.join(possible)}{known}"
        )
    return wanted  # type: ignore[return-value]


def _possible() -> tuple[Target, ...]:
    """What this machine can run, best first."""
    if importlib.util.find_spec("numba") is None:
        return ("torch",)
    from numba import config

    if config.DISABLE_JIT:
        return ("torch",)
    return ("avx2", "plain", "torch") if _features() >= _NEEDED else ("plain", "torch")


def _features() -> set[str]:
    """Instruction sets that Numba compiles for, which its settings can restrict."""
    from numba import config
    from numba.core.codegen import get_host_cpu_features

    named = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return {part[1:] for part in named.split(",") if part.startswith("+")}


TARGET: Final[Target] = _decide()
