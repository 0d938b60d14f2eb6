"""TransferView and the figures of clusters tell what the records say, and what they rest on."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import traitlets

from pdlab.bench.disaggregation import Overlap, PlanFigures
from pdlab.disagg.serving import ClusterRun
from pdlab.trace import ClusterTrace, ParcelRecord
from pdlab.workbench import TransferView, figures
from pdlab.workbench.display import mimebundle
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workbench.transfer_data import (
    MAX_BLOCKS,
    MAX_PARCELS,
    MAX_STEPS,
    Story,
    largest_transfer,
    transfer_data,
)
from pdlab.workload.serving import StepSpan

from .handmade_cluster import recorded, simulated, story

has_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def data_of(run, place: int = 0) -> dict:
    return transfer_data(Story.of(run), place)


# --- data -----------------------------------------------------------------------------------------


def test_time_0_is_the_end_of_the_prompt() -> None:
    data = data_of(story())
    assert [step[:3] for step in data["sender"]] == [[-3, -2, 0], [-2, -1, 16], [-1, 0, 4]]
    assert (data["start_s"], data["ready_s"], data["next_s"]) == (-2, 0.25, 0.75)
    assert [step[2:] for step in data["receiver"]] == [[0, 0, 1], [0, 0, 1], [1, 0, 1]]
    assert data["wait_s"] == 0.25


def test_what_is_there_before_the_prompts_end_counts_as_early() -> None:
    assert data_of(story("stream"))["early_bytes"] == 2 * 160 + 40
    assert data_of(story("push"))["early_bytes"] == 0
    assert data_of(story("push"))["wait_s"] == 1.5


def test_time_on_the_way_counts_no_pause_and_no_moment_twice() -> None:
    assert data_of(story("push"))["on_the_way_s"] == pytest.approx(1.4)
    assert data_of(story("stream"))["on_the_way_s"] == pytest.approx(4 * 0.2)
    run = story()
    first = run.transfers[0].parcels[0]
    run.transfers[0].parcels.append(first._replace(first_layer=1, sent_s=1.5, arrived_s=1.7))
    assert data_of(run)["on_the_way_s"] == pytest.approx(4 * 0.2 + 0.1)


def test_all_bytes_are_drawn_where_parcels_are_drawn_together() -> None:
    run = story()
    run.transfers[0].parcels = [
        ParcelRecord(layer, layer + 1, start, start + 4, 7, start + layer / 100, start + 1)
        for start in range(0, 400, 4)
        for layer in range(80)
    ]
    drawn = data_of(run)["parcels"]
    assert len(drawn) <= MAX_PARCELS + 100
    assert sum(p[4] for p in drawn) == run.transfers[0].num_bytes
    assert {(p[2], layer) for p in drawn for layer in range(p[0], p[1])} == {
        (start, layer) for start in range(0, 400, 4) for layer in range(80)
    }


def test_of_many_steps_its_own_stay() -> None:
    run = story()
    others = [StepSpan(1 + i / 1000, 0.001, ["r0"], {}, 0, 1, 1) for i in range(1000)]
    run.workers["d0"].steps[1:2] = others
    data = data_of(run)
    assert len(data["receiver"]) == MAX_STEPS
    assert data["num_left_out"] == 1002 - MAX_STEPS
    assert sum(step[2] for step in data["receiver"]) == 1


def test_blocks_are_those_of_both_tables() -> None:
    trace = recorded(block_sizes=(8, 16))
    for place, length in enumerate((33, 8, 17)):
        blocks = data_of(trace, place)["blocks"]
        assert blocks["sizes"] == [8, 16]
        assert blocks["num_tokens"] == length
        assert len(blocks["sender"]) == -(-length // 8)
        assert len(blocks["receiver"]) == -(-length // 16)
    assert data_of(story())["blocks"]["sender"] == []  # a run knows sizes, no numbers


def test_a_long_prompt_has_its_first_blocks_drawn() -> None:
    run = story()
    run.transfers[0].num_tokens = 8 * MAX_BLOCKS + 1
    blocks = data_of(run)["blocks"]
    assert (blocks["num_drawn"], blocks["num_tokens"]) == (8 * MAX_BLOCKS, 8 * MAX_BLOCKS + 1)


def test_a_trace_and_its_file_tell_the_same(tmp_path) -> None:
    trace = recorded()
    trace.save(tmp_path / "run.json.gz")
    assert data_of(ClusterTrace.load(tmp_path / "run.json.gz")) == data_of(trace)


@pytest.mark.parametrize("transfer", ["push", "pull", "stream"])
def test_recorded_and_simulated_say_which_they_are(transfer: str) -> None:
    for run, word in ((recorded(transfer), "measured"), (simulated(transfer), "simulated")):
        assert [data["name"] for data in TransferView(run).runs] == [transfer]
        for place in range(3):
            data = data_of(run, place)
            assert data["provenance"] == word
            assert data["line"].startswith(word)
            assert data["start_s"] < 0 <= data["wait_s"]
            assert data["next_s"] > data["ready_s"]
            own = sum(step[2] for step in data["sender"])
            assert own == data["num_tokens"]  # all of the prompt, and nothing else


def test_simulated_streams_hide_what_pushes_show() -> None:
    waits = {
        kind: data_of(run, largest_transfer(Story.of(run)))["wait_s"]
        for kind in ("push", "stream")
        for run in [simulated(kind, count=1)]
    }
    assert waits["stream"] < waits["push"] / 2


def test_transfers_are_numbered_as_their_requests() -> None:
    run = story()
    record = run.transfers[0]
    run.transfers = [replace(record, request_id=name) for name in ("r10", "r9", "r2")]
    assert [t.request_id for t in Story.of(run).transfers] == ["r2", "r9", "r10"]


def test_a_later_attempt_is_drawn_with_its_own_steps() -> None:
    run = story()
    for step in run.workers["p0"].steps[2:]:
        step.prompts = {"r1~1": 4}
    data = data_of(run)
    assert [step[2] for step in data["sender"]] == [0, 4]
    assert data["start_s"] == 1.4 - 3  # its first parcel left before


# --- the widget -----------------------------------------------------------------------------------


def test_the_summary_has_the_numbers_and_the_link() -> None:
    text = TransferView({"push": story("push"), "stream": story()}).summary()
    assert "push: 0.0004 MB from p0 to d0 in 1.4e+03 ms" in text
    assert "250 ms waited after the prompt, simulated link: 1GbE" in text
    assert text.endswith("measured on a made-up machine")


def test_another_transfer_is_shown() -> None:
    view = TransferView(recorded())
    assert [data["request"] for data in view.runs] == ["r0"]
    assert view.choices[2].startswith("r2: 17 tokens")
    view.transfer = 2
    assert [data["num_tokens"] for data in view.runs] == [17]


def test_it_begins_with_the_largest_transfer() -> None:
    run = simulated()
    sizes = [t.num_bytes for t in Story.of(run).transfers]
    assert sizes[TransferView(run).transfer] == max(sizes)


def test_data_is_small_plain_json() -> None:
    view = TransferView({kind: simulated(kind, 40) for kind in ("push", "pull", "stream")})
    assert len(json.dumps(view.runs, allow_nan=False)) < 60_000


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"view": "both"}, "view='both' must be one of whole, hand-over"),
        ({"transfer": 1}, "transfer=1"),
        ({"runs": []}, r"runs=\[\]"),
        ({"runs": {}}, "runs has 0 runs"),
        ({"runs": {"a": 3}}, "run=3"),
        ({"runs": replace(story(), transfers=[])}, "'run' has no transfer"),
    ],
)
def test_bad_input_is_named(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferView(**{"runs": story()} | knobs)


@pytest.mark.parametrize(("trait", "value"), [("transfer", 1), ("transfer", -1), ("view", "x")])
def test_bad_traits_are_refused(trait: str, value: object) -> None:
    with pytest.raises((ValueError, traitlets.TraitError), match=f"{trait}="):
        setattr(TransferView(story()), trait, value)


# --- the browser ----------------------------------------------------------------------------------


def show(page, widget) -> None:
    page.set_content(widget_page(widget))
    page.wait_for_selector("[data-shown]")


@has_browser
def test_two_transfers_share_one_axis(page) -> None:
    show(page, TransferView({"push": story("push"), "stream": story()}))
    assert page.inner_text(".pd-title") == (
        "After the prompt, the receiver waits: push 1.5 s, stream 250 ms"
    )
    zeros = [n.get_attribute("d") for n in page.query_selector_all(".pd-tv-zero")]
    assert len({re.match(r"M([\d.]+)", d).group(1) for d in zeros}) == 1
    assert len(page.query_selector_all("[data-run=push] .pd-tv-parcel")) == 1
    assert len(page.query_selector_all("[data-run=stream] .pd-tv-parcel")) == 4
    text = page.inner_text(".pd-tv-plot")
    assert "simulated link: 1GbE" in text
    assert "d0 can go on: +1.5 s" in text


@has_browser
def test_pointing_tells_the_numbers(page) -> None:
    show(page, TransferView(story()))
    page.hover(".pd-tv-parcel >> nth=2")
    tip = page.inner_text(".pd-tip")
    assert tip.startswith("layer 0, tokens 16 to 19\n40 B\nsent at −600 ms, arrived at −400 ms")
    page.hover("[data-side='1'][data-block='0']")
    assert "from blocks 0 to 1 of p0" in page.inner_text(".pd-tip")
    lit = page.query_selector_all("[data-side='0'][data-lit]")
    assert [node.get_attribute("data-block") for node in lit] == ["0", "1"]
    page.hover("[data-side='0'][data-block='2']")
    assert "4 slots free" in page.inner_text(".pd-tip")


@has_browser
def test_the_time_around_the_prompts_end_is_shown(page) -> None:
    show(page, TransferView(story()))
    whole = page.query_selector("[data-own=decode]").bounding_box()["width"]
    page.click("[data-view=hand-over]")
    assert page.get_attribute("[data-shown]", "data-shown").startswith("hand-over/0/")
    assert page.query_selector("[data-own=decode]").bounding_box()["width"] > 1.2 * whole


ALL_WITHIN = """() => [...document.querySelectorAll(".pd-tv-plot svg")].every((plot) => {
    const end = (element) => element.getBoundingClientRect().right;
    return [...plot.querySelectorAll("text")].every((text) => end(text) <= end(plot) + 1);
})"""


@has_browser
@pytest.mark.parametrize("width", [420, 700, 1080])
def test_no_text_leaves_the_picture(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    show(page, TransferView({"push": story("push"), "all cached": story(cached=20)}))
    assert "all of it was cached there" in page.inner_text(".pd-tv-plot")
    page.wait_for_function(ALL_WITHIN, timeout=10_000)  # drawn anew when a scroll bar has come


@has_browser
def test_a_saved_notebook_gets_a_small_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_PICTURES", "1")
    data, _ = TransferView({"push": story("push"), "stream": story()})._repr_mimebundle_()
    assert 8_000 < len(data["image/png"]) * 3 / 4 < 80_000


def test_a_run_cannot_break_out_of_the_page() -> None:
    name = "</script><script>window.hacked = 1</script>"
    assert "</script><script>window" not in widget_page(TransferView({name: story()}))


# --- figures --------------------------------------------------------------------------------------


def traces(figure) -> dict:
    return {trace.name: trace for trace in figure.data if trace.name}


def test_the_timeline_has_a_lane_for_each_worker_even_a_lost_one() -> None:
    figure = figures.cluster_timeline(story())
    assert [re.sub("<.*?>", " ", t) for t in figure.layout.yaxis.ticktext] == [
        " p0  prefill",
        " d0  decode",
        " d9  lost",
    ]
    found = traces(figure)
    assert list(found["prefill"].base) == [0, 1, 2]
    assert set(found["prefill"].y) == {0}
    assert set(found["decode"].y) == {1}
    assert list(found["transfer"].x) == [1.4, 3.25, None]
    assert (list(found["worker lost"].x), list(found["worker lost"].y)) == ([2], [2])
    assert list(found["goes on elsewhere"].x) == [2, 3, None]
    assert list(found["goes on elsewhere"].y) == [2, 1, None]
    assert "measured on a made-up machine; simulated link: 1GbE" in str(figure.layout.title)


def test_steps_of_both_phases_are_drawn_in_two_halves() -> None:
    run = story()
    run.workers["d0"].steps[0].prompts = {"r5": 3}
    found = traces(figures.cluster_timeline(run))
    up, down = found["prefill"].y[-1], found["decode"].y[0]
    assert up < 1 < down
    assert found["prefill"].width[-1] + found["decode"].width[0] == pytest.approx(2 * (down - up))


def test_timelines_of_long_runs_stay_small() -> None:
    run = simulated(count=300, num_decode=3)
    mimebundle(figures.cluster_timeline(run))
    mimebundle(figures.cluster_timeline(recorded()))


def test_recovery_shows_each_token_and_the_gap() -> None:
    found = traces(figures.recovery_figure(story()))
    assert list(found["a token"].x) == [1.0, 1.5, 3.0, 3.75]
    gap = found["nothing comes"]
    assert (list(gap.base), list(gap.x)) == ([1.5], [1.5])
    with pytest.raises(ValueError, match="no failure"):
        figures.recovery_figure(replace(story(), failures=[]))


def test_a_kill_in_simulated_time_is_drawn() -> None:
    run = simulated(num_decode=2, kills=[(0.5, "d0")])
    assert isinstance(run, ClusterRun)
    failure = run.failures[0]
    lines = traces(figures.cluster_timeline(run))["goes on elsewhere"]
    assert len(lines.x) == 3 * len(failure.recovered_s) > 0
    assert len(traces(figures.recovery_figure(run))["nothing comes"].y) == len(failure.request_ids)


def test_plans_are_drawn_by_workload() -> None:
    plans = [
        PlanFigures(
            plan, workload, (0.03, 0.02, 0.04), (p99, p99, p99), (1, 1, 1), (n, n - 1, n + 2)
        )
        for workload in ("chats", "answers")
        for plan, p99, n in (("one", 0.9, 60.0), ("two", 0.05, 50.0))
    ]
    figure = figures.plans_figure(plans, "measured: here")
    assert "two is calmest, one makes most tokens" in figure.layout.title.text.replace("<br>", " ")
    assert figure.layout.title.subtitle.text == "measured: here"
    bars = [t for t in figure.data if t.type == "bar"]
    assert [list(bar.x) for bar in bars] == [[60, 50], [60, 50]]
    assert list(bars[0].error_x.array) == [2, 2]
    with pytest.raises(ValueError, match="plans is empty"):
        figures.plans_figure([], "x")


def test_overlap_tells_what_is_hidden() -> None:
    one = Overlap("1GbE", 512, 10_000, 0.2, (0.25, 0.2, 0.3), (0.05, 0.05, 0.06))
    figure = figures.overlap_figure([one], "measured: here")
    assert figure.layout.title.text == "Layer by layer hides 80% of the wait"
    found = traces(figure)
    assert list(found["the whole prompt, once computed"].x) == [250]
    assert list(found["layer by layer"].x) == [50]
    with pytest.raises(ValueError, match="overlaps is empty"):
        figures.overlap_figure([], "x")
