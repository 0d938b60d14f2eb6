"""LatencyView's curves and counts are those of the report, and its data is bounded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import traitlets
from hypothesis import given
from hypothesis import strategies as st

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.workbench import LatencyView, latency_data
from pdlab.workbench.latency_data import MAX_PAIRS, MAX_POINTS, METRICS, curve, sensible_slo
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workload.report import latency_samples, summarize
from pdlab.workload.serving import SLO, ServingRun
from tests.helpers import random_model, random_prompt

from .handmade_serving import nothing, request, served, story


def within(data: dict, slo: SLO) -> float:
    """Requests within the limits, counted as the browser counts them."""
    met = [a <= slo.ttft_s and (b is None or b <= slo.tpot_s) for a, b in data["pairs"]]
    return sum(met) / len(met) * data["num_finished"] if met else 0.0


# --- curves ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=900))
def test_a_curve_is_the_distribution_of_its_values(values: list[float]) -> None:
    seconds, parts = curve(values)
    assert len(seconds) == min(len(values), MAX_POINTS)
    for s, part in zip(seconds, parts, strict=True):
        not_larger = np.mean(np.asarray(values) <= s)
        smaller = np.mean(np.asarray(values) < s)
        assert smaller - 1e-9 <= part <= not_larger + 1e-9


def test_a_short_curve_has_every_value() -> None:
    assert curve([3, 1, 2]) == ([1, 2, 3], pytest.approx([1 / 3, 2 / 3, 1]))
    assert curve([]) == ([], [])


@pytest.mark.parametrize("metric", METRICS)
def test_percentiles_are_the_reports(metric: str) -> None:
    run = served(count=40)
    found = getattr(summarize(run), f"{metric}_s")
    drawn = latency_data.latency_data(run)["curves"][metric]
    assert drawn["marked"] == [found.p50, found.p90, found.p99]
    assert drawn["n"] == found.num_samples


def test_a_run_by_hand() -> None:
    data = latency_data.latency_data(story())
    assert data["curves"]["ttft"]["seconds"] == [1.5, 3, 3]  # d, who gave up, had a first token
    assert data["curves"]["e2e"]["seconds"] == [8, 11]
    assert data["curves"]["itl"]["n"] == 4 + 5
    assert data["pairs"] == [[3, 2], [3, 1]]
    assert (data["num_finished"], data["num_requests"]) == (2, 5)


# --- counting -------------------------------------------------------------------------------------


@given(st.floats(0.01, 5), st.floats(0.005, 0.2))
def test_the_browser_counts_what_the_report_counts(ttft_s: float, tpot_s: float) -> None:
    run, slo = RUN, SLO(ttft_s, tpot_s)
    summary = summarize(run, slo)
    met = within(latency_data.latency_data(run), slo)
    assert met / len(run.requests) == pytest.approx(summary.attainment)
    assert met / run.duration_s == pytest.approx(summary.goodput_per_s)


RUN = served(count=40, num_blocks=60)


def test_a_request_of_one_token_has_only_the_first_limit() -> None:
    run = ServingRun("measured", "x", {}, [request("a", 0, 0, (1,))], [], 8)
    data = latency_data.latency_data(run)
    assert data["pairs"] == [[1, None]]
    assert within(data, SLO(1, 0)) == 1
    assert data["curves"]["tpot"]["seconds"] == []


def test_of_many_requests_an_even_sample_stands_for_all() -> None:
    run = served(count=200, num_blocks=400)
    data = latency_data.latency_data(run, max_pairs=50)
    assert (len(data["pairs"]), data["num_finished"]) == (50, 200)
    for ttft_s in np.quantile(latency_samples(run.requests)["ttft_s"], [0.2, 0.5, 0.9]):
        slo = SLO(ttft_s, 1e6)
        assert within(data, slo) / 200 == pytest.approx(summarize(run, slo).attainment, abs=0.02)


def test_limits_to_begin_with_are_what_the_best_run_mostly_meets() -> None:
    runs = [served("static"), served("mixed")]
    slo = sensible_slo([latency_samples(run.requests) for run in runs])
    p90 = [summarize(run).ttft_s.p90 for run in runs]
    assert slo.ttft_s == pytest.approx(min(p90), rel=0.06)
    assert sensible_slo([latency_samples(nothing().requests)]) == SLO(1.0, 0.1)


# --- the widget -----------------------------------------------------------------------------------


def test_goodput_follows_the_limits() -> None:
    view = LatencyView({"static": served("static"), "mixed": served()}, slo=SLO(0.5, 0.05))
    before = view.goodput()
    view.ttft_slo_s, view.tpot_slo_s = 1e6, 1e6
    assert view.slo == SLO(1e6, 1e6)
    assert view.attainment() == {"static": 1.0, "mixed": 1.0}
    assert all(view.goodput()[name] > before[name] for name in before)


def test_a_real_run_is_measured() -> None:
    with Engine(random_model(), EngineConfig(block_size=4, num_blocks=40)) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.generate([random_prompt(n) for n in (5, 9, 20)], params)
        run = ServingRun.of_trace(engine.trace)
    view = LatencyView(run, slo=SLO(1e6, 1e6))
    assert view.attainment() == {run.config["batching"]: 1.0}
    assert "measured on random on" in view.summary()


def test_nothing_finished_is_said_and_no_error() -> None:
    view = LatencyView({"empty": nothing()})
    assert view.attainment() == {"empty": None}
    assert "empty –" in view.summary()
    assert view.runs[0]["pairs"] == []


def test_a_wide_spread_begins_with_a_logarithmic_axis() -> None:
    near = [request(str(i), 0, 0, (1 + i / 10,)) for i in range(5)]
    far = [*near, request("far", 0, 0, (100,))]
    runs = [ServingRun("measured", "x", {}, requests, [], 8) for requests in (near, far)]
    assert [LatencyView(run).wide["ttft"] for run in runs] == [False, True]


def test_data_is_small_plain_json() -> None:
    requests = [request(str(i), 0, 0, tuple(np.arange(1, 20) * (1 + i))) for i in range(9000)]
    run = ServingRun("measured", "x", {}, requests, [], 8)
    view = LatencyView({"one": run, "two": run})
    text = json.dumps(view.runs, allow_nan=False)
    assert len(text) < 300_000
    assert sum(len(data["pairs"]) for data in view.runs) <= MAX_PAIRS


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"metric": "queue"}, "metric='queue' must be one of ttft, tpot, itl, e2e"),
        ({"slo": SLO(1, float("nan"))}, "tpot_s=nan"),
        ({"runs": []}, r"runs=\[\]"),
    ],
)
def test_bad_input_is_named(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyView(**{"runs": story()} | knobs)


@pytest.mark.parametrize(
    ("trait", "value"), [("metric", "x"), ("scale", "cubic"), ("ttft_slo_s", -1.0)]
)
def test_bad_traits_are_refused(trait: str, value: object) -> None:
    view = LatencyView(story())
    with pytest.raises((ValueError, traitlets.TraitError), match=f"{trait}="):
        setattr(view, trait, value)


# --- the browser ----------------------------------------------------------------------------------


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")
def test_a_saved_notebook_gets_a_small_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_PICTURES", "1")
    data, _ = LatencyView({"static": served("static"), "mixed": served()})._repr_mimebundle_()
    assert 8_000 < len(data["image/png"]) * 3 / 4 < 80_000
    assert "simulated" in data["text/plain"]


def test_a_run_cannot_break_out_of_the_page() -> None:
    name = "</script><script>window.hacked = 1</script>"
    assert "</script><script>window" not in widget_page(LatencyView({name: story()}))
