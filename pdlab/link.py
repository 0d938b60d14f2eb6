"""A slower link than the one there is, simulated: what arrives is held back until it is due.

A link holds on one machine: it compares times of `time.perf_counter`, which only the processes of
one machine share. It limits what its own end sends (or fetches), and cannot make anything faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Bytes go one after the other, each parcel arrives a latency after its last byte has left.

    Args:
        bandwidth_bytes_s: bytes a second in one direction, above 0.
        latency_s: seconds from leaving to arriving, 0 or more.
        name: what a picture calls it.

    Raises:
        ValueError: one of them is not a finite number in its range.
    """

    bandwidth_bytes_s: float
    latency_s: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth_bytes_s) and self.bandwidth_bytes_s > 0):
            raise ValueError(
                f"bandwidth_bytes_s is {self.bandwidth_bytes_s}; it must be finite and above 0"
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}; it must be finite and at least 0")

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds until the last of `num_bytes` has arrived, on a link that was free."""
        return num_bytes / self.bandwidth_bytes_s + self.latency_s

    @staticmethod
    def named(name: str) -> Link:
        """One of `LINKS`.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in LINKS:
            raise ValueError(f"link is {name!r}; it must be one of {', '.join(LINKS)}")
        return LINKS[name]


LINKS = {
    link.name: link
    for link in (
        Link(125e6, 30e-6, "1GbE"),
        Link(1.25e9, 10e-6, "10GbE"),
        Link(12.5e9, 2e-6, "100GbE"),
        Link(31.508e9, 1e-6, "PCIe4x16"),
        Link(300e9, 1e-6, "NVLink3"),
        Link(450e9, 1e-6, "NVLink4"),
    )
}
"""Links by name. The rates are published, of one direction, before any protocol's overhead:

- 1GbE, 10GbE, 100GbE: 1, 10 and 100 Gb/s, IEEE Std 802.3 (clauses 40, 49 and 80). TCP with frames
  of 1,500 bytes leaves 94.9% of it to the payload (1,460 of 1,538 bytes on the wire).
- PCIe4x16: 16 GT/s a lane, 16 lanes, 128 of 130 bits: 31.5 GB/s. PCI Express Base
  Specification 4.0.
- NVLink3: 600 GB/s in both directions together, 12 links of 25 GB/s each way. NVIDIA A100 Tensor
  Core GPU Architecture, 2020.
- NVLink4: 900 GB/s in both directions together, 18 links of 25 GB/s each way. NVIDIA H100 Tensor
  Core GPU Architecture, 2022.

The latencies are not published with the rates: they are round numbers of the right size, and next
to nothing against the time that a parcel of megabytes takes.
"""


def name_of(link: Link | None) -> str:
    """What records call a link; "" where there is none."""
    return link.name or "a link" if link else ""


class Bookings:
    """When one end of a link is free: each parcel is booked behind the one before it."""

    def __init__(self, link: Link | None):
        self.link = link
        self._free_s = 0.0

    def book(self, num_bytes: int, now_s: float) -> float:
        """When a parcel that is sent now is due at the other end; 0 without a link."""
        if self.link is None:
            return 0.0
        self._free_s = max(self._free_s, now_s) + num_bytes / self.link.bandwidth_bytes_s
        return self._free_s + self.link.latency_s
