"""Figures of several ranks show what plan and records say. The file takes a few seconds."""

import re

import pytest

from pdlab.models.catalog import shape
from pdlab.models.shard_plan import ShardPlan
from pdlab.trace.records import SequenceRecord
from pdlab.workbench import figures
from pdlab.workbench.pipeline_data import pipeline
from pdlab.workbench.shard_data import exchanges, micro_batches_of, plan_of

from .handmade import two_requests
from .handmade_parallel import CALL_S, SEND_S, SLOT_S, on_ranks

SMOLLM2 = shape("smollm2-135m")


def title(figure) -> str:
    return figure.layout.title.text.replace("<br>", " ")


def source(figure) -> str:
    return figure.layout.title.subtitle.text.replace("<br>", " ")


# --- who holds what -------------------------------------------------------------------------------


def texts(figure) -> list[tuple[str, ...]]:
    return [tuple(each.text) for each in figure.data if each.type == "scatter"]


def test_two_ranks_share_three_kv_heads_unevenly() -> None:
    figure = figures.shard_map(ShardPlan(SMOLLM2, 2), name="SmolLM2")
    assert texts(figure) == [
        ("0–29", "0–29"),
        ("0–1", "2"),
        ("0–5", "6–8"),
        ("0–767", "768–1,535"),
        ("0–24,575 E H", "24,576–49,151 E H"),
    ]
    assert title(figure) == "2 x 1 ranks: 3 KV heads on 2 ranks are 2 + 1"
    assert "counted from the shape of SmolLM2" in source(figure)
    assert "KV 67%" in figure.layout.yaxis.ticktext[0]


def test_three_ranks_cut_smollm2_evenly() -> None:
    figure = figures.shard_map(ShardPlan(SMOLLM2, 3))
    assert texts(figure)[1] == ("0", "1", "2")
    assert title(figure) == "3 x 1 ranks: everything is cut evenly"


def test_a_grid_has_embedding_and_head_at_its_ends() -> None:
    figure = figures.shard_map(ShardPlan(SMOLLM2, 2, 2))
    assert texts(figure)[0] == ("0–14", "0–14", "15–29", "15–29")
    assert [text[-1] for text in texts(figure)[4]] == ["E", "E", "H", "H"]
    assert figure.layout.yaxis.ticktext[3].startswith("rank 3, stage 1<br>")


def test_a_stage_in_the_middle_has_no_vocabulary() -> None:
    figure = figures.shard_map(ShardPlan(SMOLLM2, 1, 4))
    assert texts(figure)[4] == ("0–49,151 E", "–", "–", "0–49,151 H")
    assert title(figure) == "1 x 4 ranks: 30 layers on 4 stages are 8 + 8 + 7 + 7"
    assert "one rank holds all" in title(figures.shard_map(ShardPlan(SMOLLM2)))


# --- what travels ---------------------------------------------------------------------------------


def test_counted_bytes_stand_beside_the_formulas() -> None:
    """Step 1: 3 + 5 tokens. Rows of 64 fp32 elements are 256 bytes."""
    trace = on_ranks(2, 1)
    figure = figures.collectives_of_step(trace, 1)
    counted, formula, time = figure.data
    assert list(counted.y) == [
        "embed: 1 all-reduce", "output: 3 all-reduces", "mlp: 3 all-reduces", "logits: 1 gather"
    ]  # fmt: skip
    size = 8 * 256
    sampled = sum(s.num_drawn for s in trace.steps[1].sequences)
    assert list(counted.x) == [2 * size, 2 * 3 * size, 2 * 3 * size, sampled * 128 * 4]
    assert list(formula.x) == list(counted.x)
    assert list(time.x) == pytest.approx([1e3 * n * CALL_S for n in (1, 3, 3, 1)])
    assert title(figure).endswith("on the wires, as the formula says")
    assert "recorded on handmade" in source(figure)


def test_bytes_that_differ_from_the_formula_are_told() -> None:
    trace = on_ranks(1, 2)
    more = [each._replace(wire_bytes=each.wire_bytes + 4) for each in trace.steps[0].collectives]
    trace.steps[0].collectives[:] = more
    assert "; the formula says 2.05 kB" in title(figures.collectives_of_step(trace, 0))
    assert exchanges(trace, trace.steps[0])[0].part == "hidden"


def test_what_was_computed_in_vain_has_no_formula() -> None:
    trace = on_ranks(2, 1)
    trace.steps[0].wasted.append(trace.steps[0].sequences[0])
    assert {each.formula_bytes for each in exchanges(trace, trace.steps[0])} == {None}
    assert title(figures.collectives_of_step(trace, 0)).endswith("on the wires")


def test_sampled_rows_are_the_last_ones_of_their_sequence() -> None:
    prompt = SequenceRecord("a", "prefill", 0, [1, 2, 3], [])
    last = SequenceRecord("b", "prefill", 0, [1, 2], [], sampled=7)
    decode = SequenceRecord("c", "decode", 9, [5], [], sampled=8)
    assert micro_batches_of([prompt, last, decode], 1) == [(6, 2)]
    assert micro_batches_of([prompt, last, decode], 4) == [(2, 0), (2, 0), (1, 1), (1, 1)]
    assert micro_batches_of([decode], 4) == [(1, 1)]
    assert micro_batches_of([], 4) == []


def test_one_rank_tells_nobody() -> None:
    with pytest.raises(ValueError, match="step=0 has no collectives"):
        figures.collectives_of_step(on_ranks(1, 1), 0)
    with pytest.raises(ValueError, match=r"trace\.model has no config"):
        plan_of(two_requests())


# --- when each computes ---------------------------------------------------------------------------


def test_measured_bubbles_stand_beside_the_formulas() -> None:
    """Two stages, 8 rows in 4 micro-batches: 4 slots each, the second begins 12 ms later."""
    trace = on_ranks(1, 2, 4)
    shown = pipeline(trace, trace.steps[:1])
    wall_s = 5 * SLOT_S + SEND_S
    assert shown.wall_s == pytest.approx(wall_s)
    assert shown.bubble_share == pytest.approx(1 - 4 * SLOT_S / wall_s)
    assert shown.formula_share == 1 / 5
    figure = figures.pipeline_timeline(trace)
    assert title(figure) == ("2 stages, 4 micro-batches: 23% bubbles measured, 20% predicted")
    bars = {bar.name: bar for bar in figure.data}
    assert list(bars["bubble"].x) == pytest.approx([1e3 * wall_s] * 2)
    assert list(bars["micro-batch 2"].y) == ["rank 0", "rank 1"]
    assert list(bars["micro-batch 2"].base) == pytest.approx([20, 32])


def test_ranks_of_a_stage_have_lanes_of_their_own() -> None:
    figure = figures.pipeline_timeline(on_ranks(2, 2, 2))
    lanes = [f"rank {rank} (stage {stage})" for rank, stage in enumerate((0, 0, 1, 1))]
    assert list(figure.layout.yaxis.categoryarray) == lanes[::-1]


def test_runs_can_be_compared_and_coloured_by_phase() -> None:
    runs = {"m = 1": on_ranks(1, 2, 1), "m = 2": on_ranks(1, 2, 2)}
    figure = figures.pipeline_timeline(runs, [1, 3], color="phase")
    bars = {bar.name: bar for bar in figure.data}
    assert set(bars) == {"bubble", "prefill", "decode"}
    assert set(bars["decode"].y) == {f"{run}: rank {r}" for run in runs for r in (0, 1)}
    assert re.search(r"m = 1: \d+% bubbles measured, 50% predicted; m = 2", title(figure))


def test_a_micro_batch_has_the_phase_of_its_rows() -> None:
    trace = on_ranks(1, 2, 2)
    prompt, decode = trace.steps[0].sequences[0], trace.steps[3].sequences[0]
    trace.steps[0].sequences[:] = [decode, prompt]
    spans = trace.steps[0].rank_spans
    spans[:] = [s._replace(num_tokens=(1, 8)[s.micro_batch]) for s in spans]
    slots = pipeline(trace, trace.steps[:1]).slots
    assert [(s.rank, s.phase) for s in slots] == [
        (0, "decode"), (0, "prefill"), (1, "decode"), (1, "prefill")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "knobs", "message"),
    [
        ({}, {}, "runs is empty"),
        ({"a": 3}, {}, r"runs\['a'\]=3 must be a Trace"),
        (two_requests(), {}, "no step that ranks computed"),
        (on_ranks(1, 2), {"steps": [99]}, "step=99"),
        (on_ranks(1, 2), {"steps": []}, "steps is empty"),
        (on_ranks(1, 2), {"color": "rank"}, "color='rank'"),
    ],
)
def test_what_cannot_be_shown_is_refused(runs, knobs, message) -> None:
    with pytest.raises(ValueError, match=message):
        figures.pipeline_timeline(runs, **knobs)
