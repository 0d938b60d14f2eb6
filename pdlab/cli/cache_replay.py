"""`pdlab replay --cache-only`: what a trace's requests do to KV memory, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlab.cli.text import seconds, si
from pdlab.kvcache import PagedKVCache
from pdlab.models.catalog import RANDOM, shape
from pdlab.workload.cache_replay import (
    LARGEST,
    PREFILL_TOKENS,
    STEP_RANGE_S,
    CacheReplay,
    replay_cache,
)
from pdlab.workload.traces import TraceRequest, find_trace, read_trace

INFINITE = "infinite"


@dataclass(frozen=True)
class CacheOnly:
    """What was asked for on the command line; `num_requests` None takes all."""

    trace: str
    blocks: str
    block_size: int | None
    model: str
    kv_format: str
    num_requests: int | None
    step_ms: float
    baselines: bool


def replay_cache_only(asked: CacheOnly) -> None:
    """Replay a trace through paged and contiguous KV memory and print what became of it.

    Raises:
        ValueError: no such trace, a damaged one, or a parameter out of range.
    """
    num_blocks = _num_blocks(asked.blocks)
    least, most = STEP_RANGE_S
    if not least <= asked.step_ms / 1000 <= most:
        limits = f"from {1000 * least:g} to {1000 * most:,.0f} ms"
        raise ValueError(f"step_ms={asked.step_ms:g} must be {limits}")
    requests = read_trace(find_trace(asked.trace))
    requests = requests[: asked.num_requests]
    block_size = asked.block_size or requests[0].prefix_block_size or 16
    token_bytes = _bytes_per_token(asked.model, block_size, asked.kv_format)
    console = Console(highlight=False)
    with console.status(f"replaying {len(requests):,} requests ..."):
        results = replay_cache(
            requests,
            num_blocks=num_blocks,
            block_size=block_size,
            baselines=asked.baselines,
            step_s=asked.step_ms / 1000,
        )
    for line in _introduction(asked, requests, num_blocks, block_size, token_bytes):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_table(results, token_bytes, shares=requests[0].prefix_block_size is not None))


def _num_blocks(text: str) -> int | None:
    if text == INFINITE:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"blocks={text!r:.60} must be a number of blocks or {INFINITE!r}")
    if len(text) > len(str(LARGEST)):  # before Python refuses to convert thousands of digits
        raise ValueError(f"blocks has {len(text):,} digits, it must be at most {LARGEST:,}")
    return int(text)


def _bytes_per_token(model: str, block_size: int, kv_format: str) -> float:
    """Bytes of a token's K and V, scales included, read off the tensors of one real block."""
    config = shape(model.removeprefix(RANDOM))
    return PagedKVCache(config, 1, block_size, kv_format, max_open_blocks=1).bytes_per_token


def _introduction(
    asked: CacheOnly,
    requests: Sequence[TraceRequest],
    num_blocks: int | None,
    block_size: int,
    token_bytes: float,
) -> list[str]:
    count = len(requests)
    noun = "request" if count == 1 else "requests"
    prompt = sum(r.num_prompt_tokens for r in requests) / count
    output = sum(r.num_output_tokens for r in requests) / count
    memory = f"no limit; blocks of {block_size} tokens"
    if num_blocks is not None:
        slots = num_blocks * block_size
        memory = f"{num_blocks:,} blocks of {block_size} tokens = {slots:,} token slots"
        memory += f" = {si(slots * token_bytes, 'B')}"
    lines = [
        f"[bold]simulated[/] from request lengths, no model is run: a step takes "
        f"{asked.step_ms:g} ms, gives each running request a token, and computes at most "
        f"{PREFILL_TOKENS:,} prompt tokens",
        f"trace    {escape(asked.trace)}: {count:,} {noun} in {requests[-1].arrival_s:,.0f} s, "
        f"mean {prompt:,.0f} prompt and {output:,.0f} output tokens",
        f"memory   {memory}",
        f"bytes    {si(token_bytes, 'B')} of K and V a token ({asked.model}, {asked.kv_format})",
    ]
    if asked.baselines:
        longest = max(r.num_kv_tokens for r in requests)
        lines.append(
            "beside   contiguous memory: max reserves the longest request of the trace, "
            f"{longest:,} tokens, for each; power_of_two moves to twice the space when full; "
            "grow moves at every token"
        )
    return lines


@dataclass(frozen=True)
class Row:
    """A line of the table: a number of each policy and what it means."""

    name: str
    value: Callable[[CacheReplay], str]
    meaning: str


def _table(results: Sequence[CacheReplay], token_bytes: float, *, shares: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(result.policy, justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    rows = [*_slot_rows(results[0]), *_memory_rows(token_bytes), *_queue_rows()]
    if shares:
        rows += _sharing_rows(token_bytes)
    for row in rows:
        table.add_row(row.name, *(row.value(result) for result in results), row.meaning)
    return table


def _slot_rows(first: CacheReplay) -> list[Row]:
    whole = "all slots" if first.num_slots is not None else "the slots taken"
    meanings = {
        "used": f"hold a token; of {whole}, mean over time",
        "reserved": "taken, and will be written later",
        "internal": "taken, and never written: internal",
        "external": "free, in pieces too short for the next request: external",
        "free": "free otherwise, cached blocks included",
    }
    rows = [Row(name, _fraction(name), meanings[name]) for name in first.fractions]
    waste = "reserved and internal, of the slots taken"
    return [*rows, Row("waste", lambda r: _percent(r.waste), waste)]


def _fraction(name: str) -> Callable[[CacheReplay], str]:
    return lambda result: _percent(result.fractions[name])


def _memory_rows(token_bytes: float) -> list[Row]:
    def memory(slots: float) -> str:
        return si(slots * token_bytes, "B")

    return [
        Row("taken", lambda r: memory(r.taken_slots), "mean over time"),
        Row("a request", lambda r: memory(r.taken_slots / (r.mean_running or 1)), "mean taken"),
        Row("needed", lambda r: memory(r.needed_slots), "would have been enough for this run"),
        Row("copied", lambda r: memory(r.copied_tokens), "moved because a sequence grew"),
    ]


def _queue_rows() -> list[Row]:
    return [
        Row("running", lambda r: f"{r.mean_running:.1f}", "requests at once, mean over time"),
        Row("at most", lambda r: f"{r.max_running:,}", "of them at once"),
        Row("waiting", lambda r: f"{r.mean_waiting:.1f}", "requests in line, mean over time"),
        Row("queue", lambda r: seconds(r.mean_queue_s), "from arrival to admission, mean"),
        Row("queue p99", lambda r: seconds(r.p99_queue_s), "the same, 99th percentile"),
        Row("preempted", lambda r: f"{r.num_preemptions:,}", "times: no slot for the next token"),
        Row("refused", lambda r: f"{r.num_refused:,}", "requests larger than the memory"),
        Row("duration", lambda r: f"{r.duration_s:,.0f} s", "until the last request ended"),
    ]


def _sharing_rows(token_bytes: float) -> list[Row]:
    def paged(value: Callable[[CacheReplay], str]) -> Callable[[CacheReplay], str]:
        return lambda r: value(r) if r.policy == "paged" else "-"

    return [
        Row("hit blocks", paged(lambda r: _percent(r.block_hit_rate)), "of all prompt blocks"),
        Row("hit tokens", paged(lambda r: _percent(r.token_hit_rate)), "of all prompt tokens"),
        Row(
            "spared",
            paged(lambda r: si(r.hit_tokens * token_bytes, "B")),
            "K and V found and not computed again",
        ),
        Row(
            "shared",
            paged(lambda r: si(r.shared_slots * token_bytes, "B")),
            "memory that sharing spares at once, mean",
        ),
        Row("evicted", paged(lambda r: f"{r.num_evictions:,}"), "cached blocks overwritten"),
    ]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%" if fraction >= 0.0995 else f"{100 * fraction:.2f}%"
