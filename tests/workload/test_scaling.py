"""Scaled traces keep their shape: rate and lengths by a factor, prefixes as shared as before."""

import pytest

from pdlab.shipped import shipped
from pdlab.workload.scaling import fit_to, offered_load, scaled
from pdlab.workload.synthetic import AZURE_CONVERSATION, azure_like
from pdlab.workload.traces import TraceRequest, read_trace

from . import public

SHIPPED = shipped("data") / "traces"


def test_rate_and_lengths_are_multiplied() -> None:
    requests = [TraceRequest(0.0, 100, 30, priority=2), TraceRequest(9.0, 7, 1)]
    assert scaled(requests, rate=3.0, prompt=0.5, output=0.1) == [
        TraceRequest(0.0, 50, 3, priority=2),
        TraceRequest(3.0, 4, 1),
    ]
    assert scaled(requests) == requests
    assert scaled(requests, num_requests=1) == requests[:1]
    assert scaled(requests, num_requests=9) == requests
    assert scaled([]) == []


def test_a_length_is_at_least_one_token() -> None:
    [request] = scaled([TraceRequest(0.0, 3, 3)], prompt=0.01, output=0.01)
    assert (request.num_prompt_tokens, request.num_output_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("max_len", "lengths"), [(200, (100, 50)), (150, (100, 50)), (120, (70, 50)), (51, (1, 50)),
                             (50, (1, 49)), (2, (1, 1))],
)  # fmt: skip
def test_what_is_too_long_loses_prompt_first(max_len: int, lengths: tuple[int, int]) -> None:
    [request] = scaled([TraceRequest(0.0, 100, 50)], max_len=max_len)
    assert (request.num_prompt_tokens, request.num_output_tokens) == lengths


def test_prefix_blocks_are_scaled_with_the_prompts() -> None:
    """Full blocks stay full, and others do not become so: 1023 tokens are 63, not 64."""
    requests = [
        TraceRequest(0.0, 1024, 2, (1, 2), 512),
        TraceRequest(1.0, 1023, 2, (1, 3), 512),
        TraceRequest(2.0, 513, 2, (1, 4), 512),
        TraceRequest(3.0, 5, 2, (5,), 512),
    ]
    assert scaled(requests, prompt=1 / 16) == [
        TraceRequest(0.0, 64, 2, (1, 2), 32),
        TraceRequest(1.0, 63, 2, (1, 3), 32),
        TraceRequest(2.0, 32, 2, (1,), 32),
        TraceRequest(3.0, 1, 2, (5,), 32),
    ]
    assert scaled(requests, prompt=2.0)[2] == TraceRequest(2.0, 1026, 2, (1, 4), 1024)


def test_a_prompt_that_is_cut_keeps_its_beginning() -> None:
    requests = [TraceRequest(0.0, 1500, 20, (1, 2, 3), 512)]
    assert scaled(requests, max_len=1044) == [TraceRequest(0.0, 1024, 20, (1, 2), 512)]
    assert scaled(requests, max_len=1045) == [TraceRequest(0.0, 1025, 20, (1, 2, 3), 512)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            0.1,
            r"prompt=0\.1 makes prefix blocks of 51\.2 tokens of those of 512; .* such as 51/512",
        ),
        (1e-4, r"blocks of 0\.0512 tokens of those of 512; .* a multiple of 1/512, such as 1/512"),
        (3.0005, r"such as 1536/512, unless keep_prefixes=False"),
    ],
)
def test_prefix_blocks_stay_whole_or_are_given_up(prompt: float, message: str) -> None:
    requests = [TraceRequest(0.0, 1024, 2, (1, 2), 512, priority=1)]
    with pytest.raises(ValueError, match=message):
        scaled(requests, prompt=prompt)
    [request] = scaled(requests, prompt=prompt, keep_prefixes=False)
    assert request == TraceRequest(0.0, max(1, round(1024 * prompt)), 2, priority=1)


def test_every_whole_number_of_tokens_a_block_is_possible() -> None:
    requests = [TraceRequest(0.0, 1024, 2, (1, 2), 512)]
    for size in range(1, 1025):
        [request] = scaled(requests, prompt=size / 512)
        assert (request.num_prompt_tokens, request.prefix_block_size) == (2 * size, size)


# --- whole traces --------------------------------------------------------------------------------


def check_sharing(requests: list[TraceRequest], size: int, new_size: int) -> None:
    """Scaling from blocks of `size` to blocks of `new_size` keeps every full block and its id."""
    smaller = scaled(requests, rate=20.0, prompt=new_size / size, output=1 / 8)
    assert len(smaller) == len(requests)
    for before, after in zip(requests, smaller, strict=True):
        num_full = before.num_prompt_tokens // size
        assert after.num_prompt_tokens // new_size == num_full
        assert after.prefix_ids[:num_full] == before.prefix_ids[:num_full]
        assert len(after.prefix_ids) == -(-after.num_prompt_tokens // new_size)
        assert after.arrival_s == pytest.approx(before.arrival_s / 20, abs=1e-6)


@pytest.mark.parametrize("new_size", [1, 16, 33])
def test_scaled_conversations_share_as_many_blocks(new_size: int) -> None:
    check_sharing(read_trace(SHIPPED / "mooncake-conv-like.jsonl"), 512, new_size)


def test_the_public_conversations_are_scaled_to_a_laptop() -> None:
    requests = read_trace(public.there(public.MOONCAKE_CONVERSATION))
    check_sharing(requests, 512, 16)
    small = scaled(requests, rate=1 / 6, prompt=16 / 512, output=1 / 8, max_len=2048)
    assert len(small) == 12_031
    assert max(r.num_tokens for r in small) == 2048
    mean = sum(r.num_prompt_tokens for r in requests) / 12_031
    assert sum(r.num_prompt_tokens for r in small) / 12_031 == pytest.approx(mean / 32, rel=0.05)
    assert small[-1].arrival_s == pytest.approx(6 * requests[-1].arrival_s)


@pytest.mark.parametrize(
    ("path", "num_requests"),
    [(public.AZURE_CONVERSATION, 19_366), (public.AZURE_CODE, 8_819)],
    ids=["conversation", "code"],
)
def test_the_public_azure_traces_are_scaled_to_a_laptop(path, num_requests: int) -> None:
    requests = read_trace(public.there(path))
    small = scaled(requests, rate=0.1, prompt=0.1, output=0.1, max_len=1000)
    assert len(small) == num_requests
    assert max(r.num_tokens for r in small) <= 1000
    assert small[-1].arrival_s == pytest.approx(10 * requests[-1].arrival_s)
    for which in ("num_prompt_tokens", "num_output_tokens"):
        total = sum(getattr(r, which) for r in requests)
        assert sum(getattr(r, which) for r in small) == pytest.approx(total / 10, rel=0.05)


# --- load ----------------------------------------------------------------------------------------


def test_load_is_work_over_time() -> None:
    """Each request is 0.5 s of prefill and 1.5 s of decode, one every 4 s."""
    requests = [TraceRequest(4.0 * i, 100, 30) for i in range(5)]
    speeds = {"prefill_tokens_s": 200.0, "decode_tokens_s": 20.0}
    assert offered_load(requests, **speeds) == pytest.approx(0.5)
    assert offered_load(scaled(requests, rate=3.0), **speeds) == pytest.approx(1.5)
    assert [r.arrival_s for r in fit_to(requests, load=1.0, **speeds)] == [0, 2, 4, 6, 8]


def test_a_trace_is_slowed_down_to_a_machine() -> None:
    speeds = {"prefill_tokens_s": 400.0, "decode_tokens_s": 30.0}
    requests = azure_like(AZURE_CONVERSATION, 500)
    assert offered_load(requests, **speeds) > 10
    fitted = fit_to(requests, load=0.6, max_len=1000, **speeds)
    assert offered_load(fitted, **speeds) == pytest.approx(0.6, rel=1e-4)
    assert max(r.num_tokens for r in fitted) == 1000
    assert len(fitted) == 500


# --- bad input -----------------------------------------------------------------------------------

TWO = [TraceRequest(0.0, 5, 5), TraceRequest(1.0, 5, 5)]
SPEEDS = {"prefill_tokens_s": 100.0, "decode_tokens_s": 10.0}
BAD = {
    "rate": (lambda: scaled(TWO, rate=0), "rate=0 must be a number from 1e-06 to"),
    "prompt": (lambda: scaled(TWO, prompt=-1.0), r"prompt=-1\.0 must be a number"),
    "output": (lambda: scaled(TWO, output=float("nan")), "output=nan must be a number"),
    "output is text": (lambda: scaled([], output="2"), "output='2' must be a number"),
    "max_len": (lambda: scaled(TWO, max_len=1), "max_len=1 must be an integer >= 2"),
    "max_len 0": (lambda: scaled(TWO, max_len=0), "max_len=0 must be an integer >= 2"),
    "num_requests": (lambda: scaled(TWO, num_requests=0), "num_requests=0 must be an integer >= 1"),
    "load": (lambda: fit_to(TWO, load=0.0, **SPEEDS), r"load=0\.0 must be a number from 0\.001"),
    "speed": (
        lambda: offered_load(TWO, prefill_tokens_s=0, decode_tokens_s=1),
        "prefill_tokens_s=0 must be a number",
    ),
    "one request": (lambda: offered_load(TWO[:1], **SPEEDS), "requests has 1: a rate takes at"),
    "one moment": (lambda: fit_to(TWO[:1] * 3, **SPEEDS), "requests all arrive at one moment"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_and_limit(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
