"""What the lesson on disaggregation runs, as far as it needs no processes.

What starts processes runs with the lesson itself; here the simulator stands in for them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.link import LINKS, Link
from pdlab.models.catalog import SHAPES
from pdlab.workbench import disagg_experiments as lab
from pdlab.workbench import figures
from pdlab.workbench.disagg_experiments.killing import Reader
from pdlab.workbench.disagg_experiments.maps import CORNERS
from pdlab.workload import TraceRequest


@pytest.fixture
def twin() -> lab.Twin:
    return lab.Twin.recorded()


def test_the_scene_is_about_who_waits(twin: lab.Twin) -> None:
    """Nobody who writes waits for the document, and the document has its K and V moved."""
    run = twin.run(lab.scene(0.11))
    outcome = lab.Outcome.of(run)
    prefill_s = lab.recorded_prefill_s(lab.DOCUMENT_TOKENS)
    assert outcome.chat_gap_s < prefill_s / 2
    assert outcome.document_ttft_s >= prefill_s
    label_of = lab.labels_of(run)
    assert [label_of[t.request_id] for t in run.transfers if t.num_tokens >= 512] == ["document"]
    assert list(label_of.values()) == lab.LABELS


def test_labels_are_for_the_scene_alone(twin: lab.Twin) -> None:
    with pytest.raises(ValueError, match="run has 1 requests, the scene has 5"):
        lab.labels_of(twin.run([TraceRequest(0.0, 20, 2)]))


def test_rows_of_tokens_have_the_names_that_were_given(twin: lab.Twin) -> None:
    run = simulate_cluster(lab.scene(0.11), twin.pool(1, 2), kills=[(2.0, "d0")])
    figure = figures.token_rows({"one": run, "two": run}, lab.LABELS)
    prompts = [trace for trace in figure.data if trace.name == "its prompt is computed"]
    again = [name for name in lab.LABELS if list(prompts[0].y).count(name) > 1]
    lost = [lab.labels_of(run)[name] for name in run.failures[0].request_ids]
    assert set(prompts[0].y) == set(lab.LABELS)
    assert again == [name for name in lost if name != "document"], "whose prompt is still cached"
    tokens = [trace for trace in figure.data if trace.name == "a token"]
    assert len(tokens) == 2
    assert list(tokens[1].y).count("document") == 4
    with pytest.raises(ValueError, match="labels has 1 names, run 'one' has 5 requests"):
        figures.token_rows({"one": run}, ["a"])
    with pytest.raises(ValueError, match="runs is empty"):
        figures.token_rows({}, lab.LABELS)


def test_bytes_of_a_token() -> None:
    sizes = {
        shape.name: shape.bytes_per_token
        for shape in lab.shapes(SimpleNamespace(name="smollm2-135m", config=SHAPES["smollm2-135m"]))
    }
    assert sizes["Qwen3-8B, bf16"] == 144 * 1024
    assert sizes["Llama-2-7B, bf16 (no GQA)"] == 512 * 1024
    assert sizes["smollm2-135m, fp32"] == 46_080


def test_only_the_last_layer_is_left_over_on_a_fast_link() -> None:
    for each in lab.exposed(1.0, 36, 1e6):
        assert each.layered_s <= each.whole_s
    [slow] = lab.exposed(1.0, 10, 2.5e8, ["1GbE"])
    assert slow.layered_s == pytest.approx(0.1 + 10 * 0.2 - 1.0, abs=1e-3)


def test_the_simulator_agrees_with_the_exercise() -> None:
    for bandwidth in (1e6, 1e7, 1e8):
        prefill_s, layer_s = lab.recorded_prefill_s(400), 400 * 46_080 / 30 / bandwidth
        left = max(prefill_s + layer_s, prefill_s / 30 + 30 * layer_s) - prefill_s
        found = lab.recorded_wait_s(400, Link(bandwidth), 30, 46_080)
        assert found == pytest.approx(left, rel=0.02)


def test_the_best_division() -> None:
    assert lab.best_split(1, 1, 8) == 4
    assert lab.best_split(1, 3, 8) == 2
    assert lab.best_split(0.2, 5, 4) == 1
    with pytest.raises(ValueError, match="num_workers"):
        lab.best_split(1, 1, 1)


def test_roles_that_follow_the_tide_do_switch(twin: lab.Twin) -> None:
    tide = lab.tide(twin, each_s=30.0)
    found = lab.follow(twin, tide, 2, 2, lab.CONTROL)
    assert {switch.role for switch in found.switches} == {"prefill", "decode"}
    assert not lab.follow(twin, tide, 2, 2).switches
    assert found.in_time(lab.tide_slo(twin)) > lab.follow(twin, tide, 1, 3).in_time(
        lab.tide_slo(twin)
    )


def test_a_reader_takes_each_piece_once() -> None:
    class Piece:
        def __init__(self, token_ids: list[int], text: str):
            self.token_ids, self.text = token_ids, text

    reader, pieces = Reader(), [Piece([1], "a")]
    reader.look(pieces)
    reader.look(pieces)
    pieces.append(Piece([2, 3], "bc"))
    reader.look(pieces)
    assert (reader.token_ids, reader.text) == ([1, 2, 3], "abc")


def test_the_corner_of_a_map() -> None:
    shown = {
        "ttfts_s": [0.2, 2.0],
        "tpots_s": [0.03, 0.2],
        "modes": ["chunked", "disaggregated"],
        "best_modes": [[[], [1, 0]], [[0], [0]]],
        "goodput": [[[0.0, 1.0], [2.0, 3.0]], [[0.5, 1.5], [1.0, 1.0]]],
    }
    assert lab.corner(shown, "disaggregated") == CORNERS[(True, False)]
    assert lab.corner(shown, "chunked") == "everywhere", "a tie is no loss"
    assert lab.corner(shown | {"best_modes": [[[], [0, 1]], [[1], [1]]]}, "disaggregated") == (
        "everywhere"
    )
    assert lab.corner(shown | {"best_modes": [[[0], [0]], [[], []]]}, "disaggregated") == "nowhere"
    assert lab.goodput_at(shown, "chunked", 5.0, 0.25) == 3.0
    assert lab.goodput_at(shown, "disaggregated", 1.0, 0.03) == 1.5


def test_decoding_elsewhere_costs_the_ratio_of_bandwidths() -> None:
    found = lab.decode_elsewhere(
        "h100-sxm", "a100-80gb", [147_456], [LINKS["100GbE"].bandwidth_bytes_s]
    )
    assert found.least_price == pytest.approx(3350 / 2039, rel=0.02)
    assert found.points[0].split.ttft_s < found.slow.ttft_s


def test_the_break_even_plot_marks_where_each_size_begins_to_pay() -> None:
    names = {147_456: "bf16", 73_728: "int8"}
    found = lab.decode_elsewhere("h100-sxm", "l4", list(names))
    figure = figures.break_even_figure(found, names)
    lines = {line.name.split(":")[0]: line for line in figure.data if line.mode == "lines"}
    marks = [mark.x[0] for mark in figure.data if mark.mode != "lines"]
    assert marks == [found.least_bandwidth_bytes_s[size] for size in names]
    for line, least in zip(lines.values(), marks, strict=True):
        assert all(
            (saved_s > 0) == (at > least) for at, saved_s in zip(line.x, line.y, strict=True)
        )
    assert max(lines["bf16"].y) < found.slow.ttft_s - found.fast.ttft_s
    assert {"1GbE", "100GbE"} <= {note.text for note in figure.layout.annotations}


def test_the_recorded_agreement_has_both_workloads() -> None:
    found = lab.recorded_agreement()
    assert set(found) == {"mixed", "short chat"}
    assert all(0.5 < r < 2 for *ratios, turns in found.values() for r in ratios if turns)


def test_the_document_is_what_was_computed_in_its_steps(twin: lab.Twin) -> None:
    run = twin.run(lab.scene(0.11))
    assert lab.prefill_s(run) == pytest.approx(lab.recorded_prefill_s(lab.DOCUMENT_TOKENS))
    assert all(0 < share <= 1 for share in lab.busy(run))


def test_the_planned_division_is_the_simulated_best(twin: lab.Twin) -> None:
    requests = lab.mixed_requests(400)
    found = lab.planned(twin, requests, 8)
    capacity = lab.simulated_capacity(twin, requests, found.options)
    assert found.options[capacity.index(max(capacity))] == found.best


def test_a_small_memory_makes_the_fast_machine_cheaper() -> None:
    one = lab.decode_elsewhere("h100-sxm", "l4", [147_456]).least_price
    assert lab.price_when_full("h100-sxm", "l4") > 2 * one
    assert lab.price_when_full("h100-sxm", "h100-sxm") == 1


def test_whole_engines_need_no_controller(twin: lab.Twin) -> None:
    tide, slo = lab.tide(twin), lab.tide_slo(twin)
    assert lab.whole_engines(twin, tide, 4, 128).in_time(slo) > 0.95
    assert lab.follow(twin, tide, 2, 2).in_time(slo) < 0.9
