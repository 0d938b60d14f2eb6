"""What the speed bench makes of its samples: medians of ratios, floors, words and pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import pdlab
from pdlab.bench.contest import Entry
from pdlab.bench.speed import CASES, Case, Ceilings, SpeedBench, Spread, columns_of
from pdlab.bench.speed_agreement import (
    Difference,
    Likeness,
    compare,
    first_difference,
    measure_likeness,
)
from pdlab.bench.speed_run import _turns, measure_speed
from pdlab.cli import app
from pdlab.cli import bench_speed as command
from pdlab.engine import NaiveGenerator, SamplingParams
from pdlab.workbench.figures.peers import peers_figure

from .speed_helpers import EVEN, MODEL, invented, peers_folder, starting

DECODE, TTFT = columns_of(CASES[:1])
SMALL = (Case("b1 c4", 1, 4), Case("b2 c3", 2, 3))


# --- numbers -------------------------------------------------------------------------------------


def test_columns_are_decoding_and_first_tokens_of_single_prompts() -> None:
    names = [column.name for column in columns_of(CASES)]
    assert names == [
        "decode b1, ctx 128",
        "decode b1, ctx 1024",
        "decode b8, ctx 128",
        "TTFT 128",
        "TTFT 1024",
    ]


def test_medians_and_spread_are_those_of_the_rounds() -> None:
    found = invented()
    assert found.spread("cpu int8", DECODE) == pytest.approx((30.0, 12.0, 33.0))
    assert found.spread("cpu int8", TTFT) == pytest.approx((1 / 3, 10 / 33, 10 / 12))
    assert found.spread("nobody", DECODE) is None


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    """1.5, 1.5 and 1.0; of the medians it would be 30 over 20 too, but for the late one not."""
    found = invented()
    assert found.ratio("cpu int8", "llama.cpp", DECODE) == pytest.approx(1.5)
    assert found.ratio("cpu int8", "llama.cpp", TTFT) == pytest.approx(1.5)
    assert found.ratio("llama.cpp", "cpu int8", DECODE) == pytest.approx(1 / 1.5)
    assert found.ratio("cpu int8", "late", DECODE) == pytest.approx(2.0)  # of round 0 alone
    assert found.ratio("cpu int8", "nobody", DECODE) is None


def test_the_best_is_the_fastest_of_its_side() -> None:
    found = invented()
    for column in found.columns():
        assert found.best(column, pdlab=True).name == "cpu int8"
        assert found.best(column, pdlab=False).name == "llama.cpp"
    alone = replace(found, contestants=found.contestants[:2])
    assert alone.best(DECODE, pdlab=False) is None


def test_the_floor_of_decoding_is_weights_and_kv_over_bandwidth() -> None:
    found = invented()
    kv_bytes = (128 + 24) * MODEL.config.kv_bytes_per_token(4)
    by_hand = 1e10 / (1_000_000 + kv_bytes)
    assert found.floor(found.contestants[1], DECODE, 0) == pytest.approx(by_hand)
    # at the end of round 2 the machine has half its pace: the median of 1e10 and 5e9
    assert found.floor(found.contestants[1], DECODE, 2) == pytest.approx(0.75 * by_hand)
    assert found.share(found.contestants[1], DECODE) == pytest.approx(30 / by_hand)


def test_the_floor_of_a_first_token_is_flops_over_peak() -> None:
    found = invented()
    slow, fast = (found.floor(found.contestants[0], TTFT, round) for round in (2, 0))
    assert fast == found.floor(found.contestants[2], TTFT, 0)  # whatever the weights
    assert slow == pytest.approx(fast / 0.75)
    assert found.share(found.contestants[0], TTFT) == pytest.approx(fast / (10 / 10.0), rel=0.5)


def test_a_busy_machine_is_noticed() -> None:
    assert not invented().busy
    assert replace(invented(), ceilings=[Ceilings(1, 1, 0.5)]).busy


def test_a_saved_measurement_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    invented().save(path, [{"name": "llama.cpp"}])
    assert SpeedBench.load(path) == invented()
    assert json.loads(path.read_text())["agreement"] == [{"name": "llama.cpp"}]


# --- measuring -----------------------------------------------------------------------------------


def test_each_round_begins_with_another_and_has_all() -> None:
    turns = list(_turns(["a", "b", "c"], SMALL, 2))
    assert [name for _, name, _ in turns] == [*"abcabc", *"bcabca"]
    assert [case.name for _, _, case in turns] == [SMALL[0].name] * 3 + [SMALL[1].name] * 3 + [
        SMALL[0].name
    ] * 3 + [SMALL[1].name] * 3
    assert [number for number, _, _ in turns] == [0] * 6 + [1] * 6


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[SpeedBench, list[str]]:
    """Four fake peers, of which three fail in their own way."""
    fails: dict[str, dict[str, str]] = {
        "good": {},
        "refuses": {"fails": "refuses"},
        "dies": {"fails": "dies", "at": "open"},
        "short": {"fails": "short"},
    }
    entries = [Entry(name, "pdlab_engine", "-", "-", o) for name, o in fails.items()]
    told: list[str] = []
    found = measure_speed(
        MODEL,
        entries,
        rounds=2,
        num_tokens=6,
        threads=1,
        cases=SMALL,
        ceilings=lambda threads: EVEN,
        start=starting(peers_folder(tmp_path_factory.mktemp("bench"))),
        tell=told.append,
    )
    return found, told


def test_one_that_fails_is_left_out_and_the_rest_goes_on(
    measured: tuple[SpeedBench, list[str]],
) -> None:
    found, told = measured
    assert [contestant.name for contestant in found.contestants] == ["good", "refuses"]
    assert {sample.name for sample in found.samples} == {"good"}
    assert found.skipped.keys() == {"refuses", "dies", "short"}
    assert [line.partition(":")[0] for line in told] == ["dies", "short", "refuses"]


def test_every_sample_of_the_good_one_is_kept(measured: tuple[SpeedBench, list[str]]) -> None:
    found, _ = measured
    expected = [(round, case.name) for round in range(2) for case in SMALL]
    assert [(sample.round, sample.case) for sample in found.samples] == expected
    assert [sample.rest_tokens for sample in found.samples] == [5, 10, 5, 10]
    assert {case: len(ids) for case, ids in found.token_ids["good"].items()} == {
        "b1 c4": 1,
        "b2 c3": 2,
    }
    assert found.ceilings == [EVEN] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"num_tokens": 1}, "num_tokens=1"),
        ({"threads": 0}, "threads=0"),
        ({}, "two entries have the same name: x, x"),
    ],
)
def test_a_bad_number_is_named(given: dict[str, Any], message: str) -> None:
    entries = [Entry("x", "y", "-", "-")] * 2
    with pytest.raises(ValueError, match=message):
        measure_speed(MODEL, entries, **{"threads": 1} | given)


# --- the same text -------------------------------------------------------------------------------


def test_the_first_difference_is_where_two_texts_part() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1], [2]) == 0


def test_answers_are_compared_up_to_the_first_difference() -> None:
    asked: list[tuple[list[int], int, int]] = []

    def gap(text: list[int], one: int, other: int) -> float:
        asked.append((text, one, other))
        return 0.03

    reference = {"a": [[1, 2, 3, 4]], "b": [[5, 6, 7, 8], [9, 9, 9, 9]]}
    answers = {"a": [[1, 2, 3, 4]], "b": [[5, 6, 0, 8], [9, 9, 9, 9]]}
    prompts = {"a": [[10]], "b": [[20], [30]]}
    like = compare("x", reference, answers, prompts, gap)
    assert asked == [([20, 5, 6], 7, 0)]
    assert (like.num_answers, like.num_equal, like.equal_tokens) == (3, 2, 10 / 3)
    assert like.differences == [Difference(2, 0.03)]
    assert like.is_same_model
    assert like.describe() == (
        "2 of 3 answers the same; the others part after 2 tokens, up to 0.03 logits apart, "
        "near ties"
    )


def test_what_is_no_tie_is_not_called_one() -> None:
    like = Likeness("x", 2, 3.0, [Difference(1, 0.02), Difference(2, 1.4)])
    assert not like.is_same_model
    assert (
        like.describe()
        == "0 of 2 answers the same; the others part after 2 tokens, up to 1.4 logits apart"
    )
    assert Likeness("x", 2, 4.0, []).describe() == "2 of 2 answers the same"


def test_the_gap_is_that_of_the_models_own_logits() -> None:
    """An answer whose third token is the runner-up of the model."""
    model = pdlab.load("random:tiny-llama")
    found = replace(invented(), cases=[Case("c", 1, 5)])
    from pdlab.bench.prompts import passages

    [prompt] = passages(model, 1, 5)
    generator = NaiveGenerator(model)
    ours = generator.generate(prompt, SamplingParams(temperature=0, max_tokens=4)).token_ids
    logits = generator.logits([*prompt, *ours[:2]], last_only=True)[0]
    top = logits.topk(2)
    assert int(top.indices[0]) == ours[2]
    theirs = [*ours[:2], int(top.indices[1]), 7]
    found.token_ids.clear()
    found.token_ids.update({"base": {"c": [ours]}, "other": {"c": [theirs]}})
    [like] = measure_likeness(found, model, "base")
    [difference] = like.differences
    assert difference.position == 2
    assert difference.gap == pytest.approx(float(top.values[0] - top.values[1]), abs=1e-3)
    assert measure_likeness(found, model, "nobody") == []


# --- what is printed and drawn -------------------------------------------------------------------


def _printed(found: SpeedBench, alike: list[Likeness]) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        for part in command.report(found, alike):
            console.print(part, soft_wrap=isinstance(part, str))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_report_has_numbers_ratios_texts_and_who_was_left_out() -> None:
    lines = _printed(invented(), [Likeness("cpu int8", 1, 4.0, [])])
    text = "\n".join(lines)

    assert "10.0 GB/s read" in text
    [row] = [line for line in lines if line.startswith("cpu int8")]
    assert row.split()[2] == "30"
    [row] = [line for line in lines if line.startswith("llama.cpp") and "x" in line]
    assert row.split() == ["llama.cpp", "1.50x", "1.50x"]
    [row] = [line for line in lines if line.startswith("the fastest of them")]
    assert row.split()[-2:] == ["1.50x", "1.50x"]
    assert "  cpu int8: 1 of 1 answers the same" in lines
    assert "left out: vllm: RuntimeError: [red]no[/]" in lines


def test_the_tables_fit_a_page_of_80_columns() -> None:
    found = invented()
    long = "onnxruntime-genai fp32"
    contestants = [replace(c, name=c.name.replace("late", long)) for c in found.contestants]
    samples = [
        replace(sample, case=case.name, name=sample.name.replace("late", long))
        for case in CASES
        for sample in found.samples
    ]
    found = replace(found, cases=list(CASES), samples=samples, contestants=contestants)
    lines = _printed(found, [])
    tables = lines[lines.index("") + 1 :]
    assert sum(line.startswith(long) for line in tables) == 2
    assert not any("…" in line for line in tables)


def test_the_figure_has_bars_spread_and_floors() -> None:
    figure = peers_figure(invented())
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [list(bar.y) for bar in bars[:2]] == [["torch fp32", "cpu int8"], ["llama.cpp", "late"]]
    assert list(bars[0].x) == pytest.approx([10.0, 30.0])
    assert list(bars[0].error_x.array) == pytest.approx([1.0, 3.0])
    assert list(bars[0].error_x.arrayminus) == pytest.approx([5.0, 18.0])
    floors = [trace for trace in figure.data if trace.type == "scatter"]
    assert len(floors) == 2
    found = invented()
    assert floors[0].x[1] == found.floor(found.contestants[1], DECODE)
    assert figure.layout.title.text == "pdlab's best mode is 1.5 times as fast as the best peer"
    assert "Z80 (2 cores), 2026-01-01" in figure.layout.title.subtitle.text


def test_a_figure_without_peers_says_so_and_one_of_nothing_is_refused() -> None:
    found = invented()
    alone = replace(found, contestants=found.contestants[:2])
    assert peers_figure(alone).layout.title.text == "pdlab's modes beside the machine's floor"
    with pytest.raises(ValueError, match="nothing was measured"):
        peers_figure(replace(found, samples=[]))


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks for; nothing is measured."""
    given: dict[str, Any] = {}

    def measure(model: object, entries: list[Entry], **options: Any) -> SpeedBench:
        given.update(options, names=[entry.name for entry in entries])
        return invented()

    monkeypatch.setattr(command, "measure_speed", measure)
    monkeypatch.setattr(command, "measure_likeness", lambda *_: [Likeness("cpu int8", 1, 4.0, [])])
    monkeypatch.setattr(command, "load_outline", lambda: MODEL)
    monkeypatch.setattr(command, "load", lambda *_, **__: MODEL)
    monkeypatch.setattr("pdlab.bench.entries.default_model_directory", lambda: Path("/nowhere/hf"))
    return given


def test_bench_alone_measures_all_modes_and_transformers(asked: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 0, result.output
    assert asked["names"] == [*command.MODES, "transformers fp32"]
    assert (asked["rounds"], asked["num_tokens"]) == (5, 48)
    assert "\x1b" not in result.stdout


def test_bench_takes_modes_peers_and_files(asked: dict[str, Any], tmp_path: Path) -> None:
    options = ["--mode", "cpu int8", "--peer", "ctranslate2=/p,/m", "--no-transformers", "--quick"]
    files = {name: tmp_path / name for name in ("speed.json", "chart.json", "chart.html")}
    for name in ("chart.json", "chart.html"):
        extra = ["--save", str(files["speed.json"]), "--chart", str(files[name])]
        result = CliRunner().invoke(app, ["bench", *options, *extra])
        assert result.exit_code == 0, result.output
    assert asked["names"] == ["cpu int8", "ctranslate2"]
    assert (asked["rounds"], asked["num_tokens"], len(asked["cases"])) == (2, 24, 1)
    saved = json.loads(files["speed.json"].read_text())
    assert saved["agreement"][0]["name"] == "cpu int8"
    assert json.loads(files["chart.json"].read_text())["layout"]["title"]
    assert files["chart.html"].read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mode", "cpu"], "mode='cpu'"),
        (["--peer", "odd=/p"], "peer='odd=/p'"),
        (["--save", "/nowhere/x.json"], "save='/nowhere/x.json'"),
        (["--chart", "/nowhere/x.html"], "chart='/nowhere/x.html'"),
    ],
)
def test_a_bad_option_is_named_in_one_line(
    asked: dict[str, Any], options: list[str], named: str
) -> None:
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
    assert not asked


def test_the_other_benches_are_still_there() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    for name in ("sampling", "scheduling", "disaggregation", "--peer", "--gpu"):
        assert name in result.stdout


def test_spread_is_median_least_and_most() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == (2.5, 1.0, 10.0)
