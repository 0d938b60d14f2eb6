"""What a learner meets around the pictures."""

import json

import pytest

from pdlab.workbench import Predictions, check, checks, glossary, lesson, progress
from pdlab.workbench.lesson import GLOSSARY


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list:
    """What was displayed, in order."""
    outputs: list = []
    for module in (checks, lesson):
        monkeypatch.setattr(module, "display", lambda data, **_: outputs.append(data))
    monkeypatch.delenv("PDLAB_STRICT", raising=False)
    return outputs


def test_passed_check_is_green_and_true(shown: list) -> None:
    @check("adds up")
    def passed() -> None:
        assert 1 + 1 == 2

    assert passed is True
    assert shown[0]["text/plain"] == "✓ adds up: passed"


def test_failed_check_shows_the_hint_and_is_false(shown: list) -> None:
    @check("KV bytes")
    def passed() -> None:
        raise AssertionError("count K <and> V")

    assert passed is False
    assert "not yet: count K <and> V" in shown[0]["text/plain"]
    assert "count K &lt;and&gt; V" in shown[0]["text/html"]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (NotImplementedError(), "write your solution"),
        (AssertionError(), "not the expected one"),
        (TypeError("no"), "your code raised TypeError: no"),
        (NameError("name 'f' is not defined"), "run the cell above first"),
    ],
)
def test_check_explains_each_kind_of_failure(shown: list, error: Exception, hint: str) -> None:
    @check("exercise")
    def _() -> None:
        raise error

    assert hint in shown[0]["text/plain"]


def double(value: int) -> None:
    """An exercise solved but for its `return`."""


def nothing() -> list[int]:
    return [0]


def test_check_notices_a_missing_return(shown: list) -> None:
    @check("double")
    def _() -> None:
        assert double(2) == 4, "two and two"

    @check("a list")
    def _() -> None:
        assert nothing()[0] == sum(i for i in range(3)), "the hint of the test"

    assert "is there a `return`?" in shown[0]["text/plain"]
    assert "not yet: the hint of the test" in shown[1]["text/plain"]


def test_strict_check_raises(shown: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_STRICT", "1")
    with pytest.raises(AssertionError, match="wrong"):

        @check("exercise")
        def _() -> None:
            raise AssertionError("wrong")


def test_prediction_is_kept_and_compared(shown: list) -> None:
    guesses = Predictions()
    control = guesses.predict("How long is the TTFT?", key="ttft", unit="ms")
    control.answer.value = "120"
    assert guesses.get("ttft") == 120
    guesses.compare("ttft", 240, "ms")
    assert "your prediction: 120 ms; measured: 240 ms" in shown[0]["text/plain"]
    assert "2 times your prediction" in shown[0]["text/plain"]


def test_choice_is_kept_when_the_cell_runs_again() -> None:
    guesses = Predictions()
    question, options = "Which is slower?", ["prefill", "decode"]
    guesses.predict(question, options, key="slower").answer.value = "decode"
    again = guesses.predict(question, options, key="slower")
    assert again.answer.value == "decode"
    again.answer.value = None
    assert guesses.get("slower") is None


def test_compare_works_without_a_prediction(shown: list) -> None:
    Predictions().compare("ttft", 0.0123, "s", kind="recorded")
    assert shown[0]["text/plain"] == (
        "your prediction: no prediction recorded: answer above, then run this cell again; "
        "recorded: 0.0123 s"
    )
    Predictions().compare("ttft", 3, note="Longer prompts take longer.")
    assert shown[1]["text/plain"].endswith("cell again; measured: 3; Longer prompts take longer.")


def test_a_word_is_no_number() -> None:
    guesses = Predictions()
    control = guesses.predict("How many?", key="n")
    control.answer.value = "many <b>"
    assert guesses.get("n") is None
    assert "“many &lt;b&gt;” is not a number above 0; nothing recorded" in control.status.value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("about 10", 10),
        ("3,5", 3.5),
        ("1,000", 1000),
        ("3 times", 3),
        ("10x", 10),
        ("1e3", 1000),
        ("10 to 20", 10),
        ("-4", None),
        ("0", None),
        ("inf", None),
        ("nan", None),
        ("1e999", None),
    ],
)
def test_a_number_is_found_in_the_text(text: str, number: float | None) -> None:
    guesses = Predictions()
    control = guesses.predict("How many?", key="n")
    control.answer.value = "7"
    control.answer.value = text
    assert guesses.get("n") == (7 if number is None else number)
    if number is None:
        assert "not a number above 0; still recorded: 7" in control.status.value


@pytest.mark.parametrize(
    ("guess", "actual", "verdict"),
    [
        ("1", 340, "340 times your prediction"),
        ("51234", 3, "your prediction is 17,000 times too high"),
        ("2", float("inf"), "measured: inf"),
        ("2", 0, "off by -2"),
        ("1e300", 1e-300, "times too high"),
    ],
)
def test_verdicts_are_written_out(shown: list, guess: str, actual: float, verdict: str) -> None:
    guesses = Predictions()
    guesses.predict("How many?", key="n").answer.value = guess
    guesses.compare("n", actual)
    assert verdict in shown[0]["text/plain"]
    assert "e+0" not in shown[0]["text/plain"]


def test_only_an_option_can_be_chosen() -> None:
    control = Predictions().predict("Which?", ["a", "b"], key="k")
    with pytest.raises(ValueError, match="is not one of"):
        control.answer.value = "c"


def test_prediction_is_readable_without_widgets() -> None:
    control = Predictions().predict("Which?", ["a", "b"], key="k")
    data = control._repr_mimebundle_()
    assert data["text/plain"] == "Which? (a / b)"


def test_glossary_has_the_terms_of_the_first_lessons(shown: list) -> None:
    needed = ["token", "prefill", "decode", "KV cache", "TTFT", "TPOT", "ITL", "roofline", "GQA"]
    glossary(*needed)
    assert "预填充" in shown[0]["text/html"]
    assert shown[0]["text/html"].count("<tr>") == len(needed) + 1


def test_glossary_names_missing_terms() -> None:
    with pytest.raises(ValueError, match="'warp drive'"):
        glossary("token", "warp drive")


def test_glossary_entries_are_complete() -> None:
    for term, entry in json.loads(GLOSSARY.read_text(encoding="utf-8")).items():
        assert set(entry) == {"zh", "meaning"}, term
        assert entry["meaning"].endswith((".", "..."))


def test_progress_yields_everything_and_clears_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handle:
        shown: str

        def update(self, html) -> None:
            self.shown = html.data

    handle = Handle()
    monkeypatch.setattr(lesson, "get_ipython", object)
    monkeypatch.setattr(lesson, "display", lambda *_, **__: handle)
    assert list(progress(range(3), "prompts")) == [0, 1, 2]
    assert handle.shown == ""
    handle.shown = "a bar"
    interrupted = progress(range(3), "prompts")
    next(interrupted)
    with pytest.raises(KeyboardInterrupt):
        interrupted.throw(KeyboardInterrupt)
    assert handle.shown == ""


def test_progress_outside_a_notebook_just_yields(capsys: pytest.CaptureFixture) -> None:
    assert list(progress(range(3), "prompts")) == [0, 1, 2]
    assert capsys.readouterr().out == ""
