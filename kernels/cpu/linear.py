"""y = x W^T with a packed weight, on the threads of a team."""

import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from . import reference
from .target import TARGET
from .weights import GROUP, Weight

if TYPE_CHECKING:
    from .team import Team

FP32_ROWS: Final = 16
"""Up to so many rows `fp32` is multiplied here, more by torch, whose BLAS is then faster."""

_CHUNK_BYTES: Final = 256 * 1024  # what one thread reads in some 15 to 30 us
_CHUNKS_A_THREAD: Final = 2  # at least; one costs a third of a microsecond

_own = threading.local()


def linear(
    x: torch.Tensor, weight: Weight, team: "Team | None" = None, *, planes: int = 2
) -> torch.Tensor:
    """y float32 [rows, out] of x float32 [rows, in]; alone, or on a team's threads.

    Activations are rounded as `activations` says, unless the weight is `fp32`; to `planes` (1 or 2)
    planes of int8 if it is `int4`. A row has the same bits whatever rows stand beside it, and on
    any number of threads (except `fp32` with more than 16 rows). Raises ValueError when x is no
    float32 matrix on the CPU with the weight's width.
    """
    if x.ndim != 2 or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(
            f"x: a float32 CPU matrix is needed, not {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    if x.shape[1] != weight.in_features:
        raise ValueError(f"x: it has {x.shape[1]} columns, the weight {weight.in_features}")
    if planes not in (1, 2):
        raise ValueError(f"planes={planes}: there are 1 or 2")
    x = x.detach().contiguous()
    if TARGET == "torch" or (weight.format == "fp32" and len(x) > FP32_ROWS):
        return reference.linear(x, weight, planes=planes)
    y = torch.empty(len(x), weight.out_features)
    if len(x):
        flat = x.view(-1).numpy(), y.view(-1).numpy()
        _run(*flat, len(x), weight, planes, team or alone())
    return y


def _run(
    x: np.ndarray, y: np.ndarray, rows: int, weight: Weight, planes: int, team: "Team"
) -> None:
    """Run the step of the weight's format on flat x and y."""
    from . import linear_steps as steps

    out, width, data = weight.out_features, weight.in_features, weight.data
    each = panels_per_chunk(weight, rows, team.num_threads)
    if weight.format == "fp32":
        team.run(steps.fp32_step, x, rows, data, out, width, y, each)
    elif weight.format == "int4":
        codes = np.empty(planes * rows * width, np.int8)
        scales = np.empty(planes * rows * width // GROUP, np.float32)
        sums = np.empty(rows * width // GROUP, np.float32)
        team.run(steps.int4_step, x, rows, data, out, width, codes, scales, sums, planes, y, each)
    else:
        codes, scales = np.empty(rows * width, np.int16), np.empty(rows, np.float32)
        row_scales, grouped = weight.scales, weight.format == "q8_0"
        team.run(
            steps.int8_step, x, rows, data, row_scales, grouped, out, width, codes, scales, y, each
        )


def panels_per_chunk(weight: Weight, rows: int, num_threads: int) -> int:
    """How many panels make a chunk: some 20 us of work, and as many chunks for each thread."""
    if num_threads == 1:
        return weight.panels
    work = weight.nbytes * max(1, rows // 4)
    a_thread = max(_CHUNKS_A_THREAD, -(-work // (_CHUNK_BYTES * num_threads)))
    return -(-weight.panels // (a_thread * num_threads))


def alone() -> "Team":
    """A team of the calling thread alone."""
    from .team import Team

    if not hasattr(_own, "team"):
        _own.team = Team(1)
    team: Team = _own.team
    return team
