"""The forward pass on a GPU: `pdlab_kernels.triton` behind the engine's runner.

Per layer: the residual sum with its norm, rotary embedding with the write of K and V, attention
over the paged cache and the MLP's gate are kernels; matrix products are torch's. Sequences with
one token in the step (decodes) take the decode kernel, chunks of prompts the prefill kernel, both
in one pass. Steps of decodes alone are replayed from CUDA graphs (`decode_graphs.py`).

The step's stages are those of torch, but for a replayed graph, which is one: `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pdlab.attention import Window
from pdlab.engine.batch import BatchInputs
from pdlab.engine.compiled import Computed
from pdlab.engine.config import EngineConfig
from pdlab.engine.decode_graphs import CudaCapture, DecodeGraphs, call_again
from pdlab.engine.gpu_rows import Rows, lay_out
from pdlab.engine.timing import StageClock
from pdlab.kvcache import PagedKVCache, WritePlan, blocks_for, parse_kv_format
from pdlab.models import Model
from pdlab.models.decoder import Decoder, DecoderLayer, Lap, no_lap

Parts = tuple[Tensor, ...]


def why_not(model: Model, config: EngineConfig) -> str | None:
    """What keeps this model or configuration from the Triton kernels; None if nothing does.

    Args:
        config: with a `kv_format` that is not `auto`.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    if reason := config.needs_torch:
        return reason
    if model.packed:
        return f"its matrix products are of floats, the model's weights are {model.weights}"
    if config.kv_head_groups > 1:
        return f"kv_head_groups={config.kv_head_groups}: its kernels read all KV heads of a token"
    try:
        _plan_launches(model, config)
    except ValueError as error:
        return str(error)
    return None


def _plan_launches(model: Model, config: EngineConfig) -> None:
    """Let each kernel check what it will be given; ValueError for what one of them refuses."""
    launch = import_module("pdlab_kernels.triton.launch")
    attention = import_module("pdlab_kernels.triton.attention")
    elementwise = import_module("pdlab_kernels.triton.elementwise")
    rotary = import_module("pdlab_kernels.triton.rotary")
    decoder, c = model.decoder, model.config
    launch.check_tensors(model=decoder.embedding)

    def of(*shape: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    formats = parse_kv_format(config.kv_format, c.head_dim)
    block = (config.block_size, c.num_kv_heads, c.head_dim)
    k_parts, v_parts = (
        tuple(of(1, *shape, dtype=dtype) for shape, dtype in kv_format.parts(*block))
        for kv_format in formats
    )
    q, k, v = (
        x.unflatten(-1, (-1, c.head_dim)) for x in of(1, sum(c.qkv_sizes)).split(c.qkv_sizes, -1)
    )
    angles, numbers = of(1, c.head_dim // 2, dtype=torch.float32), of(1, dtype=torch.int32)
    starts, table = of(2, dtype=torch.int32), of(1, 1, dtype=torch.int32)
    elementwise.plan_add_rms_norm(of(1, c.hidden_size), None, of(c.hidden_size), c.rms_norm_eps)
    elementwise.plan_silu_mul(of(1, 2 * c.intermediate_size))
    rotary.plan_rope_and_write_kv(q, k, v, angles, angles, numbers, numbers, k_parts, v_parts)
    attention.plan_decode_attention(q, k_parts, v_parts, table, numbers)
    attention.plan_prefill_attention(q, k_parts, v_parts, table, starts, numbers)


class _Layer(NamedTuple):
    """A layer, and what its attention needs."""

    weights: DecoderLayer
    k_parts: Parts
    v_parts: Parts
    sight: dict[str, int | None]
    """Window, sinks and reach, as the kernels take them."""


class ForwardPass:
    """From rows to hidden states, by launches alone: nothing of it waits for the device.

    Args:
        windows: of each layer.
        kernels: those of `pdlab_kernels.triton`, or stand-ins of the same signatures.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        windows: Sequence[Window | None],
        kernels: Any,
    ):
        self._decoder = decoder
        self._kernels = kernels
        [k_store], [v_store] = cache.stores
        self._layers = [
            _Layer(
                layer,
                tuple(part[index] for part in k_store.parts),
                tuple(part[index] for part in v_store.parts),
                {"window": w.size, "sinks": w.sinks, "reach": w.reach} if w else {},
            )
            for index, (layer, w) in enumerate(zip(decoder.layers, windows, strict=True))
        ]

    def __call__(
        self,
        rows: Rows,
        lap: Lap = no_lap,
        on_layer: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states after the last layer, and their final norm, [num_rows, hidden_size]."""
        decoder, c, kernels = self._decoder, self._decoder.config, self._kernels
        norms = [layer.weights.input_norm for layer in self._layers[1:]] + [decoder.final_norm]
        x = F.embedding(rows.token_ids, decoder.embedding)
        lap("embed")
        first = self._layers[0].weights.input_norm
        normed, residual = kernels.add_rms_norm(x, None, first.weight, c.rms_norm_eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            weights = layer.weights
            q, k, v = (
                part.unflatten(-1, (-1, c.head_dim))
                for part in weights.qkv(normed).split(c.qkv_sizes, dim=-1)
            )
            if c.qk_norm:
                q, k = weights.q_norm(q), weights.k_norm(k)
            lap("qkv")
            q = kernels.rope_and_write_kv(
                q, k, v, decoder.cos, decoder.sin, rows.positions, rows.slots,
                layer.k_parts, layer.v_parts,
            )  # fmt: skip
            if on_layer:
                lap("attention")
                on_layer(index)
                lap("transfer")
            attended = self._attend(layer, q, rows)
            lap("attention")
            x = weights.output(attended.flatten(-2))
            normed, residual = kernels.add_rms_norm(
                x, residual, weights.mlp_norm.weight, c.rms_norm_eps
            )
            lap("output")
            x = weights.down(kernels.silu_mul(weights.gate_up(normed)))
            normed, residual = kernels.add_rms_norm(x, residual, next_norm.weight, c.rms_norm_eps)
            lap("mlp")
        return residual, normed

    def _attend(self, layer: _Layer, q: Tensor, rows: Rows) -> Tensor:
        """Decodes by one kernel, chunks by the other, [num_rows, num_heads, head_dim]."""
        n, parts, sight = rows.num_decodes, (layer.k_parts, layer.v_parts), layer.sight
        tables, lens = rows.block_tables, rows.context_lens
        results = []
        if n:
            results.append(
                self._kernels.decode_attention(q[:n], *parts, tables[:n], lens[:n], **sight)
            )
        if n < len(q):
            results.append(
                self._kernels.prefill_attention(
                    q[n:], *parts, tables[n:], rows.chunk_starts, lens[n:], **sight
                )
            )
        return torch.cat(results) if len(results) > 1 else results[0]


class TritonForward:
    """Computes batches of a model over its paged cache.

    Args:
        config: resolved.
        windows: of each layer.
        kernels: see `ForwardPass`.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        config: EngineConfig,
        windows: Sequence[Window | None],
        kernels: Any = None,
    ):
        self._decoder = model.decoder
        self._block_size = cache.block_size
        kernels = kernels or import_module("pdlab_kernels.triton")
        self._forward = ForwardPass(model.decoder, cache, windows, kernels)
        self._graphs: DecodeGraphs | None = None
        if config.cuda_graphs:
            device = self._decoder.device
            self._graphs = DecodeGraphs(
                self._forward,
                config.max_num_seqs,
                blocks_for(config.max_model_len or model.config.max_model_len, cache.block_size),
                device,
                CudaCapture(device) if device.type == "cuda" else call_again,
            )

    def takes(self, inputs: BatchInputs) -> bool:
        """Whether it computes such a batch."""
        return bool(inputs.token_ids)

    @torch.inference_mode()
    def run(
        self,
        inputs: BatchInputs,
        plan: WritePlan,
        clock: StageClock,
        on_layer: Callable[[int], None] | None,
    ) -> Computed:
        """Compute a batch; with `on_layer` without a graph, and it is told of each layer."""
        del plan  # formats that need one are refused
        layout = lay_out(inputs, self._block_size)
        with self._on_device():
            # Who counts what operations allocate would see none in a replay.
            watched = on_layer is not None or is_in_torch_dispatch_mode()
            if self._graphs and not watched and self._graphs.takes(layout):
                hidden, normed = self._graphs.run(layout)
                clock.lap("forward")
            else:
                rows = layout.to(self._decoder.device)
                clock.lap("prepare")
                hidden, normed = self._forward(rows, clock.lap, on_layer)
            if not layout.is_sorted:
                hidden = hidden[self._index(layout.places)]
            if not (layout.is_sorted and inputs.sample_rows == list(range(len(normed)))):
                normed = normed[self._index(layout.places[inputs.sample_rows])]
            logits = F.linear(normed, self._decoder.head).float()
            if inputs.sample_rows:
                clock.lap("logits")
        return Computed(hidden, logits)

    def _index(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self._decoder.device)

    def _on_device(self) -> AbstractContextManager:
        """Triton launches on the current device."""
        device = self._decoder.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
