"""Our own regular expressions: Python's `re` is the oracle, and the rest is refused."""

from __future__ import annotations

import random
import re
import time

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pdlab.sampling.automaton import DEAD, MAX_STATES, START, ByteAutomaton
from pdlab.sampling.regex import (
    MAX_NESTING,
    MAX_NFA_STATES,
    MAX_PATTERN,
    MAX_STEPS,
    compile_choice,
    compile_regex,
)

ALPHABET = "ab1_-. \n]^é世界😀\U0010ffff"
CHARACTERS = st.sampled_from(ALPHABET)
ESCAPES = [
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    r"\n",
    r"\.",
    r"\x61",
    r"\u4e16",
    r"\U0001f600",
]
WHOLE_CLASSES = [
    "[]a]",
    "[^]a]",
    "[a-]",
    "[-a]",
    "[a^]",
    r"[\]\\]",
    r"[^\W_]",
    r"[^\d\n]",
    "[.*+?(){|$]",
]


SPANS = st.tuples(CHARACTERS, CHARACTERS).map(
    lambda pair: f"{re.escape(min(pair))}-{re.escape(max(pair))}"
)
MEMBERS = st.lists(
    st.sampled_from(ESCAPES) | CHARACTERS.map(re.escape) | SPANS, min_size=1, max_size=3
)
CLASSES = st.tuples(st.sampled_from(["", "^"]), MEMBERS).map(
    lambda pair: f"[{pair[0]}{''.join(pair[1])}]"
)


LEAVES = CHARACTERS.map(re.escape) | st.sampled_from([".", *ESCAPES, *WHOLE_CLASSES]) | CLASSES
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{0}", "{1,}", "{0,2}", "{1,3}", "*?", "+?", "??"])
PATTERNS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(inner, REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        st.tuples(LEAVES, REPEATS).map("".join),
    ),
    max_leaves=6,
)
TEXTS = st.text(CHARACTERS, max_size=7)


def sample(automaton: ByteAutomaton, seed: int, max_bytes: int = 40) -> bytes:
    """A text that the automaton accepts: a random walk that ends where it may, or must."""
    drawn, state, text = random.Random(seed), START, b""
    while not (automaton.accepting[state] and (drawn.random() < 0.2 or len(text) > max_bytes)):
        choices = np.flatnonzero(automaton.table[state] != DEAD)
        if not len(choices):
            break
        byte = int(drawn.choice(choices))
        state, text = int(automaton.table[state, byte]), text + bytes([byte])
    return text


@settings(max_examples=600)
@given(PATTERNS, st.lists(TEXTS, max_size=8))
@example("", ["", "a"])
@example("a||b", ["", "a", "b", "ab"])
@example("(a*)*b", ["", "b", "aab", "aa"])
@example("(?:a|ab)(?:c|bcd)(?:d*)", ["acd", "abcd", "abbcd", "abcdd"])
@example("(?P<name>a)$", ["a", "aa", "a\n"])
@example("^a|b$", ["a", "b", "ab"])
def test_a_text_matches_where_python_says_so(pattern, texts):
    oracle = re.compile(pattern, re.ASCII)
    automaton = compile_regex(pattern) if "[^" not in pattern else compile_or_skip(pattern)
    for text in texts:
        assert automaton.matches(text.encode()) == bool(oracle.fullmatch(text)), text


def compile_or_skip(pattern: str) -> ByteAutomaton:
    """A class may exclude every character, and such a pattern is refused."""
    try:
        return compile_regex(pattern)
    except ValueError as error:
        assume("matches no text" not in str(error))
        raise


@settings(max_examples=300)
@given(PATTERNS, st.integers(0, 2**32))
def test_what_a_walk_spells_matches_in_python_and_every_prefix_of_it_is_alive(pattern, seed):
    automaton = compile_or_skip(pattern)
    text = sample(automaton, seed)
    assume(len(text) <= 12)  # re takes exponential time on some longer ones
    assert re.compile(pattern, re.ASCII).fullmatch(text.decode())  # decodes: it is valid UTF-8
    assert all(automaton.run(text[:end]) != DEAD for end in range(len(text) + 1))


@given(PATTERNS)
def test_from_every_state_some_match_can_be_reached(pattern):
    automaton = compile_or_skip(pattern)
    alive = automaton.accepting.copy()
    for _ in range(automaton.num_states):
        alive |= np.append(alive, False)[automaton.table].any(axis=1)
    assert alive.all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a|b", "[ab]"),
        ("aa*", "a+"),
        ("(a*)*", "a*"),
        ("(((a*)*)*)*", "a{0,}?"),
        ("(a|b)*a", "(b*a)+"),
        ("x{2,4}", "xxx?x?"),
        ("[^a]", r"[\x00-`b-\U0010ffff]"),
        (r"\d|\D", r"[\x00-\U0010ffff]"),
        (".|\n", r"[\s\S]"),
        ("cat|car|dog|dot", "ca[tr]|do[gt]"),
        ("é", r"\xe9"),
    ],
)
def test_equal_languages_give_equal_automata(one, other):
    first, second = compile_regex(one), compile_regex(other)
    assert (first.table == second.table).all()
    assert (first.accepting == second.accepting).all()


def num_texts(automaton: ByteAutomaton, num_bytes: int) -> int:
    """How many texts of at most so many bytes are accepted, counted over paths."""
    paths = np.zeros(automaton.num_states + 1, dtype=np.int64)
    paths[START], found = 1, 0
    for _ in range(num_bytes + 1):
        found += int(paths[:-1][automaton.accepting].sum())
        following = np.zeros_like(paths)
        for state in np.flatnonzero(paths[:-1]):
            np.add.at(following, automaton.table[state], paths[state])
        following[DEAD] = 0
        paths = following
    return found


BOUNDARIES = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF]
BOUNDARIES += [0x40000, 0xFFFFF, 0x100000, 0x10FFFF]


@settings(max_examples=150)
@given(st.tuples(*[st.sampled_from(BOUNDARIES) | st.characters().map(ord)] * 2).map(sorted))
@example([0, 0x10FFFF])
def test_a_range_of_characters_is_exactly_their_utf8(bounds):
    first, last = bounds
    automaton = compile_regex(rf"[\U{first:08x}-\U{last:08x}]")
    surrogates = range(max(first, 0xD800), min(last, 0xDFFF) + 1)
    assert num_texts(automaton, 5) == last - first + 1 - len(surrogates)
    for number in {first, last, (first + last) // 2} - set(surrogates):
        assert automaton.matches(chr(number).encode())


@pytest.mark.parametrize(
    "data",
    [b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80", b"\xe4\xb8", b"\xf5"],
    ids=["overlong", "surrogate", "too large", "FF", "continuation", "cut off", "F5"],
)
def test_no_class_matches_bytes_that_are_no_character(data):
    for pattern in (".*", r"[\s\S]*", "[^a]*", r"\W*"):
        assert not compile_regex(pattern).matches(data)


def test_classes_know_ascii_only():
    for pattern, character in ((r"\d", "٣"), (r"\w", "é"), (r"\s", "\u3000")):
        assert not compile_regex(pattern).matches(character.encode())
        assert compile_regex(pattern.upper()).matches(character.encode())


@pytest.mark.parametrize(
    ("pattern", "problem", "position"),
    [
        (r"(a)\1", r"'\\1' is not supported", 3),
        (r"(?P<x>a)(?P=x)", "is not supported", 8),
        (r"a(?=b)", "is not supported", 1),
        (r"a(?!b)", "is not supported", 1),
        (r"(?<=a)b", "is not supported", 0),
        (r"(?i)a", "is not supported", 0),
        (r"(?>a)", "is not supported", 0),
        (r"\bword", r"'\\b' is not supported", 0),
        (r"\p{L}", r"'\\p' is not supported", 0),
        (r"ab\Z", r"'\\Z' is not supported", 2),
        (r"[\b]", r"'\\b' is not supported", 1),
        ("a^b", "only known at the start", 1),
        ("(^a)", "only known at the start", 1),
        ("a$b", "only known at the end", 1),
        ("(a$)", "only known at the end", 2),
        ("a*+", "repeat of a repeat", 2),
        ("a**", "repeat of a repeat", 2),
        ("a{2}{3}", "repeat of a repeat", 4),
        ("*a", "nothing to repeat", 0),
        ("a|*", "nothing to repeat", 2),
        ("(+)", "nothing to repeat", 1),
        ("^*", "nothing to repeat", 1),
        ("a{", "begins no repeat", 1),
        ("a{,3}", "begins no repeat", 1),
        ("a{x}", "begins no repeat", 1),
        ("a{3,2}", "3 > 2", 1),
        ("(a", "is not closed", 0),
        ("a)", "closes no group", 1),
        ("[a", "is not closed", 0),
        ("[]", "is not closed", 0),
        ("[^]", "is not closed", 0),
        ("[a-", "is not closed", 0),
        ("[b-a]", "to a later one", 3),
        (r"[a-\d]", "to a later one", 4),
        (r"[\d-z]", "to a later one", 4),
        ("[[:alpha:]]", "in a class is not supported", 1),
        ("[a&&b]", "in a class is not supported", 2),
        ("[a--b]", "in a class is not supported", 2),
        ("\\", "stands last", 0),
        (r"\x4", "2 hexadecimal digits", 0),
        (r"\u12g4", "4 hexadecimal digits", 0),
        (r"\ud800", "U\\+D800 is no character", 0),
        (r"\U00110000", "U\\+110000 is no character", 0),
        ("a\ud800", "U\\+D800 is no character", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_its_position(pattern, problem, position):
    with pytest.raises(ValueError, match=rf"^regex=.*{problem}.* at position {position}$"):
        compile_regex(pattern)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\x00-\U0010ffff]+b"])
def test_a_pattern_that_no_text_matches_is_refused(pattern):
    with pytest.raises(ValueError, match="matches no text"):
        compile_regex(pattern)


def test_a_branch_that_no_text_matches_is_left_out():
    assert compile_regex(r"a(b[^\s\S]|c)").run(b"ab") == DEAD


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        ("(a{1000}){1000}", MAX_NFA_STATES),
        ("((a{1000}){1000}){1000}", MAX_NFA_STATES),
        ("a{100000000}", MAX_NFA_STATES),
        ("(){1000000000000}", MAX_NFA_STATES),
        ("a" * 100_000, MAX_NFA_STATES),
        ("[^a]" * 25_000, MAX_NFA_STATES),
        ("a" * 20_000, MAX_STATES),
        ("(a|b)*a(a|b){20}", MAX_STATES),
        (".*a.{500}", MAX_STEPS),
        ("(a?){5000}", MAX_STEPS),
        ("a?b?" * 10_000, MAX_STEPS),
        ("(" * 10_000 + "a" + ")" * 10_000, MAX_NESTING),
        ("(" * 100_000, MAX_NESTING),
        ("a" * 10_000_000, MAX_PATTERN),
    ],
    ids=lambda value: f"{value:.20}" if isinstance(value, str) else None,
)
def test_what_would_grow_too_big_is_refused_at_once_with_the_limit(pattern, limit):
    began = time.process_time()
    with pytest.raises(ValueError, match=rf"^regex=.*={limit:,}|=MAX_NESTING={limit}") as refused:
        compile_regex(pattern)
    assert time.process_time() - began < 20  # a second or two; minutes if it were not bounded
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "pattern", ["(((a*)*)*)*", "(a*){1000}", "a{1,5000}", "(" * 100 + ")" * 100]
)
def test_what_stays_small_is_compiled_however_it_is_written(pattern):
    assert compile_regex(pattern).num_states <= 5001


@given(st.lists(st.text(CHARACTERS, max_size=4), min_size=1, max_size=6), TEXTS)
@example(["a", "ab", ""], "a")
def test_a_choice_is_exactly_its_texts(texts, other):
    automaton = compile_choice(texts)
    assert all(automaton.matches(text.encode()) for text in texts)
    assert automaton.matches(other.encode()) == (other in texts)
    assert num_texts(automaton, 17) == len(set(texts))


def test_texts_that_end_alike_share_their_ends():
    texts = [f"{one}ing" for one in ("walk", "talk", "sing", "ring")]
    assert compile_choice(texts).num_states == compile_regex("([wt]alk|[sr]ing)ing").num_states


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ([], "at least one"),
        (["a", "\ud800"], "not valid Unicode"),
        ([f"{i:08}" for i in range(20_000)], f"MAX_STATES={MAX_STATES:,}"),
    ],
)
def test_an_impossible_choice_is_refused(texts, problem):
    with pytest.raises(ValueError, match=rf"^choice.*{problem}"):
        compile_choice(texts)
