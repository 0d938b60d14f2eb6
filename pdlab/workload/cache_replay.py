"""What a trace does to KV memory: paged, and in one piece under three policies. No model runs.

All memories get the same requests and the same number of slots; see `slot_replay` for the rules of
simulated time, which every number here depends on. Slots are sorted as in figure 2 of the vLLM
paper (Kwon et al. 2023):

    used       holds a token
    reserved   taken, and its request will write it later (or now: a prompt that waits for prefill)
    internal   taken, and never written: the request ends before (internal fragmentation)
    external   free, but the request that is first in line does not fit in one piece
    free       the rest, cached blocks included
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlab.kvcache.block_pool import blocks_for
from pdlab.kvcache.contiguous import Policy, grow, power_of_two, reserve_max
from pdlab.workload.memories import ContiguousMemory, PagedMemory, SlotMemory
from pdlab.workload.slot_replay import SlotReplay, Totals
from pdlab.workload.traces import TraceRequest

STEP_S = 0.05
"""Simulated seconds a step: the time between two tokens that a reader follows with ease."""
PREFILL_TOKENS = 8192
"""Prompt tokens a step: vLLM's default `max_num_batched_tokens` for a server on an H100."""
UNLIMITED = 2**60
"""Slots of a contiguous memory that never becomes full; intervals of it cost nothing."""
LARGEST = 10**15
"""Blocks, tokens a block or a step: more than any memory has, and less than `UNLIMITED`."""
LARGEST_POOL = 50_000_000
"""Blocks that requests can touch: a simulated one takes 60 to 100 bytes, so some GB in all."""
STEP_RANGE_S = (1e-6, 86_400.0)
"""Beyond it, the number of steps of a long trace would be no number any more."""


@dataclass(frozen=True)
class CacheReplay:
    """How one KV memory fared with a trace. Simulated; means are over simulated time.

    Attributes:
        policy: `paged`, `max`, `power_of_two` or `grow`.
        num_slots: token slots of the memory; None for a memory without limit.
        needed_slots: the memory that would have been enough: for `paged` the most slots taken at
            once, for the others one past the highest slot taken.
        used_slots, reserved_slots, internal_slots, external_slots: means, see the module.
        shared_slots: mean slots that sharing prefixes spares: a block held by three counts two.
        num_refused: requests that are larger than the memory; the others all finished.
        prompt_blocks, hit_blocks: blocks of all prompts, the unfilled last ones included, and those
            of them found in the cache when their request was first admitted. Only full blocks can
            be found, and never the one with a prompt's last token, which is always computed.
        prompt_tokens, hit_tokens: the same in tokens.
        copied_tokens: moved because a sequence had to grow.
        mean_queue_s, p99_queue_s: from arrival to admission.
        duration_s: from the first arrival to the end of the last request.
    """

    policy: str
    num_slots: int | None
    needed_slots: int
    used_slots: float
    reserved_slots: float
    internal_slots: float
    external_slots: float
    shared_slots: float
    num_finished: int
    num_refused: int
    num_preemptions: int
    num_evictions: int
    prompt_blocks: int
    hit_blocks: int
    prompt_tokens: int
    hit_tokens: int
    copied_tokens: int
    mean_running: float
    max_running: int
    mean_waiting: float
    max_waiting: int
    mean_queue_s: float
    p99_queue_s: float
    duration_s: float

    @property
    def taken_slots(self) -> float:
        """Mean slots that belong to somebody."""
        return self.used_slots + self.reserved_slots + self.internal_slots

    @property
    def waste(self) -> float:
        """Taken slots without a token over taken slots, both averaged over time."""
        taken = self.taken_slots
        return (self.reserved_slots + self.internal_slots) / taken if taken else 0.0

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks over all blocks of all prompts.

        With a memory without limit 36.6% for Mooncake's conversation trace and its blocks of 512.
        Over full blocks only it would be 38.2%.
        """
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens that were not computed over all prompt tokens."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def fractions(self) -> dict[str, float]:
        """Each kind of slot as a part of the memory; of the slots taken, if it has no limit."""
        slots = {
            "used": self.used_slots,
            "reserved": self.reserved_slots,
            "internal": self.internal_slots,
        }
        if self.num_slots is not None:
            slots["external"] = self.external_slots
            slots["free"] = self.num_slots - self.taken_slots - self.external_slots
        whole = sum(slots.values())
        return {name: number / whole if whole else 0.0 for name, number in slots.items()}


def replay_cache(
    requests: Sequence[TraceRequest],
    *,
    num_blocks: int | None,
    block_size: int | None = None,
    baselines: bool = True,
    step_s: float = STEP_S,
    prefill_tokens: int = PREFILL_TOKENS,
) -> list[CacheReplay]:
    """Push a trace through the paged memory and, with `baselines`, through the contiguous ones.

    Args:
        requests: sorted by arrival.
        num_blocks: size of every memory, in blocks; None for no limit.
        block_size: tokens a block; by default that of the trace's prefix ids, or else 16.
        step_s: simulated seconds a step.
        prefill_tokens: prompt tokens that a step computes at most.

    Returns:
        `paged` first, then `max`, `power_of_two` and `grow`.

    Raises:
        ValueError: a parameter is out of range.
    """
    block_size = _check(requests, num_blocks, block_size, step_s, prefill_tokens)
    longest = max(request.num_kv_tokens for request in requests)
    policies: dict[str, Policy | None] = {"paged": None}
    if baselines:
        policies |= {"max": reserve_max(longest), "power_of_two": power_of_two, "grow": grow}
    results = []
    for name, policy in policies.items():
        memory = _memory(requests, num_blocks, block_size, policy)
        slots = SlotReplay(requests, memory, step_s=step_s, prefill_tokens=prefill_tokens)
        totals = slots.run()
        prompt_blocks = sum(blocks_for(r.num_prompt_tokens, block_size) for r in requests)
        num_slots = None if num_blocks is None else num_blocks * block_size
        results.append(
            _result(
                name,
                memory,
                totals,
                num_slots,
                totals.hit_tokens // block_size,
                prompt_blocks,
                step_s,
            )
        )
    return results


def _check(
    requests: Sequence[TraceRequest],
    num_blocks: int | None,
    block_size: int | None,
    step_s: float,
    prefill_tokens: int,
) -> int:
    """Refuse parameters out of range; returns the block size."""
    if not requests:
        raise ValueError("requests is empty: at least 1 is needed")
    prefix_sizes = {r.prefix_block_size for r in requests if r.prefix_block_size is not None}
    if block_size is None:
        block_size = min(prefix_sizes, default=16)
    limits = {"num_blocks": num_blocks, "block_size": block_size, "prefill_tokens": prefill_tokens}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
        if value is not None and value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:,}")
    least, most = STEP_RANGE_S
    if not least <= step_s <= most:
        raise ValueError(f"step_s={step_s} must be from {least:g} to {most:,.0f} s")
    for size in prefix_sizes:
        if size % block_size:
            raise ValueError(
                f"block_size={block_size} must divide the {size} tokens "
                "that each prefix id of this trace stands for"
            )
    return block_size


def _memory(
    requests: Sequence[TraceRequest], num_blocks: int | None, block_size: int, policy: Policy | None
) -> SlotMemory:
    """A memory of this many blocks, or one that cannot become full."""
    if policy is None:
        # More blocks than all requests together ever touch would change nothing.
        most = sum(blocks_for(r.num_kv_tokens, block_size) for r in requests)
        if (touched := most if num_blocks is None else min(num_blocks, most)) > LARGEST_POOL:
            raise ValueError(
                f"num_blocks={num_blocks or 'infinite'}: the requests touch {touched:,} blocks of "
                f"{block_size} tokens, at most {LARGEST_POOL:,} can be simulated"
            )
        return PagedMemory(touched, block_size)
    return ContiguousMemory(UNLIMITED if num_blocks is None else num_blocks * block_size, policy)


def _result(
    name: str,
    memory: SlotMemory,
    totals: Totals,
    num_slots: int | None,
    hit_blocks: int,
    prompt_blocks: int,
    step_s: float,
) -> CacheReplay:
    steps = max(1, totals.num_steps)
    wasted = totals.unshared - totals.used  # shared blocks are full, so all waste is unshared
    queue_s = sorted(max(0.0, steps_ * step_s) for steps_ in totals.queue_steps)
    return CacheReplay(
        policy=name,
        num_slots=num_slots,
        needed_slots=memory.num_needed,
        used_slots=(totals.taken - wasted) / steps,
        reserved_slots=(totals.lasting - totals.used) / steps,
        internal_slots=(totals.unshared - totals.lasting) / steps,
        external_slots=totals.external / steps,
        shared_slots=(totals.unshared - totals.taken) / steps,
        num_finished=totals.num_finished,
        num_refused=totals.num_refused,
        num_preemptions=totals.num_preemptions,
        num_evictions=memory.num_evictions,
        prompt_blocks=prompt_blocks,
        hit_blocks=hit_blocks,
        prompt_tokens=totals.prompt_tokens,
        hit_tokens=totals.hit_tokens,
        copied_tokens=memory.num_copied_tokens,
        mean_running=totals.running / steps,
        max_running=totals.max_running,
        mean_waiting=totals.waiting / steps,
        max_waiting=totals.max_waiting,
        mean_queue_s=sum(queue_s) / len(queue_s) if queue_s else 0.0,
        p99_queue_s=queue_s[(len(queue_s) - 1) * 99 // 100] if queue_s else 0.0,
        duration_s=totals.num_steps * step_s,
    )
