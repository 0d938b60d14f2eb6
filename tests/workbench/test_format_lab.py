"""The FormatLab computes what is chosen, keeps it, and says in words what cannot be chosen."""

import numpy as np
import pytest
import traitlets

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.kvcache import KVFormat
from pdlab.workbench import FormatLab, format_lab
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
    assert "GROUP" in lab.message
    assert (lab.kv_format, lab.busy) == ("int8:token", False)
    lab._on_message(lab, {"type": "choose", "kv_format": "int4"}, [])
    assert (lab.message, lab.kv_format) == ("", "int4:token:32")
    with pytest.raises((ValueError, traitlets.TraitError), match="int3"):
        lab.kv_format = "int3"
    for name in ("layer", "head"):
        with pytest.raises((ValueError, traitlets.TraitError), match=f"{name}=99"):
            setattr(lab, name, 99)


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
