"""Costs of KV formats and windows: measured as defined, kept, and drawn."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pdlab import EngineConfig, Model, NaiveGenerator
from pdlab.bench.topics import topic_tokens
from pdlab.kvcache import KVFormat
from pdlab.workbench import figures
from pdlab.workbench.figures.kv_costs import change_percent
from pdlab.workbench.kv_costs import (
    KVCost,
    first_difference,
    greedy_agreement,
    kv_costs,
)
from pdlab.workbench.kv_study import Study, format_configs, recorded_study

from ..helpers import plain_kv, random_model, random_prompt

LABELS = ("fp32", "bf16", "int8", "int4:token:8")


def configs(*labels: str) -> dict[str, EngineConfig]:
    return {label: EngineConfig(block_size=4, kv_format=label) for label in labels}


@pytest.fixture(scope="module")
def costs() -> list[KVCost]:
    text = random_prompt(70)
    return kv_costs(random_model(), configs(*LABELS), text, segment_len=32, chunk_size=8)


def test_the_reference_costs_nothing(costs: list[KVCost]) -> None:
    reference = costs[0]
    assert (reference.kl, reference.agreement) == (0, 1)
    assert not reference.k_error.any()
    assert not reference.v_error.any()
    assert reference.attended_error.max() < 1e-6
    assert reference.num_tokens == 31 + 31 + 5


def test_perplexity_is_that_of_each_segment_on_its_own(costs: list[KVCost]) -> None:
    text, nll = random_prompt(70), 0.0
    for start in (0, 32, 64):
        segment = text[start : start + 32]
        logits = NaiveGenerator(random_model()).logits(segment).double().log_softmax(-1)
        nll -= float(logits[:-1].gather(1, torch.tensor(segment[1:])[:, None]).sum())
    assert costs[0].perplexity == pytest.approx(math.exp(nll / 67), rel=1e-6)


def test_parts_of_the_text_add_up_to_its_perplexity(costs: list[KVCost]) -> None:
    for cost in costs:
        total = math.log(cost.perplexity) * cost.num_tokens
        assert np.dot(cost.segment_nll, [31, 31, 5]) == pytest.approx(total)
        by_position = [3 * 8, 8 + 8, 8 + 8, 7 + 7]
        by_position[0] = 8 + 8 + 5
        assert np.dot(cost.chunk_nll, by_position) == pytest.approx(total)


def test_fewer_bytes_cost_more(costs: list[KVCost]) -> None:
    sizes = [cost.bytes_per_token for cost in costs]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] == sizes[0] / 2
    assert 0 < costs[1].kl < costs[3].kl
    assert (costs[2].k_error < costs[3].k_error).all()


def test_a_cost_names_the_bytes_of_a_block_that_fills(costs: list[KVCost]) -> None:
    assert [cost.open_bytes for cost in costs] == [0] * len(costs)
    model = random_model()
    both = configs("fp32", "int8:channel", "int8:channel/int8")
    _, all_of_it, k_only = kv_costs(model, both, random_prompt(20))
    assert all_of_it.open_bytes == 4 * model.config.kv_bytes_per_token(4)  # four tokens in fp32
    assert k_only.open_bytes == all_of_it.open_bytes / 2
    hover = [row[4] for row in figures.kv_costs([costs[0], k_only]).data[0].customdata]
    assert hover[0] == ""
    assert "still fills" in hover[1]


def test_heatmaps_can_have_one_scale(costs: list[KVCost]) -> None:
    [own] = figures.error_heatmap(costs[2], "k").data
    assert own.zmax == pytest.approx(100 * costs[2].k_error.max())
    [shared] = figures.error_heatmap(costs[2], "k", zmax=0.5).data
    assert shared.zmax == 50


def test_errors_of_k_and_v_are_those_of_the_format() -> None:
    model, text = random_model(), random_prompt(32)
    labels = ["fp32", "int8/int4:token:4"]
    cost = kv_costs(model, configs(*labels), text, chunk_size=8)[1]
    kv = plain_kv(model, text)[:, 0]  # of layer 0, which no cache has touched yet
    for x, text_format, error in zip(
        kv, labels[1].split("/"), (cost.k_error, cost.v_error), strict=True
    ):
        kv_format = KVFormat.parse(text_format, 8)
        there_and_back = kv_format.decode(kv_format.encode(x), torch.float32)
        right = (there_and_back - x).norm(dim=(0, 2)) / x.norm(dim=(0, 2))
        assert error[0] == pytest.approx(right.numpy(), rel=1e-3)


def test_a_window_is_measured_against_full_attention() -> None:
    windowed = {
        "full": EngineConfig(block_size=4),
        "window": EngineConfig(block_size=4, window=8),
    }
    full, window = kv_costs(
        random_model(), windowed, random_prompt(64), chunk_size=8, reference="full"
    )
    assert window.peak_blocks < full.peak_blocks == 16
    assert not window.k_error.any()
    assert (window.attended_error > 0.01).all()


def test_configurations_that_do_not_fit_are_refused() -> None:
    model, text = random_model(), random_prompt(20)
    with pytest.raises(ValueError, match="reference='fp32' is not one of 'int8'"):
        kv_costs(model, configs("int8"), text)
    with pytest.raises(ValueError, match="GROUP=5"):
        kv_costs(model, configs("fp32", "int8:token:5"), text)
    with pytest.raises(ValueError, match="at least 2"):
        kv_costs(model, configs("fp32"), text[:1])
    with pytest.raises(ValueError, match="has no tokenizer"):
        topic_tokens(model, 10)


def test_what_is_known_is_told_after_each_segment() -> None:
    told: list[list[KVCost]] = []
    text = random_prompt(60)
    kv_costs(
        random_model(), configs("fp32", "int8"), text, segment_len=20, after_segment=told.append
    )
    assert [[c.num_tokens for c in known] for known in told] == [[19, 19], [38, 38], [57, 57]]


def test_greedy_texts_part_where_the_first_token_differs() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    found = greedy_agreement(
        random_model(), configs("fp32", "int4:token:4"), [random_prompt(9), random_prompt(5)], 8
    )
    assert found["fp32"].first_difference == [None, None]
    for index, ours, right in zip(
        found["int4:token:4"].first_difference,
        found["int4:token:4"].token_ids,
        found["fp32"].token_ids,
        strict=True,
    ):
        assert ours[:index] == right[:index]


def test_the_text_is_the_same_every_time(smollm2: Model) -> None:
    text = topic_tokens(smollm2, 3000)
    assert len(text) == 3000
    assert topic_tokens(smollm2, 100) == text[:100]
    with pytest.raises(ValueError, match="num_tokens=1000000000 is more than"):
        topic_tokens(smollm2, 10**9)


def test_per_channel_scales_help_k_of_the_default_model(smollm2: Model) -> None:
    text = topic_tokens(smollm2, 96)
    labels = ("fp32", "int8", "int4:token", "int4:channel/int4:token")
    _, int8, token, channel = kv_costs(smollm2, format_configs(labels), text)
    assert channel.k_error.mean() < 0.6 * token.k_error.mean()
    assert int8.agreement > 0.95
    assert int8.kl < 0.1 * channel.kl


# --- what is kept ---------------------------------------------------------------------------------


def test_a_study_reads_back_as_it_was_saved(costs: list[KVCost], tmp_path: Path) -> None:
    machine = {"processor": "a machine", "date": "2026-01-01T00:00:00"}
    study = Study(costs, "a text", 32, 8, "fp32", "random", machine, "python -m ...")
    study.save(tmp_path / "study.json")
    back = Study.load(tmp_path / "study.json")
    assert back.source == "recorded: random, 67 tokens of a text, on a machine, 2026-01-01"
    for ours, theirs in zip(costs, back.costs, strict=True):
        assert (ours.label, ours.config) == (theirs.label, theirs.config)
        assert ours.perplexity == theirs.perplexity
        assert ours.segment_nll == theirs.segment_nll
        assert theirs.k_error == pytest.approx(ours.k_error, rel=1e-3)


def test_recorded_formats_keep_their_promises() -> None:
    """The promise: int8 within 1% of fp32's perplexity, int4 with per-channel K within 5%."""
    study = recorded_study("kv_formats")
    costs = {cost.label: cost for cost in study.costs}
    reference = costs["fp32"]
    assert reference.num_tokens >= 20_000
    for label in ("int8", "int8:head", "int8:channel", "bf16", "fp16"):
        assert abs(change_percent(costs[label], reference)) < 1
    for label in ("int4:channel/int4:token:32", "int4:channel/int4:token"):
        assert change_percent(costs[label], reference) < 5
    for cost in study.costs:
        assert cost.k_error.shape == (30, 3)
        assert cost.attended_error.shape == (30, 9)


def test_recorded_windows_show_what_sinks_are_for() -> None:
    costs = {cost.label: cost for cost in recorded_study("windows").costs}
    assert costs["full"].peak_blocks == 4096 // 16
    for size in (64, 128, 256, 512, 1024):
        alone, kept = costs[f"window {size}"], costs[f"window {size} + 4 sinks"]
        assert costs["full"].perplexity < kept.perplexity < alone.perplexity
        assert alone.peak_blocks <= (size + 256) // 16 + 1


def test_unknown_studies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name='formats' is not one of .*kv_formats"):
        recorded_study("formats")


# --- how it is drawn ------------------------------------------------------------------------------


def test_every_format_is_a_labelled_point(costs: list[KVCost]) -> None:
    figure = figures.kv_costs(costs)
    [points] = figure.data
    assert [a.text for a in figure.layout.annotations] == list(LABELS)
    assert list(points.x) == [cost.bytes_per_token / 1e3 for cost in costs]
    assert list(points.y) == [change_percent(cost, costs[0]) for cost in costs]
    assert "measured on 67 tokens" in figure.layout.title.subtitle.text
    with pytest.raises(ValueError, match="reference='full'"):
        figures.kv_costs(costs, reference="full")


@pytest.mark.parametrize("which", ["k", "v", "attended"])
def test_the_worst_head_is_named(costs: list[KVCost], which: str) -> None:
    figure = figures.error_heatmap(costs[3], which)  # type: ignore[arg-type]
    errors = getattr(costs[3], f"{which}_error")
    layer, head = np.unravel_index(errors.argmax(), errors.shape)
    assert np.array(figure.data[0].z) == pytest.approx(errors.T * 100)
    assert f"worst in layer {layer}, head {head}" in figure.layout.title.text.replace("<br>", " ")


def test_a_heatmap_without_errors_names_no_worst(costs: list[KVCost]) -> None:
    assert "worst" not in figures.error_heatmap(costs[0]).layout.title.text
    with pytest.raises(ValueError, match="which='q'"):
        figures.error_heatmap(costs[0], "q")  # type: ignore[arg-type]


def test_recorded_studies_are_drawn_with_their_source() -> None:
    windows, formats = recorded_study("windows"), recorded_study("kv_formats")
    for figure, study in (
        (figures.window_costs(windows.costs, source=windows.source), windows),
        (figures.kv_costs(formats.costs, source=formats.source), formats),
    ):
        assert figure.layout.title.subtitle.text.replace("<br>", " ") == study.source


@pytest.mark.parametrize(("length", "chunk_size"), [(33, 32), (17, 16), (5, 1), (2, 1)])
def test_a_last_chunk_that_predicts_nothing_is_left_out(length, chunk_size):
    """The last token of a text foretells nothing that is in the text."""
    model = random_model()
    [cost] = kv_costs(
        model,
        {"fp32": EngineConfig()},
        random_prompt(length),
        segment_len=length,
        chunk_size=chunk_size,
    )
    assert cost.num_tokens == length - 1
    assert len(cost.chunk_nll) == -(-(length - 1) // chunk_size)


def test_a_prompt_that_one_configuration_refuses_is_an_error_and_no_bad_format():
    configs = {"fp32": EngineConfig(), "small": EngineConfig(num_blocks=1)}
    with pytest.raises(ValueError, match="num_blocks is 1"):
        greedy_agreement(random_model(), configs, [random_prompt(20)], 4)
