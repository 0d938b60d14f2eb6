"""SpeculationView tells what the records say of drafts, and predicts what the formula says."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import traitlets

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.models.catalog import SHAPES
from pdlab.speculate import expected_tokens, speedup
from pdlab.trace.records import DraftRecord, SequenceRecord
from pdlab.workbench import SpeculationView
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workbench.speculation_data import drafting, drafting_frames
from tests.engine.guessing import Guess
from tests.helpers import random_model

from .handmade import Recorder

has_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")

Step = tuple[list[int], int, int, float]


def run(steps: list[Step], *, temperature: float = 1.0, q: float | None = 0.5) -> Trace:
    """A request of 4 prompt tokens, then steps: (drafted, how many stand, drawn, seconds).

    Drafting a token takes 0.01 s of them.
    """
    recorder = Recorder(num_blocks=64)
    recorder.submit("r0", 4)
    trace = recorder.trace
    trace.engine["speculation"] = "Handmade()"
    request = trace.requests["r0"]
    trace.requests["r0"] = replace(request, params={"temperature": temperature, "max_tokens": 99})
    first = recorder.step({"r0": 4})
    known = [*request.prompt_ids, first.sequences[0].sampled]
    for drafted, num_accepted, drawn, wall_s in steps:
        draft = DraftRecord(
            token_ids=drafted,
            num_accepted=num_accepted,
            proposed=None if q is None else [q] * len(drafted),
            probabilities=[0.4] * min(num_accepted + 1, len(drafted)),
        )
        record = SequenceRecord(
            sequence_id="r0",
            phase="decode",
            start=len(known) - 1,
            token_ids=[known[-1], *drafted[:num_accepted]],
            blocks_taken=[],
            sampled=drawn,
            probability=0.3,
            draft=draft if drafted else None,
        )
        known += record.put_out
        trace.steps.append(
            replace(
                first,
                step=len(trace.steps),
                wall_s=wall_s,
                stage_s={"draft": 0.01 * len(drafted)},
                sequences=[record],
            )
        )
    return trace


def drafts() -> Trace:
    """Three drafts of three tokens, of which 3, 1 and 0 stand, and three steps without one."""
    told = [([1, 2, 3], 3, 4, 0.2), ([5, 6, 7], 1, 8, 0.19), ([9, 9, 9], 0, 1, 0.21)]
    return run([*told, *[([], 0, 2, 0.1)] * 3])


def plain() -> Trace:
    return run([([], 0, 2, 0.1)] * 10)


# --- a run as a whole -----------------------------------------------------------------------------


def test_tokens_behind_a_rejected_one_were_not_looked_at() -> None:
    told = drafting(drafts())
    assert told.positions == [(3, 2), (2, 1), (1, 1)]
    assert (told.num_drafted, told.num_accepted, told.num_cut) == (9, 4, 2)
    assert told.acceptance == pytest.approx(4 / 6)
    assert told.by_tokens == [0, 4, 1, 0, 1]
    assert told.tokens_a_step == pytest.approx(10 / 6)
    assert (told.share, told.mean_length) == (0.5, 3)


def test_costs_are_in_plain_steps() -> None:
    told = drafting(drafts())
    assert told.plain_s == 0.1
    assert told.cost_ratio == pytest.approx(0.1)
    assert told.check_slope == pytest.approx((0.17 / 0.1 - 1) / 3)
    assert told.speedup == pytest.approx(10 / 0.9 / 10)
    assert told.against == "the 3 steps of this run without a draft"


def test_a_step_that_was_held_up_does_not_count() -> None:
    steps = [([1, 2], 2, 3, 0.15)] * 4
    told = drafting(run([*steps, ([1, 2], 2, 3, 60.0)]), plain())
    assert told.speedup == pytest.approx(3 / 0.15 * 0.1)


def test_a_run_without_drafts_says_what_plain_steps_take() -> None:
    told = drafting(run([([1, 2], 2, 3, 0.15)] * 4), plain())
    assert told.speedup == pytest.approx(3 / 0.15 * 0.1)
    assert told.against == "a run without drafts"
    alone = drafting(run([([1, 2], 2, 3, 0.15)] * 4))
    assert (alone.plain_s, alone.speedup, alone.cost_ratio) == (None, None, 0)


def test_an_end_inside_a_draft_was_right_too() -> None:
    told = drafting(run([([1, 2, 3], 1, 2, 0.1)]))
    assert told.positions == [(1, 1), (1, 1)]
    assert (told.num_accepted, told.num_cut) == (2, 0)
    [_, frame] = drafting_frames(run([([1, 2, 3], 1, 2, 0.1)]), "r0")
    assert [t["fate"] for t in frame["draft"]] == ["accepted", "accepted", "not looked at"]
    assert frame["drawn"] is None


def test_with_a_draft_in_every_step_the_prediction_is_leviathans() -> None:
    told = drafting(run([([1, 2], 1, 3, 0.12), ([4, 5], 2, 6, 0.12)]), plain())
    assert told.share == 1
    for k in (0, 1, 5):
        assert told.predicted(k, 0.1, 0) == pytest.approx(speedup(told.acceptance, k, 0.1))


def test_seldom_drafts_gain_seldom() -> None:
    told = drafting(drafts())
    tokens = 0.5 * expected_tokens(told.acceptance, 2) + 0.5
    assert told.predicted(2, 0.1, 0.2) == pytest.approx(tokens / (0.5 * 1.6 + 0.5))
    assert told.predicted(0) == 1


def test_without_decodes_there_is_nothing_to_tell() -> None:
    with pytest.raises(ValueError, match="no step that only decodes"):
        SpeculationView(run([]))
    with pytest.raises(ValueError, match="plain has no step"):
        drafting(drafts(), run([]))


# --- step by step ---------------------------------------------------------------------------------


def test_each_token_has_its_fate_and_the_model_one_of_its_own() -> None:
    frames = drafting_frames(drafts(), "r0")
    fates = [[token["fate"] for token in frame["draft"]] for frame in frames]
    assert fates[0] == []
    assert fates[1] == ["accepted"] * 3
    assert fates[2] == ["accepted", "rejected", "not looked at"]
    assert [f["drawn"]["kind"] for f in frames] == [
        "plain", "bonus", "resampled", "resampled", *["plain"] * 3
    ]  # fmt: skip
    assert [f["known"] for f in frames] == [4, 5, 9, 11, 12, 13, 14]
    kept = {"text": "é", "id": 13, "q": 0.5, "p": 0.4, "fate": "accepted"}
    assert drafting_frames(run([([13], 1, 2, 0.1)]), "r0")[1]["draft"] == [kept]
    assert [token["p"] for token in frames[2]["draft"]] == [0.4, 0.4, None]


def test_rules_follow_the_request_and_the_draft() -> None:
    def rule(**knobs) -> str:
        return drafting_frames(run([([1, 2], 1, 3, 0.1)], **knobs), "r0")[1]["rule"]

    assert rule(temperature=0.0, q=None) == "greedy"
    assert rule(q=None) == "chosen"
    assert rule(q=0.5) == "drawn"


def test_a_copied_draft_shows_where_it_stood() -> None:
    steps = [([], 0, token, 0.1) for token in (10, 11, 12, 13, 10, 11)]
    frame = drafting_frames(run([*steps, ([12, 13], 2, 0, 0.1)], q=None), "r0")[-1]
    assert frame["match"] == {"start": 5, "length": 2, "copied": 2}
    drawn = drafting_frames(run([*steps, ([12, 13], 2, 0, 0.1)]), "r0")[-1]
    assert drawn["match"] is None


def test_a_real_run_is_told_as_its_outputs_are() -> None:
    model = random_model(SHAPES["tiny-llama"], seed=3)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = [[1, 2, 3, 4], [9, 8, 7]]
    with Engine(model) as engine:
        truth = [output.token_ids for output in engine.generate(prompts, params)]
    wanted = {f"r{i}": ids for i, ids in enumerate(truth)}
    guess = Guess(
        lambda s, n: wanted[s.sequence_id][s.num_output_tokens :][:n], 200, random.Random(1)
    )
    with Engine(model, EngineConfig(speculation=guess)) as engine:
        outputs = engine.generate(prompts, params)
        view = SpeculationView(engine.trace)
    assert [output.token_ids for output in outputs] == truth
    assert view.told.num_drafted == sum(o.metrics.num_draft_tokens for o in outputs) > 0
    for name, output in zip(view.sequences, outputs, strict=True):
        view.sequence_id = name
        assert sum(frame["put_out"] for frame in view.frames) == len(output.token_ids)
        assert [t for t, _ in view.tokens[view.num_prompt :]] == output.token_ids
    assert sum(n * count for n, count in enumerate(view.told.by_tokens)) == view.told.num_tokens


# --- the widget -----------------------------------------------------------------------------------


def test_it_begins_where_some_stand_and_one_does_not() -> None:
    view = SpeculationView(drafts())
    assert view.step == 2
    view.step = 99
    assert view.step == len(view.frames) - 1
    assert SpeculationView(drafts(), step=1).step == 1


def test_the_summary_has_the_numbers() -> None:
    text = SpeculationView(drafts()).summary()
    assert "4 of 9 drafted tokens stood, 1.67 tokens a step, speed-up 1.11 x" in text
    assert "resampled; recorded on handmade" in text


def test_another_run_brings_its_own_costs() -> None:
    other = run([([1], 1, 2, 0.11)] * 5)
    view = SpeculationView({"three": drafts(), "one": other}, plain=plain())
    assert view.cost_ratio == pytest.approx(0.1)
    view.cost_ratio = 0.7
    view.run = "one"
    assert view.cost_ratio == pytest.approx(0.1)
    assert len(view.frames) == 6
    assert SpeculationView({"three": drafts(), "one": other}, run="one").told.num_drafted == 5


def test_data_is_small_plain_json() -> None:
    long = run([([i % 16] * 16, i % 17, 3, 0.1) for i in range(700)])
    view = SpeculationView(long)
    assert len(view.frames) == 500
    assert view.num_cut == 201
    size = len(json.dumps(view.view_state(), allow_nan=False))
    assert size < 1_000_000


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"runs": {}}, "runs has 0 runs"),
        ({"runs": {"a": 3}}, r"runs\['a'\]=3 must be a Trace"),
        ({"run": "b"}, "run='b'"),
        ({"sequence_id": "r9"}, "sequence_id='r9'"),
    ],
)
def test_bad_input_is_named(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationView(**{"runs": {"a": drafts()}} | knobs)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_cost_ratio_out_of_range_is_refused(value: float) -> None:
    with pytest.raises((ValueError, traitlets.TraitError), match="cost_ratio="):
        SpeculationView(drafts()).cost_ratio = value


def test_text_cannot_break_out_of_the_page() -> None:
    trace = drafts()
    trace.tokens[1] = "</script><script>window.hacked = 1</script>"
    page = widget_page(SpeculationView({"</script><script>window": trace}))
    assert "</script><script>window" not in page


# --- the browser ----------------------------------------------------------------------------------


def show(page, widget) -> None:
    page.set_content(widget_page(widget))
    page.wait_for_selector("[data-frame]")


@has_browser
def test_a_step_shows_what_was_drafted_and_what_stood(page) -> None:
    show(page, SpeculationView(drafts()))
    assert page.inner_text(".pd-title") == "3 drafted, 1 stands: 2 tokens in one step"
    fates = [node.inner_text() for node in page.query_selector_all(".pd-sv-fate")]
    assert fates == [
        "✓ stands", "✗ rejected", "– not looked at", "→ drawn in its place, from max(0, p − q)"
    ]  # fmt: skip
    label = page.get_attribute(".pd-sv-bars[data-fate=rejected]", "aria-label")
    assert "q 50.0%, p 40.0%, rejected" in label
    page.focus("input[aria-label=Step]")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("[data-frame='1']")
    assert page.inner_text(".pd-title") == "3 drafted, 3 stand: 4 tokens in one step"


@has_browser
def test_the_curve_is_the_formula_and_follows_the_cost_ratio(page) -> None:
    view = SpeculationView(drafts())
    show(page, view)

    def predicted() -> list[float]:
        text = page.get_attribute("[data-frame]", "data-predicted")
        return [float(value) for value in text.split()]

    for ratio in (view.cost_ratio, 0.5):
        slider = page.query_selector("input[aria-label^='Cost ratio']")
        slider.evaluate(
            "(node, v) => { node.value = v; node.dispatchEvent(new Event('input')) }", ratio
        )
        expected = [view.told.predicted(k, ratio) for k in range(len(predicted()))]
        assert predicted() == pytest.approx(expected, abs=1e-4)
    assert page.is_enabled("button:text-is('measured')")


@has_browser
@pytest.mark.parametrize("width", [420, 700, 1080])
def test_nothing_leaves_the_widget(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1200})
    show(page, SpeculationView({"three": drafts(), "two": drafts()}))
    root = page.query_selector(".pd-speculation-view").bounding_box()
    for node in page.query_selector_all(".pd-sv-fate, .pd-sv-plot, .pd-sv-ratio, .pd-title"):
        box = node.bounding_box()
        assert box["x"] + box["width"] <= root["x"] + root["width"] + 1
