"""The static pictures of a served workload show the run's own numbers and their source."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest

from pdlab.workbench import figures
from pdlab.workbench.display import mimebundle
from pdlab.workbench.figures.serving import BINS, FIGURE_ROWS
from pdlab.workbench.gantt_data import lives
from pdlab.workbench.latency_data import METRICS
from pdlab.workload.report import latency_samples, over_time, summarize
from pdlab.workload.serving import SLO, ServingRun

from .handmade_serving import nothing, served, story


def by_name(figure: go.Figure) -> dict[str, go.Figure]:
    return {trace.name: trace for trace in figure.data if trace.showlegend is not False}


@pytest.fixture(scope="module")
def runs() -> dict[str, ServingRun]:
    return {batching: served(batching) for batching in ("static", "prefill_first", "mixed")}


def all_figures(run: ServingRun) -> list[go.Figure]:
    return [
        figures.gantt_figure(run, slo=SLO(1, 0.1)),
        *(figures.latency_cdf_figure(run, metric, SLO(1, 0.1)) for metric in METRICS),
        figures.queue_figure(run),
        figures.comparison_figure(run),
    ]


def test_bars_are_the_lives_of_the_requests() -> None:
    bars = by_name(figures.gantt_figure(story()))
    for kind in ("waiting", "stalled", "preempted", "prefill"):
        drawn = sorted(zip(bars[kind].y, bars[kind].base, bars[kind].x, strict=True))
        spans = [(n, s.start_s, s.wall_s) for n, ss in lives(story()).items() for s in ss
                 if s.kind == kind]  # fmt: skip
        assert drawn == sorted(spans)
    assert sorted(bars["decode"].customdata) == [1, 2, 5]  # decodes in a row are one bar


def test_ends_are_marked_by_shape() -> None:
    bars = by_name(figures.gantt_figure(story(), slo=SLO(3, 1)))
    assert list(bars["finished, within limits"].y) == ["b"]
    assert list(bars["limits missed"].y) == ["a"]
    assert list(bars["aborted or refused"].y) == ["c", "d"]
    symbols = [trace.marker.symbol for trace in bars.values() if isinstance(trace, go.Scatter)]
    assert len(set(symbols)) == 3


def test_a_long_run_says_which_requests_it_shows() -> None:
    figure = figures.gantt_figure(served(count=60), first=15)
    assert f"requests 16 to {15 + FIGURE_ROWS} of 60" in figure.layout.title.subtitle.text


@pytest.mark.parametrize("metric", METRICS)
def test_curves_end_at_all_of_the_samples(runs: dict[str, ServingRun], metric: str) -> None:
    figure = figures.latency_cdf_figure(runs, metric)
    for (name, run), line in zip(runs.items(), figure.data, strict=True):
        samples = latency_samples(run.requests)[f"{metric}_s"]
        assert (line.name, line.x[-1], line.y[-1]) == (name, samples.max(), 100)
        assert line.x[0] == np.quantile(samples, 1 / len(line.x[1:]), method="inverted_cdf")


def test_runs_differ_by_colour_and_dash(runs: dict[str, ServingRun]) -> None:
    lines = figures.latency_cdf_figure(runs).data
    assert len({line.line.color for line in lines}) == len({line.line.dash for line in lines}) == 3


def test_the_limit_is_drawn_where_the_metric_has_one(runs: dict[str, ServingRun]) -> None:
    slo = SLO(0.5, 0.05)
    limits = {m: figures.latency_cdf_figure(runs, m, slo).layout.shapes for m in METRICS}
    assert {m: [s.x0 for s in shapes] for m, shapes in limits.items()} == {
        "ttft": [0.5], "tpot": [0.05], "itl": [], "e2e": [],
    }  # fmt: skip


def test_levels_are_the_reports(runs: dict[str, ServingRun]) -> None:
    figure = figures.queue_figure({"mixed": runs["mixed"]})
    levels = over_time(runs["mixed"], BINS)
    queue, batch, blocks = figure.data
    assert list(queue.y[:-1]) == levels.queue_depth.tolist()
    assert list(batch.y[:-1]) == levels.batch_size.tolist()
    assert list(blocks.y[:-1]) == (100 * levels.kv_occupancy).tolist()
    assert np.array(queue.x).tolist() == levels.edges_s.tolist()


def test_runs_are_compared_by_the_reports_numbers(runs: dict[str, ServingRun]) -> None:
    slo = SLO(0.5, 0.05)
    figure = figures.comparison_figure(runs, slo)
    summaries = [summarize(run, slo) for run in runs.values()]
    ttft, tpot, rates = figure.data[:3], figure.data[3:6], figure.data[6]
    assert [list(t.x) for t in ttft] == [[s.ttft_s.p50, s.ttft_s.p99] for s in summaries]
    assert [list(t.x) for t in tpot] == [[s.tpot_s.p50, s.tpot_s.p99] for s in summaries]
    assert list(rates.x) == [s.goodput_per_s for s in summaries]
    without = figures.comparison_figure(runs).data[-1]
    assert list(without.x) == [s.requests_per_s for s in summaries]


@pytest.mark.parametrize("run", [story(), served(), nothing()], ids=["story", "served", "nothing"])
def test_every_figure_names_its_source_and_stays_small(run: ServingRun) -> None:
    line = "measured on a made-up machine" if run.provenance == "measured" else "simulated: "
    for figure in all_figures(run):
        assert figure.layout.title.subtitle.text.startswith(line)
        mimebundle(figure)  # refuses what is too heavy for a notebook


def test_sources_of_several_runs_are_all_named() -> None:
    figure = figures.comparison_figure({"here": story(), "there": served()})
    source = figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "measured on a made-up machine; simulated: round numbers" in source


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(ValueError, match="metric='queue' must be one of ttft"):
        figures.latency_cdf_figure(story(), "queue")
