"""`pdlab replay` prints what became of a workload, labelled, or fails in one line."""

import gzip
import importlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from pdlab import Trace
from pdlab.cli import app
from pdlab.cli.replay_traffic import ServingReplay, Traffic
from pdlab.cli.serving_view import LiveView, print_summary
from pdlab.cli.text import seconds
from pdlab.costmodel import StepShape
from pdlab.engine import RequestMetrics
from pdlab.workload.cache_replay import replay_cache
from pdlab.workload.replay import Progress
from pdlab.workload.report import summarize
from pdlab.workload.scaling import scaled
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan
from pdlab.workload.traces import read_trace, shipped_traces
from pdlab.workload.traffic import WORKLOADS
from tests.workload.test_export import parse, values

COMMAND = importlib.import_module("pdlab.cli.replay")
"""The module; in `pdlab.cli` a function has the same name."""


def pdlab(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "110"}).invoke(app, arguments)


def cells(result: Result, row: str) -> list[str]:
    """The first words of a row of the table, behind its name."""
    [line] = [line for line in result.stdout.splitlines() if line.startswith(row + "  ")]
    return line[len(row) :].split()


# --- --cache-only --------------------------------------------------------------------------------


def test_the_table_holds_what_the_replay_found() -> None:
    result = pdlab("replay", "azure-conv-like", "--cache-only", "--blocks=4096", "--requests=300")
    assert result.exit_code == 0
    requests = read_trace(shipped_traces()["azure-conv-like"])[:300]
    expected = replay_cache(requests, num_blocks=4096)
    assert re.search(r"^ +paged +max +power_of_two +grow", result.stdout, re.M)
    waste = [f"{100 * r.waste:.1f}" for r in expected]
    shown = [f"{float(cell.rstrip('%')):.1f}" for cell in cells(result, "waste")[:4]]
    assert shown == waste
    assert cells(result, "preempted")[:4] == [f"{r.num_preemptions:,}" for r in expected]
    assert cells(result, "running")[:4] == [f"{r.mean_running:.1f}" for r in expected]


def test_it_says_that_time_is_simulated_and_on_what() -> None:
    result = pdlab("replay", "azure-code-like", "--cache-only", "--blocks=512", "--requests=20")
    assert result.stdout.startswith("simulated from request lengths, no model is run")
    assert "a step takes 50 ms" in result.stdout
    assert "512 blocks of 16 tokens = 8,192 token slots = 189 MB" in result.stdout
    assert "23.0 kB of K and V a token (smollm2-135m, bf16)" in result.stdout
    assert "max reserves the longest request" in result.stdout


def test_hit_rates_of_a_cache_without_limit() -> None:
    arguments = ("replay", "mooncake-conv-like", "--cache-only", "--no-baselines")
    result = pdlab(*arguments, "--blocks", "infinite")
    assert result.exit_code == 0
    assert "no limit; blocks of 512 tokens" in result.stdout
    assert cells(result, "hit blocks")[0] == "36.6%"
    assert cells(result, "evicted")[0] == "0"
    assert "power_of_two" not in result.stdout
    small = pdlab(*arguments, "--blocks", "500")
    assert float(cells(small, "hit blocks")[0].rstrip("%")) < 20


def test_without_prefix_ids_there_are_no_hits_to_show() -> None:
    result = pdlab("replay", "azure-code-like", "--cache-only", "--requests", "5")
    assert "hit blocks" not in result.stdout
    assert "external" not in result.stdout  # a memory without limit has no holes that matter


def test_formats_and_models_change_the_bytes_only() -> None:
    arguments = ("replay", "azure-code-like", "--cache-only", "--requests=5", "--no-baselines")
    int8 = pdlab(*arguments, "--kv-format", "int8", "--model", "random:llama-1b")
    assert "16.9 kB of K and V a token (random:llama-1b, int8)" in int8.stdout
    assert cells(int8, "waste") == cells(pdlab(*arguments), "waste")


def test_a_trace_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,2\n")
    result = pdlab("replay", str(path), "--cache-only")
    assert "1 request in 0 s" in result.stdout
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,x\n")
    result = pdlab("replay", str(path), "--cache-only")
    assert (result.exit_code, result.stdout) == (2, "")
    told = f"{path}, line 2: GeneratedTokens='x' is no number of tokens from 1 to 1,000,000"
    assert result.stderr == f"pdlab: {told}\n"


def test_a_name_is_shown_as_it_is_and_may_be_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "[red]mine[x].csv.gz"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,2\n"
    path.write_bytes(gzip.compress(text.encode()))
    result = pdlab("replay", str(path), "--cache-only")
    assert f"trace    {path}: 1 request in 0 s" in result.stdout


REFUSED = {
    "no such trace": (["nothing", "--cache-only"], "trace='nothing' is no file; by name there are"),
    "blocks in words": (["azure-conv-like", "--cache-only", "--blocks=many"], "blocks='many'"),
    "no blocks": (["azure-conv-like", "--cache-only", "--blocks=0"], "num_blocks=0"),
    "block size": (["mooncake-conv-like", "--cache-only", "--block-size=100"], "must divide"),
    "model": (["azure-conv-like", "--cache-only", "--model=gpt"], "no shape is called 'gpt'"),
    "format": (["azure-conv-like", "--cache-only", "--kv-format=int9"], "kv_format='int9'"),
    "no time": (["azure-conv-like", "--cache-only", "--step-ms=0"], "step_ms=0 must be from"),
    "tiny step": (["azure-conv-like", "--cache-only", "--step-ms=1e-300"], "step_ms=1e-300 must"),
    "long name": (["x" * 5000, "--cache-only"], "is no file; by name there are"),
    "digits": (
        ["azure-conv-like", "--cache-only", f"--blocks={'9' * 5000}"],
        "blocks has 5,000 digits, it must be at most 1,000,000,000,000,000",
    ),
    "many blocks": (
        ["azure-conv-like", "--cache-only", "--blocks=2" + "0" * 15],
        "num_blocks must",
    ),
    "long words": (["azure-conv-like", "--cache-only", f"--blocks={'x' * 5000}"], "blocks='xxx"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line(name: str) -> None:
    arguments, message = REFUSED[name]
    result = pdlab("replay", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("pdlab: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 500


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    result = pdlab("replay", str(tmp_path), "--cache-only")
    assert result.exit_code == 2
    assert "is no file" in result.stderr


# --- on the engine -------------------------------------------------------------------------------

QUICK = ("azure-conv-like", "--model=random:tiny-llama", "--requests=6", "--rate=5")


def test_a_replay_shows_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    result = pdlab("replay", *QUICK, "--json", str(path), "--seed=3")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout  # no terminal: nothing that commands one
    assert "azure-conv-like: 6 of 800 requests" in result.stdout
    assert "measured: random:tiny-llama (fp32) on " in result.stdout
    assert "6 of 6 finished" in result.stdout
    summary = json.loads(path.read_text())["summary"]
    assert summary["provenance"] == "measured"
    for row, key in (("queue", "queue_s"), ("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s")):
        [line] = [x for x in result.stdout.splitlines() if re.match(rf"{row} .*(to|each)", x)]
        shown = re.findall(r"[\d.]+ (?:s|ms|µs)\b", line)
        columns = ("mean", "p50", "p90", "p95", "p99", "max")
        assert shown == [seconds(summary[key][column]) for column in columns]
    assert f"{summary['attainment']:.0%} of all" in result.stdout


def test_what_it_writes_agrees(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("save", "json", "prometheus")}
    options = [f"--{name}={path}" for name, path in paths.items()]
    result = pdlab("replay", *QUICK, *options)
    assert result.exit_code == 0
    run = ServingRun.of_trace(Trace.load(paths["save"]))
    raw = json.loads(paths["json"].read_text())
    assert [r["request_id"] for r in raw["requests"]] == [r.request_id for r in run.requests]
    assert sum(s["num_steps"] for s in raw["summary"]["steps"].values()) == len(run.steps)
    _, samples = parse(paths["prometheus"].read_text())
    assert {s.labels["model_name"] for s in samples} == {"random:tiny-llama"}
    assert values(samples, "generation_tokens_total") == {None: raw["summary"]["num_output_tokens"]}
    for path in paths.values():
        assert str(path) in result.stdout.replace("\n", "")


def test_clients_and_knobs_reach_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = [
        *("--clients=2", "--requests=5", "--batching=static", "--max-num-seqs=3", "--budget=64"),
        *("--chunk-size=16", "--blocks=40", "--block-size=8", "--policy=deadline"),
        "--max-overtakes=7",
        *("--ttft-slo-ms=500", "--prompt-scale=0.1", f"--json={path}"),
    ]
    result = pdlab("replay", "azure-conv-like", "--model=random:tiny-llama", *options)
    assert result.exit_code == 0, result.stderr
    assert "closed loop of 2 clients" in result.stdout
    assert "cut to 320 tokens: no more fit" in result.stdout
    raw = json.loads(path.read_text())
    knobs = {
        "batching": "static",
        "policy": "deadline(ttft_slo_s=0.5)",
        "max_num_seqs": 3,
        "max_overtakes": 7,
        "max_num_batched_tokens": 64,
        "chunk_size": 16,
        "num_blocks": 40,
        "block_size": 8,
    }
    assert {name: raw["config"][name] for name in knobs} == knobs
    assert raw["summary"]["slo"] == {"ttft_s": 0.5, "tpot_s": 0.25}
    assert raw["summary"]["running"]["max"] == 2
    assert raw["summary"]["step_tokens"]["max"] <= 32  # two prompts in chunks of 16


def test_ctrl_c_saves_what_was_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def update(self: LiveView, progress: Progress) -> None:
        heard.append(progress)
        if len(heard) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(LiveView, "update", update)
    paths = {name: tmp_path / name for name in ("save", "json", "prometheus")}
    result = pdlab("replay", *QUICK, *(f"--{name}={path}" for name, path in paths.items()))
    assert result.exit_code == 130
    assert result.stderr == "pdlab: interrupted\n"
    steps = sum(progress.step is not None for progress in heard)
    assert len(Trace.load(paths["save"]).steps) == steps
    assert "interrupted: only what was served until then" in result.stdout
    assert re.search(r"of those that got there; \d+ aborted", result.stdout)
    raw = json.loads(paths["json"].read_text())
    assert raw["interrupted"] is True
    assert sum(s["num_steps"] for s in raw["summary"]["steps"].values()) == steps
    assert raw["summary"]["num_aborted"] > 0
    _, samples = parse(paths["prometheus"].read_text())
    assert values(samples, "run_interrupted") == {None: 1}


def test_a_trace_is_trimmed_for_a_laptop_unless_told_otherwise() -> None:
    for name, path in shipped_traces().items():
        trace = read_trace(path)
        traffic = Traffic.of(ServingReplay(name))
        assert traffic.trimmed
        assert len(traffic.requests) == 40
        assert sum(r.num_prompt_tokens for r in traffic.requests) <= 40 * 301
        assert sum(r.num_output_tokens for r in traffic.requests) <= 40 * 51
        rate = 39 / (traffic.requests[-1].arrival_s - traffic.requests[0].arrival_s)
        assert rate == pytest.approx(0.4)
        blocks = [len(r.prefix_ids) for r in trace[:40]]
        assert [len(r.prefix_ids) for r in traffic.requests] == pytest.approx(blocks, abs=1)
        whole = Traffic.of(ServingReplay(name, 30, rate=1.0, prompt_scale=1, output_scale=1))
        assert whole.requests == trace[:30]
        assert not whole.trimmed


def test_named_workloads_are_served_as_they_are() -> None:
    traffic = Traffic.of(ServingReplay("short-chat", seed=2))
    assert traffic.requests == WORKLOADS["short chat"](40, seed=2)
    assert not traffic.trimmed
    twice = Traffic.of(ServingReplay("short chat", 7, rate=2))
    assert twice.requests == scaled(WORKLOADS["short chat"](7), rate=2)


# --- simulated -----------------------------------------------------------------------------------


@dataclass
class EvenSteps:
    """Every step takes 10 ms."""

    basis: str = "made up for a test"

    def step_s(self, shape: StepShape) -> float:
        return 0.01


def test_simulated_numbers_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(COMMAND, "measured_step_times", lambda model, config: EvenSteps())
    path = tmp_path / "run.json"
    result = pdlab("replay", *QUICK, "--simulate", f"--json={path}")
    assert result.exit_code == 0, result.stderr
    assert "simulated; step times: made up for a test" in result.stdout
    assert "measured" not in result.stdout
    summary = json.loads(path.read_text())["summary"]
    assert (summary["provenance"], summary["num_finished"]) == ("simulated", 6)
    assert summary["itl_s"]["p50"] == pytest.approx(0.01)


def test_published_hardware_needs_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(COMMAND, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    path = tmp_path / "run.json"
    options = ["--hardware=a100-opt-13b", "--requests=100", f"--json={path}"]
    result = pdlab("replay", "azure-conv-like", "--simulate", *options)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^simulated; step times: published: OPT-13B on 1 x A100", result.stdout, re.M)
    assert "100 of 800 requests\n" in result.stdout  # neither trimmed nor scaled
    config = json.loads(path.read_text())["config"]
    assert (config["num_blocks"], config["max_num_seqs"]) == (4134, 256)
    assert "at most 256 sequences (a server's; --max-num-seqs says otherwise)" in result.stdout
    asked = pdlab("replay", "azure-conv-like", "--simulate", *options, "--max-num-seqs=32")
    assert "at most 32 sequences and" in asked.stdout
    small = pdlab("replay", "azure-conv-like", "--simulate", *options, "--budget=100")
    assert "at most 100 sequences (" in small.stdout


# --- the live table ------------------------------------------------------------------------------


def progress(now_s: float, num_tokens: int = 1, ended: tuple[ServedRequest, ...] = ()) -> Progress:
    step = StepSpan(now_s - 0.1, 0.1, ["a", "b"], {"c": 5}, 7, 4, 25)
    return Progress(now_s, step, 12, num_tokens, list(ended))


def test_a_row_of_the_live_table() -> None:
    good = ServedRequest("a", RequestMetrics(0, 0, [0.5, 0.6]), "length")
    late = ServedRequest("b", RequestMetrics(0, 0, [5.0]), "length")
    refused = ServedRequest("d", RequestMetrics(0), "error", error="too long")
    view = LiveView(Console(file=io.StringIO()), 100, 20, SLO(1, 1))
    view.update(progress(9, num_tokens=100))
    view.update(progress(11.5, num_tokens=3, ended=(good, late)))
    view.update(progress(12, num_tokens=5, ended=(refused,)))
    row = view.row(progress(12))
    assert row[:4] == ["12.0 s", "7", "4", "3"]
    assert re.fullmatch(r"███ +25%", row[4])
    assert row[5:] == ["4.0", "2 of 20", "33%"]  # 8 tokens in the last 2 s; 1 good of 3
    idle = view.row(Progress(13, None, 12, 0, []))
    assert idle[1:4] == ["0", "0", "0"]


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_is_drawn_on(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100)
    with LiveView(console, 100, 20, SLO(1, 1)) as view:
        for i in range(40):
            view.update(progress(1 + i))
    assert bool(file.getvalue()) is terminal
    assert ("attained" in file.getvalue()) is terminal
    assert len(view.rows) == (12 if terminal else 0)  # a long replay does not scroll away


def test_a_summary_says_who_is_missing_in_it() -> None:
    """One finished, one was refused, two were aborted, of whom one while it waited."""
    requests = [
        ServedRequest("a", RequestMetrics(0, 0, [1.0]), "length"),
        ServedRequest("b", RequestMetrics(0, 0), "abort"),
        ServedRequest("c", RequestMetrics(0), "abort"),
        ServedRequest("d", RequestMetrics(0), "error", error="too long"),
    ]
    steps = [StepSpan(0, 1, [], {"a": 5, "b": 5}, 1, 2, 3)]
    whole = ServingRun("measured", "a test", {}, requests, steps, 10)
    assert "of those that got there; 1 refused and 2 aborted" in summary_of(whole)
    assert re.search(
        r"^queue .* requests waiting, without 1 aborted there$", summary_of(whole), re.M
    )
    served = ServingRun("measured", "a test", {}, requests[:1], steps, 10)
    assert "got there" not in summary_of(served)
    assert "aborted" not in summary_of(served)


def summary_of(run: ServingRun) -> str:
    file = io.StringIO()
    print_summary(Console(file=file, width=150), run, summarize(run))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


# --- refusals ------------------------------------------------------------------------------------

AT_ODDS = {
    "serving option": (["--cache-only", "--policy=sjf"], "--policy needs a model to run; --cache"),
    "file": (["--cache-only", "--save=x"], "--save needs a model to run; --cache-only runs none"),
    "cache option": (["--step-ms=5"], "--step-ms is for --cache-only"),
    "baselines": (["--no-baselines"], "--baselines is for --cache-only"),
    "think": (["--think-s=1"], "--think-s needs --clients"),
    "rate": (["--clients=2", "--rate=2"], "--rate and --clients"),
    "hardware": (["--hardware=a100-opt-13b"], "--hardware needs --simulate"),
    "model": (["--simulate", "--hardware=a100-opt-13b", "--model=x"], "--model and --hardware"),
    "trace": (["--simulate", "--save=x"], "--save and --simulate"),
    "infinite": (["--blocks=infinite"], "blocks='infinite' must be a number of blocks"),
    "digits": ([f"--blocks={'9' * 5000}"], "blocks='999"),
    "no blocks": (["--blocks=0"], "num_blocks=0"),
    "batching": (["--batching=all"], "batching='all' must be one of static"),
    "policy": (["--policy=best"], "policy='best' must be one of fcfs"),
    "budget": (["--budget=8"], "max_num_batched_tokens=8 is less than max_num_seqs=32"),
    "rate 0": (["--rate=0"], "rate=0"),
    "prompts": (["--prompt-scale=-1"], "prompt_scale=-1"),
    "seed": (
        [f"--seed={2**64}"],
        "seed has 17 hex digits, it must be from 0 to 18446744073709551615",
    ),
    "requests": (["--requests=100000000"], "--requests=100000000 must be at most 10,000,000"),
    "overtakes": (["--max-overtakes=9999999999999999"], "max_overtakes has 14 hex digits"),
    "one file": (["--json=x", "--prometheus=./x"], "prometheus='x' is also --json: each needs"),
    "one file more": (["--save=x", "--json=x"], "json='x' is also --save"),
    "slo": (["--ttft-slo-ms=-1"], "ttft_slo_ms=-1"),
    "nan": (["--tpot-slo-ms=nan"], "tpot_slo_ms=nan"),
    "thoughts": (["--clients=1", "--think-s=-1"], "think_s=-1"),
    "no machine": (["--simulate", "--hardware=h9000"], "hardware='h9000' must be one of a100"),
    "no folder": (["--json=/no/such/place/x"], "json='/no/such/place/x': there is no directory"),
}


@pytest.mark.parametrize("name", AT_ODDS)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMMAND, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    options, message = AT_ODDS[name]
    result = pdlab("replay", "azure-conv-like", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pdlab: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 500


def test_the_trace_itself_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,5,2\n"
    path.write_text(text)
    result = pdlab("replay", str(path), f"--json={path}")
    assert result.exit_code == 2
    assert "is also the trace that is replayed" in result.stderr
    assert path.read_text() == text


def test_a_workload_may_be_long_but_not_endless() -> None:
    result = pdlab("replay", "mixed", "--requests=100000000")
    assert result.exit_code == 2
    assert result.stderr == "pdlab: --requests=100000000 must be at most 10,000,000\n"


def test_a_scale_that_cuts_blocks_names_one_that_does_not() -> None:
    def ask(scale: str) -> Result:
        options = ("--simulate", "--hardware=a100-opt-13b", "--requests=3")
        return pdlab("replay", "mooncake-conv-like", *options, f"--prompt-scale={scale}")

    result = ask("0.03")
    assert result.exit_code == 2
    assert result.stderr.startswith("pdlab: --prompt-scale=0.03: blocks of 512 tokens")
    assert "keep_prefixes" not in result.stderr
    nearest = result.stderr.split()[-1]
    assert nearest == repr(15 / 512)
    assert ask(nearest).exit_code == 0


def test_an_unknown_trace_lists_the_workloads_too() -> None:
    result = pdlab("replay", "nothing")
    assert result.exit_code == 2
    assert "azure-conv-like" in result.stderr
    assert "made by seed: short-chat, long-documents, mixed" in result.stderr
