"""Drafts from models: the target's output stays what it is, and nothing is lost on the way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pdlab import (
    DraftModel,
    EarlyExit,
    Engine,
    EngineConfig,
    Model,
    NaiveGenerator,
    SamplingParams,
    SelfDraft,
)
from pdlab.engine import Sequence, admission
from pdlab.engine.drafting import Outcome, Speculation
from pdlab.sampling import Draft, run_chain
from pdlab.speculate import FixedLength, ModelDrafter, first_layers
from pdlab.speculate.model_drafter import UP_TO_DATE

from ..helpers import TINY, random_model, random_prompt
from ..sampling.test_verify import chi_square
from .running import run

SHAPE = replace(TINY, hidden_size=64, intermediate_size=96, head_dim=16, num_layers=3)
CONFIG = EngineConfig(exact=True, num_blocks=128, block_size=4)
PROMPTS = [random_prompt(5 + 3 * i, seed=i) for i in range(8)]


def target() -> Model:
    return random_model(SHAPE)


DRAFTERS: dict[str, Speculation] = {
    "itself": DraftModel(target()),
    "another": DraftModel(random_model(SHAPE, seed=1), num_tokens=2),
    "int8": SelfDraft("int8", kv_format="int8"),
    "first layers": EarlyExit(2, num_tokens=3),
    "in chunks": DraftModel(target(), chunk_size=7),
    "short of room": DraftModel(target(), num_blocks=17),
    "adaptive": DraftModel(target(), num_tokens="auto"),
}


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("speculation", DRAFTERS.values(), ids=DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding_bit_for_bit(speculation, batch) -> None:
    params = [SamplingParams(max_tokens=12 + i) for i in range(batch)]
    plain = run(target(), CONFIG, PROMPTS[:batch], params)
    drafted = run(target(), replace(CONFIG, speculation=speculation), PROMPTS[:batch], params)
    assert drafted.num_drafted > 0
    for ours, theirs in zip(drafted.seen, plain.seen, strict=True):
        assert ours.is_same(theirs)
    assert drafted.leftovers == 0


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    drafted = run(target(), replace(CONFIG, speculation=DraftModel(target())), PROMPTS[:3], params)
    assert drafted.num_accepted == drafted.num_drafted > 0
    # the first token comes with the prompt, and then 5 with each step, the last of which has 4
    assert [len(drafted.trace.sequence_steps(f"r{i}")) for i in range(3)] == [7, 7, 7]


def test_a_drafter_that_is_mostly_wrong_still_only_costs_time() -> None:
    """Preemption, chunked prompts, stop tokens and samples of one prompt beside it."""
    config = replace(CONFIG, num_blocks=24, chunk_size=5, max_num_batched_tokens=40)
    params = [
        SamplingParams(max_tokens=18),
        SamplingParams(max_tokens=18, stop_token_ids=list(range(0, 61, 9))),
        SamplingParams(max_tokens=12, n=3),
        SamplingParams(max_tokens=18, repetition_penalty=1.3),
    ]
    speculation = EarlyExit(1, num_tokens=3, num_blocks=24)
    with Engine(target(), config) as engine:
        plain = engine.generate(PROMPTS[:4], params)
    with Engine(target(), replace(config, speculation=speculation)) as engine:
        drafted = engine.generate(PROMPTS[:4], params)
        trace = engine.trace
    ours, theirs = (
        [[c.token_ids for c in output.completions] for output in outputs]
        for outputs in (drafted, plain)
    )
    assert ours == theirs
    assert any(step.preempted for step in trace.steps)


# --- the drafter alone ----------------------------------------------------------------------------


def drafter(speculation: Speculation, config: EngineConfig = CONFIG) -> ModelDrafter:
    made = speculation.make(target(), admission.resolve(target(), config))
    assert isinstance(made, ModelDrafter)
    return made


def sequence(
    token_ids: list[int], params: SamplingParams | None = None, seed: int = 0, name: str = "r0"
) -> Sequence:
    return Sequence(
        name, name, token_ids, params or SamplingParams(), seed=seed, uses_prefix_cache=True
    )


def greedy(model: Model, token_ids: list[int], length: int) -> list[int]:
    """What the model says next, without caches, blocks or batches."""
    if not length:
        return []
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    return NaiveGenerator(model).generate(token_ids, params).token_ids


def num_held(made: ModelDrafter) -> int:
    pool = made.memory.manager.pool
    pool.check(shadow.block_table for shadow in made.shadows.values())
    return pool.num_blocks - pool.num_free


@pytest.mark.parametrize("chunk_size", [512, 6])
def test_drafts_are_the_draft_models_own_text_whatever_became_of_earlier_ones(chunk_size) -> None:
    other, draw = random_model(SHAPE, seed=1), random.Random(0)
    made = drafter(DraftModel(other, num_tokens=4, chunk_size=chunk_size))
    sequences = [sequence(prompt, name=f"r{i}") for i, prompt in enumerate(PROMPTS[:3])]
    num_drafts = 0
    for _ in range(25):
        asked = draw.sample(sequences, draw.randint(1, 3))
        limits = [draw.choice((0, 1, 3, 9)) for _ in asked]
        drafts = made.propose(asked, limits)
        for each, limit, draft in zip(asked, limits, drafts, strict=True):
            assert len(draft) <= min(limit, 4)
            assert draft.token_ids == greedy(other, each.token_ids, len(draft))
            assert draft.probabilities is None
            num_drafts += len(draft) > 0
            stood = draw.randint(0, len(draft))
            each.token_ids += [*draft.token_ids[:stood], draw.randrange(61)]
    assert num_drafts > 20
    for each in sequences:
        made.forget(each)
    assert num_held(made) == 0


def test_what_an_interrupted_round_left_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter(DraftModel(random_model(SHAPE, seed=1), num_tokens=4))
    both = [sequence(PROMPTS[0]), sequence(PROMPTS[1], name="r1")]
    compute, num_passes = made.runner.compute, 0

    def interrupted(*args):
        nonlocal num_passes
        num_passes += 1
        computed = compute(*args)
        if num_passes == at:
            raise KeyboardInterrupt
        return computed

    monkeypatch.setattr(made.runner, "compute", interrupted)
    for at in range(1, 5):
        num_passes = 0
        with pytest.raises(KeyboardInterrupt):
            made.propose(both, [4, 4])
        num_passes = 10
        drafts = made.propose(both, [4, 4])
        for each, draft in zip(both, drafts, strict=True):
            assert draft.token_ids == greedy(made.model, each.token_ids, 4)
            each.token_ids += [*draft.token_ids[:at], 7]


def test_an_interrupted_engine_goes_on_as_if_nothing_had_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=15)
    config = replace(CONFIG, speculation=DraftModel(random_model(SHAPE, seed=1)))
    plain = run(target(), CONFIG, PROMPTS[:2], params)
    with Engine(target(), config) as engine:
        made = engine.drafter
        assert isinstance(made, ModelDrafter)
        compute, draw = made.runner.compute, random.Random(0)

        def sometimes(*args):
            if draw.random() < 0.3:
                raise KeyboardInterrupt
            return compute(*args)

        monkeypatch.setattr(made.runner, "compute", sometimes)
        names = [engine.submit(prompt, params) for prompt in PROMPTS[:2]]
        interrupts = 0
        while not all(engine.requests[name].finished for name in names):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert [engine.collect(name).token_ids for name in names] == plain.tokens
        assert interrupts > 3


def test_a_prompt_is_computed_in_chunks_beside_others_drafts() -> None:
    made = drafter(DraftModel(target(), num_tokens=2, chunk_size=10))
    short, long = sequence(random_prompt(4)), sequence(random_prompt(33), name="r1")
    found = []
    for _ in range(4):
        drafts = made.propose([long, short], [2, 2])
        found.append([len(draft) for draft in drafts])
        for each, draft in zip((long, short), drafts, strict=True):
            each.token_ids += [*draft.token_ids, 5]
    # of 10 tokens a round the short one takes 4 first, and then 2; the long one has 33, 34, ...
    assert found == [[0, 2], [0, 2], [0, 2], [0, 2]]
    assert made.shadows[long].num_computed_tokens == 6 + 3 * 8
    assert [len(draft) for draft in made.propose([long, short], [2, 2])] == [2, 2]


def test_rounds_that_computed_a_prompt_teach_nothing_of_what_drafts_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = drafter(DraftModel(target(), num_tokens=3))
    learned = []
    monkeypatch.setattr(
        FixedLength, "learn", lambda _, outcomes, draft_s, step_s: learned.append(draft_s)
    )
    mine = sequence(random_prompt(4 + UP_TO_DATE))
    for _ in range(2):
        [draft] = made.propose([mine], [3])
        mine.token_ids += [*draft.token_ids, 5]
        made.learn([Outcome(mine, 3, 3)], 0.25, 1.0)
    assert learned == [None, 0.25]


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    made = drafter(DraftModel(target(), num_tokens=2))
    prompt = random_prompt(30)
    first, second = sequence(prompt), sequence([*prompt, 1, 2, 3], name="r1")
    made.propose([first], [2])
    made.forget(first)
    assert num_held(made) == 0
    made.propose([second], [2])
    assert made.memory.manager.take_orders() == []
    assert made.shadows[second].prefixes[6] is not None
    assert made.memory.manager.pool.num_evictions == 0
    private = Sequence("r2", "r2", prompt, SamplingParams())
    tables = made.shadows[second].block_table
    made.propose([private], [2])
    assert not set(made.shadows[private].block_table) & set(tables)


def test_without_room_it_drafts_less_and_forgets_who_is_not_here() -> None:
    made = drafter(DraftModel(target(), num_tokens=4, num_blocks=6))  # 24 slots
    one, two, big = (
        sequence(random_prompt(length), name=f"r{i}") for i, length in enumerate((11, 9, 40))
    )
    assert [len(d) for d in made.propose([one, two, big], [9, 9, 9])] == [2, 4, 0]
    assert num_held(made) == 6
    assert [len(d) for d in made.propose([one], [9])] == [4]  # the other one is not here
    assert list(made.shadows) == [one]
    assert [len(d) for d in made.propose([big], [9])] == [0]
    made.forget(one)
    made.forget(big)
    assert num_held(made) == 0


def test_it_does_not_draft_beyond_the_draft_models_length() -> None:
    short = random_model(replace(SHAPE, max_model_len=16), seed=1)
    made = drafter(DraftModel(short, num_tokens=5))
    found = [made.propose([sequence(random_prompt(n), name=f"r{n}")], [9]) for n in (8, 13, 16, 20)]
    assert [len(draft) for [draft] in found] == [5, 3, 0, 0]


def test_nothing_is_drafted_behind_a_token_that_ends_the_text() -> None:
    text = greedy(target(), PROMPTS[0], 5)
    mine = sequence(PROMPTS[0])
    mine.stop_ids = frozenset(text[2:3])
    [draft] = drafter(DraftModel(target(), num_tokens=5)).propose([mine], [5])
    assert draft.token_ids == text[: text.index(text[2]) + 1]


def test_a_closed_engine_leaves_no_shadow() -> None:
    config = replace(CONFIG, speculation=DraftModel(target()))
    with Engine(target(), config) as engine:
        made = engine.drafter
        assert isinstance(made, ModelDrafter)
        engine.submit(PROMPTS[0], SamplingParams(max_tokens=9))
        engine.step()
        engine.step()
        assert num_held(made) > 0
    assert num_held(made) == 0


# --- drafts that are drawn ------------------------------------------------------------------------

DRAWN = {
    "plain": SamplingParams(temperature=1.0),
    "shaped": SamplingParams(temperature=1.4, top_k=20, top_p=0.8, min_p=0.01),
    "biased": SamplingParams(temperature=0.7, logit_bias={3: 4.0, 5: -100.0}),
}


@pytest.mark.parametrize("params", DRAWN.values(), ids=DRAWN)
def test_tokens_are_drawn_from_the_probabilities_that_are_told(params) -> None:
    """By chi-square, first and second token; q is what the draft model's chain says."""
    made = drafter(DraftModel(target(), num_tokens=2), replace(CONFIG, num_blocks=1024))
    runs, firsts, seconds = 1500, torch.zeros(61), torch.zeros(61)
    expected = torch.zeros(61)
    for start in range(0, runs, 50):
        several = [
            sequence(PROMPTS[0], params, seed, f"r{seed}") for seed in range(start, start + 50)
        ]
        for draft in made.propose(several, [2] * 50):
            assert draft.probabilities is not None
            assert draft.probabilities.dtype is torch.float32
            first, second = draft.token_ids
            firsts[first] += 1
            seconds[second] += 1
            expected += draft.probabilities[1]
        for each in several:
            made.forget(each)
    q = draft.probabilities[0]
    logits = NaiveGenerator(target()).logits(PROMPTS[0], last_only=True)
    chain = run_chain(logits, [sequence(PROMPTS[0], params)]).logits[0].softmax(-1)
    assert torch.allclose(q, chain, atol=1e-5)
    # with the rare tokens in one: at most 60 degrees of freedom, above 99.6 once in 1,000
    for counts, probable in ((firsts, runs * q), (seconds, expected)):
        assert pooled_chi_square(counts, probable) < 99.6
        assert pooled_chi_square(counts, probable.flip(0)) > 99.6, "it could not fail"


def pooled_chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Tokens that are expected less than 5 times count as one."""
    often = expected >= 5
    counts, expected = (
        torch.cat([x[often], x[~often].sum()[None]]).double() for x in (counts, expected)
    )
    return chi_square(counts, expected.clamp(min=1e-3))


def test_the_numbers_drawn_with_differ_from_draft_to_draft_and_are_not_the_targets() -> None:
    """q equal to p, the target's own darts would draw the very same text; and so would the numbers
    of the last draft."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    made = drafter(DraftModel(target(), num_tokens=8))
    same_as_target = same_as_before = 0
    for seed in range(8):
        theirs = NaiveGenerator(target()).generate(PROMPTS[0], params, seed=seed).token_ids
        mine = sequence(PROMPTS[0], params, seed)
        [draft] = made.propose([mine], [8])
        same_as_target += sum(a == b for a, b in zip(draft.token_ids, theirs, strict=False))
        assert made.propose([mine], [8])[0].token_ids == draft.token_ids  # asked again
        mine.token_ids += draft.token_ids[:1]
        [later] = made.propose([mine], [8])
        same_as_before += later.token_ids[:7] == draft.token_ids[1:]
    assert same_as_target < 16
    assert same_as_before == 0


def test_greedy_and_drawn_drafts_stand_side_by_side() -> None:
    made = drafter(DraftModel(target(), num_tokens=3))
    warm = SamplingParams(temperature=1.0)
    drafts: list[Draft] = made.propose(
        [sequence(PROMPTS[0]), sequence(PROMPTS[1], warm, name="r1")], [3, 3]
    )
    assert drafts[0].probabilities is None
    assert drafts[0].token_ids == greedy(target(), PROMPTS[0], 3)
    assert drafts[1].probabilities is not None
    assert drafts[1].probabilities.shape == (3, 61)
    assert torch.allclose(drafts[1].probabilities.sum(-1), torch.ones(3))


def test_a_draft_model_that_computes_no_numbers_drafts_nothing() -> None:
    broken = random_model(replace(SHAPE, rope_theta=9_000.0), seed=3)
    broken.decoder.final_norm.weight.fill_(torch.nan)
    made = drafter(DraftModel(broken))
    mine = sequence(PROMPTS[0], SamplingParams(temperature=1.0))
    assert made.propose([mine], [4])[0].token_ids == []


FIVE = replace(SHAPE, vocab_size=5, eos_token_ids=())


@pytest.mark.parametrize(
    ("speculation", "params"),
    [
        (EarlyExit(1, num_tokens=3), SamplingParams(temperature=1.5, top_p=0.95)),
        (
            DraftModel(random_model(FIVE, seed=1), num_tokens=2),
            SamplingParams(temperature=1.0, frequency_penalty=0.5),
        ),
    ],
)
def test_sampled_texts_have_the_targets_distribution(speculation, params) -> None:
    """All texts of three tokens, by chi-square: up to 124 degrees of freedom, above 181 once in
    1,000."""
    model, prompt, runs = random_model(FIVE), [1, 2, 3], 1500
    params = replace(params, max_tokens=3)
    config = EngineConfig(
        num_blocks=256, block_size=4, max_num_seqs=64, speculation=speculation, record_trace=False
    )
    with Engine(model, config) as engine:
        outputs = engine.generate(
            [prompt] * runs, [replace(params, seed=seed) for seed in range(runs)]
        )
    counts = torch.zeros(5, 5, 5)
    for output in outputs:
        counts[tuple(output.token_ids)] += 1
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert 0.1 * runs < accepted < 1.9 * runs, "some drafts stand, and some do not"
    expected = runs * texts(model, prompt, params)
    assert pooled_chi_square(counts, expected) < 181
    wrong = runs * texts(random_model(FIVE, seed=1), prompt, params)
    assert pooled_chi_square(counts, wrong) > 181, "it could not fail"


def texts(model: Model, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    """How probable each text of three tokens is, [5, 5, 5], by the chain alone."""
    table = torch.ones(5, 5, 5, dtype=torch.float64)
    naive = NaiveGenerator(model)
    for a in range(5):
        for b in range(5):
            for place, output in ((0, []), (1, [a]), (2, [a, b])):
                behind = sequence(prompt, params)
                behind.token_ids += output
                logits = naive.logits(behind.token_ids, last_only=True)
                p = run_chain(logits, [behind]).logits[0].double().softmax(-1)
                table[a, b] *= p if place == 2 else p[(a, b)[place]]
    return table


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfDraft("int3"), "weights='int3'"),
        (lambda: SelfDraft(num_tokens=-1), "num_tokens=-1"),
        (lambda: SelfDraft(chunk_size=0), "chunk_size=0"),
        (lambda: SelfDraft(num_blocks=0), "num_blocks=0"),
        (lambda: SelfDraft(kv_format="int8:channel"), "kv_format='int8:channel' must have token"),
        (lambda: SelfDraft(kv_format="int7"), "int7"),
        (lambda: EarlyExit(0), "num_layers=0"),
        (lambda: DraftModel(""), "model=''"),
        (lambda: DraftModel(7), "model=7"),  # type: ignore[arg-type]
        (lambda: drafter(EarlyExit(3)), "num_layers=3.* less than the 3 layers"),
        (lambda: drafter(DraftModel(random_model(FIVE))), "vocabulary of 5 tokens, .* of 61"),
        (lambda: drafter(DraftModel("no such model")), "no such model"),
    ],
)
def test_what_does_not_fit_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_tokenizers_that_differ_are_refused() -> None:
    class Words:
        def __init__(self, words: dict[str, int]):
            self.backend, self.words = self, words

        def get_vocab(self) -> dict[str, int]:
            return self.words

    ours = replace(target(), tokenizer=Words({"a": 0, "b": 1}))  # type: ignore[arg-type]
    theirs = replace(target(), tokenizer=Words({"a": 0, "c": 1}))  # type: ignore[arg-type]
    config = admission.resolve(target(), CONFIG)
    with pytest.raises(ValueError, match=r"tokenizers of random and random differ, .* 'b', 1 and"):
        DraftModel(ours).make(theirs, config)
    DraftModel(ours).make(ours, config)


def test_a_target_that_is_not_fp32_has_no_draft_in_a_cheaper_format() -> None:
    half = replace(target(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"SelfDraft\(weights='int8'\) needs a target on the CPU"):
        SelfDraft("int8").make(half, admission.resolve(target(), CONFIG))


def test_knobs_are_read_back_from_their_repr() -> None:
    for knobs in (
        SelfDraft("int8", num_tokens="auto"),
        EarlyExit(3),
        DraftModel("a", num_blocks=9),
    ):
        assert eval(repr(knobs)) == knobs
    assert repr(DraftModel(target())).startswith("DraftModel('random', num_tokens=4")
    config = EngineConfig(speculation=DraftModel(target()))
    assert config.to_dict()["speculation"] == repr(config.speculation)


# --- models that are part of another --------------------------------------------------------------


def test_the_first_layers_share_the_weights_and_are_what_they_are() -> None:
    full, part = target().decoder, first_layers(target(), 2)
    assert part.config.num_layers == 2
    ours = dict(part.decoder.named_parameters())
    for name, theirs in full.named_parameters():
        if not name.startswith("stack.2."):
            assert ours.pop(name).data_ptr() == theirs.data_ptr()
    assert not ours
    windowed = replace(SHAPE, layer_windows=(None, 5, None))
    assert first_layers(random_model(windowed), 2).config.layer_windows == (None, 5)


def test_where_kernels_cannot_be_had_torch_drafts_with_rounded_weights() -> None:
    """A head_dim of 8 is no compiled kernel's."""
    small = random_model(replace(SHAPE, output_bias=True))
    made = SelfDraft("int8").make(small, admission.resolve(small, CONFIG))
    assert made.config.backend == "torch"
    ours, theirs = (m.decoder.layers[0].down.weight for m in (made.model, small))
    assert not torch.equal(ours, theirs)
    assert torch.allclose(ours, theirs, atol=float(theirs.abs().max()) / 100)
