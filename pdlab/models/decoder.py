"""One decoder for the Llama family: embeddings, layers, final norm, head.

A forward pass is written as it is served. Everything in it is token-wise (each row is computed from
that row alone) except attention, and attention is not here: the caller passes `attend`, which gets
q, k, v of the new tokens and returns what they attended to. So one forward pass serves the paged
engine, the cacheless baseline, and whatever kernel stands behind `attend`. This file does not know
about blocks, sequences or phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdlab.models.config import ModelConfig
from pdlab.models.rope import apply_rope, rope_tables


class Attend(Protocol):
    """Attention over whatever the new tokens may see, themselves included."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim].

        Returns [num_tokens, num_heads, head_dim].
        """
        ...


Lap = Callable[[str], None]
"""Called with a stage's name when that stage of the forward pass ends."""


Part = Literal["embed", "output", "mlp"]
"""What the ranks of a sharded decoder compute each in part: the embedding, the projection of what
attention returned, the MLP."""
Combine = Callable[[Part, Tensor], Tensor]
"""Makes a whole of such parts: their sum over the ranks, [num_tokens, hidden_size]."""


def is_whole(part: Part, x: Tensor) -> Tensor:
    """What a layer that is not sharded combines."""
    return x


def no_lap(stage: str) -> None:
    """Keep no time."""


def empty_weight(*shape: int, **place: Any) -> nn.Parameter:
    """A weight without content, to be loaded; `place` is dtype and device."""
    return nn.Parameter(torch.empty(*shape, **place), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, **place: Any):
        super().__init__()
        self.weight = empty_weight(size, **place)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Module):
    """x W^T + b. torch's own would first fill its weights at random."""

    def __init__(self, size_in: int, size_out: int, bias: bool = False, **place: Any):
        super().__init__()
        self.weight = empty_weight(size_out, size_in, **place)
        self.bias = empty_weight(size_out, **place) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class DecoderLayer(nn.Module):
    """One layer, cut where attention happens: `project` before, `add_attended` and `mlp` after."""

    def __init__(self, config: ModelConfig, **place: Any):
        super().__init__()
        self.config = config
        self.combine: Combine = is_whole
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps, **place)
        self.qkv = Linear(hidden, sum(config.qkv_sizes), config.qkv_bias, **place)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps, **place)
            self.k_norm = RMSNorm(config.head_dim, eps, **place)
        self.output = Linear(config.q_size, hidden, config.output_bias, **place)
        self.mlp_norm = RMSNorm(hidden, eps, **place)
        self.gate_up = Linear(hidden, 2 * inner, config.mlp_bias, **place)
        self.down = Linear(inner, hidden, config.mlp_bias, **place)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, hidden_size] to q, k, v, with the positions rotated into q and k."""
        c = self.config
        q, k, v = self.qkv(self.input_norm(x)).split(c.qkv_sizes, dim=-1)
        q = q.unflatten(-1, (c.num_heads, c.head_dim))
        k = k.unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = v.unflatten(-1, (c.num_kv_heads, c.head_dim))
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def add_attended(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add what attention returned, through its output projection."""
        return x + self.combine("output", self.output(attended.flatten(-2)))

    def mlp(self, x: Tensor) -> Tensor:
        """Add the gated MLP (Shazeer 2020, SwiGLU)."""
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.combine("mlp", self.down(F.silu(gate) * up))


class Decoder(nn.Module):
    """A Llama-family decoder without attention. Its weights are empty until `load_weights`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.config = config
        place = {"dtype": dtype, "device": device}
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = empty_weight(*vocabulary, **place)
        self.stack = nn.ModuleList(DecoderLayer(config, **place) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.head = (
            self.embedding if config.tie_word_embeddings else empty_weight(*vocabulary, **place)
        )
        self.cos, self.sin = rope_tables(config, config.max_model_len, device)

    @property
    def layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.stack))

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights held; tied embeddings count once."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """What goes into the first layer, [num_tokens, hidden_size]."""
        return self.embedding[token_ids]

    @torch.inference_mode()
    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        row_tile: int | None = None,
        lap: Lap = no_lap,
    ) -> Tensor:
        """Hidden states after the last layer, [num_tokens, hidden_size], before the final norm.

        Args:
            x: token ids, int64 [num_tokens]; or hidden states, as `embed` gives them.
            positions: int64 [num_tokens], on this model's device.
            attend: attention, called once a layer.
            row_tile: see `in_row_tiles`; None gives all rows at once.
            lap: told when a stage ends: embed, qkv, attention, output (its projection), mlp.
        """
        if x.ndim == 1:
            x = self.embed(x)
        cos, sin = self.cos[positions], self.sin[positions]
        lap("embed")
        for index, layer in enumerate(self.layers):
            q, k, v = in_row_tiles(layer.project, row_tile, x, cos, sin)
            lap("qkv")
            attended = attend(index, q, k, v)
            lap("attention")
            x = in_row_tiles(layer.add_attended, row_tile, x, attended)
            lap("output")
            x = in_row_tiles(layer.mlp, row_tile, x)
            lap("mlp")
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, row_tile: int | None = None) -> Tensor:
        """Next-token logits of the given rows, float32, [num_rows, vocab_size]."""
        return in_row_tiles(self._project_out, row_tile, hidden)

    def _project_out(self, hidden: Tensor) -> Tensor:
        return F.linear(self.final_norm(hidden), self.head).float()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the weights from tensors named as Hugging Face names them.

        Raises:
            ValueError: a name is missing or unknown, or a shape does not fit.
        """
        places = self.named_weights()
        missing = set(places)
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq"):
                continue
            if self.config.tie_word_embeddings and name == "lm_head.weight":
                continue
            if name not in places:
                raise ValueError(f"weight {name!r} has no place in a {self.config.family} decoder")
            target = places[name]
            if tensor.shape != target.shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, "
                    f"the configuration asks for {tuple(target.shape)}"
                )
            target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"{len(missing)} weights are missing, first: {sorted(missing)[0]!r}")

    def named_weights(self) -> dict[str, Tensor]:
        """Hugging Face name of every weight, and the (view of a) tensor it belongs in."""
        c = self.config
        places: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm.weight,
        }
        if not c.tie_word_embeddings:
            places["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            modules: dict[str, nn.Module] = {
                "input_layernorm": layer.input_norm,
                "post_attention_layernorm": layer.mlp_norm,
                "self_attn.o_proj": layer.output,
                "mlp.down_proj": layer.down,
            }
            if c.qk_norm:
                modules |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
            for name, module in modules.items():
                for kind, parameter in module.named_parameters():
                    places[f"model.layers.{index}.{name}.{kind}"] = parameter
            for block, names, module, sizes in (
                ("self_attn", ("q_proj", "k_proj", "v_proj"), layer.qkv, c.qkv_sizes),
                ("mlp", ("gate_proj", "up_proj"), layer.gate_up, (c.intermediate_size,) * 2),
            ):
                for kind, parameter in module.named_parameters():
                    for name, view in zip(names, parameter.split(sizes), strict=True):
                        places[f"model.layers.{index}.{block}.{name}.{kind}"] = view
        return places


def in_row_tiles(function: Callable[..., Any], row_tile: int | None, *inputs: Tensor) -> Any:
    """Apply a token-wise function, all rows at once or in padded tiles of `row_tile` rows.

    A matrix product may round differently for 1 row than for 100. With a fixed number of rows (the
    last tile is padded) a token's result does not depend on the batch it is computed in; exact mode
    asks for that.

    Args:
        function: takes tensors whose first dimension is rows; returns a tensor or a tuple of them.
        inputs: tensors with the same number of rows.
    """
    if row_tile is None:
        return function(*inputs)
    num_rows = inputs[0].shape[0]
    tiles = []
    for start in range(0, num_rows, row_tile):
        rows = min(row_tile, num_rows - start)
        padded = [x.new_zeros(row_tile, *x.shape[1:]) for x in inputs]
        for tile, x in zip(padded, inputs, strict=True):
            tile[:rows] = x[start : start + rows]
        result = function(*padded)
        tiles.append(
            tuple(t[:rows] for t in result) if isinstance(result, tuple) else (result[:rows],)
        )
    columns = [torch.cat(column) for column in zip(*tiles, strict=True)]
    return tuple(columns) if len(columns) > 1 else columns[0]
