"""The command line says what the engine did, and fails in one line."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from pdlab_kernels.cpu.target import TARGET
from typer.testing import CliRunner, Result

from pdlab import Engine, EngineConfig, Model, SamplingParams, Trace
from pdlab.cli import app, ceilings, checkup, lab_server, text, walk
from pdlab.cli.stages import ElementBytes, decode_stages, prefill_stages
from pdlab.costmodel import Hardware, StepCost
from pdlab.models import FetchError, available

from .helpers import random_model, random_prompt

ROUND = Hardware(
    name="a round machine",
    kind="cpu",
    peak_flops={"fp32": 1e12, "bf16": 1e12},
    bandwidth_bytes_s=1e11,
    memory_bytes=10**10,
    source="made up for a test",
    measured=True,
    launch_s=2e-6,
    details={"copy_bytes_s": 9e10, "gemv_bytes_s": 8e10, "processor_share": 1.0},
)
PROMPT = "What is the capital of France?"


def pdlab(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, smollm2: Model) -> Model:
    """`run` takes the model that is loaded already, and a machine that needs no measuring."""
    monkeypatch.setattr(walk, "load", lambda name, weights, device: smollm2)
    monkeypatch.setattr(walk, "calibrate", lambda device, dtype: ROUND)
    return smollm2


# --- run -----------------------------------------------------------------------------------------


def test_run_shows_every_stage_and_the_text(quick: Model) -> None:
    result = pdlab("run", PROMPT, "--max-tokens", "8")
    assert result.exit_code == 0
    with Engine(quick) as engine:
        message = [{"role": "user", "content": PROMPT}]
        expected = engine.generate(message, SamplingParams(max_tokens=8))[0]
    assert expected.text in result.stdout
    for stage in ("tokenize", "prefill", "first token", "decode", "median step", "TTFT", "TPOT"):
        assert re.search(rf"^{stage}\b", result.stdout, re.M), stage
    assert f"finished: {expected.finish_reason}, {len(expected.token_ids)} tokens" in result.stdout


def test_run_fits_a_page_of_80_columns(quick: Model) -> None:
    for line in pdlab("run", PROMPT, "--max-tokens", "4").stdout.splitlines():
        if not line.startswith("machine"):
            assert len(line.rstrip()) <= 80


def test_run_shows_each_chunk_of_a_prefill(quick: Model) -> None:
    output = pdlab("run", PROMPT, "--max-tokens", "1", "--chunk-size", "16").stdout
    num_tokens = len(quick.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}]))
    rows = re.findall(r"^prefill (\d)/(\d) +(\d+)", output, re.M)
    assert [int(tokens) for *_, tokens in rows] == [16, 16, num_tokens - 32]
    assert "decode" not in output


def test_raw_leaves_the_chat_template_out(quick: Model) -> None:
    output = pdlab("run", PROMPT, "--max-tokens", "1", "--raw").stdout
    assert f"{len(quick.tokenizer.encode(PROMPT))} tokens, as given" in output


def test_exact_mode_and_seed_reach_the_engine(quick: Model, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["--exact", "--temperature", "0.8", "--seed", "3", "--save", str(path)]
    assert pdlab("run", PROMPT, "--max-tokens", "3", *arguments).exit_code == 0
    trace = Trace.load(path)
    assert trace.engine["exact"] is True
    params = next(iter(trace.requests.values())).params
    assert (params["temperature"], params["seed"]) == (0.8, 3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["", "--max-tokens", "4"], "prompt"),
        ([PROMPT, "--max-tokens", "0"], "max_tokens=0"),
        ([PROMPT, "--chunk-size", "0"], "chunk_size=0"),
        ([PROMPT, "--temperature", "-1"], "temperature=-1"),
        ([PROMPT, "--temperature", "nan"], "temperature=nan"),
        ([PROMPT, "--seed", "-1"], "seed=-1"),
        ([PROMPT, "--save", "/nowhere/run.json"], "save='/nowhere/run.json'"),
        (["long " * 9000], "max_model_len is 8192"),
    ],
)
def test_a_bad_parameter_is_named_in_one_line(
    quick: Model, arguments: list[str], named: str
) -> None:
    result = pdlab("run", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["no-such-model", "random:tiny-llama"])
def test_a_model_that_cannot_serve_is_named(name: str) -> None:
    result = pdlab("run", PROMPT, "--model", name)
    assert result.exit_code == 2
    assert name in result.stderr
    assert result.stderr.count("\n") == 1


def test_weights_of_another_format_reach_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["--weights", "file", "--max-tokens", "3", "--save", str(path)]
    assert pdlab("run", PROMPT, *arguments).exit_code == 0
    trace = Trace.load(path)
    assert trace.model["weight_bytes"] < 110e6
    assert trace.engine["backend"] == ("torch" if TARGET == "torch" else "cpu")


def test_unknown_weights_are_named_in_one_line() -> None:
    result = pdlab("run", PROMPT, "--weights", "int3")
    assert result.exit_code == 2
    assert "weights='int3'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_cannot_be_fetched_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, weights: str, device: str) -> Model:
        raise FetchError("cannot download it\nWhat helps: ...")

    monkeypatch.setattr(walk, "load", unreachable)
    result = pdlab("run", PROMPT)
    assert result.exit_code == 1
    assert "What helps" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("after_steps", [0, 3])
def test_ctrl_c_ends_with_what_was_generated(
    quick: Model, monkeypatch: pytest.MonkeyPatch, after_steps: int
) -> None:
    step, engines = Engine.step, []

    def interrupted(engine: Engine) -> object:
        engines.append(engine)
        if len(engines) > after_steps:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = pdlab("run", PROMPT)
    assert result.exit_code == 130
    assert f"finished: abort, {after_steps} token" in result.stdout
    assert "Traceback" not in result.output
    engine = engines[0]
    assert engine.pool.num_free == engine.config.num_blocks


def test_the_model_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    walk._print_text(Console(), "a\x1b]0;title\x07b\nc[bold]d\x9b1m")
    assert capsys.readouterr().out == "a]0;titleb\nc[bold]d1m"


def test_stages_add_up_to_the_trace() -> None:
    model = random_model()
    with Engine(model, EngineConfig(chunk_size=4)) as engine:
        engine.generate(random_prompt(10), SamplingParams(max_tokens=5, ignore_eos=True))
    prefill = [r for r in engine.trace.steps if r.phase == "prefill"]
    decode = [r for r in engine.trace.steps if r.phase == "decode"]
    stages = prefill_stages(prefill, model.config, ElementBytes(4, 4)) + decode_stages(decode)[:1]
    assert [s.num_tokens for s in stages] == [4, 4, 2, 1, 4]
    total = sum((s.cost for s in stages if s.cost), StepCost.zero())
    assert total.total_flops == sum(r.total_flops for r in engine.trace.steps)
    assert total.total_bytes == sum(r.total_bytes for r in engine.trace.steps)
    assert sum(s.time_s for s in stages) == pytest.approx(sum(r.wall_s for r in engine.trace.steps))


def test_run_works_as_a_command_without_a_terminal(smollm2: Model) -> None:
    command = [sys.executable, "-c", "from pdlab.cli import app; app()"]
    command += ["run", PROMPT, "--max-tokens", "12"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "Paris" in result.stdout
    assert "\x1b" not in result.stdout


# --- lab -----------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The arguments that JupyterLab would have been started with; nothing is fetched."""
    from jupyterlab.labapp import LabApp

    import pdlab.models

    calls: list[list[str]] = []

    def launch(argv: list[str]) -> None:
        settings = next(a for a in argv if "app_settings_dir" in a).partition("=")[2]
        overrides = json.loads((Path(settings) / "overrides.json").read_text())
        assert overrides == lab_server.LAB_SETTINGS
        calls.append(argv)

    (tmp_path / "00_start_here.ipynb").touch()
    (tmp_path / "01_prefill.ipynb").touch()
    monkeypatch.setattr(LabApp, "launch_instance", launch)
    monkeypatch.setattr(lab_server, "lessons_folder", lambda: tmp_path)
    monkeypatch.setattr(pdlab.models, "default_model_directory", lambda progress: tmp_path)
    return calls


def test_lab_opens_on_the_first_lesson(launched: list[list[str]], tmp_path: Path) -> None:
    assert pdlab("lab", "--port", "9000", "--no-browser").exit_code == 0
    arguments = launched[0]
    assert f"--ServerApp.root_dir={tmp_path}" in arguments
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in arguments
    assert "--ServerApp.port=9000" in arguments
    assert "--ServerApp.open_browser=False" in arguments


def test_lab_without_lessons_says_so(launched: list[list[str]], tmp_path: Path) -> None:
    for lesson in tmp_path.glob("*.ipynb"):
        lesson.unlink()
    result = pdlab("lab")
    assert result.exit_code == 1
    assert "there are no lessons" in result.stderr
    assert not launched


def test_the_working_copy_keeps_what_the_reader_wrote(tmp_path: Path) -> None:
    shipped, folder = tmp_path / "shipped", tmp_path / "mine"
    (shipped / "demos").mkdir(parents=True)
    (shipped / "00_a.ipynb").write_text("new")
    (shipped / "demos" / "b.ipynb").write_text("new")
    lab_server.copy_missing(shipped, folder)
    (folder / "00_a.ipynb").write_text("the reader's")
    lab_server.copy_missing(shipped, folder)
    assert (folder / "00_a.ipynb").read_text() == "the reader's"
    assert (folder / "demos" / "b.ipynb").read_text() == "new"


def test_lab_serves_on_another_port_when_its_own_is_taken(smollm2: Model, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as taken, log.open("w") as output:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", "from pdlab.cli import app; app()"]
        command += ["lab", "--no-browser", "--port", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            url = _wait_for_url(log, server)
            assert f":{port}/" not in url
            with urllib.request.urlopen(url, timeout=30) as page:
                assert b"jupyter-config-data" in page.read()
        finally:
            server.terminate()
            server.wait(timeout=30)


def _wait_for_url(log: Path, server: subprocess.Popen[bytes], limit_s: float = 90) -> str:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+/lab/tree/\S+token=\w+", log.read_text())
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(log.read_text())


# --- models, doctor, calibrate -------------------------------------------------------------------


def test_models_lists_every_name() -> None:
    result = pdlab("models")
    assert result.exit_code == 0
    for entry in available():
        assert entry.name in result.stdout
    assert "Apache-2.0" in result.stdout


def test_doctor_finds_nothing_missing_here() -> None:
    result = pdlab("doctor")
    assert result.exit_code == 0
    for name in ("python", "torch", "CUDA", "triton", "model", "jupyterlab", "anywidget"):
        assert re.search(rf"^{name}\b", result.stdout, re.M), name


def test_doctor_says_how_to_mend_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "anywidget":
            raise checkup.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(checkup, "version", version)
    monkeypatch.setattr("pdlab.workbench.picture.find_browser", lambda: None)
    result = pdlab("doctor")
    assert result.exit_code == 1
    assert "pip install anywidget" in result.stdout
    assert "apt-get install" in result.stdout


def test_calibrate_prints_the_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "calibrate", lambda device, dtype, refresh: ROUND)
    output = pdlab("calibrate").stdout
    for shown in ("a round machine, measured", "1.00 TFLOP/s", "100 GB/s", "10 FLOP/B", "2 µs"):
        assert shown in output
    assert "busy" not in output


def test_calibrate_refuses_an_unknown_dtype() -> None:
    result = pdlab("calibrate", "--dtype", "int3")
    assert result.exit_code == 2
    assert "dtype='int3'" in result.stderr


# --- words and numbers ---------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    result = pdlab("--help")
    for name in ("lab", "run", "models", "doctor", "calibrate"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (46_080, "46.1 kB"),
        (538_060_032, "538 MB"),
        (3.78e9, "3.78 GB"),
        (999_999_999, "1.00 GB"),
        (1.5e21, "1500 EB"),
    ],
)
def test_si_keeps_three_digits(value: float, shown: str) -> None:
    assert text.si(value, "B") == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 µs"),
        (85e-6, "85 µs"),
        (0.99996e-3, "1.00 ms"),
        (18.24e-3, "18.2 ms"),
        (0.9996, "1.00 s"),
        (61.4, "61.4 s"),
        (600, "600 s"),
    ],
)
def test_seconds_keep_three_digits(value: float, shown: str) -> None:
    assert text.seconds(value) == shown
