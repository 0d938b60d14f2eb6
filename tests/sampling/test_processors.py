"""Each link of the chain does what its definition says, and what transformers' own does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

from pdlab import SamplingParams
from pdlab.sampling import CHAIN, LogitsProcessor, Sampled, Sampler, Tally, run_chain
from pdlab.sampling.matcher import Drawer
from tests.sampling.drawers import drawer, kept, processed

VOCAB = 200
PROMPT, OUTPUT = [3, 3, 7, 150], [7, 9, 9, 9, 11]
EOS = 5


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 4) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


# --- the oracle: the parameters that transformers has too ---------------------------------------

PARAMETERS = {
    "temperature": ({"temperature": 0.3}, lambda: [theirs.TemperatureLogitsWarper(0.3)]),
    "top_k": ({"top_k": 7}, lambda: [theirs.TopKLogitsWarper(7)]),
    "top_k over the vocabulary": ({"top_k": 999}, lambda: [theirs.TopKLogitsWarper(999)]),
    "top_p": ({"top_p": 0.7}, lambda: [theirs.TopPLogitsWarper(0.7)]),
    "a small top_p": ({"top_p": 0.01}, lambda: [theirs.TopPLogitsWarper(0.01)]),
    "min_p": ({"min_p": 0.1}, lambda: [theirs.MinPLogitsWarper(0.1)]),
    "typical_p": ({"typical_p": 0.6}, lambda: [theirs.TypicalLogitsWarper(0.6)]),
    "repetition up": (
        {"repetition_penalty": 1.5},
        lambda: [theirs.RepetitionPenaltyLogitsProcessor(1.5)],
    ),
    "repetition down": (
        {"repetition_penalty": 0.6},
        lambda: [theirs.RepetitionPenaltyLogitsProcessor(0.6)],
    ),
    "logit_bias": (
        {"logit_bias": {4: 3.5, 199: -100, 0: 0.25}},
        lambda: [theirs.SequenceBiasLogitsProcessor({(4,): 3.5, (199,): -100.0, (0,): 0.25})],
    ),
    "bad_words": (
        {"bad_words": [(8,), (9, 11), (9, 11, 60), (7, 11, 61)]},
        lambda: [
            theirs.NoBadWordsLogitsProcessor(
                [[8], [9, 11], [9, 11, 60], [7, 11, 61]], eos_token_id=EOS
            )
        ],
    ),
    "min_tokens": (
        {"min_tokens": 6},
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, EOS, "cpu")],
    ),
    "min_tokens reached": (
        {"min_tokens": 5},
        lambda: [theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, EOS, "cpu")],
    ),
    "everything": (
        {
            "temperature": 0.8,
            "top_k": 60,
            "top_p": 0.95,
            "min_p": 0.001,
            "typical_p": 0.9,
            "repetition_penalty": 1.3,
            "logit_bias": {7: 4.0, 50: -2.0},
            "bad_words": [(11, 13)],
            "min_tokens": 9,
        },
        lambda: [
            theirs.SequenceBiasLogitsProcessor({(7,): 4.0, (50,): -2.0}),
            theirs.RepetitionPenaltyLogitsProcessor(1.3),
            theirs.NoBadWordsLogitsProcessor([[11, 13]], eos_token_id=EOS),
            theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, EOS, "cpu"),
            theirs.TemperatureLogitsWarper(0.8),
            theirs.TopKLogitsWarper(60),
            theirs.TopPLogitsWarper(0.95),
            theirs.MinPLogitsWarper(0.001),
            theirs.TypicalLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("scale", [0.5, 4, 30])
def test_agrees_with_transformers(name: str, scale: float):
    given_params, make = PARAMETERS[name]
    params = SamplingParams(**{"temperature": 1.0} | given_params)
    expected = logits = random_logits(20, scale=scale)
    history = torch.tensor([PROMPT + OUTPUT] * 20)
    for processor in make():
        expected = processor(history, expected.clone())
    rows = [drawer(params, prompt=PROMPT, output=OUTPUT, stop_ids=frozenset([EOS]))] * 20
    ours = run_chain(logits, rows).logits
    assert torch.equal(ours == -torch.inf, expected == -torch.inf)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


# --- definitions --------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [0.0, 1e-8, 1e-3])
@pytest.mark.parametrize("scale", [0, 0.1, 4])
def test_the_best_token_always_stays_in_top_p(top_p: float, scale: float):
    logits = random_logits(scale=scale)[0]
    logits[42] = 0.5 + logits.max()
    expected = {42} if top_p * VOCAB * 2 < 1 or scale == 4 else kept(logits, top_p=top_p)
    assert kept(logits, top_p=top_p) == expected
    assert 42 in kept(logits, top_p=top_p)


@pytest.mark.parametrize(
    ("top_k", "num_kept"),
    [(0, VOCAB), (-1, VOCAB), (1, 1), (2, 2), (VOCAB, VOCAB), (VOCAB + 1, VOCAB)],
)
def test_top_k_keeps_k_tokens_and_0_and_minus_1_keep_all(top_k: int, num_kept: int):
    logits = random_logits()[0]
    assert kept(logits, top_k=top_k) == set(logits.topk(num_kept).indices.tolist())


def test_the_order_of_the_filters_is_temperature_top_k_top_p_min_p_typical_p():
    names = [link.name for link in CHAIN]
    assert names == [
        "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty",
        "bad_words", "min_tokens", "constraint",
        "temperature", "top_k", "top_p", "min_p", "typical_p",
    ]  # fmt: skip
    seen: list[str] = []
    params = SamplingParams(
        temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, typical_p=0.9, frequency_penalty=1,
        repetition_penalty=2, presence_penalty=1, logit_bias={3: 1}, bad_words=[(2,)], min_tokens=8,
    )  # fmt: skip
    row = drawer(params, prompt=PROMPT, output=OUTPUT, stop_ids=frozenset([EOS]))
    run_chain(random_logits(), [row], lambda name, _: seen.append(name))
    assert seen == [name for name in names if name != "constraint"]


def test_top_p_counts_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 two stay; of those the first has 4/7 of the probability."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.55) == {0, 1}
    assert kept(logits, top_k=2, top_p=0.55) == {0}


def test_temperature_comes_before_top_p():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.5, temperature=1.0) == {0, 1}
    assert kept(logits, top_p=0.5, temperature=0.5) == {0}
    assert kept(logits, top_p=0.5, temperature=100.0) == {0, 1}


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}])
def test_tokens_as_probable_as_the_last_that_stays_stay_too(params: dict):
    logits = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0])
    assert kept(logits, **params) == {1, 2, 3}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([3.0, -1.0, 0.0, 3.0, -1.0])
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5)
    ours = processed(logits, params, prompt=[0, 0, 1], output=[2])
    assert ours.tolist() == [2.0, -1.5, 0.0, 3.0, -1.0]


def test_repetition_counts_prompt_and_output_the_others_the_output_only():
    logits = torch.zeros(6) + 1
    tokens = {"prompt": [0, 1, 1], "output": [1, 2, 2, 2]}
    once = processed(logits, SamplingParams(repetition_penalty=2.0), **tokens)
    assert once.tolist() == [0.5, 0.5, 0.5, 1, 1, 1]
    each = processed(logits, SamplingParams(frequency_penalty=0.5), **tokens)
    assert each.tolist() == [1, 0.5, -0.5, 1, 1, 1]
    flat = processed(logits, SamplingParams(presence_penalty=0.25), **tokens)
    assert flat.tolist() == [1, 0.75, 0.75, 1, 1, 1]


def test_penalties_of_a_prompt_without_output_do_nothing():
    logits = random_logits()[0]
    params = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
    assert torch.equal(processed(logits, params, prompt=PROMPT), logits)


def test_negative_penalties_encourage():
    params = SamplingParams(frequency_penalty=-1.0, presence_penalty=-1.0)
    assert processed(torch.zeros(3), params, output=[1, 1]).tolist() == [0, 3, 0]


@pytest.mark.parametrize("penalty", [2.0, 0.5])
def test_a_forbidden_token_stays_forbidden_under_penalties(penalty: float):
    logits = torch.tensor([-torch.inf, 1.0, 2.0])
    params = SamplingParams(repetition_penalty=penalty, frequency_penalty=1.0)
    assert processed(logits, params, output=[0, 1])[0] == -torch.inf


@given(st.floats(0.01, 0.99), st.integers(0, 10_000), st.sampled_from([0.3, 2.0, 10.0]))
@settings(max_examples=60, deadline=None)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(top_p: float, seed: int, scale: float):
    logits = random_logits(seed=seed, scale=scale)[0]
    probabilities = logits.double().softmax(dim=-1)
    left = kept(logits, top_p=top_p)
    mass = float(sum(probabilities[i] for i in left))
    assert mass >= top_p - 1e-6
    assert mass - min(float(probabilities[i]) for i in left) <= top_p + 1e-6
    assert min(probabilities[i] for i in left) >= max(
        (probabilities[i] for i in range(VOCAB) if i not in left), default=0.0
    )


@given(st.floats(0.01, 0.99), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_typical_p_keeps_those_nearest_to_the_entropy(typical_p: float, seed: int):
    logits = random_logits(seed=seed, scale=2)[0]
    probabilities = logits.double().softmax(dim=-1)
    entropy = float(-(probabilities * probabilities.log()).sum())
    distance = [abs(-math.log(p) - entropy) for p in probabilities.tolist()]
    left = kept(logits, typical_p=typical_p)
    assert sum(float(probabilities[i]) for i in left) >= typical_p - 1e-6
    assert max(distance[i] for i in left) <= min(
        (distance[i] + 1e-5 for i in range(VOCAB) if i not in left), default=math.inf
    )


# --- the batch ------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=2.0, top_k=50, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, typical_p=0.5, repetition_penalty=1.7),
    SamplingParams(frequency_penalty=1.0, presence_penalty=-0.5, logit_bias={9: 50}),
    SamplingParams(temperature=1.0, bad_words=[(9,), (11, 4)], min_tokens=7),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_of_a_mixed_batch_is_what_it_is_alone(dtype: torch.dtype):
    logits = random_logits(len(MIXED)).to(dtype)
    rows = [drawer(p, prompt=PROMPT, output=OUTPUT, stop_ids=frozenset([EOS])) for p in MIXED]
    together = run_chain(logits, rows).logits
    assert together.dtype == torch.float32
    for i, row in enumerate(rows):
        assert torch.equal(together[i], run_chain(logits[i : i + 1], [row]).logits[0])


def test_the_models_logits_are_left_as_they_are():
    logits = random_logits(len(MIXED))
    before = logits.clone()
    run_chain(logits, [drawer(p, prompt=PROMPT, output=OUTPUT) for p in MIXED])
    assert torch.equal(logits, before)


def test_a_greedy_row_is_nudged_and_masked_but_not_shaped():
    logits = random_logits()[0]
    best, second = logits.topk(2).indices.tolist()
    params = SamplingParams(top_k=3, top_p=0.1, min_p=0.5, bad_words=[(best,)])
    ours = processed(logits, params)
    assert int(ours.argmax()) == second
    assert (ours > -torch.inf).sum() == VOCAB - 1


# --- one's own processors -------------------------------------------------------------------------


class OnlyEven(LogitsProcessor):
    name = "only_even"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def process(self, logits: Tensor, drawers: list[Drawer]) -> Tensor:
        self.calls.append(len(drawers))
        logits[:, 1::2] = -torch.inf
        return logits


class Broken(LogitsProcessor):
    name = "broken"

    def __init__(self, what: object) -> None:
        self.what = what

    def process(self, logits: Tensor, drawers: list[Drawer]) -> Tensor:
        if isinstance(self.what, Exception):
            logits.zero_()
            raise self.what
        return self.what(logits)  # type: ignore[operator]


def test_ones_own_processor_sees_all_its_rows_at_once_and_no_others():
    even = OnlyEven()
    own = SamplingParams(temperature=1.0, logits_processors=(even,))
    rows = [drawer(own), drawer(), drawer(own)]
    ours = run_chain(random_logits(3), rows).logits
    assert even.calls == [2]
    assert [(row > -torch.inf).sum().item() for row in ours] == [VOCAB // 2, VOCAB, VOCAB // 2]


def test_ones_own_processors_run_in_the_order_given():
    seen: list[str] = []

    class Note(OnlyEven):
        def __init__(self, name: str):
            super().__init__()
            self.name = name

        def process(self, logits: Tensor, drawers: list[Drawer]) -> Tensor:
            seen.append(self.name)
            return logits

    a, b = Note("a"), Note("b")
    rows = [drawer(SamplingParams(logits_processors=pair)) for pair in ((a, b), (b, a))]
    run_chain(random_logits(2), rows)
    assert sorted(seen[:2]) == sorted(seen[2:]) == ["a", "b"]
    assert seen == ["a", "b", "b", "a"]


def test_ones_own_processor_cannot_allow_what_is_forbidden():
    class Eager(OnlyEven):
        def process(self, logits: Tensor, drawers: list[Drawer]) -> Tensor:
            return torch.full_like(logits, -100.0).index_fill_(1, torch.tensor([8]), 100.0)

    params = SamplingParams(logits_processors=(Eager(),), bad_words=[(8,)])
    assert processed(random_logits()[0], params)[8] == -torch.inf


@pytest.mark.parametrize(
    "what",
    [
        RuntimeError("oops"),
        lambda logits: None,
        lambda logits: logits[:, :3],
        lambda logits: logits * torch.nan,
        lambda logits: logits + torch.inf,
    ],
    ids=["raises", "returns nothing", "wrong shape", "NaN", "inf"],
)
def test_a_broken_processor_fails_its_own_rows_alone(what: object):
    broken = SamplingParams(logits_processors=(Broken(what),))
    logits = random_logits(3)
    ours = run_chain(logits, [drawer(), drawer(broken), drawer()])
    assert list(ours.errors) == [1]
    assert "logits_processors" in str(ours.errors[1])
    assert torch.equal(ours.logits[[0, 2]], logits[[0, 2]])
    alone = run_chain(logits[:1], [drawer(broken)])
    assert list(alone.errors) == [0]


# --- bad words as texts ---------------------------------------------------------------------------


def test_bad_words_as_texts_are_never_spelled(smollm2):
    """Whatever tokens spell it: single characters, with a space before, inside another word."""
    from pdlab.sampling import Compiler

    tokenizer, vocab_size = smollm2.tokenizer, smollm2.config.vocab_size
    params = SamplingParams(temperature=1.0, bad_words=["cat", "世"])
    compiler = Compiler(tokenizer, vocab_size)
    output: list[int] = tokenizer.encode("The c")
    row = drawer(params, output=output, bad_words=compiler.bad_words(params))
    left = run_chain(torch.zeros(1, vocab_size), [row]).logits[0] > -torch.inf
    for token_id in range(vocab_size):
        spelled = b"c" + (tokenizer.token_bytes(token_id) or b"")
        if token_id in tokenizer.special_ids:
            assert left[token_id]
        else:
            assert bool(left[token_id]) == (b"cat" not in spelled and "世".encode() not in spelled)


# --- rows that nothing can be drawn from --------------------------------------------------------

SHAPING = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.9},
    "penalties": {"repetition_penalty": 2, "frequency_penalty": 1, "presence_penalty": 1},
}


@pytest.mark.parametrize("name", SHAPING)
@pytest.mark.parametrize("what", ["nothing allowed", "all NaN", "one NaN", "one allowed"])
def test_a_row_without_a_distribution_harms_no_other(name: str, what: str):
    params = SamplingParams(temperature=1.0, **SHAPING[name])
    logits = random_logits(3)
    logits[1] = {
        "nothing allowed": torch.full((VOCAB,), -torch.inf),
        "all NaN": torch.full((VOCAB,), torch.nan),
        "one NaN": torch.where(torch.arange(VOCAB) == 3, torch.nan, logits[1]),
        "one allowed": torch.where(torch.arange(VOCAB) == 3, logits[1], -torch.inf),
    }[what]
    rows = [drawer(params, prompt=PROMPT, output=OUTPUT) for _ in range(3)]
    first, middle, last = Sampler(2).sample(logits, rows)
    alone = Sampler(2).sample(logits[:1], rows[:1])[0]
    assert isinstance(first, Sampled)
    assert isinstance(last, Sampled)
    assert first == alone
    if what == "one allowed":
        assert (middle.token_id, middle.num_allowed) == (3, 1)
    else:
        assert isinstance(middle, ValueError)
        assert ("no token is allowed" in str(middle)) == (what == "nothing allowed")


@pytest.mark.parametrize("num_threads", [1, 4])
def test_each_row_is_what_it_is_alone_over_a_whole_vocabulary(num_threads: int):
    """Where torch would split the sum over one long row between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for seed in range(4):
            logits = random_logits(8, vocab=49_152, seed=seed, scale=3)
            for given_params in (*SHAPING.values(), {"temperature": 0.7}):
                params = SamplingParams(**{"temperature": 1.0} | given_params)
                rows = [drawer(params, prompt=PROMPT, output=OUTPUT, seed=i) for i in range(8)]
                together = run_chain(logits, rows).logits
                for i, row in enumerate(rows):
                    assert torch.equal(together[i], run_chain(logits[i : i + 1], [row]).logits[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "what",
    [
        lambda logits: logits + torch.zeros(VOCAB, requires_grad=True),
        lambda logits: logits[:, :1].expand(-1, VOCAB),
        lambda logits: logits.double(),
        lambda logits: logits.t().contiguous().t(),
    ],
    ids=["with a gradient", "expanded", "float64", "transposed"],
)
@pytest.mark.parametrize("company", [0, 1])
def test_odd_tensors_of_ones_own_processor_are_taken(what: object, company: int):
    params = SamplingParams(
        temperature=1.0, top_p=0.9, typical_p=0.9, logits_processors=(Broken(what),)
    )
    processed = run_chain(random_logits(1 + company), [drawer(params)] + [drawer()] * company)
    assert not processed.errors
    assert processed.logits.dtype == torch.float32


def test_a_processor_must_be_one_and_have_a_name():
    class Nameless(LogitsProcessor):
        def process(self, logits: Tensor, drawers: list[Drawer]) -> Tensor:
            return logits

    class Alike:
        name = "alike"

        def process(self, logits: Tensor, drawers: list[Drawer]) -> Tensor:
            return logits

    with pytest.raises(ValueError, match="has no name"):
        SamplingParams(logits_processors=(Nameless(),))
    with pytest.raises(ValueError, match="is no LogitsProcessor"):
        SamplingParams(logits_processors=(Alike(),))


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 20), st.lists(st.integers(0, 60)))
def test_a_tally_counts_what_a_counter_counts(
    token_ids: list[int], num_prompt: int, stops: list[int]
):
    tally = Tally(num_prompt)
    for stop in [*sorted(stops), len(token_ids)]:
        tally.sync(token_ids[: max(stop, 0)] if stop < len(token_ids) else token_ids)
    counts = dict(zip(tally.token_ids.tolist(), tally.counts.tolist(), strict=True))
    assert counts == {i: token_ids[num_prompt:].count(i) for i in token_ids}
