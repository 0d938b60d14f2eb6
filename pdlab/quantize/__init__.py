"""Weight formats: their names, how weights are quantized to them, and what that loses."""

from pdlab.quantize.calibration import causal_attention
from pdlab.quantize.errors import relative_error, relative_errors
from pdlab.quantize.formats import METHODS, WeightFormat, parse_format
from pdlab.quantize.packed import (
    PackedLayer,
    PackedWeights,
    fill_decoder,
    matrices,
    pack_decoder,
)
from pdlab.quantize.regroup import regroup

__all__ = [
    "METHODS",
    "PackedLayer",
    "PackedWeights",
    "WeightFormat",
    "causal_attention",
    "fill_decoder",
    "matrices",
    "pack_decoder",
    "parse_format",
    "regroup",
    "relative_error",
    "relative_errors",
]
