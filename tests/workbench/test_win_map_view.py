"""The WinMap shows what `win_map` computed, and computes for other settings."""

import json
import re
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

import pdlab.workbench.win_map_data as data_module
import pdlab.workbench.win_map_view as module
from pdlab import EngineConfig
from pdlab.costmodel import LinearStepTimes
from pdlab.disagg.simulated.search import MODES, Machine, candidates
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.disagg.simulated.win_map import WinMap as Map
from pdlab.disagg.simulated.win_map import win_map
from pdlab.workbench import WinMap
from pdlab.workbench.picture import widget_page
from pdlab.workbench.win_map_data import (
    DESCRIPTIONS,
    LOADS,
    TIE,
    MapSettings,
    _best_modes,
    by_pace,
    load_shipped,
    plain,
    save,
)
from pdlab.workload.traces import TraceRequest

TIMES = LinearStepTimes("made up for a test", 0.01, 0.0, 0.0, 0.001, 0.0, 0.0005, 0.0, 0.0)
CONFIG = EngineConfig(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256)
ONE = Machine("one", SimulatedSpec("both", CONFIG, TIMES, kv_bytes_per_token=64, num_layers=4))
REQUESTS = [TraceRequest(i * 0.05, 60 + i * 7 % 50, 10 + i % 11) for i in range(40)]


@pytest.fixture(scope="module")
def found() -> Map:
    tried = candidates([ONE], 3, chunk_sizes=(64,))
    return win_map(tried, REQUESTS, [0.15, 0.4], [0.013, 0.03, 0.2], [2.0, 4.0, 8.0], least_s=0.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Maps that are computed in a second."""
    monkeypatch.setattr(data_module, "LOADS", (0.1, 0.6))
    monkeypatch.setattr(data_module, "NUM_REQUESTS", 10)
    monkeypatch.setattr(data_module, "CHUNK_SIZES", (512,))
    monkeypatch.setattr(data_module, "TRANSFERS", ("stream",))
    data_module._requests.cache_clear()
    monkeypatch.setattr(module, "SHORT_S", 0.0)
    yield
    data_module._requests.cache_clear()


def test_the_page_has_every_goodput_and_whose_it_is(found: Map) -> None:
    view = WinMap(found, line="three made up")
    shown = view.shown
    assert shown["modes"] == list(MODES)
    assert shown["goodput"] == [
        [[pytest.approx(v, rel=1e-3) for v in row] for row in grid] for grid in found.goodput
    ]
    for y, row in enumerate(shown["best_modes"]):
        for x, best in enumerate(row):
            here = found.goodput[:, y, x]
            near = [m for m in range(3) if here[m] and here[m] > (1 - TIE) * here.max()]
            assert sorted(best) == near
            assert best[:1] == [w for w in [found.winner[y, x]] if w >= 0]
    for m, mode in enumerate(MODES):
        for y in range(3):
            for x in range(2):
                name = shown["names"][shown["best"][m][y][x]]
                assert name == str(found.best(mode, y, x))
    assert len(json.dumps(view.view_state(), allow_nan=False)) < 20_000
    assert "three made up: of 6 pairs of limits" in view.summary()
    assert "simulated: made up for a test" in view.summary()
    assert "pd-win-map" in widget_page(view)


def test_a_place_on_the_map_can_be_looked_at(found: Map) -> None:
    view = WinMap(found)
    view.cell = [2, 1]
    with pytest.raises(ValueError, match=re.escape("cell=[3, 0]")):
        view.cell = [3, 0]
    assert view.cell == [2, 1]


def test_a_map_survives_a_file(found: Map, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "shipped", lambda _folder: tmp_path)
    assert load_shipped() == {}
    assert "nothing was computed" in WinMap().summary()
    data = plain(found, "a line", "a basis")
    save(tmp_path / data_module.SHIPPED, data)
    assert load_shipped() == json.loads(json.dumps(data))
    assert load_shipped("itl") == json.loads(json.dumps(by_pace(data, "itl")))
    assert WinMap().shown["line"] == "a line"


def test_both_measures_of_pace_are_there(found: Map) -> None:
    view = WinMap(found, pace="itl")
    assert (view.pace, view.shown["pace"]) == ("itl", "itl")
    assert view.shown["goodput"] == view.shown["by_pace"]["itl"]["goodput"]
    assert "pairs of limits on TTFT and p99 gap" in view.summary()
    cell = view.cell
    view.pace = "tpot"
    assert view.shown["goodput"] == view.shown["by_pace"]["tpot"]["goodput"]
    assert view.shown["goodput"] != view.shown["by_pace"]["itl"]["goodput"]
    assert view.cell == cell, "it is looked at by both"
    with pytest.raises(ValueError, match="pace='mean'"):
        view.pace = "mean"
    with pytest.raises(ValueError, match="pace='mean'"):
        WinMap(pace="mean")
    assert view.pace == "tpot"
    assert WinMap(found.by("itl")).pace == "itl"


def test_the_line_says_what_was_made_of_the_workload() -> None:
    line = MapSettings().full_line(300.0)
    assert "300 s of traffic; 14% of the prompts cut to 2,048 tokens with the output" in line
    assert load_shipped()["line"] == line
    assert "cut" not in MapSettings("short chat").full_line(60.0)


def test_the_shipped_map_is_of_the_first_settings() -> None:
    view = WinMap()
    assert view.shown["settings"] == vars(MapSettings())
    assert view.settings == MapSettings()
    assert "published: OPT-13B on 1 x A100" in view.shown["basis"]
    bests = {tuple(best) for row in view.shown["best_modes"] for best in row}
    assert bests > {(), (0,), (1,), (2,)}, "each mode wins somewhere"
    assert any(len(best) > 1 for best in bests)
    y, x = view.cell
    assert view.shown["best_modes"][y][x] == [2], "it begins where disaggregation wins"


def test_rates_of_the_shipped_map_go_beyond_what_any_mode_bears() -> None:
    """At the last two rates no mode meets any limits, so none is cut off."""
    rates = MapSettings().rates_rps()
    by_pace = load_shipped()["by_pace"].values()
    most = max(v for tiles in by_pace for grid in tiles["goodput"] for row in grid for v in row)
    assert most < rates[-2]
    assert load_shipped()["most_rps"] == rates[-1]


def test_modes_that_come_near_are_tied() -> None:
    assert _best_modes(np.array([0.98, 1.0, 0.5])) == [1, 0]
    assert _best_modes(np.array([0.91, 1.0, 1.0])) == [1, 2]
    assert _best_modes(np.zeros(3)) == []


@pytest.mark.parametrize("workload", DESCRIPTIONS)
@pytest.mark.parametrize("machine", ["a100-opt-13b", "4xa100-llama2-70b"])
def test_rates_go_from_leisure_to_too_much(workload: str, machine: str) -> None:
    settings = MapSettings(workload, machine=machine)
    rates = settings.rates_rps()
    assert rates == sorted(rates)
    assert len(rates) == len(LOADS)
    limit = settings.worker().spec.config.max_model_len
    assert all(r.num_prompt_tokens + r.num_output_tokens <= limit for r in settings.requests())
    assert {c.num_devices for c in settings.tried()} == {4 * settings.worker().spec.num_devices}


def test_it_computes_for_other_settings(small) -> None:
    view = WinMap()
    seen = []
    view.observe(lambda change: seen.append(change["new"]["done"]), "work")
    view.compute(workload="short chat", num_workers=2, link="10GbE")
    view.wait(120)
    assert (view.work["state"], view.work["of"]) == ("done", 6)
    assert view.shown["num_runs"] == 6, "at leisure all are needed"
    assert seen[-1] == 6
    assert "short chat on 2 x A100, OPT-13B, links 10GbE" in view.summary()
    assert view.shown["settings"]["num_workers"] == 2


def test_it_can_be_stopped_and_keeps_its_map(found: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(settings, *, on_run, **_how):
        for done in count(1):
            on_run(done, done, settings.tried()[0], 1.0)

    monkeypatch.setattr(module, "compute", endless)
    view = WinMap(found)
    before = view.shown
    view.compute()
    assert view.work["state"] == "running"
    view.compute()
    assert "a map is being computed" in view.message
    view._on_message(view, {"type": "views", "change": -1}, [])
    view.wait(60)
    assert view.work["state"] == "stopped"
    assert view.shown == before


def test_what_goes_wrong_is_said(found: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compute", lambda *_args, **_options: 1 / 0)
    view = WinMap(found)
    view.compute()
    view.wait(60)
    assert view.work["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("workload", "poems", "workload='poems'"),
        ("num_workers", 1, "num_workers=1"),
        ("link", "wet string", "link='wet string'"),
        ("machine", "a phone", "machine='a phone'"),
        ("chunk", 3, "chunk is not one of workload"),
    ],
)
def test_what_is_wrong_is_said(found: Map, name: str, value: object, words: str) -> None:
    view = WinMap(found)
    before = view.settings
    view.choose(**{name: value})
    assert words in view.message
    assert view.settings == before
    with pytest.raises(ValueError, match=re.escape(words)):
        WinMap(found, **{name: value})


def test_every_question_is_answered(found: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compute", lambda _settings, **_how: plain(found, "new", "b"))
    view = WinMap(found, pace="itl")
    for number, content in enumerate(
        (
            {"type": "set", "values": {"link": "1GbE"}},
            {"type": "compute"},
            {"type": "stop"},
        ),
        1,
    ):
        view._on_message(view, {"number": number, **content}, [])
        assert (view.answered, view.message) == (number, "")
    view.wait(60)
    assert (view.link, view.pace, view.shown["pace"]) == ("1GbE", "itl", "itl")
    assert view.shown["line"] == "new"
