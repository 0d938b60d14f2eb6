"""The blocks of a GGUF file as packed weights, without a way through floats."""

from __future__ import annotations

import numpy as np
from pdlab_kernels.cpu.weights import Weight, pack_gguf

from pdlab.models.config import ModelConfig
from pdlab.models.gguf import in_hugging_face_order
from pdlab.models.gguf_file import GGUFFile
from pdlab.quantize import PackedLayer, PackedWeights

FILE = "file"
"""The value of `weights` that asks for this."""
KINDS = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF tensor types whose blocks the kernels can read."""


def packed_from_gguf(file: GGUFFile, config: ModelConfig) -> PackedWeights:
    """Every matrix of the file, worth exactly what `weights_from_gguf` gives.

    Raises:
        ValueError: a matrix is stored in another way than `KINDS`, or those that are joined (q, k
            and v; gate and up) not in the same one.
    """

    def joined(*names: str) -> Weight:
        parts = [_rows(file, name, config) for name in names]
        kinds = dict.fromkeys(kind for _, kind in parts)
        if len(kinds) > 1:
            raise ValueError(
                f"weights={FILE!r} needs one tensor type for {', '.join(names)}, which "
                f"{file.path} stores as {', '.join(kinds)}"
            )
        return pack_gguf(np.concatenate([rows for rows, _ in parts]), *kinds, _columns(names[0]))

    def _columns(name: str) -> int:
        return file.tensors[name].shape[-1]

    def layer(index: int) -> PackedLayer:
        def names(*parts: str) -> list[str]:
            return [f"blk.{index}.{part}.weight" for part in parts]

        return PackedLayer(
            qkv=joined(*names("attn_q", "attn_k", "attn_v")),
            output=joined(*names("attn_output")),
            gate_up=joined(*names("ffn_gate", "ffn_up")),
            down=joined(*names("ffn_down")),
        )

    head = joined("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    return PackedWeights(FILE, [layer(i) for i in range(config.num_layers)], head)


def _rows(file: GGUFFile, name: str, config: ModelConfig) -> tuple[np.ndarray, str]:
    """The blocks of a matrix, uint8 [out, row bytes] in Hugging Face's order, and their type."""
    blocks, kind = file.stored(name)
    if kind not in KINDS:
        raise ValueError(
            f"weights={FILE!r} needs matrices in {', '.join(KINDS)}; {file.path} stores {name} as "
            f"{kind}. Quantize it instead, say weights='q8_0'."
        )
    return in_hugging_face_order(name, blocks, config), kind
