"""What weight formats cost: the numbers are those of their definitions, and of nothing else."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pdlab.bench import weights as bench
from pdlab.bench.weights import FormatCost, GreedyPath, WeightCosts, measure_weights
from pdlab.engine import NaiveGenerator
from pdlab.models import Model, load_outline
from pdlab.models.catalog import shape
from pdlab.models.decoder import Decoder
from pdlab.models.random_weights import random_weights
from pdlab.quantize import fill_decoder, pack_decoder, regroup
from pdlab.shipped import shipped

COST = FormatCost(
    weights="int4",
    regrouped=True,
    nbytes=96_000_000,
    perplexity=12.6,
    kl=0.01,
    agreement=0.97,
    greedy={"a": GreedyPath(32, None), "b": GreedyPath(4, 0.02)},
    errors={"qkv": 0.07},
    pack_s=1.5,
)
COSTS = WeightCosts(
    perplexity=12.0,
    nbytes=538_000_000,
    costs=[COST],
    model="m",
    text="t",
    num_tokens=1000,
    window=512,
    greedy_tokens=32,
    machine={"processor": "p"},
    versions={"torch": "2"},
)


@pytest.fixture(scope="module")
def model() -> Model:
    """A small one that can read, and whose weights come from 4-bit codes."""
    outline = load_outline(progress=False)
    config = replace(shape("tiny-qwen2"), vocab_size=outline.config.vocab_size)
    decoder = Decoder(config)
    decoder.load_weights(random_weights(config, torch.float32, torch.device("cpu")))
    fill_decoder(decoder, pack_decoder(decoder, "int4"))
    return replace(outline, config=config, decoder=decoder, device=torch.device("cpu"))


def test_a_format_is_compared_with_the_plain_weights(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two windows, the second one shorter; and against another way to have the numbers."""
    monkeypatch.setattr(bench, "load", lambda name, **options: model)
    found = measure_weights(
        formats=["int4"], regrouped=["int4"], num_tokens=150, window=100, greedy_tokens=3
    )
    lossless, lossy = found.costs
    assert found.num_tokens == 99 + 49
    assert (lossless.kl, lossless.agreement, found.increase(lossless)) == (0.0, 1.0, 0.0)
    assert lossless.equal_prompts == len(lossless.greedy) == 16
    assert set(lossless.errors.values()) == {0.0}
    assert lossy.errors["down"] > 0.03
    assert 0.0 < lossy.agreement < 1.0
    other = replace(model, decoder=deepcopy(model.decoder))
    regroup(other.decoder)
    fill_decoder(other.decoder, pack_decoder(other.decoder, "int4"))
    ids = bench.topic_tokens(model, 150)
    ours, theirs = (read(each, ids) for each in (model, other))
    targets = torch.tensor(ids[1:100] + ids[101:])[:, None]
    assert found.perplexity == pytest.approx(float((-ours.gather(1, targets)).mean().exp()))
    assert lossy.perplexity == pytest.approx(float((-theirs.gather(1, targets)).mean().exp()))
    assert lossy.kl == pytest.approx(float((ours.exp() * (ours - theirs)).sum(1).mean()), rel=1e-3)


def read(model: Model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token, in both windows."""
    windows = ids[:100], ids[100:]
    rows = [NaiveGenerator(model).logits(window[:-1]) for window in windows]
    return torch.cat(rows).log_softmax(-1)


def test_a_greedy_path_ends_where_the_tokens_differ() -> None:
    assert COST.equal_prompts == 1
    assert COST.equal_tokens == 18
    assert COSTS.increase(COST) == pytest.approx(0.05)


def test_what_was_measured_comes_back_from_its_file(tmp_path: Path) -> None:
    COSTS.save(tmp_path / "w.json")
    assert WeightCosts.load(tmp_path / "w.json") == COSTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 1}, "num_tokens=1"),
        ({"window": 1}, "window=1"),
        ({"greedy_tokens": 0}, "greedy_tokens=0"),
        ({"formats": ["int3"]}, "weights='int3'"),
        ({"name": "random:tiny-llama"}, "no tokenizer"),
    ],
)
def test_bad_parameters_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_weights(**{"formats": []} | arguments)


def test_the_command_prints_a_row_for_each_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    from pdlab.cli.bench_weights import weights

    asked = []
    monkeypatch.setattr(bench, "measure_weights", lambda *a, **k: asked.append((a, k)) or COSTS)
    app = typer.Typer()
    app.command()(weights)
    result = CliRunner().invoke(
        app, ["int4", "--tokens", "100", "--save", str(tmp_path / "w.json")]
    )
    assert result.exit_code == 0, result.output
    assert "int4, regrouped" in result.output
    assert "+5.00%" in result.output
    assert asked[0][0] == ("smollm2-135m", ["int4"])
    assert asked[0][1]["regrouped"] == ()
    assert WeightCosts.load(tmp_path / "w.json") == COSTS
    CliRunner().invoke(app, [])
    assert asked[1][0] == ("smollm2-135m", bench.FORMATS)


def test_the_recorded_formats_keep_their_limits() -> None:
    """int8 at most 0.5% and int4 at most 4% above the perplexity of the plain weights."""
    recorded = WeightCosts.load(shipped("data") / "measured" / "weight_formats.json")
    limits = {"int8": 0.005, "q8_0": 0.005, "int4": 0.04, "int4:gptq/int4": 0.04}
    increases = {c.weights: recorded.increase(c) for c in recorded.costs if not c.regrouped}
    assert all(increases[name] < limit for name, limit in limits.items()), increases
