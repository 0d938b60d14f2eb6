"""Predicted times: the roofline, utilisation and whole requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.costmodel import (
    Chunk,
    Hardware,
    StepCost,
    load_hardware,
    mbu,
    mfu,
    predict,
    predict_request,
    ridge_point,
    step_cost,
)

from .shapes import LLAMA_3_1_8B, TINY

TABLE = load_hardware()


def cost(*, linear_flops=0, attention_flops=0, weights=0, kv_read=0) -> StepCost:
    zero = StepCost.zero()
    return StepCost(
        {**zero.flops, "mlp": linear_flops, "attention": attention_flops},
        {**zero.bytes, "weights": weights, "kv_read": kv_read},
    )


def test_the_slower_of_compute_and_memory_decides(round_machine: Hardware) -> None:
    by_memory = predict(cost(linear_flops=100, weights=20), round_machine, "fp32")
    assert (by_memory.compute_s, by_memory.memory_s) == (1, 2)
    assert (by_memory.bound, by_memory.time_s) == ("memory", 2)
    by_compute = predict(cost(linear_flops=300, weights=20), round_machine, "fp32")
    assert (by_compute.bound, by_compute.time_s) == ("compute", 3)


def test_attention_and_linear_layers_meet_their_own_roofs(round_machine: Hardware) -> None:
    """3 s of linear compute hide 1 s of weights, but not the 2 s attention waits for memory."""
    mixed = cost(linear_flops=300, weights=10, attention_flops=100, kv_read=20)
    prediction = predict(mixed, round_machine, "fp32")
    assert prediction.time_s == 3 + 2
    assert prediction.roofline_s == 4


def test_launches_are_added(round_machine: Hardware) -> None:
    prediction = predict(cost(weights=10), round_machine, "fp32", num_launches=4)
    assert (prediction.overhead_s, prediction.time_s) == (1, 2)


def test_a_prediction_says_what_it_rests_on(round_machine: Hardware) -> None:
    prediction = predict(cost(weights=10), round_machine, "fp32")
    assert (prediction.provenance, prediction.basis) == ("predicted", "published")
    assert prediction.hardware == "round"


def test_the_bound_turns_at_the_ridge_point(round_machine: Hardware) -> None:
    assert ridge_point(round_machine, "fp32") == 10
    assert predict(cost(linear_flops=99, weights=10), round_machine, "fp32").bound == "memory"
    assert predict(cost(linear_flops=100, weights=10), round_machine, "fp32").bound == "compute"


def test_utilisation_at_the_predicted_time_is_at_most_one(round_machine: Hardware) -> None:
    step = cost(linear_flops=100, weights=20)
    time_s = predict(step, round_machine, "fp32").time_s
    assert mfu(step, time_s, round_machine, "fp32") == 0.5
    assert mbu(step, time_s, round_machine) == 1


@given(
    start=st.integers(0, 4000),
    num_tokens=st.integers(1, 4000),
    short_name=st.sampled_from([name for name, row in TABLE.items() if "bf16" in row.peak_flops]),
)
def test_no_prediction_exceeds_a_ceiling(start: int, num_tokens: int, short_name: str) -> None:
    machine = TABLE[short_name]
    step = step_cost(
        LLAMA_3_1_8B,
        [Chunk(start, num_tokens)],
        num_sampled=1,
        weight_element_bytes=2,
        kv_element_bytes=2,
    )
    prediction = predict(step, machine, "bf16")
    assert prediction.roofline_s <= prediction.time_s * (1 + 1e-12)
    assert mfu(step, prediction.time_s, machine, "bf16") <= 1 + 1e-12
    assert mbu(step, prediction.time_s, machine) <= 1 + 1e-12


def test_prefill_is_bound_by_compute_and_decode_by_memory() -> None:
    """The example of the lessons: a 1,024-token prompt, 256 tokens generated."""
    machine = TABLE["a100-80gb"]
    request = predict_request(LLAMA_3_1_8B, 1024, 256, machine, "bf16")
    assert predict(request.prefill, machine, "bf16").bound == "compute"
    assert predict(request.decode, machine, "bf16").bound == "memory"
    assert request.tpot_s is not None
    assert request.e2e_s == pytest.approx(request.ttft_s + 255 * request.tpot_s)
    assert 0.04 < request.ttft_s < 0.06
    assert 0.0072 < request.tpot_s < 0.0082


def test_chunks_read_the_weights_again() -> None:
    machine = TABLE["a100-80gb"]
    whole = predict_request(LLAMA_3_1_8B, 1024, 1, machine, "bf16")
    chunked = predict_request(LLAMA_3_1_8B, 1024, 1, machine, "bf16", chunk_size=64)
    assert chunked.prefill.flops == whole.prefill.flops
    assert chunked.prefill.bytes["weights"] > 10 * whole.prefill.bytes["weights"]
    assert chunked.ttft_s > whole.ttft_s
    assert whole.tpot_s is None
    assert whole.e2e_s == whole.ttft_s


def test_a_prefix_hit_shortens_the_first_token_and_not_the_others() -> None:
    machine = TABLE["a100-80gb"]
    cold = predict_request(LLAMA_3_1_8B, 1024, 8, machine, "bf16")
    warm = predict_request(LLAMA_3_1_8B, 1024, 8, machine, "bf16", num_cached_tokens=1008)
    assert warm.ttft_s < cold.ttft_s / 3
    assert warm.tpot_s == cold.tpot_s


def test_quantized_weights_shorten_decode() -> None:
    machine = TABLE["a100-80gb"]
    bf16 = predict_request(LLAMA_3_1_8B, 16, 8, machine, "bf16")
    int4 = predict_request(LLAMA_3_1_8B, 16, 8, machine, "bf16", weight_element_bytes=0.5)
    assert bf16.tpot_s / int4.tpot_s == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens=0 is below the limit 1"),
        ({"output_tokens": 0}, "output_tokens=0 is below the limit 1"),
        ({"num_cached_tokens": 8}, "num_cached_tokens=8 is not within 0 to 7"),
        ({"chunk_size": 0}, "chunk_size=0 is below the limit 1"),
        ({"num_launches": -1}, "num_launches=-1 is below the limit 0"),
        ({"dtype": "fp4"}, "dtype='fp4' is not one of fp32"),
        ({"dtype": "bf16"}, "dtype='bf16' has no peak on round; known are fp32"),
        ({"kv_element_bytes": -1}, "kv_element_bytes=-1 is not above the limit 0"),
        ({"kv_element_bytes": 0}, "kv_element_bytes=0 is not above the limit 0"),
    ],
)
def test_bad_values_are_named(round_machine: Hardware, values: dict, message: str) -> None:
    arguments = {"prompt_tokens": 8, "output_tokens": 2, "dtype": "fp32", **values}
    with pytest.raises(ValueError, match=message):
        predict_request(TINY, hardware=round_machine, **arguments)


def test_a_time_must_be_positive(round_machine: Hardware) -> None:
    with pytest.raises(ValueError, match="wall_s=0 is not above the limit 0"):
        mbu(cost(weights=1), 0, round_machine)
