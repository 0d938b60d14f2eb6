"""Fits a trace to a machine: a GPU's hour of traffic becomes minutes that a laptop can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdlab.requirements import require_int, require_number
from pdlab.workload.traces import LONGEST_OUTPUT, LONGEST_PROMPT, TraceRequest

FACTORS = (1e-6, 1e6)
LONGEST = LONGEST_PROMPT + LONGEST_OUTPUT


def scaled(
    requests: Sequence[TraceRequest],
    *,
    rate: float = 1.0,
    prompt: float = 1.0,
    output: float = 1.0,
    max_len: int | None = None,
    num_requests: int | None = None,
    keep_prefixes: bool = True,
) -> list[TraceRequest]:
    """The requests, at another rate and with other lengths.

    A length is never less than 1 token. Where prompts share prefixes, the blocks that share are
    scaled with them: with `prompt=1/16` an id that stood for 512 tokens stands for 32, and as many
    blocks are full, and shared, as before.

    Args:
        requests: sorted by arrival.
        rate: arrivals a second, as a multiple of the trace's.
        prompt, output: tokens, as a multiple.
        max_len: most tokens of prompt and output together, after scaling. The output keeps its
            length if one prompt token is left beside it; the prompt loses its end, so that what it
            shares with others stays.
        num_requests: only so many, the first.
        keep_prefixes: False forgets which prompts begin alike, and allows any factor `prompt`.

    Raises:
        ValueError: a number is out of range, or `prompt` would cut the trace's prefix blocks into
            parts of tokens: it must be a multiple of 1/512 for blocks of 512.
    """
    for name, factor in {"rate": rate, "prompt": prompt, "output": output}.items():
        require_number(name, factor, *FACTORS)
    if max_len is not None:
        require_int("max_len", max_len, 2, LONGEST)
    if num_requests is not None:
        require_int("num_requests", num_requests, 1)
    if not keep_prefixes:
        requests = [replace(r, prefix_ids=(), prefix_block_size=None) for r in requests]
    return [
        _scaled(request, rate, prompt, output, max_len or LONGEST)
        for request in requests[:num_requests]
    ]


def _scaled(
    request: TraceRequest, rate: float, prompt: float, output: float, max_len: int
) -> TraceRequest:
    size = request.prefix_block_size
    new_size = None if size is None else _scaled_block(size, prompt)
    if size is None or new_size is None:
        num_prompt_tokens = round(request.num_prompt_tokens * prompt)
    else:  # rounded down, so that no block becomes full that was not
        num_prompt_tokens = request.num_prompt_tokens * new_size // size
    num_output_tokens = min(max(1, round(request.num_output_tokens * output)), max_len - 1)
    num_prompt_tokens = min(max(1, num_prompt_tokens), max_len - num_output_tokens)
    num_ids = -(-num_prompt_tokens // new_size) if new_size else 0
    return replace(
        request,
        arrival_s=round(request.arrival_s / rate, 6),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        prefix_ids=request.prefix_ids[:num_ids],
        prefix_block_size=new_size,
    )


def _scaled_block(size: int, prompt: float) -> int:
    """Tokens of a prefix block after scaling."""
    exact, whole = size * prompt, scaled_block(size, prompt)
    if not leaves_whole(size, prompt):
        raise ValueError(
            f"prompt={prompt} makes prefix blocks of {exact:g} tokens of those of {size}; it must "
            f"be a multiple of 1/{size}, such as {whole}/{size}, unless keep_prefixes=False"
        )
    return whole


def scaled_block(size: int, prompt: float) -> int:
    """Tokens of a prefix block after scaling, to the nearest whole number."""
    return max(1, round(size * prompt))


def leaves_whole(size: int, prompt: float) -> bool:
    """Whether a factor makes whole tokens of a prefix block."""
    exact = size * prompt
    return abs(exact - scaled_block(size, prompt)) <= 1e-6 * exact


def offered_load(
    requests: Sequence[TraceRequest], *, prefill_tokens_s: float, decode_tokens_s: float
) -> float:
    """Seconds of work that arrive in a second: near 1 the queue grows, above it without end.

    Args:
        requests: at least 2, sorted by arrival.
        prefill_tokens_s: prompt tokens that the machine computes in a second.
        decode_tokens_s: output tokens, over all sequences of the batch that you expect.

    Raises:
        ValueError: fewer than 2 requests, all at one moment, or a speed out of range.
    """
    require_number("prefill_tokens_s", prefill_tokens_s, 1e-6, 1e12)
    require_number("decode_tokens_s", decode_tokens_s, 1e-6, 1e12)
    if len(requests) < 2:
        raise ValueError(f"requests has {len(requests)}: a rate takes at least 2")
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if span_s <= 0:
        raise ValueError("requests all arrive at one moment: they have no rate")
    work_s = sum(
        r.num_prompt_tokens / prefill_tokens_s + r.num_output_tokens / decode_tokens_s
        for r in requests
    )
    mean_gap_s = span_s / (len(requests) - 1)
    return work_s / len(requests) / mean_gap_s


def fit_to(
    requests: Sequence[TraceRequest],
    *,
    load: float = 0.7,
    prefill_tokens_s: float,
    decode_tokens_s: float,
    max_len: int | None = None,
) -> list[TraceRequest]:
    """The requests at the rate that offers a machine this `load`; scale lengths before, if at all.

    Raises:
        ValueError: as `offered_load` and `scaled`.
    """
    require_number("load", load, 1e-3, 1e3)
    requests = scaled(requests, max_len=max_len)
    offered = offered_load(
        requests, prefill_tokens_s=prefill_tokens_s, decode_tokens_s=decode_tokens_s
    )
    return scaled(requests, rate=load / offered)
