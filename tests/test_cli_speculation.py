"""`--speculate` on the command line."""

import re

import pytest
from typer.testing import CliRunner

from pdlab import DraftModel, EarlyExit, PromptLookup, SelfDraft
from pdlab.cli import app
from pdlab.cli.speculation import parse_speculation

FORMS = {
    "prompt_lookup": PromptLookup(),
    "prompt_lookup:7": PromptLookup(num_tokens=7),
    "prompt_lookup:auto": PromptLookup(num_tokens="auto"),
    "self:int4": SelfDraft("int4"),
    "self:int8:3": SelfDraft("int8", num_tokens=3),
    "self:int4:gptq:auto": SelfDraft("int4:gptq", num_tokens="auto"),
    "early_exit:10": EarlyExit(10),
    "early_exit:10:3": EarlyExit(10, num_tokens=3),
    "early_exit:10:auto": EarlyExit(10, num_tokens="auto"),
    "model:random:llama-1b:4": DraftModel("random:llama-1b", num_tokens=4),
    "model:org/name": DraftModel("org/name"),
}
WRONG = {
    "": "must be one of prompt_lookup",
    "medusa:4": "must be one of prompt_lookup",
    "prompt_lookup:many": r"must be prompt_lookup\[:TOKENS\]",
    "prompt_lookup:100": "num_tokens=100 must be an integer from 0 to 64",
    "self": "must be self:WEIGHTS",
    "self:4": "must be self:WEIGHTS",
    "self:int3:4": "weights='int3'",
    "early_exit": "must be early_exit:LAYERS",
    "early_exit:auto": "must be early_exit:LAYERS",
    "early_exit:ten:3": "must be early_exit:LAYERS",
    "early_exit:0:3": "num_layers=0",
    "model::4": "must be model:NAME",
}


@pytest.mark.parametrize(("text", "expected"), FORMS.items(), ids=FORMS)
def test_each_form_is_read(text, expected) -> None:
    assert parse_speculation(text) == expected


def test_nothing_asks_for_nothing() -> None:
    assert parse_speculation(None) is None


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=WRONG)
def test_what_is_none_of_them_is_refused(text, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_speculation(text)
    assert f"speculate={text!r}" in str(caught.value)


@pytest.mark.parametrize("command", [["run", "Hello"], ["chat"], ["replay", "chat"]])
def test_a_mistake_costs_no_loading(command) -> None:
    result = CliRunner().invoke(app, [*command, "--speculate", "medusa"])
    assert result.exit_code == 2
    assert "speculate='medusa' must be one of" in result.output


def test_what_is_not_simulated_is_refused() -> None:
    asked = ["replay", "chat", "--simulate", "--speculate", "prompt_lookup"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "--speculate and --simulate" in result.output


def test_a_walk_counts_its_tokens_and_tells_of_its_drafts() -> None:
    prompt = "one two three one two three one two"
    asked = ["run", prompt, "--raw", "--max-tokens", "16", "--speculate", "prompt_lookup:5"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "tokens were accepted" in result.output
    [decode] = [line.split() for line in result.output.splitlines() if line.startswith("decode ")]
    finished = re.search(r"finished: \w+, (\d+) tokens", result.output)
    assert finished
    assert int(decode[1]) == int(finished[1]) - 1  # the first came with the prompt
