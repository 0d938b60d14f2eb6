"""What a machine can do at most: peak FLOP/s by dtype, memory bandwidth, memory size.

The table in `data/hardware.json` holds what vendors publish; `calibrate` measures the machine at
hand. Both are `Hardware`, and `provenance` says which one it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pdlab.costmodel.checks import check_positive
from pdlab.shipped import shipped

Provenance = Literal["predicted", "measured", "published"]
"""Where a number comes from: from a formula, from a clock, or from a vendor's document."""

TABLE = "hardware.json"


@dataclass(frozen=True)
class Hardware:
    """The ceilings of one machine: one GPU, or one processor with its memory.

    A published peak is a dense one (no structured sparsity), with fp32 accumulation where the
    vendor tells them apart. A vendor's GB and TB are 10^9 and 10^12 bytes.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    peak_flops: Mapping[str, float]
    """FLOP/s of a dense matrix product, by dtype: fp32, tf32, fp16, bf16, fp8, int8."""
    bandwidth_bytes_s: float
    """Most bytes a second that memory delivers to a reader: the denominator of MBU."""
    memory_bytes: int
    """Size of that memory; 0 where a calibration could not tell."""
    source: str
    """Document and table of a published number, or how and when a measured one was taken."""
    measured: bool = False
    launch_s: float = 0.0
    """Seconds to start one operation; 0 in published rows, because vendors publish none."""
    link_bytes_s: float | None = None
    """Bytes a second to host memory in one direction; None where there is no other memory, or where
    it is not known."""
    tdp_w: float | None = None
    """Thermal design power in watts."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further measurements that no prediction uses, such as `copy_bytes_s` and `gemv_bytes_s`."""

    def __post_init__(self) -> None:
        for dtype, flops in self.peak_flops.items():
            check_positive(**{f"peak_flops[{dtype}]": flops})
        check_positive(bandwidth_bytes_s=self.bandwidth_bytes_s)

    @property
    def provenance(self) -> Provenance:
        return "measured" if self.measured else "published"

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype.

        Raises:
            ValueError: for a dtype this machine has no number for. Weight-only formats (int4,
                int8 weights) compute in the dtype of their activations: ask for that one.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ValueError(f"dtype={dtype!r} has no peak on {self.name}; known are {known}")
        return self.peak_flops[dtype]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hardware:
        """The inverse of `to_dict`; a TypeError or ValueError for anything else."""
        return cls(**values)


def load_hardware() -> dict[str, Hardware]:
    """Every machine of the table by its short name, in the order of rising bandwidth."""
    text = (shipped("data") / TABLE).read_text(encoding="utf-8")
    rows = json.loads(text)["hardware"]
    return {short_name: Hardware.from_dict(row) for short_name, row in rows.items()}
