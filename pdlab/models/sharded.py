"""A decoder that is one rank's share of a whole one, and how its weights are cut out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from pdlab.models.config import ModelConfig
from pdlab.models.decoder import Decoder, Part, empty_weight
from pdlab.models.shard_plan import Shard

CombineRanks = Callable[[Part, int | None, Tensor], Tensor]
"""The sum over the ranks of a stage: of which part, of which of the model's layers (None for the
embedding), and this rank's share, [num_tokens, hidden_size]."""
LAYERS = "model.layers."
OUTPUT_ROWS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads"}
OUTPUT_ROWS |= {"gate_proj": "mlp", "up_proj": "mlp"}
INPUT_COLUMNS = {"o_proj": "heads", "down_proj": "mlp"}


class ShardedDecoder(Decoder):
    """The layers of a stage, and of each the heads and MLP columns of one rank.

    Args:
        whole: the shape of the whole model; `config` is that of the share.
        combine: called wherever the ranks of the stage need a sum; None where there is one rank.
    """

    def __init__(
        self,
        whole: ModelConfig,
        shard: Shard,
        combine: CombineRanks | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(shard.config(whole), dtype, device)
        self.shard = shard
        self._combine = combine
        nothing = empty_weight(0, whole.hidden_size, dtype=dtype, device=device)
        if not holds_embedding(whole, shard):
            self.embedding = nothing
        if whole.tie_word_embeddings:
            self.head = self.embedding
        elif not shard.has_head:
            self.head = nothing
        if combine:
            for number, layer in zip(shard.layers, self.layers, strict=True):
                layer.combine = partial(self._combine_in, number)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the tokens in this rank's part of the vocabulary, summed with the others'."""
        if self._combine is None:
            return super().embed(token_ids)
        ours = self.shard.vocabulary
        rows = token_ids - ours.start
        theirs = (rows < 0) | (rows >= len(ours))
        x = super().embed(rows.masked_fill(theirs, 0))
        x[theirs] = 0
        return self._combine("embed", None, x)

    def _combine_in(self, layer: int, part: Part, x: Tensor) -> Tensor:
        assert self._combine
        return self._combine(part, layer, x)


def holds_embedding(whole: ModelConfig, shard: Shard) -> bool:
    """Whether a rank has rows of the embedding: to embed with, or because they are the head's."""
    return shard.has_embedding or (whole.tie_word_embeddings and shard.has_head)


def shard_weights(
    whole: ModelConfig, shard: Shard, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Cut a share out of a model's weights, one after the other, for `load_weights` of its decoder.

    Args:
        tensors: all of the model's, named as Hugging Face names them.
    """
    has_rows = {
        "model.embed_tokens.weight": holds_embedding(whole, shard),
        "lm_head.weight": shard.has_head,
    }
    for name, tensor in tensors:
        if name in has_rows:
            yield name, tensor[_slice(shard.vocabulary)] if has_rows[name] else tensor[:0]
        elif not name.startswith(LAYERS):
            yield name, tensor
        else:
            number, _, rest = name.removeprefix(LAYERS).partition(".")
            if int(number) in shard.layers:
                renamed = f"{LAYERS}{int(number) - shard.layers.start}.{rest}"
                yield renamed, _cut_in_layer(whole, shard, rest, tensor)


def _cut_in_layer(whole: ModelConfig, shard: Shard, name: str, tensor: Tensor) -> Tensor:
    """This rank's part of a layer's weight."""
    *_, module, kind = name.split(".")
    if module in OUTPUT_ROWS:
        return tensor[_slice(_elements(whole, shard, OUTPUT_ROWS[module]))]
    if module in INPUT_COLUMNS:
        if kind == "bias":  # is added once
            return tensor if shard.place == 0 else torch.zeros_like(tensor)
        return tensor[:, _slice(_elements(whole, shard, INPUT_COLUMNS[module]))]
    return tensor


def _elements(whole: ModelConfig, shard: Shard, of: str) -> range:
    """Rows (or columns) of a matrix: those of heads, or of the MLP."""
    part: range = getattr(shard, of)
    size = 1 if of == "mlp" else whole.head_dim
    return range(part.start * size, part.stop * size)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
