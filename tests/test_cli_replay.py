"""`pdlab replay --cache-only` prints what the replay found, labelled, or fails in one line."""

import gzip
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdlab.cli import app
from pdlab.workload.cache_replay import replay_cache
from pdlab.workload.traces import read_trace, shipped_traces


def pdlab(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "110"}).invoke(app, arguments)


def cells(result: Result, row: str) -> list[str]:
    """The first words of a row of the table, behind its name."""
    [line] = [line for line in result.stdout.splitlines() if line.startswith(row + "  ")]
    return line[len(row) :].split()


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
    "no --cache-only": (["azure-conv-like"], "needs --cache-only"),
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
