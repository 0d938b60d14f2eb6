"""When it pays to decode somewhere else: by the link's bandwidth, and by K and V's bytes a token.

One request on an empty cluster, three ways: all of it on the fast machine, all of it on the slow
one, or its prompt on the fast one and its output on the slow one. With the slow machine alone, the
prompt takes long; with both, K and V must travel. The split pays, against the slow machine, from
that bandwidth on at which what the fast prefill saves is more than what the transfer adds.

Layers leave evenly over the prefill, one behind the other on one link. With a prefill of T, L
layers and b seconds a layer on the link, the last has arrived max(T + b, T/L + L b) after the
start: either the link waits for every layer, or every layer but the first waits for the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlab.costmodel import StepShape, StepTimes, causal_pairs
from pdlab.link import Link
from pdlab.requirements import require_int


@dataclass(frozen=True)
class Latencies:
    """Of one request, in seconds."""

    ttft_s: float
    tpot_s: float
    """The mean gap between tokens, with what the second one waits for K and V."""
    e2e_s: float


@dataclass(frozen=True)
class BreakEvenPoint:
    """A bandwidth, K and V of some size, and what comes of it."""

    bandwidth_bytes_s: float
    kv_bytes_per_token: int
    exposed_s: float
    """From the end of the prefill to the arrival of the last layer."""
    split: Latencies


@dataclass(frozen=True)
class BreakEven:
    """Predicted from step times; see the module."""

    fast: Latencies
    """All on the fast machine."""
    slow: Latencies
    points: list[BreakEvenPoint]
    least_bandwidth_bytes_s: dict[int, float]
    """By bytes a token: from here on the split is over sooner than the slow machine alone;
    infinity if it never is."""
    least_price: float
    """The split takes less of the fast machine: it pays against that one alone if a second there
    costs at least this many times a second of the slow one. Infinity if it never does."""
    basis: str


def break_even(
    fast: StepTimes,
    slow: StepTimes,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_layers: int,
    kv_bytes_per_token: Sequence[int],
    bandwidths_bytes_s: Sequence[float],
    latency_s: float = 0.0,
    batch: int = 1,
) -> BreakEven:
    """When decoding on the slow machine pays.

    Args:
        kv_bytes_per_token: of all layers, one for each KV format to look at.
        bandwidths_bytes_s: of the link.
        latency_s: of the link.
        batch: requests alike that decode together; each takes its share of a step's price.

    Raises:
        ValueError: a list is empty, or a number is out of range.
    """
    tokens, out = num_prompt_tokens, num_output_tokens
    require_int("num_prompt_tokens", tokens, least=1)
    require_int("num_output_tokens", out, least=2)
    require_int("num_layers", num_layers, least=1)
    require_int("batch", batch, least=1)
    if not kv_bytes_per_token or not bandwidths_bytes_s:
        raise ValueError("kv_bytes_per_token and bandwidths_bytes_s need at least 1 value each")
    prefill_s = [_prefill_s(times, tokens) for times in (fast, slow)]
    decode_s = [_decode_s(times, tokens, out, batch) for times in (fast, slow)]

    def latencies(ttft_s: float, rest_s: float) -> Latencies:
        return Latencies(ttft_s, rest_s / (out - 1), ttft_s + rest_s)

    points = []
    for num_bytes in kv_bytes_per_token:
        require_int("kv_bytes_per_token", num_bytes, least=1)
        for bandwidth in bandwidths_bytes_s:
            exposed = exposed_s(
                prefill_s[0], num_layers, tokens * num_bytes, Link(bandwidth, latency_s)
            )
            split = latencies(prefill_s[0], exposed + decode_s[1])
            points.append(BreakEvenPoint(bandwidth, num_bytes, exposed, split))
    saved_s = prefill_s[1] - prefill_s[0] - latency_s
    return BreakEven(
        fast=latencies(prefill_s[0], decode_s[0]),
        slow=latencies(prefill_s[1], decode_s[1]),
        points=points,
        least_bandwidth_bytes_s={
            num_bytes: least_bandwidth(saved_s, prefill_s[0], num_layers, tokens * num_bytes)
            for num_bytes in kv_bytes_per_token
        },
        least_price=decode_s[1] / decode_s[0] if decode_s[0] else float("inf"),
        basis=f"fast: {fast.basis}; slow: {slow.basis}",
    )


def exposed_s(prefill_s: float, num_layers: int, num_bytes: int, link: Link) -> float:
    """Seconds from the end of a prefill to the arrival of its last layer, layer by layer."""
    layer_s = num_bytes / num_layers / link.bandwidth_bytes_s
    gap_s = prefill_s / num_layers
    return max(layer_s, gap_s + num_layers * layer_s - prefill_s) + link.latency_s


def least_bandwidth(saved_s: float, prefill_s: float, num_layers: int, num_bytes: int) -> float:
    """Where `exposed_s`, without latency, is `saved_s`; infinity if it never is so short."""
    if saved_s <= 0:
        return float("inf")
    hidden_s = prefill_s * (1 - 1 / num_layers)
    layer_s = min(saved_s, (saved_s + hidden_s) / num_layers)
    return num_bytes / num_layers / layer_s


def _prefill_s(times: StepTimes, tokens: int) -> float:
    return times.step_s(StepShape(1, tokens, causal_pairs(0, tokens), 0, 0))


def _decode_s(times: StepTimes, tokens: int, out: int, batch: int) -> float:
    """All steps after the first token."""
    contexts = range(tokens + 1, tokens + out)
    return sum(times.step_s(StepShape(0, 0, 0, batch, batch * c, c)) for c in contexts)
