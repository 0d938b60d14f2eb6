"""The forward pass as one compiled call a step: `pdlab_kernels.cpu` behind the engine's runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from tqdm.auto import tqdm

from pdlab.attention import Window
from pdlab.engine.batch import BatchInputs
from pdlab.engine.config import EngineConfig
from pdlab.engine.timing import StageClock
from pdlab.kvcache import PagedKVCache, WritePlan
from pdlab.models import Model
from pdlab.models.decoder import Decoder
from pdlab.quantize import PackedLayer, pack_decoder

if TYPE_CHECKING:
    from pdlab_kernels.cpu.attention_plan import PagedKV
    from pdlab_kernels.cpu.decoder import LayerWeights, Shape

    from pdlab.sampling.sampler import SurveyRows


class Computed(NamedTuple):
    """Hidden states of every token of a batch, and logits of the rows that are sampled from."""

    hidden: Tensor
    logits: Tensor


def why_not(model: Model, config: EngineConfig) -> str | None:
    """What keeps this model or configuration from the compiled step; None if nothing does."""
    from pdlab_kernels.cpu.target import TARGET, VARIABLE

    decoder = model.decoder
    if TARGET == "torch":
        return f"Numba, which compiles it, is not installed, or turned off by {VARIABLE}=torch"
    if decoder.device.type != "cpu" or decoder.dtype is not torch.float32:
        return f"it computes in fp32 on the CPU, the model is {decoder.dtype} on {decoder.device}"
    if reason := config.needs_torch:
        return reason
    if model.config.output_bias or model.config.mlp_bias:
        return f"{model.name} has biases behind attention or MLP"
    from pdlab_kernels.cpu.decoder import why_not as why_not_shape

    return why_not_shape(_shape(decoder))


def compiled_survey() -> SurveyRows:
    """What finds the most probable tokens where the step is compiled."""
    from pdlab_kernels.cpu.survey import survey

    return survey


class CompiledForward:
    """Computes batches of a model over its paged cache.

    Args:
        windows: of each layer.
    """

    def __init__(self, model: Model, cache: PagedKVCache, windows: Sequence[Window | None]):
        from pdlab_kernels.cpu.decoder import CompiledDecoder
        from pdlab_kernels.cpu.team import Team

        _compile_kernels()
        decoder = model.decoder
        self.windows = list(dict.fromkeys(windows))
        packed = model.packed or pack_decoder(decoder, "fp32")
        self.decoder = CompiledDecoder(
            _shape(decoder),
            _layers(decoder, packed.layers, [self.windows.index(w) for w in windows]),
            decoder.embedding,
            decoder.final_norm.weight,
            packed.head,
            decoder.cos,
            decoder.sin,
            _paged_kv(cache),
            Team(torch.get_num_threads()),
        )

    def takes(self, inputs: BatchInputs) -> bool:
        """Whether it computes such a batch sooner than torch, and nobody counts allocations."""
        return self.decoder.takes(len(inputs.token_ids)) and not is_in_torch_dispatch_mode()

    def run(
        self,
        inputs: BatchInputs,
        plan: WritePlan,
        clock: StageClock,
        on_layer: Callable[[int], None] | None,
    ) -> Computed:
        """Compute a batch; with `on_layer` layer by layer, and it is told of each."""
        from pdlab_kernels.cpu.attention_plan import AttentionPlan, BlockRows

        reads, where = inputs.attention, plan.blocks
        attention = AttentionPlan(
            self.decoder.kv,
            reads.query_starts,
            reads.context_lens,
            reads.block_tables,
            inputs.slot_mapping,
            windows=self.windows,
            blocks=where
            and BlockRows(where.whole_blocks, where.whole_rows, where.open_slots, where.open_rows),
            num_threads=self.decoder.team.num_threads,
        )
        everything = range(len(self.decoder.layers))
        hidden = None
        for layers in [everything] if on_layer is None else [range(i, i + 1) for i in everything]:
            result = self.decoder.run(
                inputs.token_ids,
                inputs.positions,
                attention,
                inputs.sample_rows,
                layers=layers,
                hidden=hidden,
            )
            clock.split(result.stage_s, rest="prepare")
            hidden = result.hidden
            if on_layer:
                on_layer(layers.start)
                clock.lap("transfer")
        return Computed(result.hidden, result.logits)


def _compile_kernels() -> None:
    """Shows a bar if it takes its time, which it does once for each version of pdlab."""
    from pdlab_kernels.cpu.ahead import compile_step

    bars: list[tqdm] = []

    def tell(name: str) -> None:
        if not bars:
            bars.append(tqdm(desc="Compiling kernels, once", unit=" kernels", leave=False))
        bars[0].update()

    compile_step(tell)
    for bar in bars:
        bar.close()


def _shape(decoder: Decoder) -> Shape:
    from pdlab_kernels.cpu.decoder import Shape

    c = decoder.config
    return Shape(
        c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
    )


def _paged_kv(cache: PagedKVCache) -> PagedKV:
    from pdlab_kernels.cpu.attention_plan import PagedKV, Stored

    k, v = (
        Stored(
            kv_format.name,
            kv_format.scales,
            kv_format.group,
            [store.parts for store in stores],
            [store.open for store in stores],
        )
        for kv_format, stores in zip((cache.k_format, cache.v_format), cache.stores, strict=True)
    )
    opened = cache.open_blocks
    return PagedKV(k, v, cache.config.num_heads, opened.place_of if opened else None)


def _layers(
    decoder: Decoder, packed: Sequence[PackedLayer], kinds: Sequence[int]
) -> list[LayerWeights]:
    from pdlab_kernels.cpu.decoder import LayerWeights

    has_norms = decoder.config.qk_norm
    return [
        LayerWeights(
            input_norm=layer.input_norm.weight,
            qkv=weights.qkv,
            output=weights.output,
            mlp_norm=layer.mlp_norm.weight,
            gate_up=weights.gate_up,
            down=weights.down,
            qkv_bias=layer.qkv.bias,
            q_norm=layer.q_norm.weight if has_norms else None,
            k_norm=layer.k_norm.weight if has_norms else None,
            window_kind=kind,
        )
        for layer, weights, kind in zip(decoder.layers, packed, kinds, strict=True)
    ]
