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
from typing import Any, Final, Literal, get_args

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
    return wanted


def _possible() -> tuple[Target, ...]:
    """What this machine can run, best first."""
    if importlib.util.find_spec("numba") is None:
        return ("torch",)
    if _settings().DISABLE_JIT:
        return ("torch",)
    return ("avx2", "plain", "torch") if _features() >= _NEEDED else ("plain", "torch")


def _features() -> set[str]:
    """Instruction sets that Numba compiles for, which its settings can restrict."""
    from numba.core.codegen import get_host_cpu_features

    named = _settings().CPU_FEATURES
    if named is None:
        named = get_host_cpu_features()
    return {part[1:] for part in named.split(",") if part.startswith("+")}


def _settings() -> Any:
    """Numba's settings, which have no declared names."""
    from numba import config

    return config


TARGET: Final[Target] = _decide()
