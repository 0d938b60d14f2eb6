"""Names of weight formats.

    LAYERS[:METHOD][/HEAD]        int8    q8_0    int4    int4:gptq    int4/int4    int4:gptq/int4

LAYERS is the format of the linear layers and HEAD that of the head, which with tied embeddings is
the embedding too. METHOD says how codes of 4 bits are found; 8 bits are rounded to the nearest.

Unless told otherwise the head of `int4` is `q8_0`: it holds a fifth of a small model's weights,
its errors go straight into the logits, and no layer comes after it to even them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pdlab_kernels.cpu.weights import FORMATS, Format

from pdlab.requirements import shown

Method = Literal["nearest", "fit", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)
DEFAULT_METHOD: Method = "fit"
_HEAD_OF: dict[Format, Format] = {"fp32": "fp32", "int8": "int8", "q8_0": "q8_0", "int4": "q8_0"}


@dataclass(frozen=True)
class WeightFormat:
    """How layers and head are kept, and how their 4-bit codes are found."""

    layers: Format
    head: Format
    method: Method = DEFAULT_METHOD

    @property
    def name(self) -> str:
        """The shortest name that is read back as this format."""
        method = "" if self.method == DEFAULT_METHOD else f":{self.method}"
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
    method = method if colon else DEFAULT_METHOD
    if layers not in FORMATS or head not in FORMATS or method not in METHODS:
        raise ValueError(
            f"weights={name!r}: LAYERS[:METHOD][/HEAD] is needed, with formats "
            f"{', '.join(FORMATS)} and methods {', '.join(METHODS)}, say int4:gptq/int8"
        )
    if colon and layers != "int4":
        raise ValueError(f"weights={name!r}: methods are for int4; {layers} has one way only")
    return WeightFormat(layers, head, method)
