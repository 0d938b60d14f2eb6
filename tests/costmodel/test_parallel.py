"""Several devices, by hand: their memory, and seconds of a step. The file takes a second."""

from dataclasses import replace

import pytest

from pdlab.costmodel import (
    Chunk,
    ElementBytes,
    Hardware,
    StepCost,
    bubble_share,
    kv_capacity_tokens,
    load_hardware,
    pipeline_ends_s,
    predict,
    predict_parallel,
    predict_request,
    predict_step,
    rank_kv_bytes_per_token,
    rank_memory,
    rank_weight_bytes,
    step_cost,
    weight_bytes,
)
from pdlab.costmodel.parallel import decode_pieces, prompt_pieces
from pdlab.costmodel.parallel_memory import stage_config
from pdlab.link import LINKS, Link
from pdlab.models.catalog import shape
from pdlab.models.shard_plan import ShardPlan

from .shapes import LLAMA_3_1_8B, TINY, TINY_TIED, TINY_WINDOWED

SMOLLM2 = shape("smollm2-135m")
WIRE = Link(100.0, 0.5, "wire")
"""100 bytes/s, half a second of latency."""
FAR = Link(1e12, 0.0, "no matter")
FP32 = ElementBytes.of("fp32")
HIDDEN, LAYER = 24, 24 * (48 + 2 * 16) + 48 * 24 + 3 * 24 * 40 + 2 * 24
"""TINY: elements of a row, and of a layer with its two norms."""


# --- memory ---------------------------------------------------------------------------------------


def test_one_rank_holds_the_whole_model() -> None:
    for config in (TINY, TINY_TIED):
        assert rank_weight_bytes(ShardPlan(config), 4) == [weight_bytes(config, 4)]


def test_a_tied_matrix_lies_on_the_first_and_on_the_last_stage() -> None:
    """3 layers on 2 stages are 2 + 1; the final norm is on both."""
    matrix = 97 * HIDDEN
    for config in (TINY, TINY_TIED):
        held = rank_weight_bytes(ShardPlan(config, 1, 2), 4)
        assert held == [4 * (2 * LAYER + HIDDEN + matrix), 4 * (LAYER + HIDDEN + matrix)]


def test_a_stage_in_the_middle_has_neither_embedding_nor_head() -> None:
    assert rank_weight_bytes(ShardPlan(TINY, 1, 3), 2)[1] == 2 * (LAYER + HIDDEN)


def test_ranks_of_a_stage_share_all_but_the_norms() -> None:
    """Over two ranks the tied model is there once, and its 7 norms twice."""
    held = rank_weight_bytes(ShardPlan(TINY_TIED, 2), 4)
    assert held[0] - held[1] == 4 * HIDDEN  # of 97 tokens the first has one more
    assert sum(held) == weight_bytes(TINY_TIED, 4) + 4 * 7 * HIDDEN


def test_kv_goes_by_layers_and_kv_heads() -> None:
    """SmolLM2's 3 KV heads of 64 on two ranks are 2 + 1; 30 layers on 4 stages 8 + 8 + 7 + 7."""
    assert rank_kv_bytes_per_token(ShardPlan(SMOLLM2, 2), 4) == [
        2 * 30 * 2 * 64 * 4,
        2 * 30 * 1 * 64 * 4,
    ]
    layers = [8, 8, 7, 7]
    by_stage = rank_kv_bytes_per_token(ShardPlan(SMOLLM2, 1, 4), 4)
    assert by_stage == [2 * n * 3 * 64 * 4 for n in layers]


def test_the_fullest_rank_says_how_much_kv_fits() -> None:
    plan = ShardPlan(SMOLLM2, 2)
    memory = rank_memory(plan, FP32, kv_tokens=10, rows=1, num_sampled=1)
    first = memory[0]
    assert first.kv == 10 * 2 * 30 * 2 * 64 * 4
    device = Hardware("d", "gpu", {"fp32": 1.0}, 1.0, first.total, "made up")
    assert kv_capacity_tokens(plan, memory, device, 4) == 10
    assert kv_capacity_tokens(plan, memory, replace(device, memory_bytes=1), 4) == 0


# --- a step ---------------------------------------------------------------------------------------


def test_the_ranks_flops_are_the_models() -> None:
    plan = ShardPlan(TINY_WINDOWED, 2, 3)
    chunks = [Chunk(3, 2), Chunk(0, 5)]
    sizes = {"weight_element_bytes": 4, "kv_element_bytes": 4}
    of_ranks = sum(
        (
            step_cost(stage_config(plan, s), chunks, num_sampled=2 * s.has_head, **sizes)
            for s in plan.shards
        ),
        StepCost.zero(),
    )
    whole = step_cost(TINY_WINDOWED, chunks, num_sampled=2, **sizes)
    assert of_ranks.flops == whole.flops
    assert of_ranks.bytes["kv_read"] == whole.bytes["kv_read"]


def test_one_rank_takes_what_one_device_takes() -> None:
    device = load_hardware()["a100-80gb"]
    one = predict_parallel(LLAMA_3_1_8B, device, LINKS["NVLink4"], prompt_tokens=500)
    alone = predict_request(LLAMA_3_1_8B, 500, 2, device, "bf16")
    assert (one.ttft_s, one.tpot_s) == pytest.approx((alone.ttft_s, alone.tpot_s))
    assert one.prefill.collective_s == one.prefill.waiting_s == one.prefill.bubble_share == 0
    assert (one.provenance, one.basis) == ("predicted", "published")


def test_all_reduces_cost_their_rounds_and_bytes(round_machine: Hardware) -> None:
    """Two ranks, 5 rows: seven all-reduces of 480 bytes, and 48 of the 97 logits of one row."""
    step = predict_step(ShardPlan(TINY, 2), prompt_pieces(5, 1), round_machine, WIRE, "fp32", FP32)
    assert step.collective_s == pytest.approx(7 * (0.5 + 480 / 100) + 0.5 + 48 * 4 / 100)
    assert step.time_s == pytest.approx(step.compute_s + step.collective_s)


def test_a_large_all_reduce_of_three_ranks_takes_two_rounds(round_machine: Hardware) -> None:
    """1,000 rows of 24 columns, 8 for each rank: 16 sent for the sums, and 8 to each of two. Of one
    row's 97 logits, 32 come from the second rank and, at the same time, 32 from the third."""
    plan = ShardPlan(replace(TINY, num_heads=3, num_kv_heads=3), 3)
    pieces = [([Chunk(0, 1000)], 1)]
    step = predict_step(plan, pieces, round_machine, WIRE, "fp32", FP32)
    sums_s = 7 * (2 * 0.5 + 1000 * 4 * (16 + 2 * 8) / 100)
    assert step.collective_s == pytest.approx(sums_s + 0.5 + 32 * 4 / 100)


def test_equal_stages_take_gpipes_slots() -> None:
    """3 stages, 4 micro-batches of 2 s: 6 slots, a third of them without work."""
    ends = pipeline_ends_s([[2.0] * 4] * 3, [0] * 4, Link(1.0))
    assert ends[-1] == [6, 8, 10, 12]
    assert 1 - 3 * 4 * 2 / (3 * 12) == pytest.approx(bubble_share(3, 4)) == 1 / 3


def test_a_slow_stage_holds_up_the_others() -> None:
    assert pipeline_ends_s([[1.0] * 3, [4.0] * 3], [0] * 3, Link(1.0))[-1][-1] == 1 + 3 * 4


def test_a_link_that_is_slower_than_a_stage_sets_the_pace() -> None:
    """Slots of 1 s, sends of 3 s one behind the other, and half a second of latency."""
    ends = pipeline_ends_s([[1.0] * 3] * 2, [300] * 3, WIRE)
    assert ends == [[1, 2, 3], [1 + 3 + 0.5 + 1, 1 + 6 + 0.5 + 1, 1 + 9 + 0.5 + 1]]


def test_a_pipeline_is_the_slots_of_its_stages(round_machine: Hardware) -> None:
    plan = ShardPlan(TINY, 1, 3)
    pieces = decode_pieces(batch=4, context=6, most=2)
    step = predict_step(plan, pieces, round_machine, FAR, "fp32", FP32)
    sizes = {"weight_element_bytes": 4, "kv_element_bytes": 4}
    slots = [
        predict(
            step_cost(
                stage_config(plan, shard), [(6, 1)] * 2, num_sampled=2 * shard.has_head, **sizes
            ),
            round_machine,
            "fp32",
        ).time_s
        for shard in plan.shards
    ]
    assert max(slots) == slots[2]  # the head
    assert step.time_s == pytest.approx(sum(slots) + slots[2])
    assert step.compute_s == pytest.approx(2 * slots[2])
    assert step.waiting_s == pytest.approx(slots[0] + slots[1])
    assert step.bubble_share == pytest.approx(1 - 2 * sum(slots) / (3 * step.time_s))


def test_pieces_cover_the_rows_once() -> None:
    assert prompt_pieces(5, 2) == [([Chunk(0, 3)], 0), ([Chunk(3, 2)], 1)]
    assert prompt_pieces(2, 4) == [([Chunk(0, 1)], 0), ([Chunk(1, 1)], 1)]
    assert decode_pieces(3, 7, 2) == [([Chunk(7, 1)] * 2, 2), ([Chunk(7, 1)], 1)]


# --- a plan ---------------------------------------------------------------------------------------


def test_micro_batches_help_a_prompt_and_not_a_decode() -> None:
    """A micro-batch of decodes reads all weights of its stage once more."""
    device, nvlink = load_hardware()["a100-80gb"], LINKS["NVLink4"]

    def plan(pieces: int):
        return predict_parallel(
            LLAMA_3_1_8B, device, nvlink, 1, 4, prompt_tokens=4096, batch=8, micro_batches=pieces
        )

    one, four = plan(1), plan(4)
    assert four.ttft_s < 0.6 * one.ttft_s
    assert four.prefill.bubble_share < one.prefill.bubble_share
    assert four.tpot_s > one.tpot_s
    assert four.tokens_s == 8 / four.tpot_s


def test_a_slow_link_eats_what_tensor_parallel_gains() -> None:
    device = load_hardware()["a100-80gb"]

    def ttft_s(link: str, tensor_parallel: int) -> float:
        found = predict_parallel(
            LLAMA_3_1_8B, device, LINKS[link], tensor_parallel, prompt_tokens=1024
        )
        return found.ttft_s

    assert ttft_s("NVLink4", 4) < ttft_s("NVLink4", 1) < ttft_s("1GbE", 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel": 4}, "tensor_parallel=4"),
        ({"pipeline_parallel": 31}, "pipeline_parallel=31"),
        ({"prompt_tokens": 9000}, "prompt_tokens=9000.*max_model_len=8192"),
        ({"context_tokens": 8192}, "context_tokens=8192.*8193 tokens"),
        ({"batch": 0}, "batch=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"dtype": "fp64"}, "dtype='fp64'"),
        ({"batch": 2000}, r"rank 0 needs .* GB \(weights .*\); .* has memory_bytes=16 GB"),
    ],
)
def test_refusals_name_the_parameter(values, message) -> None:
    begin = {"prompt_tokens": 500, "dtype": "fp32"}
    with pytest.raises(ValueError, match=message):
        predict_parallel(
            SMOLLM2, load_hardware()["core-i7-1165g7"], LINKS["10GbE"], **begin | values
        )
