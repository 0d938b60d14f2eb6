"""Replays count slots exactly, keep to their rules, and find what is known of public traces."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.kvcache.contiguous import grow, power_of_two, reserve_max
from pdlab.shipped import shipped
from pdlab.workload.cache_replay import CacheReplay, replay_cache
from pdlab.workload.memories import ContiguousMemory, PagedMemory, SlotMemory
from pdlab.workload.slot_replay import SlotReplay, Totals
from pdlab.workload.traces import TraceRequest, read_trace

from . import public

SHIPPED = shipped("data") / "traces"


def request(
    prompt: int, output: int, arrival_s: float = 0.0, ids: tuple[int, ...] = ()
) -> TraceRequest:
    return TraceRequest(arrival_s, prompt, output, ids, 4 if ids else None)


def replay(requests: list[TraceRequest], num_blocks: int | None, **options) -> dict:
    results = replay_cache(requests, num_blocks=num_blocks, block_size=4, step_s=1.0, **options)
    return {result.policy: result for result in results}


# --- slots, worked out by hand -------------------------------------------------------------------


def test_slots_of_one_request() -> None:
    """5 prompt tokens, then 2 more steps: 5, 6 and 7 tokens in the cache; the last is not fed."""
    results = replay([request(5, 3)], num_blocks=None)
    slots = {
        name: (r.used_slots, r.reserved_slots, r.internal_slots, r.needed_slots, r.copied_tokens)
        for name, r in results.items()
    }
    assert slots == {
        "paged": (6, 1, 1, 8, 0),
        "max": (6, 1, 0, 7, 0),
        "power_of_two": (6, 1, 1, 8, 0),
        "grow": (6, 0, 0, 18, 11),  # 5, then 6, then 7 slots, each behind the one before
    }
    assert all(r.duration_s == 3 and r.num_finished == 1 for r in results.values())
    assert results["paged"].waste == 0.25


def test_holes_too_short_for_the_next_are_external() -> None:
    requests = [request(4, 1), request(3, 2), request(8, 1)]
    results = replay(requests, num_blocks=3)
    # In step 1 the first has gone: 4 slots free before the second, 4 behind it, 8 wanted.
    assert results["power_of_two"].external_slots == pytest.approx(8 / 3)
    assert results["power_of_two"].duration_s == 3
    assert results["paged"].external_slots == 0
    assert results["paged"].duration_s == 2


def test_the_youngest_gives_way_and_starts_again() -> None:
    result = replay([request(4, 5), request(4, 5)], num_blocks=2, baselines=False)["paged"]
    assert (result.num_preemptions, result.num_finished) == (1, 2)
    # Steps 0 to 4 are the first's; the second then computes 5 tokens and samples 3 more.
    assert result.duration_s == 9
    assert (result.max_running, result.max_waiting) == (2, 1)


def test_what_cannot_fit_is_refused_and_the_rest_runs() -> None:
    results = replay([request(9, 1), request(3, 2), request(8, 1)], num_blocks=2)
    assert {n: (r.num_refused, r.num_finished) for n, r in results.items()} == {
        "paged": (1, 2),
        "max": (3, 0),  # it reserves 9 slots for everyone
        "power_of_two": (1, 2),
        "grow": (1, 2),
    }


def test_prefill_is_cut_to_the_budget_oldest_first() -> None:
    result = replay(
        [request(10, 1), request(3, 1)], num_blocks=None, baselines=False, prefill_tokens=4
    )["paged"]
    # 4 and 4 of the first, its last 2 and 2 of the second, then 1.
    assert result.duration_s == 4
    assert result.used_slots == (4 + 8 + 10 + 2 + 3) / 4
    assert result.mean_queue_s == 1.0


def test_requests_wait_for_their_arrival_and_the_first_in_line() -> None:
    requests = [request(8, 2), request(8, 1, 0.5), request(1, 1, 0.5), request(4, 1, 9.0)]
    result = replay(requests, num_blocks=3, baselines=False)["paged"]
    # The short third does not overtake the second, which fits in step 2 only.
    assert (result.mean_queue_s, result.p99_queue_s) == ((0 + 1.5 + 1.5 + 0) / 4, 1.5)
    assert result.duration_s == 10


# --- sharing -------------------------------------------------------------------------------------


def test_hits_are_full_blocks_of_an_earlier_prompt() -> None:
    requests = [request(10, 1, ids=(0, 1, 2)), request(12, 1, 5, ids=(0, 1, 3))]
    result = replay(requests, num_blocks=None, baselines=False)["paged"]
    assert (result.hit_blocks, result.prompt_blocks, result.hit_tokens) == (2, 6, 8)
    assert (result.block_hit_rate, result.token_hit_rate) == (2 / 6, 8 / 22)
    assert result.num_evictions == 0


def test_the_last_token_of_a_known_prompt_is_computed() -> None:
    requests = [request(8, 1, ids=(0, 1)), request(8, 1, 5, ids=(0, 1))]
    assert replay(requests, num_blocks=None, baselines=False)["paged"].hit_blocks == 1


def test_the_same_block_behind_another_prefix_is_another_block() -> None:
    requests = [request(9, 1, ids=(0, 1, 2)), request(9, 1, 5, ids=(7, 1, 2))]
    assert replay(requests, num_blocks=None, baselines=False)["paged"].hit_blocks == 0


def test_blocks_in_use_are_shared_and_counted_once() -> None:
    requests = [request(9, 3, ids=(0, 1, 2)), request(9, 2, 1.0, ids=(0, 1, 3))]
    result = replay(requests, num_blocks=None, baselines=False)["paged"]
    # Steps 1 and 2 of 3: both run, and hold 4 blocks instead of 6.
    assert result.shared_slots == pytest.approx(2 * 8 / 3)
    assert result.taken_slots == pytest.approx((12 + 16 + 16) / 3)
    assert result.used_slots == pytest.approx((9 + (10 + 1) + (11 + 2)) / 3)
    assert result.needed_slots == 16


def test_a_full_pool_evicts_the_least_recently_used_ends_first() -> None:
    first, other, again = (0, 1), (5, 6), (0, 1, 2)
    requests = [
        request(8, 1, 0, ids=first),
        request(8, 1, 2, ids=other),
        request(9, 1, 4, ids=again),
    ]
    assert replay(requests, 5, baselines=False)["paged"].hit_blocks == 2
    tight = replay(requests, 3, baselines=False)["paged"]
    # The second takes the empty block and that with the end of the first's prompt.
    assert (tight.hit_blocks, tight.num_evictions) == (1, 3)


def test_smaller_blocks_are_parts_of_the_traces_own() -> None:
    requests = [request(10, 1, ids=(0, 1, 2)), request(12, 1, 5, ids=(0, 1, 3))]
    [result] = replay_cache(requests, num_blocks=None, block_size=2, baselines=False, step_s=1)
    assert (result.hit_blocks, result.prompt_blocks) == (4, 11)
    with pytest.raises(ValueError, match="block_size=3 must divide the 4 tokens"):
        replay_cache(requests, num_blocks=None, block_size=3)


# --- the slot replay against a recount of every step ---------------------------------------------


class StepByStep(SlotReplay):
    """Takes every step one by one and counts everything anew."""

    def _next_event(self, step: int) -> int:
        self.now = step
        return step + 1

    def _step(self, step: int) -> bool:
        self.now = step
        super()._step(step)
        return True

    def _count(self, num_steps: int, used: int) -> None:
        jobs = list(self._running.values())
        assert num_steps == 1
        assert used == sum(job.tokens_at(self.now) for job in jobs)
        assert all(job.tokens_at(self.now) <= job.holding.capacity for job in jobs)
        assert self._held == sum(job.holding.capacity for job in jobs)
        assert self._lasting == sum(min(j.holding.capacity, j.request.num_kv_tokens) for j in jobs)
        self.check_memory([job.holding for job in jobs])
        super()._count(num_steps, used)

    def check_memory(self, holdings: list) -> None:
        if isinstance(self.memory, PagedMemory):
            self.memory.pool.check(holding.blocks for holding in holdings)
        else:
            self.memory.allocator.check(holding.region for holding in holdings)


def memories(num_blocks: int) -> list[SlotMemory]:
    return [
        PagedMemory(num_blocks, 4),
        *(
            ContiguousMemory(4 * num_blocks, policy)
            for policy in (reserve_max(34), power_of_two, grow)
        ),
    ]


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    arrival_s = 0.0
    named = draw(st.booleans())
    for i in range(draw(st.integers(1, 9))):
        arrival_s += draw(st.sampled_from([0, 0, 0.5, 1, 7]))
        prompt = draw(st.integers(1, 20))
        ids: tuple[int, ...] = ()
        if named:
            known = draw(st.sampled_from([(), *(r.prefix_ids for r in requests)]))
            fresh = tuple(range(100 * (i + 1), 100 * (i + 1) + 5))
            ids = (known + fresh)[: -(-prompt // 4)]
        requests.append(request(prompt, draw(st.integers(1, 15)), arrival_s, ids))
    return requests


@given(requests=traces(), num_blocks=st.integers(1, 16), prefill=st.sampled_from([3, 16, 100]))
def test_skipping_quiet_steps_changes_nothing(
    requests: list[TraceRequest], num_blocks: int, prefill: int
) -> None:
    for quick, slow in zip(memories(num_blocks), memories(num_blocks), strict=True):
        totals = SlotReplay(requests, quick, step_s=1.0, prefill_tokens=prefill).run()
        recounted = StepByStep(requests, slow, step_s=1.0, prefill_tokens=prefill).run()
        assert totals == recounted
        check_end(totals, quick, requests)


def check_end(totals: Totals, memory: SlotMemory, requests: list[TraceRequest]) -> None:
    """Everyone has finished or was refused, and all slots are back."""
    assert totals.num_finished + totals.num_refused == len(requests)
    assert totals.num_refused == sum(not memory.fits(r.num_kv_tokens) for r in requests)
    assert memory.num_taken == 0
    assert totals.used <= totals.lasting <= totals.unshared
    assert totals.taken <= totals.unshared
    assert memory.num_needed <= memory.num_slots


@given(requests=traces(), num_blocks=st.integers(1, 16))
def test_fractions_of_memory_add_up(requests: list[TraceRequest], num_blocks: int) -> None:
    for result in replay(requests, num_blocks).values():
        check_fractions(result)
    for result in replay(requests, None).values():
        check_fractions(result)
        assert result.num_refused == result.num_preemptions == result.external_slots == 0


def check_fractions(result: CacheReplay) -> None:
    for field in fields(result):
        value = getattr(result, field.name)
        assert value is None or isinstance(value, str) or value >= 0, field.name
    assert all(fraction >= 0 for fraction in result.fractions.values())
    if result.num_slots is not None or result.num_finished:
        assert sum(result.fractions.values()) == pytest.approx(1)


def test_a_memory_larger_than_all_requests_is_one_without_limit() -> None:
    requests = read_trace(SHIPPED / "mooncake-conv-like.jsonl")[:50]
    [huge] = replay_cache(requests, num_blocks=10**12, baselines=False)
    [unlimited] = replay_cache(requests, num_blocks=None, baselines=False)
    assert huge.num_slots == 512 * 10**12
    assert huge.needed_slots == unlimited.needed_slots
    assert huge.hit_blocks == unlimited.hit_blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"num_blocks": 4, "block_size": 0}, "block_size=0 must be at least 1"),
        ({"num_blocks": 4, "prefill_tokens": 0}, "prefill_tokens=0 must be at least 1"),
        ({"num_blocks": 10**5000}, "num_blocks must be at most 1,000,000,000,000,000"),
        ({"num_blocks": 4, "block_size": 10**16}, "block_size must be at most"),
        ({"num_blocks": 4, "step_s": 0.0}, r"step_s=0\.0 must be from 1e-06 to 86,400 s"),
        ({"num_blocks": 4, "step_s": 1e-300}, "step_s=1e-300 must be from"),
        ({"num_blocks": 4, "step_s": float("nan")}, "step_s=nan must be from"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay_cache([request(1, 1)], **options)
    with pytest.raises(ValueError, match="requests is empty"):
        replay_cache([], num_blocks=4)


def test_a_pool_that_cannot_be_simulated_is_refused() -> None:
    requests = [TraceRequest(0.0, 10**7, 1)] * 6
    with pytest.raises(ValueError, match="num_blocks=infinite: the requests touch 60,000,000 bl"):
        replay_cache(requests, num_blocks=None, block_size=1)
    with pytest.raises(ValueError, match="num_blocks=1000000000: the requests touch 60,000,000"):
        replay_cache(requests, num_blocks=10**9, block_size=1)


def test_an_extreme_trace_is_counted_exactly() -> None:
    """The longest prompt there may be, and the longest wait at the shortest step."""
    requests = [TraceRequest(0.0, 10**7, 3), TraceRequest(10.0**12, 1, 1)]
    for result in replay_cache(requests, num_blocks=None, block_size=16, step_s=1e-6):
        assert result.num_finished == 2
        assert result.duration_s == pytest.approx(1e12)
        assert result.needed_slots >= 10**7 + 2


# --- known facts ---------------------------------------------------------------------------------


def test_mooncake_hits_36_6_percent_of_its_blocks_in_a_cache_without_limit() -> None:
    requests = read_trace(public.there(public.MOONCAKE_CONVERSATION))
    [result] = replay_cache(requests, num_blocks=None, baselines=False)
    assert (result.hit_blocks, result.prompt_blocks) == (105_592, 288_500)
    assert f"{result.block_hit_rate:.1%}" == "36.6%"
    full_blocks = sum(r.num_prompt_tokens // 512 for r in requests)
    assert f"{result.hit_blocks / full_blocks:.1%}" == "38.2%"


def test_a_larger_cache_hits_more_of_mooncakes_blocks() -> None:
    requests = read_trace(SHIPPED / "mooncake-conv-like.jsonl")
    sizes = [400, 1000, 2000, 4000, None]
    rates = [
        replay_cache(requests, num_blocks=size, baselines=False)[0].block_hit_rate for size in sizes
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.2
    assert 0.36 <= rates[-1] <= 0.37


def test_paged_memory_wastes_less_than_4_percent_on_azures_conversations() -> None:
    requests = read_trace(public.there(public.AZURE_CONVERSATION))
    [paged] = replay_cache(requests, num_blocks=None, baselines=False)
    assert paged.num_finished == 19_366
    assert 0.005 < paged.waste < 0.007


@pytest.mark.parametrize("file", ["azure-conv-like.csv", "azure-code-like.csv"])
def test_paging_wastes_less_than_reserving_and_copies_less_than_growing(file: str) -> None:
    requests = read_trace(SHIPPED / file)
    results = {r.policy: r for r in replay_cache(requests, num_blocks=None)}
    assert results["paged"].waste < 0.04
    assert results["max"].waste > 0.6
    assert 0.2 < results["power_of_two"].waste < 0.5
    assert results["paged"].copied_tokens == results["max"].copied_tokens == 0
    assert results["grow"].copied_tokens > 100 * results["power_of_two"].copied_tokens > 0
    needed = {name: result.needed_slots for name, result in results.items()}
    assert min(needed, key=needed.__getitem__) == "paged"
    assert len({result.used_slots for result in results.values()}) == 1  # the same requests ran
