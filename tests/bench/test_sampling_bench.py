"""The bench runs every mix in real decode steps, in turns, and says what it ran on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdlab import Engine, Model
from pdlab.bench import MixCost, SamplingCosts, measure_sampling, sampling
from pdlab.bench.mixes import all_mixes, possible
from pdlab.cli import app
from pdlab.cli import bench as command
from tests.helpers import TINY, random_model

SMALL = {"batch": 3, "context_len": 20, "repeats": 2, "num_steps": 2}
SPOKEN = ("bad_words", "regex", "json_schema", "everything")


@pytest.fixture(scope="module")
def speaking(smollm2: Model) -> Model:
    """A tiny model with random weights and the real vocabulary."""
    model = random_model(replace(TINY, vocab_size=smollm2.config.vocab_size))
    return replace(model, tokenizer=smollm2.tokenizer)


@pytest.fixture(scope="module")
def spoken(speaking: Model) -> SamplingCosts:
    return measure_sampling(speaking, **SMALL)


@pytest.fixture(scope="module")
def speechless() -> SamplingCosts:
    return measure_sampling(random_model(), **SMALL)


def watch_turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The mixes that are run from now on, in order."""
    seen: list[str] = []
    run = sampling._decode

    def watched(engine, prompts, mix, num_steps):
        seen.append(mix.name)
        return run(engine, prompts, mix, num_steps)

    monkeypatch.setattr(sampling, "_decode", watched)
    return seen


# --- what is measured -----------------------------------------------------------------------------


def test_every_mix_has_every_step_of_every_counted_round(spoken: SamplingCosts) -> None:
    assert [cost.name for cost in spoken.costs] == [mix.name for mix in all_mixes(3)]
    for cost in spoken.costs:
        assert len(cost.sample_s) == len(cost.step_s) == SMALL["repeats"] * SMALL["num_steps"]
        pairs = zip(cost.sample_s, cost.step_s, strict=True)
        assert all(0 < sample < step for sample, step in pairs)


def test_mixes_take_turns_and_each_round_begins_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch_turns(monkeypatch)
    found = measure_sampling(random_model(), **SMALL)
    names = [cost.name for cost in found.costs]
    rounds = [seen[i : i + len(names)] for i in range(0, len(seen), len(names))]
    assert len(rounds) == SMALL["repeats"] + 1  # the first one warms up and is not counted
    assert all(sorted(one) == sorted(names) for one in rounds)
    assert [one[0] for one in rounds] == names[: len(rounds)]


def test_the_batch_decodes_together_with_the_asked_parameters(
    monkeypatch: pytest.MonkeyPatch, speaking: Model
) -> None:
    """What the engine was given is what the table will say."""
    submitted: list[tuple[int, object]] = []
    submit = Engine.submit

    def watched(engine, prompt, params=None):
        submitted.append((len(prompt), params))
        return submit(engine, prompt, params)

    monkeypatch.setattr(Engine, "submit", watched)
    measure_sampling(speaking, **SMALL)
    assert {length for length, _ in submitted} == {SMALL["context_len"]}
    mixes = all_mixes(SMALL["num_steps"] + 1)
    first_round = [params for _, params in submitted[: SMALL["batch"] * len(mixes)]]
    expected = [mix.row(i) for mix in mixes for i in range(SMALL["batch"])]
    assert first_round == expected


def test_rows_of_the_mixed_batch_differ_and_the_rest_are_alike() -> None:
    *alike, mixed = all_mixes(4)
    assert all(len(mix.params) == 1 for mix in alike)
    assert list(mixed.params) == [mix.params[0] for mix in alike]
    assert mixed.row(0) == replace(alike[0].params[0], seed=0)
    assert mixed.row(len(alike) + 1) == replace(alike[1].params[0], seed=len(alike) + 1)


def test_everything_has_all_that_the_single_mixes_have() -> None:
    """Except for what only one of can be asked: greedy or not, one constraint."""
    named = {mix.name: mix.params[0] for mix in all_mixes(4)}
    everything = named.pop("everything").to_dict()
    plain = named["temperature 0.8"].to_dict()
    for name in ("top_k 50", "top_p 0.9", "typical_p 0.95", "three penalties", "logprobs 5"):
        changed = {k: v for k, v in named[name].to_dict().items() if v != plain[k]}
        assert changed.items() <= everything.items(), name
    assert everything["min_p"] > 0
    assert everything["regex"]
    assert everything["logit_bias"]


def test_a_model_without_words_is_measured_without_those_mixes(speechless: SamplingCosts) -> None:
    names = [cost.name for cost in speechless.costs]
    assert names == [mix.name for mix in all_mixes(3) if mix.name not in SPOKEN]
    mixed = possible(all_mixes(3), has_text=False, constraint_backend="llguidance")[-1]
    assert len(mixed.params) == len(names) - 1
    assert speechless.prompts == "random tokens"


def test_our_own_masker_is_measured_without_json(speaking: Model) -> None:
    found = measure_sampling(speaking, **SMALL, constraint_backend="pdlab")
    names = [cost.name for cost in found.costs]
    assert "regex" in names
    assert "json_schema" not in names


# --- what is said about it ------------------------------------------------------------------------


def test_medians_quartiles_and_shares_are_those_of_the_steps() -> None:
    cost = MixCost("x", [1.0, 2.0, 3.0, 10.0, 4.0], [10.0, 20.0, 10.0, 20.0, 40.0])
    assert (cost.median_sample_s, cost.median_step_s) == (3.0, 20.0)
    assert cost.quartiles_s == (2.0, 4.0)
    assert cost.share == 0.1  # of 0.1, 0.1, 0.3, 0.5, 0.1: not 3 over 20
    alone = MixCost("x", [2.0], [8.0])
    assert (alone.quartiles_s, alone.share) == ((2.0, 2.0), 0.25)


def test_a_measurement_says_what_it_ran_on(spoken: SamplingCosts) -> None:
    assert spoken.model["vocab_size"] == 49152
    assert (spoken.batch, spoken.context_len) == (3, 20)
    assert {"processor", "cores", "threads", "date", "load_before"} <= spoken.machine.keys()
    assert {"torch", "numpy", "llguidance", "pdlab"} == spoken.versions.keys()


@pytest.mark.parametrize(("load", "busy"), [(0.1, False), (0.5, True), (3.0, True), (None, False)])
def test_a_busy_machine_is_noticed(
    speechless: SamplingCosts, load: float | None, busy: bool
) -> None:
    found = replace(speechless, machine=speechless.machine | {"load_before": load})
    assert found.busy is busy


def test_a_saved_measurement_is_read_back(spoken: SamplingCosts, tmp_path: Path) -> None:
    path = tmp_path / "sampling.json"
    spoken.save(path)
    again = SamplingCosts.load(path)
    assert [cost.name for cost in again.costs] == [cost.name for cost in spoken.costs]
    for ours, theirs in zip(again.costs, spoken.costs, strict=True):
        assert ours.step_s == pytest.approx(theirs.step_s, rel=1e-3)
        assert ours.share == pytest.approx(theirs.share, rel=1e-2)
    assert replace(again, costs=[]) == replace(spoken, costs=[])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 0}, "batch=0 must be an integer >= 1"),
        ({"repeats": 0}, "repeats=0"),
        ({"context_len": 0}, "context_len=0"),
        ({"context_len": 126}, "context_len=126 and 3 more tokens are more than the 128"),
        ({"constraint_backend": "mine"}, "constraint_backend='mine'"),
    ],
)
def test_a_bad_number_is_named(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_sampling(random_model(), **SMALL | given)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load", lambda name, device: random_model())


@pytest.fixture
def lines() -> list[str]:
    """The table of invented times, on a page of 80 columns."""
    costs = [
        MixCost("greedy", [0.001, 0.001, 0.003], [0.1, 0.1, 0.1]),
        MixCost("top_p 0.9", [0.004, 0.004, 0.004], [0.1, 0.1, 0.1]),
    ]
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(command._table(costs))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table_has_times_parts_and_bars(lines: list[str]) -> None:
    _, greedy, top_p = lines
    assert max(map(len, lines)) <= 80
    assert greedy.split() == ["greedy", "1.00", "ms", "1", "to", "2", "100", "ms", "1.0%", "███"]
    assert top_p.split()[:3] == ["top_p", "0.9", "4.00"]
    assert top_p.endswith("4.0%  " + "█" * command.BAR)


@pytest.mark.parametrize(("part", "shown"), [(0, ""), (1 / 96, "▏"), (0.5, "█" * 6), (1, "█" * 12)])
def test_a_bar_is_as_long_as_its_part(part: float, shown: str) -> None:
    assert command.bar(part) == shown


def test_bench_prints_a_plain_table_and_saves_it(quick: None, tmp_path: Path) -> None:
    path = tmp_path / "sampling.json"
    options = ["--batch", "2", "--context", "8", "--repeats", "1", "--save", str(path)]
    result = CliRunner().invoke(app, ["bench", "sampling", *options])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert "2 sequences decoding at 8 tokens of context" in result.stdout
    saved = json.loads(path.read_text(encoding="utf-8"))
    for cost in saved["costs"]:
        assert cost["name"] in result.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--batch", "0"], "batch=0"),
        (["--repeats", "0"], "repeats=0"),
        (["--context", "1000"], "context_len"),
        (["--save", "/nowhere/x.json"], "save='/nowhere/x.json'"),
        (["--context", "8", "--constraint-backend", "mine"], "constraint_backend='mine'"),
    ],
)
def test_a_bad_option_is_named_in_one_line(quick: None, options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "sampling", *options])
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
