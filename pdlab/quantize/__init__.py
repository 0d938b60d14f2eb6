"""Weight formats: their names, how weights are quantized to them, and what that loses."""

from pdlab.quantize.errors import relative_error, relative_errors
from pdlab.quantize.formats import METHODS, WeightFormat, parse_format
from pdlab.quantize.packed import (
    PackedLayer,
    PackedWeights,
    fill_decoder,
    matrices,
    pack_decoder,
    pack_matrix,
)

__all__ = [
    "METHODS",
    "PackedLayer",
    "PackedWeights",
    "WeightFormat",
    "fill_decoder",
    "matrices",
    "pack_decoder",
    "pack_matrix",
    "parse_format",
    "relative_error",
    "relative_errors",
]
