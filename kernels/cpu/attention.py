"""Attention of a batch over paged K and V, on the threads of a team."""

from typing import TYPE_CHECKING

import torch

from . import attention_reference
from .attention_plan import AttentionPlan
from .linear import alone
from .target import TARGET

if TYPE_CHECKING:
    from .team import Team


def attention(
    qkv: torch.Tensor,
    plan: AttentionPlan,
    layer: int,
    *,
    kind: int = 0,
    team: "Team | None" = None,
) -> torch.Tensor:
    """Store K and V of a step's rows, and let its queries attend to what they see.

    Args:
        qkv: float32 [num_rows, (num_heads + 2 num_kv_heads) * head_dim]: q, k and v of each row,
            in the order of the plan's rows, after rotation.
        layer: whose K and V these are.
        kind: which of the plan's windows the layer looks through.

    Returns:
        float32 [num_rows, num_heads * head_dim].

    Raises:
        ValueError: qkv, layer or kind is none that the plan is for.
    """
    kv, shape = plan.kv, (plan.num_rows, plan.kv.row_width)
    if qkv.dtype != torch.float32 or qkv.shape != shape or qkv.device.type != "cpu":
        raise ValueError(
            f"qkv: must be float32 {shape} on the CPU, is {qkv.dtype} {tuple(qkv.shape)} on "
            f"{qkv.device}"
        )
    if not qkv.is_contiguous():
        raise ValueError(f"qkv: must be contiguous, has strides {qkv.stride()}")
    if not 0 <= layer < kv.num_layers:
        raise ValueError(f"layer={layer}, must be from 0 to {kv.num_layers - 1}")
    if not 0 <= kind < len(plan.windows):
        raise ValueError(f"kind={kind}, must be from 0 to {len(plan.windows) - 1}")
    if TARGET == "torch":
        return attention_reference.attention(qkv, plan, layer, kind=kind)
    from .attention_step import attention_step

    out = torch.empty(plan.num_rows, kv.num_heads * kv.head_dim)
    (team or alone()).run(
        attention_step,
        *(kv.table, plan.table, layer, kind),
        *(qkv.detach().view(-1).numpy(), out.view(-1).numpy()),
        *(plan.write_chunks, plan.attend_chunks[kind], plan.combine_chunks[kind]),
    )
    return out
