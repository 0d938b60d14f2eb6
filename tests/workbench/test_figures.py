"""The numbers in the figures are the numbers of the trace."""

import numpy as np
import plotly.graph_objects as go
import pytest

from pdlab import Model, Trace
from pdlab.costmodel import Hardware
from pdlab.workbench import decode_step_s, decode_sweep, figures
from pdlab.workbench.attention_data import attention_matrix, pool
from pdlab.workbench.figures.style import TITLE_CHARS, milliseconds, styled
from pdlab.workbench.memory_data import kv_capacity_bytes, ledger
from pdlab.workbench.palette import MEANING, phase_color
from pdlab.workbench.roofline_data import stage_floors_s

from .handmade import KV_BYTES, two_requests
from .handmade_memory import memory_moves


def by_name(figure: go.Figure) -> dict[str, go.Figure]:
    return {trace.name: trace for trace in figure.data}


def all_figures(trace: Trace, hardware: Hardware) -> list[go.Figure]:
    name = next(iter(trace.requests))
    return [
        figures.step_timeline(trace),
        figures.stage_breakdown(trace, 1),
        figures.kv_occupancy(trace),
        figures.block_grid(trace, 1),
        figures.attention_heatmap(trace, name, 0, 1),
        figures.roofline(trace, hardware),
        figures.roofline(trace, hardware, recorded_here=False),
        figures.ttft_by_prompt(trace),
        figures.tpot_by_context(trace),
        figures.tpot_by_batch(trace),
    ]


def test_step_timeline_shows_every_step_in_its_phase(recorded: Trace) -> None:
    figure = figures.step_timeline(recorded)
    shown = {
        step: (bars.name, height)
        for bars in figure.data
        for step, height in zip(bars.x, bars.y, strict=True)
    }
    assert shown == {r.step: (r.phase, r.wall_s * 1e3) for r in recorded.steps}
    assert by_name(figure)["decode"].marker.color == phase_color("decode")


def test_stage_breakdown_shows_the_stage_times(recorded: Trace) -> None:
    record = recorded.steps[2]
    bars = figures.stage_breakdown(recorded, record.step).data[0]
    shown = dict(zip(bars.y, bars.x, strict=True))
    assert shown == {name: s * 1e3 for name, s in record.stage_s.items() if s > 0}


def test_kv_occupancy_adds_up_to_the_pool(recorded: Trace) -> None:
    figure = figures.kv_occupancy(recorded)
    bars = by_name(figure)
    used, wasted = (np.array(bars[n].y) for n in ("used", "wasted: slots taken, still empty"))
    assert used.tolist() == [r.kv_used_bytes / 1e6 for r in recorded.steps]
    assert wasted.tolist() == [r.kv_wasted_bytes / 1e6 for r in recorded.steps]
    stacked = sum(np.array(b.y) for b in figure.data if isinstance(b, go.Bar))
    assert stacked == pytest.approx(kv_capacity_bytes(recorded) / 1e6)


def test_block_grid_shows_owner_and_fill_of_every_block(recorded: Trace) -> None:
    record = recorded.steps[2]
    grid = figures.block_grid(recorded, record.step, columns=8).data[0]
    owners, texts = np.array(grid.z).ravel(), np.array(grid.text).ravel()
    requests, size = list(recorded.requests), recorded.engine["block_size"]
    taken = {}
    for resident in record.residents:
        for i, block in enumerate(resident.block_table):
            filled = min(size, resident.num_computed_tokens - i * size)
            taken[block] = (requests.index(resident.sequence_id), str(filled))
    assert len(taken) > 2
    for block in range(recorded.engine["num_blocks"]):
        assert (owners[block], texts[block]) == taken.get(block, (-1, ""))


def test_kv_occupancy_shows_cached_shared_and_swapped_bytes() -> None:
    trace = memory_moves()
    parts = by_name(figures.kv_occupancy(trace))
    stacked = sum(np.array(bars.y) for bars in parts.values() if isinstance(bars, go.Bar))
    assert stacked == pytest.approx(kv_capacity_bytes(trace) / 1e6)
    cached = parts["cached: free, keeps a prefix"]
    assert list(cached.y) == [ledger(trace, r).cached / 1e6 for r in trace.steps]
    assert list(parts["swapped, in host memory"].y) == [
        r.kv_swapped_bytes / 1e6 or None for r in trace.steps
    ]
    assert parts["without sharing"].y[0] == (2 * 14 + 2) * KV_BYTES / 1e6


def test_block_grid_marks_shared_and_cached_blocks() -> None:
    trace = memory_moves()
    parts = by_name(figures.block_grid(trace, 1, columns=6))
    assert len(parts["sequence r0.1"].x) == 3  # blocks 0 to 2, which r0 holds too
    assert len(parts["sequence r1"].x) == 2
    assert parts["sequence r0"].x == (None,)
    grid = figures.block_grid(trace, 4, columns=6)
    kept = by_name(grid)["free, keeps a prefix"]
    assert [y * 6 + x for x, y in zip(kept.x, kept.y, strict=True)] == [4, 5]
    subtitle = grid.layout.title.subtitle.text.replace("<br>", " ")
    assert "r1 lies in host blocks 0–3" in subtitle
    dropped = figures.block_grid(trace, 6).layout.title.subtitle.text.replace("<br>", " ")
    assert "2 logical blocks were given back" in dropped


FRACTIONS = [
    ("paged", {"used": 0.95, "internal": 0.03, "free": 0.02}),
    ("reserve max", {"used": 0.2, "reserved": 0.2, "internal": 0.5, "free": 0.1}),
]


def test_fragmentation_bars_are_the_fractions() -> None:
    figure = figures.fragmentation(FRACTIONS)
    for key, name in (("used", "holds a token"), ("internal", "internal: never written")):
        shown = dict(zip(by_name(figure)[name].y, by_name(figure)[name].x, strict=True))
        assert shown == pytest.approx({label: 100 * parts[key] for label, parts in FRACTIONS})
    assert "external: holes too small" not in by_name(figure)
    title = figure.layout.title.text.replace("<br>", " ")
    assert title == "Paged: 96.9% of the taken memory holds tokens; reserve max: 22.2%"


def test_title_of_fragmentation_names_paging_where_another_is_fuller() -> None:
    grown = ("grow by copying", {"used": 0.997, "internal": 0.003})
    title = figures.fragmentation([*FRACTIONS, grown]).layout.title.text.replace("<br>", " ")
    assert title == "Paged: 96.9% of the taken memory holds tokens; reserve max: 22.2%"
    title = figures.fragmentation([FRACTIONS[1], grown]).layout.title.text.replace("<br>", " ")
    assert title.startswith("Grow by copying: 99.7% ")
    assert ";" not in figures.fragmentation(FRACTIONS[:1]).layout.title.text


def test_fragmentation_refuses_what_does_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"fractions of 'paged' add up to 0.9, not 1"):
        figures.fragmentation([("paged", {"used": 0.9})])
    with pytest.raises(ValueError, match="results is empty"):
        figures.fragmentation([])


def test_hit_rate_rises_to_the_infinite_cache() -> None:
    points = [(None, 0.366), (1000, 0.1), (100, 0.02)]
    parts = by_name(figures.hit_rate_by_blocks(points))
    pool_line = parts["pool of this size, least recently used evicted first"]
    assert (list(pool_line.x), list(pool_line.y)) == ([100, 1000], [2, 10])
    assert list(parts["infinite cache"].y) == pytest.approx([36.6, 36.6])
    with pytest.raises(ValueError, match="points is empty"):
        figures.hit_rate_by_blocks([])


def test_hit_rate_has_ticks_at_its_points() -> None:
    def ticks(*blocks: int | None) -> list[str]:
        axis = figures.hit_rate_by_blocks([(n, 0.1) for n in blocks]).layout.xaxis
        assert [f"{n:,}" for n in axis.tickvals] == list(axis.ticktext)
        return list(axis.ticktext)

    assert ticks(250, 500, 1000, 2000, 4000) == ["250", "500", "1,000", "2,000", "4,000"]
    assert ticks(10, 3900, 4000, 10**5) == ["10", "4,000", "100,000"]  # 3,900 is too close
    assert (ticks(7, None), ticks(None)) == (["7"], [])


def test_attention_heatmap_shows_the_captured_weights(recorded: Trace) -> None:
    name = next(iter(recorded.requests))
    shown = figures.attention_heatmap(recorded, name, layer=7, head=2).data[0].customdata
    for capture in recorded.captures:
        if capture.sequence_id == name and capture.layer == 7:
            rows = range(capture.start, capture.start + capture.array.shape[1])
            for i, row in enumerate(rows):
                assert shown[row][: row + 1] == pytest.approx(capture.array[2, i, : row + 1])
                assert np.isnan(shown[row][row + 1 :]).all()


def test_roofline_points_stand_where_the_records_say(recorded: Trace, hardware: Hardware) -> None:
    figure = figures.roofline(recorded, hardware)
    points = {
        (p.name, custom[0]): (x, y)
        for p in figure.data
        if "recorded" in (p.name or "")
        for x, y, custom in zip(p.x, p.y, p.customdata, strict=True)
    }
    expected = {
        (f"{r.phase} (recorded)", r.step): (
            r.total_flops / r.total_bytes,
            r.total_flops / r.wall_s,
        )
        for r in recorded.steps
    }
    assert points == expected
    roof = by_name(figure)["ceiling"]
    assert (roof.x[1], roof.y[1], roof.y[2]) == pytest.approx((10, 100e9, 100e9))


def test_predicted_points_never_pass_the_roof(recorded: Trace, hardware: Hardware) -> None:
    figure = figures.roofline(recorded, hardware, recorded_here=False)
    for points in (p for p in figure.data if "predicted" in (p.name or "")):
        for x, y in zip(points.x, points.y, strict=True):
            assert y <= min(100e9, x * 10e9) * 1.0001
        assert points.marker.symbol.endswith("-open")


def test_ttft_counts_from_arrival_to_the_end_of_the_first_token(recorded: Trace) -> None:
    for point in figures.ttft_points(recorded):
        first = next(r for r, s in recorded.sequence_steps(point.request_id) if s.sampled)
        arrival_s = recorded.requests[point.request_id].arrival_s
        assert point.ttft_s == first.start_s + first.wall_s - arrival_s > 0
    shown = figures.ttft_by_prompt(recorded).data[-1]
    assert list(shown.x) == [len(r.prompt_ids) for r in recorded.requests.values()]


def test_tpot_figures_show_the_decode_steps(recorded: Trace) -> None:
    steps = [r for r in recorded.steps if r.phase == "decode"]
    times = [r.wall_s * 1e3 for r in steps]
    batch, context = figures.tpot_by_batch(recorded), figures.tpot_by_context(recorded)
    assert list(batch.data[0].y) == list(context.data[0].y) == times
    assert list(batch.data[0].x) == [len(r.sequences) for r in steps]
    assert list(context.data[0].x) == [sum(s.end for s in r.sequences) for r in steps]


def test_the_title_of_tpot_by_context_states_the_medians_of_both_ends(smollm2: Model) -> None:
    trace = decode_sweep(smollm2, context_lens=[20, 40, 80], num_steps=4, repeats=1)
    short_s, long_s = (decode_step_s(trace, context_len=n) for n in (20, 80))
    title = figures.tpot_by_context(trace).layout.title.text.replace("<br>", " ")
    assert f"take {milliseconds(short_s)} at " in title
    assert f"{milliseconds(long_s)} at " in title


def test_predictions_stand_at_the_ceilings(recorded: Trace, hardware: Hardware) -> None:
    """A decode step of SmolLM2 at 10 GB/s: its bytes over the bandwidth; each stage likewise."""
    step = next(r for r in recorded.steps if r.phase == "decode")
    seconds = step.total_bytes / hardware.bandwidth_bytes_s
    predicted = by_name(figures.tpot_by_batch(recorded, hardware))
    line = predicted["predicted, at the machine's ceilings"]
    assert line.y[list(line.x).index(len(step.sequences))] == pytest.approx(seconds * 1e3, rel=0.02)
    floors = stage_floors_s(recorded, step, hardware)
    embedding_rows = 576 * 4 * step.num_tokens / hardware.bandwidth_bytes_s
    assert sum(floors.values()) + embedding_rows == pytest.approx(seconds, rel=1e-3)
    marks = figures.stage_breakdown(recorded, step.step, hardware).data[1]
    assert dict(zip(marks.y, marks.x, strict=True)) == pytest.approx(
        {name: floor * 1e3 for name, floor in floors.items()}
    )


def test_every_figure_has_a_message_a_source_and_large_type(
    recorded: Trace, hardware: Hardware
) -> None:
    for figure in all_figures(recorded, hardware):
        assert 10 < len(figure.layout.title.text) <= 100
        assert max(map(len, figure.layout.title.text.split("<br>"))) <= TITLE_CHARS
        assert "recorded on" in figure.layout.title.subtitle.text
        assert figure.layout.title.subtitle.font.size >= 14
        sizes = [figure.layout.font.size, figure.layout.xaxis.tickfont.size]
        assert min(sizes) >= 14


def test_what_stands_above_the_plot_has_room() -> None:
    def drawn(title: str, names: list[str]) -> go.Layout:
        parts = [go.Scatter(x=[1], y=[1], name=name) for name in names]
        return styled(go.Figure(parts), title, "recorded on a machine").layout

    plain, long = drawn("Short title", ["a", "b"]), drawn("A long title " * 8, ["a", "b"])
    assert long.title.text.count("<br>") == 1
    assert long.margin.t - plain.margin.t == long.height - plain.height > 20
    crowded = drawn("Short title", [f"a rather long name, number {i}" for i in range(5)])
    assert crowded.margin.t > plain.margin.t + 40
    for layout in (plain, long, crowded):
        legend_top = (1 - layout.legend.y) * layout.height
        lines = layout.title.text.count("<br>") + 1
        assert 22 + 24 * lines + 20 < legend_top < layout.margin.t - 24


def test_figures_accept_waiting_preempted_and_foreign_tokens(hardware: Hardware) -> None:
    assert len(all_figures(two_requests(), hardware)) == 10


def test_unknown_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step=99 is not in this trace; it holds steps 0 to 11"):
        figures.stage_breakdown(two_requests(), 99)


def test_pooling_averages_and_leaves_the_future_out() -> None:
    matrix = np.tril(np.arange(25, dtype=np.float32).reshape(5, 5))
    matrix[np.triu_indices(5, 1)] = np.nan
    pooled = pool(matrix, max_side=3)
    assert pooled.factor == 2
    assert pooled.array[0, 0] == pytest.approx(np.mean([0, 5, 6]))
    assert pooled.array[2, 0] == pytest.approx(np.mean([20, 21]))
    assert np.isnan(pooled.array[0, 1])


def test_long_attention_is_pooled_and_says_so() -> None:
    from pdlab.trace.records import Capture

    trace = two_requests()
    weights = np.tril(np.ones((1, 300, 300), np.float32)) / np.arange(1, 301)[None, :, None]
    trace.captures = [
        Capture(0, "first", 0, "attention", "reference", 0, list(range(len(weights))), weights)
    ]
    figure = figures.attention_heatmap(trace, "first", 0, 0)
    assert np.shape(figure.data[0].z) == (150, 150)
    assert "mean over 2 × 2 tokens" in figure.layout.title.text.replace("<br>", " ")


def test_attention_without_capture_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match="layer=5 has no captured attention"):
        attention_matrix(two_requests(), "first", 5)


def test_wasted_and_used_have_their_own_colours(recorded: Trace) -> None:
    parts = by_name(figures.kv_occupancy(recorded))
    names = ("used", "wasted: slots taken, still empty", "free")
    colors = [parts[name].marker.color for name in names]
    assert colors == [MEANING["cached"], MEANING["wasted"], MEANING["free"]]
