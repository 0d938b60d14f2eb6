"""`pdlab chat` down a pipe: one line a turn, and what each turn took below its answer."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdlab import Engine, Model, Trace
from pdlab.cli import app
from pdlab.engine.conversation import Conversation

from .engine.test_text import speaking

chat = importlib.import_module("pdlab.cli.chat")  # the package has the command by this name


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, smollm2: Model) -> list[Engine]:
    """The engines that were made: the real tokenizer, a runner that takes no time."""
    made: list[Engine] = []

    def make(model: Model, config) -> Engine:
        made.append(speaking(model, record_trace=config.record_trace))
        return made[-1]

    monkeypatch.setattr(chat, "load", lambda name, weights, device: smollm2)
    monkeypatch.setattr(chat, "Engine", make)
    return made


def talk(*lines: str, options: tuple[str, ...] = ("--max-tokens", "6")) -> Result:
    return CliRunner().invoke(app, ["chat", *options], input="".join(f"{x}\n" for x in lines))


def test_each_line_is_a_turn_and_the_prefix_cache_is_counted(engines: list[Engine]) -> None:
    result = talk("Hello!", "", "   ", "And?")
    assert result.exit_code == 0, result.output
    took = re.findall(
        r"^(\d+) tokens · .* tok/s · TTFT .* · (\d+) of (\d+) prompt tokens from the prefix "
        r"cache · (\d+) KV blocks, \d.* kB$",
        result.stdout,
        re.M,
    )
    assert [int(tokens) for tokens, *_ in took] == [6, 6]
    (_, none, first, _), (_, cached, _, blocks) = took
    assert int(none) == 0
    assert int(cached) == (int(first) + 5) // 16 * 16 > 0
    assert int(blocks) > int(cached) // 16
    assert "> " not in result.stdout
    assert "\x1b" not in result.stdout
    assert not engines[0].trace.steps


def test_the_text_is_the_conversations(engines: list[Engine], smollm2: Model) -> None:
    stdout = talk("Hello!").stdout
    with speaking(smollm2) as engine:
        params = chat.SamplingParams(max_tokens=6)
        said = "".join(chunk.text for chunk in Conversation(engine, params).say("Hello!"))
    assert said.translate(chat.CONTROL_CHARACTERS) + "\n" in stdout


def test_options_reach_the_engine(engines: list[Engine], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    options = ["--temperature", "0.5", "--top-p", "0.8", "--seed", "3", "--save", str(path)]
    result = talk("Hi", options=("--max-tokens", "2", "--system", "Be brief.", *options))
    assert result.exit_code == 0, result.output
    [request] = Trace.load(path).requests.values()
    shown = {name: request.params[name] for name in ("temperature", "top_p", "seed", "max_tokens")}
    assert shown == {"temperature": 0.5, "top_p": 0.8, "seed": 3, "max_tokens": 2}
    assert request.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_commands_answer(engines: list[Engine]) -> None:
    lines = ["/help", "Hello!", "/undo", "/undo", "/retry", "Hi", "/retry", "/stats", "/nonsense"]
    stdout = talk(*lines, "/system Speak French.", "/reset", "/stats", "/quit", "never").stdout
    for said in (
        "/system TEXT  what the model is told",
        "taken back: 'Hello!'",
        "the conversation is empty",
        "context: ",
        "prefix cache: ",
        "/nonsense is no command",
        "the model is told: Speak French.",
        "a new conversation",
        "context: 0 of",
    ):
        assert said in stdout, said
    assert stdout.count("from the prefix cache") == 3  # Hello!, Hi, Hi again
    rows = re.findall(r"^ +(\d) +(\d+) +(\d+) +(\d+) +6 ", stdout, re.M)
    assert len(rows) == 1
    number, prompt, cached, computed = map(int, rows[0])
    assert (number, prompt) == (1, cached + computed)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Engine.step, []

    def interrupted(engine: Engine) -> object:
        calls.append(engine)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = talk("Hello!", "And?")
    assert result.exit_code == 0
    assert "3 tokens (stopped)" in result.stdout
    assert "\n6 tokens · " in result.stdout
    assert "Traceback" not in result.output
    assert engines[0].memory is None


def test_forgetting_is_said(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, smollm2: Model
) -> None:
    small = speaking(smollm2, max_model_len=100)
    monkeypatch.setattr(chat, "Engine", lambda *_: small)
    result = talk(*["Tell me more, please."] * 4, "no " * 100)
    assert re.search(r"^forgotten: the oldest \d exchanges?; 100 tokens fit$", result.stdout, re.M)
    assert "more than the 100 that fit" in result.stdout
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temperature", "-1"], "temperature=-1"),
        (["--top-p", "2"], "top_p=2"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--save", "/nowhere/chat.json"], "save='/nowhere/chat.json'"),
    ],
)
def test_a_bad_option_is_named_in_one_line(
    engines: list[Engine], options: list[str], named: str
) -> None:
    result = talk("Hi", options=tuple(options))
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_cannot_chat_is_named() -> None:
    result = talk("Hi", options=("--model", "random:tiny-llama"))
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr


def test_chat_works_as_a_command_without_a_terminal(smollm2: Model) -> None:
    command = [sys.executable, "-c", "from pdlab.cli import app; app()"]
    command += ["chat", "--max-tokens", "8", "--temperature", "0"]
    lines = "What is the capital of France?\n"
    result = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=300, check=True
    )
    assert "Paris" in result.stdout
    assert "\x1b" not in result.stdout
