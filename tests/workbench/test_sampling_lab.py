"""The SamplingLab's numbers are those of the logits, and its tokens those of the engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import traitlets

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.forced import forced_logits
from pdlab.sampling import LogitsProcessor
from pdlab.workbench import SamplingLab
from pdlab.workbench.logits_data import TextSoFar
from pdlab.workbench.picture import widget_page
from pdlab.workbench.sampling_lab import SETTABLE
from pdlab.workbench.sampling_lab_data import draw_many, follow, link_names

from ..helpers import TINY, random_model, random_prompt

PROMPT = "Once upon a time, in a small village by the sea, there lived"
PARAMS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "filters": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
    ),
    "biased": SamplingParams(temperature=0.9, logit_bias={260: 4.0, 253: -100.0}, top_k=12),
    "bad words": SamplingParams(temperature=1.0, top_p=0.8, bad_words=("old", "young")),
}


@pytest.fixture(scope="module")
def lab(speaker: Model) -> SamplingLab:
    return SamplingLab(speaker, PROMPT, SamplingParams(temperature=0.8, top_p=0.9), seed=3)


@pytest.fixture(scope="module")
def exact(speaker: Model) -> SamplingLab:
    return SamplingLab(speaker, PROMPT, exact=True)


@pytest.fixture
def tiny() -> SamplingLab:
    return SamplingLab(random_model(), random_prompt(9), SamplingParams(temperature=1.0), seed=5)


def start(lab: SamplingLab, params: SamplingParams | None = None, seed: int = 0) -> None:
    """At the prompt, with these parameters alone."""
    params = params or SamplingParams()
    lab.reset()
    lab.choose(seed=seed, **{name: getattr(params, name) for name in SETTABLE})
    assert not lab.message


def close(found: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=tolerance)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def drawer(params: SamplingParams, seed: int = 0, output: tuple[int, ...] = ()) -> TextSoFar:
    return TextSoFar(params, seed, random_prompt(9), list(output), frozenset({2}))


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMS)
def test_every_stage_sums_to_one_and_is_what_is_shown(lab: SamplingLab, name: str) -> None:
    start(lab, PARAMS[name], 1)
    applied = [stage.chances for stage in lab.outcome.stages if stage.chances is not None]
    for place, chances in enumerate(applied):
        assert float(chances.sum()) == pytest.approx(1, abs=1e-9)
        shown = sum(token["chances"][place] for token in lab.result["tokens"])
        assert shown + lab.result["others"]["chances"][place] == pytest.approx(1, abs=1e-6)
    for token in lab.result["tokens"]:
        exact = [float(chances[token["id"]]) for chances in applied]
        assert token["chances"] == pytest.approx(exact, abs=1e-8)


def test_the_models_own_distribution_is_the_softmax_of_its_logits(
    lab: SamplingLab, speaker: Model
) -> None:
    lab.reset()
    ids = speaker.tokenizer.encode(PROMPT)
    [logits] = forced_logits(speaker, ids, EngineConfig())
    own = softmax(logits[-1].double().numpy())
    close(lab.outcome.own, own, 1e-5)
    best = np.argsort(-own)[:25].tolist()
    assert {token["id"] for token in lab.result["tokens"]} >= set(best)
    bits = -(own * np.log2(own)).sum()
    assert lab.result["stages"][0]["entropy"] == pytest.approx(bits, abs=1e-3)


def test_stages_equal_the_formulas_computed_apart() -> None:
    """Temperature, top_k and top_p by numpy, from the logits alone."""
    logits = torch.randn(200) * 3
    params = SamplingParams(temperature=0.6, top_k=30, top_p=0.8)
    outcome = follow(logits, drawer(params))
    stages = {stage.name: stage for stage in outcome.stages}
    warm = softmax(logits.double().numpy() / 0.6)
    close(stages["temperature"].chances, warm, 1e-6)
    ranked = np.argsort(-warm)
    kept = np.where(np.isin(np.arange(200), ranked[:30]), warm, 0)
    assert stages["top_k"].num_left == 30
    assert stages["top_k"].removed == pytest.approx(1 - kept.sum(), abs=1e-6)
    kept /= kept.sum()
    num = int((np.cumsum(kept[ranked]) - kept[ranked] < 0.8).sum())
    final = np.where(np.isin(np.arange(200), ranked[:num]), kept, 0)
    close(outcome.final, final / final.sum(), 1e-6)
    assert {outcome.removed_by[i] for i in ranked[30:].tolist()} == {"top_k"}
    assert {outcome.removed_by[i] for i in ranked[num:30].tolist()} == {"top_p"}
    assert not set(outcome.removed_by) & set(ranked[:num].tolist())


def test_penalties_equal_the_formulas_computed_apart() -> None:
    logits = torch.randn(TINY.vocab_size) * 3
    output = (4, 9, 9, 17)
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={7: 1.5},
    )
    expected = logits.double().numpy().copy()
    expected[7] += 1.5
    for i in {*random_prompt(9), *output}:
        expected[i] = expected[i] / 1.5 if expected[i] > 0 else expected[i] * 1.5
    for i in output:
        expected[i] -= 0.5
    for i in set(output):
        expected[i] -= 0.25
    outcome = follow(logits, drawer(params, output=output))
    close(outcome.final, softmax(expected), 1e-6)
    assert all(stage.removed == 0 for stage in outcome.stages)


def test_the_stages_come_in_the_order_of_the_chain() -> None:
    class Mine(LogitsProcessor):
        name = "mine"

        def process(self, logits, drawers):
            logits[:, :30] = -torch.inf
            return logits

    params = SamplingParams(temperature=0.5, logits_processors=(Mine(),), min_tokens=3, top_p=0.9)
    outcome = follow(torch.randn(TINY.vocab_size), drawer(params))
    assert [stage.name for stage in outcome.stages] == ["model", *link_names(params)]
    names = link_names(params)
    assert names.index("presence_penalty") < names.index("mine") < names.index("bad_words")
    applied = [stage.name for stage in outcome.stages if stage.chances is not None]
    assert applied == ["model", "mine", "min_tokens", "temperature", "top_p"]
    assert {outcome.removed_by[i] for i in range(30)} == {"mine"}


def test_a_link_that_does_not_apply_says_why() -> None:
    params = SamplingParams(frequency_penalty=1.0, top_k=5)
    stages = {s.name: s for s in follow(torch.randn(50), drawer(params)).stages}
    assert stages["frequency_penalty"].why_not == "no output yet"
    assert stages["top_k"].why_not == "greedy: nothing is drawn"
    assert stages["logit_bias"].why_not == "off"


def test_greedy_leaves_one_token_and_throws_no_dart(lab: SamplingLab) -> None:
    start(lab)
    best = int(lab.outcome.own.argmax())
    assert (lab.outcome.draw.token_id, lab.outcome.draw.dart) == (best, None)
    assert (lab.result["stages"][-1]["left"], float(lab.outcome.final[best])) == (1, 1.0)
    assert lab.draw_many(50) == {best: 50}
    removed = next(s["removed"] for s in lab.result["stages"] if s["name"] == "temperature")
    assert removed == pytest.approx(1 - float(lab.outcome.own[best]), abs=1e-6)


# --- the draw ------------------------------------------------------------------------------------


def test_walking_on_writes_what_the_engine_writes(exact: SamplingLab, speaker: Model) -> None:
    """The same parameters and seed, exact mode: the same tokens as `Engine.generate`."""
    params = [replace(each, seed=11, max_tokens=4) for each in PARAMS.values()]
    with Engine(speaker, EngineConfig(exact=True)) as engine:
        outputs = engine.generate([PROMPT] * len(params), params)
    for each, output in zip(params, outputs, strict=True):
        start(exact, each, 11)
        for _ in range(4):
            exact.take()
        assert exact.output_ids == output.token_ids
        assert exact.text == PROMPT + output.text


def test_the_dart_lies_in_the_share_of_the_token_it_hit() -> None:
    logits = torch.randn(300)
    for seed in range(40):
        outcome = follow(logits, drawer(SamplingParams(temperature=1.5, top_k=50), seed))
        draw = outcome.draw
        assert draw.low <= draw.dart < draw.high
        assert draw.high - draw.low == pytest.approx(float(outcome.final[draw.token_id]), abs=1e-6)


def test_many_draws_are_those_of_the_engine_one_by_one() -> None:
    logits = torch.randn(60)
    params = SamplingParams(temperature=1.0, top_p=0.7)
    outcome = follow(logits, drawer(params))
    counts = draw_many(outcome, range(80), 0)
    singly: dict[int, int] = {}
    for seed in range(80):
        token_id = follow(logits, drawer(params, seed)).draw.token_id
        singly[token_id] = singly.get(token_id, 0) + 1
    assert counts == singly


def test_draws_follow_the_stated_distribution(lab: SamplingLab) -> None:
    start(lab, SamplingParams(temperature=1.0, top_p=0.9))
    counts = lab.draw_many(5000)
    final = lab.outcome.final
    often = [i for i in range(len(final)) if final[i] * 5000 >= 10]
    stated = {i: 5000 * float(final[i]) for i in often}
    distance = sum((counts.get(i, 0) - n) ** 2 / n for i, n in stated.items())
    assert distance < len(often) + 5 * math.sqrt(2 * len(often))  # chi-square, five sigmas
    assert sum(lab.counts["tokens"].values()) + lab.counts["others"] == 5000
    lab.draw_again()
    assert lab.counts == {}  # they belong to what was shown


def test_segments_are_the_cumulative_distribution_in_order_of_id(lab: SamplingLab) -> None:
    start(lab, SamplingParams(temperature=1.0, top_p=0.95))
    edges = np.cumsum(lab.outcome.final.numpy())
    segments = lab.result["segments"]
    assert [s[0] for s in segments] == sorted(s[0] for s in segments)
    for token_id, _, low, high in segments:
        assert high == pytest.approx(edges[token_id], abs=1e-5)
        assert high - low == pytest.approx(float(lab.outcome.final[token_id]), abs=1e-5)


# --- resampling ----------------------------------------------------------------------------------


def test_going_back_and_taking_another_token_equals_a_fresh_run(
    exact: SamplingLab, speaker: Model
) -> None:
    params = SamplingParams(temperature=0.9, frequency_penalty=0.5)
    start(exact, params, 2)
    for _ in range(3):
        exact.take()
    exact.rewind(exact.num_prompt + 1)
    taken = {exact.tokens[exact.position][0], exact.outcome.draw.token_id}
    other = next(t["id"] for t in exact.result["tokens"][::-1] if t["id"] not in taken)
    exact.take(other)
    assert exact._logits.num_computed_tokens == 1  # one decode step, the rest is cached
    fresh = SamplingLab(speaker, PROMPT, params, seed=2, exact=True)
    fresh.take(exact.output_ids[0])
    fresh.take(other)
    assert (exact.output_ids, exact.text) == (fresh.output_ids, fresh.text)
    assert torch.equal(exact.outcome.own, fresh.outcome.own)
    assert exact.result == fresh.result


def test_going_back_keeps_what_comes_later_until_a_token_is_taken(tiny: SamplingLab) -> None:
    for _ in range(3):
        tiny.take()
    ids = [token[0] for token in tiny.tokens]
    first = tiny.result
    tiny.rewind(10)
    assert ([token[0] for token in tiny.tokens], tiny.position) == (ids, 10)
    assert tiny.output_ids == ids[9:10]
    assert tiny.outcome.draw.token_id == ids[10]  # the same seed draws it again
    tiny.position = 12
    assert tiny.result == first
    tiny.rewind(10)
    tiny.take(3)
    assert [token[0] for token in tiny.tokens] == [*ids[:10], 3]


def test_going_back_into_the_prompt_makes_it_shorter(tiny: SamplingLab) -> None:
    prompt = random_prompt(9)
    tiny.rewind(4)
    assert (tiny.output_ids, tiny.num_prompt) == ([], 9)
    tiny.take(7)
    assert (tiny.output_ids, tiny.num_prompt) == ([7], 4)
    assert [token[0] for token in tiny.tokens] == [*prompt[:4], 7]
    tiny.reset()
    assert ([token[0] for token in tiny.tokens], tiny.position) == (prompt, 9)


# --- the controls --------------------------------------------------------------------------------


def test_every_parameter_is_a_trait(tiny: SamplingLab) -> None:
    values = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.6,
        "min_p": 0.1,
        "typical_p": 0.7,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.2,
        "logit_bias": {3: 2.0},
        "seed": 9,
    }
    for name, value in values.items():
        before = tiny.result
        setattr(tiny, name, value)
        assert getattr(tiny.params, name) == getattr(tiny, name) == value
        assert tiny.result != before or name in ("frequency_penalty", "presence_penalty"), name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("top_p", 1.5, "top_p=1.5"),
        ("temperature", -1, "temperature=-1"),
        ("top_k", -2, "top_k=-2"),
        ("logit_bias", {3: 1000}, r"logit_bias\[3\]=1000"),
        ("temperature", "warm", "temperature"),
        ("seed", -1, "seed=-1"),
        ("position", 0, "position=0"),
        ("position", 99, "position"),
    ],
)
def test_bad_input_is_refused_and_the_old_state_stays(
    tiny: SamplingLab, name: str, value: object, words: str
) -> None:
    before = (tiny.view_state(), tiny.params)
    with pytest.raises((ValueError, traitlets.TraitError), match=words):
        setattr(tiny, name, value)
    assert (tiny.view_state(), tiny.params) == before


def test_the_page_gets_a_message_and_an_answer(tiny: SamplingLab) -> None:
    def ask(number: int, **content: object) -> None:
        tiny._on_message(tiny, {"number": number, **content}, [])

    ask(1, type="set", values={"top_p": "much"})
    assert "top_p='much'" in tiny.message
    assert (tiny.answered, tiny.top_p) == (1, 1.0)
    ask(2, type="set", values={"top_p": 0.5, "temperature": 1.3})
    assert (tiny.answered, tiny.message, tiny.top_p, tiny.temperature) == (2, "", 0.5, 1.3)
    ask(3, type="set", values={"logit_bias": {"4": 100}})
    assert tiny.logit_bias == {4: 100}
    assert tiny.outcome.draw.token_id == 4
    ask(4, type="take", id=400)
    assert "token_id" in tiny.message
    ask(5, type="take")
    assert tiny.output_ids == [4]
    ask(6, type="rewind", position=3)
    ask(7, type="many")
    assert (tiny.position, tiny.counts["num"], tiny.message) == (3, 1000, "")


def test_nothing_left_is_said_and_nothing_changes(speaker: Model) -> None:
    class Nothing(LogitsProcessor):
        name = "nothing"
        active = False

        def process(self, logits, drawers):
            return torch.full_like(logits, -torch.inf) if self.active else logits

    mine = Nothing()
    params = SamplingParams(temperature=1.0, logits_processors=(mine,))
    lab = SamplingLab(random_model(), random_prompt(5), params)
    before = lab.result
    mine.active = True
    lab.draw_again()
    assert "no token is allowed" in lab.message
    assert (lab.result, lab.seed) == (before, 0)


def test_a_constraint_is_one_of_the_stages(speaker: Model) -> None:
    params = SamplingParams(temperature=1.0, regex="(yes|no)")
    lab = SamplingLab(speaker, "Is water wet? Answer:", params)
    stage = next(s for s in lab.result["stages"] if s["name"] == "constraint")
    assert stage["left"] == lab.result["stages"][-1]["left"] < 10
    with pytest.raises(ValueError, match="' sea' is forbidden here by constraint"):
        lab.take(speaker.tokenizer.encode(" sea")[0])
    assert lab.position == lab.num_prompt
    lab.take(speaker.tokenizer.encode("yes")[0])
    assert lab.result["draw"]["id"] in speaker.config.eos_token_ids
    with pytest.raises(ValueError, match="ends the text"):
        lab.take()


def test_a_prompt_must_fit(speaker: Model) -> None:
    with pytest.raises(ValueError, match="prompt has 0 tokens, SamplingLab takes 1 to 512"):
        SamplingLab(speaker, "")
    with pytest.raises(ValueError, match="takes 1 to 512"):
        SamplingLab(speaker, "word " * 600)


def test_a_full_text_takes_no_more(tiny: SamplingLab) -> None:
    for _ in range(TINY.max_model_len - 9):
        tiny.take()
    with pytest.raises(ValueError, match="128 tokens"):
        tiny.take()
    assert tiny.position == TINY.max_model_len


def test_only_a_few_tokens_are_sent(lab: SamplingLab) -> None:
    start(lab, SamplingParams(temperature=2.0))
    assert len(lab.result["tokens"]) <= 40
    assert len(widget_page(lab)) < 120_000


def test_saved_notebooks_show_a_card(lab: SamplingLab) -> None:
    data, _ = lab._repr_mimebundle_()
    assert "tokens are left" in data["text/plain"]
    assert "run this cell" in data["text/html"]
