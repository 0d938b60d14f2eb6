"""The FormatLab computes what is chosen, keeps it, and says in words what cannot be chosen."""

import numpy as np
import pytest
import traitlets

import pdlab
from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.kvcache import KVFormat, parse_kv_format
from pdlab.workbench import FormatLab, format_lab
from pdlab.workbench.format_lab import in_words
from pdlab.workbench.format_trial import Outlier, explain, largest_outlier, run_trial
from pdlab.workbench.picture import widget_page

from ..helpers import TINY, random_model, random_prompt

PROMPT = "Prefill writes keys and values into the cache; decode reads them again and again."


@pytest.fixture(scope="module")
def lab(smollm2: Model) -> FormatLab:
    return FormatLab(smollm2, PROMPT, "int4:token", max_tokens=6)


def test_the_text_is_what_the_engine_generates(lab: FormatLab, smollm2: Model) -> None:
    lab.kv_format = "int4:token"
    for text, kv_format in zip(lab.result["texts"], ("fp32", "int4:token"), strict=True):
        with Engine(smollm2, EngineConfig(kv_format=kv_format)) as engine:
            output = engine.generate(PROMPT, SamplingParams(max_tokens=6))[0]
        assert "".join(text) == output.text


def test_the_outlier_channel_of_k_is_found_and_named(lab: FormatLab, smollm2: Model) -> None:
    shape = (2, 30, 3, 64)
    sizes = np.frombuffer(lab.sizes, "<f4").reshape(shape)
    outlier = largest_outlier(sizes)
    assert outlier.ratio > 8
    assert (lab.layer, lab.head) == (outlier.layer, outlier.head)
    assert sizes[0, lab.layer, lab.head].argmax() == outlier.channel
    lab.choose("int4:channel/int4:token")
    assert f"channel {outlier.channel} of layer {lab.layer}" in lab.result["sentences"][0][1]
    assert "no longer coarsens" in lab.result["sentences"][0][1]


def test_scales_per_channel_take_the_error_off_the_neighbours(lab: FormatLab) -> None:
    def errors(kv_format: str) -> np.ndarray:
        lab.choose(kv_format)
        of_k = np.frombuffer(lab.channel_errors, "<f4").reshape(2, 30, 3, 64)[0]
        return of_k[lab.layer, lab.head]

    by_token, by_channel = errors("int4:token"), errors("int4:channel/int4:token")
    assert by_token.max() > 4 * by_channel.max()
    assert np.median(by_token) > 2 * np.median(by_channel)


def test_an_answer_is_kept(lab: FormatLab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.choose("int8")
    first = lab.trial
    lab.choose("int4:token")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(format_lab, "run_trial", fail)
    for same in ("int8", "int8:token", "int8/int8:token"):
        lab.choose(same)
        assert (lab.kv_format, lab.trial) == ("int8:token", first)


def test_what_cannot_be_chosen_is_said_in_words(lab: FormatLab) -> None:
    lab.choose("int8")
    lab._on_message(lab, {"type": "choose", "kv_format": "int4:token:7"}, [])
    assert lab.message == "A head has 64 channels: they cannot be cut into groups of 7."
    assert (lab.kv_format, lab.busy) == ("int8:token", False)
    lab._on_message(lab, {"type": "choose", "kv_format": "int4"}, [])
    assert (lab.message, lab.kv_format) == ("", "int4:token:32")
    with pytest.raises((ValueError, traitlets.TraitError), match="int3"):
        lab.kv_format = "int3"
    for name in ("layer", "head"):
        with pytest.raises((ValueError, traitlets.TraitError), match=f"{name}=99"):
            setattr(lab, name, 99)


@pytest.mark.parametrize(
    ("kv_format", "words"),
    [
        ("int3", "There is no format 'int3'"),
        ("bf16:token:32", "write bf16 alone"),
        ("int8/int8/int8", "names 3 formats"),
        ("fp8:block", "not per 'block'"),
        ("int8/int8:channel:4", "stands only after :token"),
        ("int8:token:3", "cannot be cut into groups of 3"),
        ("int4:token:1", "an even number, not 1"),
    ],
)
def test_what_is_wrong_with_a_format_is_said_in_words(kv_format: str, words: str) -> None:
    assert words in in_words(kv_format, 8)
    with pytest.raises(ValueError, match="kv_format"):
        parse_kv_format(kv_format, 8)


@pytest.mark.parametrize(
    "kv_format", ["fp32", "int4", "int8:token:4/bf16", "fp8:channel/int4:head"]
)
def test_no_fault_is_found_with_what_fits(kv_format: str) -> None:
    parse_kv_format(kv_format, 8)
    assert in_words(kv_format, 8) == ""


def test_bytes_of_open_blocks_are_shown(lab: FormatLab) -> None:
    block = 16 * 30 * 3 * 64 * 4  # tokens, layers, heads, channels, bytes of fp32; K alone
    for kv_format, num_bytes in (
        ("int4:channel/int4", block),
        ("int8:channel", 2 * block),
        ("int8", 0),
    ):
        lab.choose(kv_format)
        assert lab.result["open_bytes"] == num_bytes
    with Engine(lab._model, EngineConfig(kv_format="int8:channel")) as engine:
        assert engine.kv_cache.open_bytes == lab.result["max_open"] * 2 * block


def test_an_interrupt_leaves_what_was_shown(
    lab: FormatLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.choose("int8")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(format_lab, "run_trial", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lab.choose("fp8/int8")
    assert lab.message == "Interrupted: fp8/int8 was not computed."
    assert (lab.kv_format, lab.busy) == ("int8:token", False)
    assert lab.trial.kv_format == lab.result["kv_format"] == "int8:token"


def test_full_precision_changes_nothing(lab: FormatLab) -> None:
    lab.choose("fp32")
    assert lab.result["first_difference"] is None
    assert not np.frombuffer(lab.channel_errors, "<f4").any()
    assert lab.result["perplexity"][0] == lab.result["perplexity"][1]


def test_the_lab_needs_a_prompt_of_some_length(smollm2: Model) -> None:
    for prompt, count in (("A", 1), ("word " * 600, 60)):
        with pytest.raises(ValueError, match=f"prompt has {count}.*FormatLab takes 2 to 512"):
            FormatLab(smollm2, prompt)


def test_saved_notebooks_show_a_card(lab: FormatLab) -> None:
    lab.choose("int8")
    data, _ = lab._repr_mimebundle_()
    assert "11,880 bytes a token (26% of fp32)" in data["text/plain"]
    assert "run this cell" in data["text/html"]
    assert "int8:token" in widget_page(lab)


def test_a_trial_of_a_block_wise_format_counts_what_is_still_open() -> None:
    trial = run_trial(random_model(), random_prompt(21), "int8:channel/int8", max_tokens=3)
    assert trial.num_open == 5
    assert trial.sizes.shape == (2, TINY.num_layers, TINY.num_kv_heads, TINY.head_dim)
    assert run_trial(random_model(), random_prompt(21), "int8", max_tokens=3).num_open == 0


def test_errors_by_channel_are_of_what_a_window_has_kept() -> None:
    model = pdlab.load("random:tiny-mistral")
    trial = run_trial(model, random_prompt(60), "int4", max_tokens=2)
    assert model.config.windows[0] is not None
    assert np.isfinite(trial.channel_errors).all()
    assert (trial.channel_errors > 0).all()


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_floats_are_explained(name: str) -> None:
    fmt = KVFormat.parse(name)
    [(what, k), (_, v)] = explain(fmt, fmt, Outlier(0, 0, 0, 9.0), 0)
    assert (what, k) == ("K", v)
    assert name in k


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("scales", ["token", "token:4", "head", "channel"])
def test_every_format_is_explained(name: str, scales: str) -> None:
    fmt = KVFormat.parse(f"{name}:{scales}", 8)
    lines = explain(fmt, fmt, Outlier(3, 1, 7, 12.0), 5)
    assert [what for what, _ in lines] == ["K", "V", ""]
    assert "channel 7 of layer 3, head 1" in lines[0][1]
    assert "12 times" in lines[0][1]
