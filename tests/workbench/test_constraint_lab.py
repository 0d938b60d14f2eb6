"""The ConstraintLab's masks are the matcher's, its numbers those of the run's own logits."""

import json
import re

import numpy as np
import pytest

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.forced import forced_logits
from pdlab.sampling import Compiler
from pdlab.sampling.automaton import DEAD, ByteAutomaton
from pdlab.sampling.regex import compile_choice, compile_regex
from pdlab.workbench import ConstraintLab, constraint_lab
from pdlab.workbench.automaton_data import MAX_COLUMNS, automaton_drawing, label, path_of
from pdlab.workbench.constraint_lab_data import (
    ConstrainedRun,
    frames,
    own_automaton,
    run_constrained,
)
from pdlab.workbench.picture import widget_page

from ..helpers import random_model

PROMPT = "The first people walked on the moon on"
DATE = r"(19|20)\d\d-(0\d|1[0-2])-[0-3]\d"
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
RUNS = {
    "regex, our own masker": (SamplingParams(regex=DATE), "pdlab"),
    "regex, llguidance": (SamplingParams(regex=DATE, temperature=0.8), "llguidance"),
    "choice": (SamplingParams(choice=("in 1969", "in 1970"), temperature=1.0), "pdlab"),
    "json": (SamplingParams(json_schema=PERSON, temperature=1.0, top_p=0.9), "llguidance"),
    "may end": (SamplingParams(regex="[a-z ]+", temperature=1.0, max_tokens=6), "pdlab"),
}


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, speaker: Model) -> ConstrainedRun:
    params, backend = RUNS[request.param]
    params = SamplingParams(
        **(vars(params) | {"seed": 4, "max_tokens": min(params.max_tokens, 11)})
    )
    ids = speaker.tokenizer.encode(PROMPT)
    return run_constrained(speaker, ids, params, backend=backend)


@pytest.fixture(scope="module")
def lab(speaker: Model) -> ConstraintLab:
    return ConstraintLab(speaker, PROMPT, SamplingParams(temperature=0.7), regex=DATE, seed=1)


# --- the numbers ---------------------------------------------------------------------------------


def test_the_run_is_the_engines_own(run: ConstrainedRun, speaker: Model) -> None:
    with Engine(speaker, EngineConfig(constraint_backend=run.backend)) as engine:
        [output] = engine.generate([PROMPT], run.params)
    assert [d.token_id for d in run.decisions] == output.token_ids == run.output.token_ids
    assert run.output.text == output.text
    if run.params.regex == DATE and output.finish_reason == "stop":
        assert re.fullmatch(DATE, output.text)


def test_allowed_tokens_are_the_matchers_mask(run: ConstrainedRun, speaker: Model) -> None:
    compiler = Compiler(speaker.tokenizer, speaker.config.vocab_size, run.backend)
    for index, decision in enumerate(run.decisions):
        matcher = compiler.constraint(run.params)
        matcher.sync(run.output.token_ids[:index])
        mask = matcher.allowed().copy()
        assert (decision.num_allowed, decision.may_end) == (mask.sum(), matcher.may_end)
        mask[list(speaker.config.eos_token_ids)] |= matcher.may_end
        assert (decision.possible.numpy() == mask).all()
        assert decision.is_forced == (mask.sum() == 1)


def test_before_and_after_are_the_softmax_of_the_models_logits(
    run: ConstrainedRun, speaker: Model
) -> None:
    prompt = speaker.tokenizer.encode(PROMPT)
    text = prompt + run.output.token_ids[:-1]
    [logits] = forced_logits(speaker, text, EngineConfig())
    for row, decision in zip(logits[len(prompt) - 1 :], run.decisions, strict=True):
        powers = np.exp(row.double().numpy() - float(row.max()))
        before = powers / powers.sum()
        left = np.where(decision.possible.numpy(), before, 0)
        np.testing.assert_allclose(decision.before, before, rtol=0, atol=1e-5)
        np.testing.assert_allclose(decision.after, left / left.sum(), rtol=1e-3, atol=1e-5)
        assert decision.removed == pytest.approx(1 - left.sum(), abs=1e-5)


def test_a_frame_adds_up_to_all_tokens(run: ConstrainedRun, speaker: Model) -> None:
    for decision, frame in zip(
        run.decisions, frames(run, speaker.tokenizer.token_text, lambda _: b""), strict=True
    ):
        tokens, others = frame["tokens"], frame["others"]
        for side in ("before", "after"):
            total = sum(t[side] for t in tokens) + others[side]
            assert total == pytest.approx(1, abs=1e-6)
        assert len(tokens) + others["num"] == speaker.config.vocab_size
        num = sum(t["allowed"] for t in tokens) + others["allowed"]
        assert num == int(decision.possible.sum())
        best = decision.before.topk(20).indices.tolist()
        assert {t["id"] for t in tokens} >= {*best, decision.token_id, decision.unconstrained_id}
        assert all(t["after"] == 0 for t in tokens if not t["allowed"])


def test_without_the_mask_the_same_dart_is_thrown(speaker: Model) -> None:
    """At the first step, what would have been taken is what an unconstrained request takes."""
    for seed in range(3):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=1)
        ids = speaker.tokenizer.encode(PROMPT)
        bound = SamplingParams(**(vars(params) | {"regex": DATE}))
        run = run_constrained(speaker, ids, bound, backend="pdlab")
        with Engine(speaker, EngineConfig()) as engine:
            [output] = engine.generate([ids], params)
        assert run.decisions[0].unconstrained_id == output.token_ids[0]


# --- the automaton -------------------------------------------------------------------------------


def test_the_states_follow_the_bytes_of_the_text(lab: ConstraintLab) -> None:
    automaton = compile_regex(DATE)
    lab.choose(regex=DATE, temperature=0.7, seed=1)
    assert lab.automaton["num_states"] == automaton.num_states
    text = b""
    for frame in lab.frames:
        assert frame["path"][0] == automaton.run(text)
        text += frame["taken"]["text"].encode()
        assert frame["path"][-1] == automaton.run(text)
    assert automaton.accepting[frame["path"][-1]]


def test_a_drawing_has_every_state_and_every_byte() -> None:
    for automaton in (
        compile_regex(DATE),
        compile_regex("(ab|ba)*c?"),
        compile_choice(["yes", "no", "maybe not"]),
    ):
        drawing = automaton_drawing(automaton)
        assert len(drawing["states"]) == automaton.num_states
        places = {(s["x"], s["y"]) for s in drawing["states"]}
        assert len(places) == automaton.num_states  # no two in one place
        assert max(x for x, _ in places) < drawing["columns"] <= MAX_COLUMNS
        edges = {(e["from"], e["to"]) for e in drawing["edges"]}
        states, values = np.nonzero(automaton.table != DEAD)
        assert edges == set(zip(states, automaton.table[states, values], strict=True))


def test_states_that_do_not_fit_side_by_side_go_on_below() -> None:
    drawing = automaton_drawing(compile_regex("abcdefg"))
    assert (len(drawing["states"]), drawing["columns"]) == (8, 4)
    crossing = [e for e in drawing["edges"] if e["lane"] is not None]
    assert [(e["from"], e["to"]) for e in crossing] == [(3, 4)]
    above, below = drawing["states"][3], drawing["states"][4]
    assert above["y"] < crossing[0]["lane"] < below["y"] + 0.5
    assert automaton_drawing(compile_regex("a{40}")) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (list(range(48, 58)), "0–9"),
        ([45], "‘-’"),
        ([32], "space"),
        ([97, 98], "ab"),
        ([*range(48, 58), 95, *range(97, 103)], "0–9 ‘_’ a–f"),
        (list(range(0x80, 0xC0)), "80–BF"),
        (list(range(256)), "any byte"),
        ([48, 65, 97, 120], "0 A …"),
    ],
)
def test_bytes_are_written_as_ranges(values: list[int], text: str) -> None:
    assert label(values) == text


def test_a_path_ends_where_the_bytes_do_not_fit() -> None:
    automaton: ByteAutomaton = compile_regex("abc")
    assert path_of(automaton, 0, b"abc") == [0, 1, 2, 3]
    assert path_of(automaton, 0, b"abx") == [0, 1, 2]


def test_what_our_masker_cannot_read_has_no_automaton() -> None:
    assert own_automaton(SamplingParams(json_schema=PERSON)) is None
    assert own_automaton(SamplingParams(regex=r"(a)\1")) is None
    assert own_automaton(SamplingParams(choice=("a", "b"))).num_states == 2


# --- the widget ----------------------------------------------------------------------------------


def test_the_best_masker_is_chosen_and_named(lab: ConstraintLab) -> None:
    lab.choose(regex=DATE)
    assert "pdlab" in lab.asked["masker"]
    lab.choose(backend="llguidance")
    assert (lab.asked["masker"], lab.asked["source"]) == ("llguidance", DATE)
    assert lab.automaton["drawing"] is not None  # ours still shows what is going on
    lab.choose(backend="auto", json_schema=PERSON)
    assert (lab.asked["masker"], lab.asked["kind"]) == ("llguidance", "json_schema")
    assert json.loads(lab.text).keys() == {"age"}
    assert lab.automaton["drawing"] is None
    assert "parser" in lab.automaton["why"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"regex": "(a"}, "'(' is not closed"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema"),
        ({"json_schema": "{"}, "is not JSON"),
        ({"choice": []}, "choice has 0 texts"),
        ({"grammar": "start: missing"}, "missing"),
        ({"backend": "other"}, "backend='other'"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"json_schema": PERSON, "backend": "pdlab"}, "constraint_backend"),
        ({"colour": 3}, "colour is not one of"),
    ],
)
def test_what_cannot_be_is_said_in_words(
    lab: ConstraintLab, values: dict[str, object], words: str
) -> None:
    lab.choose(regex=DATE, backend="auto")
    before = (lab.asked, lab.frames)
    lab.choose(**values)
    assert words in lab.message
    assert (lab.asked, lab.frames) == before
    lab.choose(regex=DATE)
    assert lab.message == ""


def test_the_page_gets_an_answer(lab: ConstraintLab) -> None:
    values = {
        "kind": "choice",
        "source": "one\ntwo\n",
        "backend": "auto",
        "temperature": 1,
        "seed": 8,
    }
    lab._on_message(lab, {"type": "run", "number": 3, "values": values}, [])
    assert (lab.answered, lab.message, lab.params.choice) == (3, "", ("one", "two"))
    assert lab.text in ("one", "two")
    lab._on_message(lab, {"type": "run", "number": 4, "values": values | {"kind": "x"}}, [])
    assert lab.answered == 4
    assert "kind='x'" in lab.message


def test_an_interrupt_leaves_the_old_run(
    lab: ConstraintLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.choose(regex=DATE)
    before = lab.frames

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(constraint_lab, "run_constrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lab.choose(regex="a")
    assert "Interrupted" in lab.message
    assert (lab.frames, lab.asked["source"]) == (before, DATE)


def test_steps_are_moved_through_from_python(lab: ConstraintLab) -> None:
    lab.choose(regex=DATE)
    lab.step = 2
    assert lab.frame == lab.frames[2]
    lab.step = 999
    assert lab.step == len(lab.frames) - 1
    assert "complete" in lab.ending


def test_a_run_that_is_cut_says_so(speaker: Model) -> None:
    lab = ConstraintLab(speaker, PROMPT, SamplingParams(max_tokens=3), regex="[a-z ]+!")
    assert len(lab.frames) == 3
    assert lab.ending == "cut after 3 tokens: not complete"


def test_a_lab_needs_a_constraint_and_a_tokenizer(speaker: Model) -> None:
    with pytest.raises(ValueError, match="needs a constraint"):
        ConstraintLab(speaker, PROMPT)
    with pytest.raises(ValueError, match="n=2"):
        ConstraintLab(speaker, PROMPT, SamplingParams(n=2), regex="a")
    with pytest.raises(ValueError, match="regex needs a tokenizer"):
        ConstraintLab(random_model(), [1, 2, 3], regex="a")
    with pytest.raises(ValueError, match="prompt has 0 tokens, ConstraintLab takes 1 to 512"):
        ConstraintLab(speaker, "", regex="a")


def test_saved_notebooks_show_a_card(lab: ConstraintLab) -> None:
    lab.choose(regex=DATE)
    data, _ = lab._repr_mimebundle_()
    assert "tokens are allowed" in data["text/plain"]
    assert "run this cell" in data["text/html"]
    assert len(widget_page(lab)) < 200_000
