"""Our own masker: llguidance and brute force over the real vocabulary are the oracles."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdlab.sampling.automaton import (
    DEAD,
    MAX_STATES,
    START,
    AutomatonMatcher,
    ByteAutomaton,
    TokenBytes,
    TokenMasker,
    avoid,
)
from pdlab.sampling.regex import compile_choice, compile_regex

BOUNDED = [
    r"\d{4}-\d{2}-\d{2}",
    r"[a-z]{1,8}@[a-z]{2,6}\.(com|org)",
    r"(yes|no|maybe)( \w{1,5}){0,3}",
    r"[一-龥]{1,5}。?|(😀|é){2,3}",
    r'\{"name": "[^"\\\x00-\x1f]{0,12}", "age": [1-9]?[0-9]\}',
    r"(a|ab)(c|bcd)(d{0,4})",
]
UNBOUNDED = [
    r"[A-Za-z ]+\.",
    r".*",
    r"(\w+, )*\w+",
    r"[^a]*\n",
]
DATES = BOUNDED[0]


@pytest.fixture(scope="module")
def token_bytes(smollm2) -> TokenBytes:
    return TokenBytes.of(smollm2.tokenizer, smollm2.tokenizer.vocab_size)


def walk(matcher: AutomatonMatcher, seed: int, max_tokens: int):
    """Draw allowed tokens until the text must end or is long; yield the tokens before each."""
    drawn, token_ids = random.Random(seed), []
    for _ in range(max_tokens):
        matcher.sync(token_ids)
        yield list(token_ids)
        if not matcher.allowed().any() or (matcher.may_end and drawn.random() < 0.1):
            return
        # short tokens are few: let them in now and then, so that the walk meets many states
        choices = np.flatnonzero(matcher.allowed()).tolist()
        spellings = matcher.masker.token_bytes.spellings
        weights = [1 / len(spellings[choice]) ** 2 for choice in choices]
        token_ids.append(drawn.choices(choices, weights)[0])


def spelled(token_bytes: TokenBytes, token_ids: list[int]) -> bytes:
    return b"".join(token_bytes.spellings[token_id] for token_id in token_ids)


# Masks


@pytest.mark.parametrize("pattern", BOUNDED + UNBOUNDED)
def test_a_mask_is_what_reading_each_token_alone_gives(token_bytes, pattern):
    masker = TokenMasker(compile_regex(pattern), token_bytes)
    states = range(masker.automaton.num_states)
    for state in random.Random(0).sample(states, min(3, len(states))):
        one_by_one = [
            spelling != b"" and masker.automaton.run(spelling, state) != DEAD
            for spelling in token_bytes.spellings
        ]
        assert (masker.allowed(state) == one_by_one).all()


@pytest.fixture(scope="module")
def llguidance_tokenizer(smollm2):
    from llguidance import LLTokenizer

    tokenizer = smollm2.tokenizer
    return LLTokenizer(
        tokenizer.backend.to_str(),
        n_vocab=tokenizer.vocab_size,
        eos_token=list(tokenizer.eos_token_ids),
    )


@pytest.mark.parametrize("pattern", BOUNDED + UNBOUNDED)
def test_masks_are_those_of_llguidance_along_random_walks(
    smollm2, token_bytes, llguidance_tokenizer, pattern
):
    import llguidance.numpy
    from llguidance import LLMatcher

    ours = pattern.replace(r"\w", "[0-9A-Za-z_]").replace(r"\d", "[0-9]")  # theirs is Unicode's
    masker = TokenMasker(compile_regex(ours), token_bytes)
    bits = llguidance.numpy.allocate_token_bitmask(1, token_bytes.vocab_size)
    num_equal = 0
    for seed in range(4):
        theirs = LLMatcher(llguidance_tokenizer, LLMatcher.grammar_from_regex(ours))
        matcher = AutomatonMatcher(masker)
        for token_ids in walk(matcher, seed, max_tokens=12):
            if token_ids:
                assert theirs.consume_token(token_ids[-1])
            forced = theirs.compute_ff_tokens()
            llguidance.numpy.fill_next_token_bitmask(theirs, bits)
            mask = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
            assert matcher.may_end == theirs.is_accepting() == mask[smollm2.tokenizer.eos_token_id]
            mask[list(smollm2.tokenizer.special_ids)] = False
            if forced:  # of the spellings of a text that is certain it allows the tokenizer's own
                assert np.flatnonzero(mask).tolist() == forced[:1]
                assert matcher.allowed()[forced[0]]
            else:
                assert (matcher.allowed() == mask).all()
                num_equal += 1
    assert num_equal >= 8


@pytest.mark.parametrize("pattern", BOUNDED)
def test_random_walks_end_in_a_full_match(token_bytes, pattern):
    masker = TokenMasker(compile_regex(pattern), token_bytes)
    for seed in range(20):
        matcher = AutomatonMatcher(masker)
        *_, token_ids = walk(matcher, seed, max_tokens=1000)
        assert matcher.may_end
        assert masker.automaton.matches(spelled(token_bytes, token_ids))


def test_a_walk_through_a_choice_spells_one_of_its_texts(token_bytes):
    texts = ["left", "right", "straight on", "世界", "😀"]
    masker = TokenMasker(compile_choice(texts), token_bytes)
    walks = [list(walk(AutomatonMatcher(masker), seed, 100))[-1] for seed in range(60)]
    assert {spelled(token_bytes, token_ids).decode() for token_ids in walks} == set(texts)


def test_what_is_no_text_is_never_allowed(smollm2, token_bytes):
    vocab_size = (
        token_bytes.vocab_size + 64
    )  # an embedding may have more rows than there are tokens
    padded = TokenBytes.of(smollm2.tokenizer, vocab_size)
    allowed = TokenMasker(compile_regex(r"[\s\S]*"), padded).allowed(START)
    assert allowed.shape == (vocab_size,)
    assert not allowed[list(smollm2.tokenizer.special_ids)].any()
    assert not allowed[token_bytes.vocab_size :].any()
    assert not TokenMasker(compile_regex("a*"), TokenBytes.from_spellings([b"", b"a"])).allowed(0)[
        0
    ]


def test_a_way_that_needs_a_byte_which_no_token_has_is_not_entered(token_bytes):
    tokens = TokenBytes.from_spellings([b"a", b"b", b"ab"])
    allowed = TokenMasker(compile_regex("ac|b+|abc|aa?"), tokens).allowed(START)
    assert allowed.tolist() == [True, True, False]
    impossible = AutomatonMatcher(TokenMasker(compile_regex(r"a\x04"), token_bytes))
    assert not impossible.allowed().any()
    assert not impossible.may_end


def test_a_dead_end_shows():
    tokens = TokenBytes.from_spellings([b"a", b"xc"])  # has a c, but none that fits behind an a
    matcher = AutomatonMatcher(TokenMasker(compile_regex("ac"), tokens))
    matcher.sync([0])
    assert not matcher.allowed().any()
    assert not matcher.may_end
    assert not matcher.is_over


def test_masks_kept_stay_within_their_bytes_and_are_right_when_made_again(token_bytes):
    automaton = compile_regex(r"[a-z]{0,40}")
    limit = 5 * token_bytes.vocab_size + 1
    small = TokenMasker(automaton, token_bytes, max_cached_bytes=limit)
    large = TokenMasker(automaton, token_bytes)
    for state in [*range(20), *range(20)]:
        assert (small.allowed(state) == large.allowed(state)).all()
        assert small.cached_bytes <= limit
    assert large.cached_bytes == 20 * token_bytes.vocab_size
    tiny = TokenMasker(automaton, token_bytes, max_cached_bytes=0)
    assert tiny.allowed(3) is tiny.allowed(3)  # the one in use is always kept


def test_the_mask_unused_for_longest_goes_first(token_bytes):
    masker = TokenMasker(
        compile_regex("[a-z]{0,9}"), token_bytes, max_cached_bytes=2 * token_bytes.vocab_size
    )
    first = masker.allowed(0)
    masker.allowed(1)
    masker.allowed(0)
    masker.allowed(2)  # in the place of 1
    assert masker.allowed(0) is first


def test_a_mask_cannot_be_changed_for_others(token_bytes):
    mask = TokenMasker(compile_regex("a"), token_bytes).allowed(START)
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True


# The state of a sequence


def test_sync_takes_in_only_what_is_new(token_bytes):
    masker = TokenMasker(compile_regex(DATES), token_bytes)
    at_once, one_by_one = AutomatonMatcher(masker), AutomatonMatcher(masker)
    token_ids = [token_bytes.spellings.index(bytes([byte])) for byte in b"2024-02-29"]
    for end in range(len(token_ids) + 1):
        for _ in range(2):
            one_by_one.sync(token_ids[:end])
    at_once.sync(token_ids)
    assert one_by_one.state == at_once.state != START
    assert at_once.may_end
    assert at_once.is_over


def test_a_token_that_is_not_allowed_is_an_error_each_time_and_changes_nothing(token_bytes):
    matcher = AutomatonMatcher(TokenMasker(compile_regex(DATES), token_bytes))
    one, letter = token_bytes.spellings.index(b"1"), token_bytes.spellings.index(b"a")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"token {letter} is not allowed at 1"):
            matcher.sync([one, letter])
    matcher.sync([one, one])
    for wrong in (0, -1, token_bytes.vocab_size):  # a control token; no tokens
        with pytest.raises(ValueError, match="at 2"):
            matcher.sync([one, one, wrong])


def test_forks_go_their_own_ways(token_bytes):
    matcher = AutomatonMatcher(TokenMasker(compile_regex("a(b|c)d"), token_bytes))
    a, b, c, d = (token_bytes.spellings.index(text) for text in (b"a", b"b", b"c", b"d"))
    matcher.sync([a])
    fork = matcher.fork()
    fork.sync([a, b, d])
    assert fork.is_over
    assert not matcher.may_end
    matcher.sync([a, c])
    assert not matcher.may_end
    assert fork.masker is matcher.masker


def test_a_text_that_may_end_need_not_be_over(token_bytes):
    matcher = AutomatonMatcher(TokenMasker(compile_choice(["a", "ab"]), token_bytes))
    a, b = (token_bytes.spellings.index(text) for text in (b"a", b"b"))
    states = []
    for token_ids in ([], [a], [a, b]):
        matcher.sync(token_ids)
        states.append((matcher.may_end, matcher.is_over))
    assert states == [(False, False), (True, False), (True, True)]


# Unwanted words

BYTES = st.binary(max_size=4).map(lambda data: bytes(b"abc"[byte % 3] for byte in data))
WORDS = st.lists(BYTES.filter(bool), max_size=5)


@settings(max_examples=400)
@given(WORDS, st.lists(BYTES, max_size=5).map(b"".join))
@example([b"abc", b"bd"], b"abd")
@example([b"aab", b"a"], b"bba")
@example([b"abab", b"ba"], b"ab")
def test_avoid_accepts_what_contains_no_word(words, text):
    automaton = avoid(words)
    assert automaton.matches(text) == (not any(word in text for word in words))


def test_an_empty_or_an_endless_list_of_words_is_refused():
    with pytest.raises(ValueError, match=r"^bad_words: .* empty"):
        avoid([b"a", b""])
    with pytest.raises(ValueError, match=rf"^bad_words: .*MAX_STATES={MAX_STATES:,}"):
        avoid([f"{i:08}".encode() for i in range(20_000)])


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_never_spell_an_unwanted_word_and_every_other_token_is_allowed(
    token_bytes, seed
):
    words = [" the", "e", "世", "😀", "ing", "\n\n", "an a"]
    words = [word.encode() for word in random.Random(seed).sample(words, 4)]
    matcher = AutomatonMatcher(TokenMasker(avoid(words), token_bytes, textless=True))
    drawn, token_ids, text = random.Random(seed), [], b""
    for _ in range(6):
        matcher.sync(token_ids)
        spells = [any(word in text + token for word in words) for token in token_bytes.spellings]
        assert (matcher.allowed() == ~np.array(spells)).all()
        assert matcher.may_end
        assert not matcher.is_over
        # choose what brings a word near, if anything does
        near = [
            i for i in np.flatnonzero(matcher.allowed()) if matcher.masker.step(matcher.state, i)
        ]
        token_ids.append(int(drawn.choice(near)))
        text += token_bytes.spellings[token_ids[-1]]


def test_a_control_token_in_between_hides_no_unwanted_word(smollm2, token_bytes):
    matcher = AutomatonMatcher(TokenMasker(avoid([b"ab"]), token_bytes, textless=True))
    a, b = (token_bytes.spellings.index(text) for text in (b"a", b"b"))
    for control in smollm2.tokenizer.special_ids:
        matcher.sync([a, control])  # the text is "a" when control tokens are left out
        assert matcher.allowed()[control]
        assert not matcher.allowed()[b]
        matcher = AutomatonMatcher(matcher.masker)
    with pytest.raises(ValueError, match="is not allowed at 0"):
        matcher.sync([token_bytes.vocab_size])


# Automata


@st.composite
def automata(draw) -> ByteAutomaton:
    """Any table at all over three classes of bytes."""
    num_states = draw(st.integers(1, 5))
    states = st.integers(DEAD, num_states - 1)
    columns = draw(
        st.lists(st.lists(states, min_size=3, max_size=3), min_size=num_states, max_size=num_states)
    )
    accepting = draw(st.lists(st.booleans(), min_size=num_states, max_size=num_states))
    class_of_byte = np.arange(256) * 7 % 3
    return ByteAutomaton(np.array(columns, np.int32)[:, class_of_byte], np.array(accepting))


def languages(automaton: ByteAutomaton, num_bytes: int) -> dict[int, tuple[bool, ...]]:
    """Of each state that a text can reach: which of all short texts are accepted from there on."""
    texts = [text for length in range(num_bytes + 1) for text in product(range(3), repeat=length)]
    reached = {automaton.run(bytes(text)) for text in texts} - {DEAD}
    ends = {state: [automaton.run(bytes(text), state) for text in texts] for state in reached}
    return {
        state: tuple(end != DEAD and bool(automaton.accepting[end]) for end in found)
        for state, found in ends.items()
    }


@settings(max_examples=300)
@given(automata())
def test_a_minimized_automaton_accepts_the_same_with_one_state_for_each_future(automaton):
    # Two of 5 states, and DEAD, are told apart by at most 4 bytes, and reached by as many.
    before = languages(automaton, 4)
    small = ByteAutomaton.pruned(automaton.table, automaton.accepting).minimized()
    after = languages(small, 4)
    assert after[START] == before[START]
    futures = {future for future in before.values() if any(future)} | {before[START]}
    assert small.num_states == len(futures)
    assert set(after.values()) == futures


@given(automata())
def test_pruning_changes_no_text_and_leaves_no_way_into_a_dead_end(automaton):
    pruned = ByteAutomaton.pruned(automaton.table, automaton.accepting)
    assert languages(pruned, 4)[START] == languages(automaton, 4)[START]
    assert all(any(future) for state, future in languages(pruned, 4).items() if state != START)
