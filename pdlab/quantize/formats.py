"""Names of weight formats.

    LAYERS[:METHOD][/HEAD]        int8    q8_0    int4    int4:gptq    int4/int4    int4:gptq/int4

LAYERS is the format of the linear layers and HEAD that of the head, which with tied embeddings is
the embedding too. METHOD says how codes of 4 bits are found: `nearest` rounds each weight in the
range of its group, `gptq` looks at what the model computes on some text (see `gptq`). 8 bits are
rounded to the nearest.

Unless told otherwise the head of `int4` is `q8_0`: its errors go straight into the logits, and no
layer comes after it to even them out. Rounded to 4 bits it alone costs the default model
6.6% of perplexity, with `gptq` 1.1%, for 13% fewer bytes (`data/measured/weight_formats.json`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pdlab_kernels.cpu.weights import FORMATS, Format

from pdlab.requirements import shown

Method = Literal["nearest", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)
_HEAD_OF: dict[Format, Format] = {"fp32": "fp32", "int8": "int8", "q8_0": "q8_0", "int4": "q8_0"}


@dataclass(frozen=True)
class WeightFormat:
    """How layers and head are kept, and how their 4-bit codes are found."""

    layers: Format
    head: Format
    method: Method = "nearest"

    @property
    def name(self) -> str:
        """The shortest name that is read back as this format."""
        method = "" if self.method == "nearest" else f":{self.method}"
        head = "" if self.head == _HEAD_OF[self.layers] else f"/{self.head}"
        return f"{self.layers}{method}{head}"

    @property
    def is_calibrated(self) -> bool:
        """Whether it needs to see what the model computes on some text."""
        return self.method == "gptq"


def parse_format(name: str) -> WeightFormat:
    """The format called `name`.

    Raises:
        ValueError: it names none; the message says what there is.
    """
    if not isinstance(name, str):
        raise ValueError(f"weights={shown(name)} must be a name")
    rest, slash, head = name.partition("/")
    layers, colon, method = rest.partition(":")
    head = head if slash else _HEAD_OF.get(layers, "")
    method = method if colon else "nearest"
    if layers not in FORMATS or head not in FORMATS or method not in METHODS:
        raise ValueError(
            f"weights={name!r}: LAYERS[:METHOD][/HEAD] is needed, with formats "
            f"{', '.join(FORMATS)} and methods {', '.join(METHODS)}, say int4:gptq/int8"
        )
    if colon and layers != "int4":
        raise ValueError(f"weights={name!r}: methods are for int4; {layers} has one way only")
    return WeightFormat(layers, head, method)
