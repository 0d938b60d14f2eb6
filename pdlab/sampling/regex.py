r"""Regular expressions to automata over bytes, for our own masker.

Three steps, each textbook. The pattern is parsed to a tree; the tree becomes an automaton that may
be in several states at once (Thompson 1968, "Regular expression search algorithm"); and each *set*
of its states becomes one state of an automaton that is in one at a time (Rabin & Scott 1959, the
subset construction), which is then made as small as it can be.

The automaton must match the whole text, as if between ^ and $. It reads bytes, as tokens may end
in mid-character; a character above U+007F is the 2 to 4 bytes of its UTF-8.

    a  \n \r \t \f \v \a  \xNN \uNNNN \UNNNNNNNN  \. \\ ...    a character
    .           any character but \n
    \d \w \s    [0-9]  [0-9A-Za-z_]  [ \t\n\r\f\v]; \D \W \S any other character. ASCII only, where
                llguidance and Python's re (without re.ASCII) know all of Unicode
    [a-z_] [^"] one character of these, or of all others
    (...) (?:...) (?P<name>...)    a group
    x|y  x* x+ x? x{m} x{m,} x{m,n}    alternatives, repeats. A `?` after a repeat (lazy) is read
                and changes nothing: which match is found first is no question for a whole text
    ^ $         where a top-level alternative begins and ends: nothing, it does so anyway

What cannot be a finite automaton (backreferences) or is not built here (lookaround, \b, flags,
possessive repeats, Unicode properties, classes within classes) is a ValueError that says where.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

import numpy as np

from pdlab.sampling.automaton import DEAD, MAX_STATES, START, ByteAutomaton, trie

MAX_PATTERN = 200_000
MAX_NFA_STATES = 4 * MAX_STATES
MAX_NESTING = 100
MAX_STEPS = 1_000_000
"""A bound on the work of the subset construction, a second or so: edges and states looked at."""

LARGEST_CHARACTER = 0x10FFFF
SURROGATES = range(0xD800, 0xE000)

Range = tuple[int, int]
"""From the first to the last number, both included: of characters, or of bytes."""
Ranges = tuple[Range, ...]

CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
CLASSES: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
SET_OPERATIONS = ("&&", "--", "~~")
"""Within a class these are plain characters for some and operations for others."""
BOUNDS = re.compile(r"\{([0-9]{1,18})(,?)([0-9]{0,18})\}")
NAMED_GROUP = re.compile(r"\?P?<[A-Za-z_][A-Za-z0-9_]*>")


def compile_regex(pattern: str) -> ByteAutomaton:
    """The automaton of the texts that the pattern matches as a whole.

    Raises:
        ValueError: the pattern is faulty, uses what is not supported, matches no text, or needs
            more than MAX_PATTERN, MAX_NFA_STATES, MAX_STATES or MAX_STEPS.
    """
    shown = f"regex={pattern[:80]!r}"
    _require_at_most("MAX_PATTERN", MAX_PATTERN, len(pattern), "characters", shown)
    tree = _Parser(pattern, shown).parse()
    what = "states of a nondeterministic automaton"
    _require_at_most("MAX_NFA_STATES", MAX_NFA_STATES, tree.num_states, what, shown)
    nfa = Nfa()
    end = tree.add_to(nfa, nfa.new_state())
    automaton = _determinize(nfa, end, shown).minimized()
    if not automaton.accepting.any():
        raise ValueError(f"{shown}: matches no text")
    return automaton


def compile_choice(texts: Sequence[str]) -> ByteAutomaton:
    """The automaton of these texts and no others.

    Raises:
        ValueError: there are none, more than fit into MAX_STATES, or one is no valid Unicode.
    """
    if not texts:
        raise ValueError(f"choice={texts!r} must be at least one text")
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise ValueError(f"choice={error.object!r:.80} is not valid Unicode: {error}") from error
    children, is_text = trie(encoded, "choice")
    table = np.full((len(children), 256), DEAD, dtype=np.int32)
    for node, by_byte in enumerate(children):
        table[node, list(by_byte)] = list(by_byte.values())
    return ByteAutomaton(table, is_text).minimized()


@dataclass
class Nfa:
    """A nondeterministic automaton: from a state several edges may lead on with the same byte."""

    edges: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """By state: (first byte, last byte, next state)."""
    jumps: list[list[int]] = field(default_factory=list)
    """By state: where it leads without reading anything."""

    def new_state(self) -> int:
        self.edges.append([])
        self.jumps.append([])
        return len(self.edges) - 1


class Node(ABC):
    """A part of a pattern.

    Building one adds edges out of `start`, and returns the state in which its text has been read.
    Nothing leads back into `start` itself, so what was built before is not affected.
    """

    @property
    @abstractmethod
    def num_states(self) -> int:
        """States that `add_to` makes, or a few more; at least 1, so that repeats count."""

    @abstractmethod
    def add_to(self, nfa: Nfa, start: int) -> int: ...


@dataclass(frozen=True)
class Characters(Node):
    """One character, of those in the ranges."""

    sequences: tuple[Ranges, ...]
    """Its UTF-8: a range for each byte."""

    @property
    def num_states(self) -> int:
        return 1 + len({s[i:] for s in self.sequences for i in range(1, len(s))})

    def add_to(self, nfa: Nfa, start: int) -> int:
        # Sequences that end alike share the states from there on.
        states: dict[Ranges, int] = {(): nfa.new_state()}
        for sequence in self.sequences:
            for cut in reversed(range(len(sequence))):
                (first, last), rest = sequence[cut], sequence[cut + 1 :]
                if cut == 0:
                    nfa.edges[start].append((first, last, states[rest]))
                elif sequence[cut:] not in states:
                    states[sequence[cut:]] = nfa.new_state()
                    nfa.edges[states[sequence[cut:]]].append((first, last, states[rest]))
        return states[()]


@dataclass(frozen=True)
class Concatenation(Node):
    parts: tuple[Node, ...]

    @property
    def num_states(self) -> int:
        return 1 + sum(part.num_states for part in self.parts)

    def add_to(self, nfa: Nfa, start: int) -> int:
        for part in self.parts:
            start = part.add_to(nfa, start)
        return start


@dataclass(frozen=True)
class Alternatives(Node):
    options: tuple[Node, ...]

    @property
    def num_states(self) -> int:
        return 1 + sum(option.num_states for option in self.options)

    def add_to(self, nfa: Nfa, start: int) -> int:
        end = nfa.new_state()
        for option in self.options:
            nfa.jumps[option.add_to(nfa, start)].append(end)
        return end


@dataclass(frozen=True)
class Repeat(Node):
    part: Node
    least: int
    most: int | None
    """None: no limit."""

    @property
    def num_states(self) -> int:
        copies = self.least + 1 if self.most is None else self.most
        return 1 + copies * self.part.num_states

    def add_to(self, nfa: Nfa, start: int) -> int:
        for _ in range(self.least):
            start = self.part.add_to(nfa, start)
        end = nfa.new_state()
        if self.most is None:
            nfa.jumps[start].append(end)
            nfa.jumps[self.part.add_to(nfa, end)].append(end)
            return end
        for _ in range(self.most - self.least):
            nfa.jumps[start].append(end)
            start = self.part.add_to(nfa, start)
        nfa.jumps[start].append(end)
        return end


class _Parser:
    """Reads a pattern from left to right. Open groups are kept on a stack, not in recursion."""

    def __init__(self, pattern: str, shown: str):
        self.pattern = pattern
        self.shown = shown
        self.position = 0
        self._nodes: dict[Ranges, Characters] = {}

    def parse(self) -> Node:
        groups: list[list[list[Node]]] = [[[]]]  # open groups > their alternatives > their parts
        opened: list[int] = []
        while self.position < len(self.pattern):
            start, parts = self.position, groups[-1][-1]
            match character := self._next():
                case "(":
                    if len(opened) == MAX_NESTING:
                        self._fail(f"groups nest deeper than MAX_NESTING={MAX_NESTING}", start)
                    self._skip_kind_of_group(start)
                    groups.append([[]])
                    opened.append(start)
                case ")":
                    if not opened:
                        self._fail("')' closes no group", start)
                    opened.pop()
                    group = groups.pop()
                    groups[-1][-1].append(_alternatives(group))
                case "|":
                    groups[-1].append([])
                case "*" | "+" | "?" | "{":
                    least, most = self._repeat(character, start)
                    if not parts:
                        self._fail(f"{character!r} has nothing to repeat", start)
                    parts.append(Repeat(parts.pop(), least, most))
                case "^":
                    if opened or parts:
                        self._fail("'^' is only known at the start of the pattern", start)
                case "$":
                    if opened or self._peek() not in ("", "|"):
                        self._fail("'$' is only known at the end of the pattern", start)
                case _:
                    parts.append(self._characters(self._ranges(character, start)))
        if opened:
            self._fail("'(' is not closed", opened[-1])
        return _alternatives(groups[0])

    def _characters(self, ranges: Ranges) -> Characters:
        """The node for one character; the same one for the same ranges."""
        if ranges not in self._nodes:
            sequences = [s for first, last in ranges for s in utf8_sequences(first, last)]
            self._nodes[ranges] = Characters(tuple(sequences))
        return self._nodes[ranges]

    def _ranges(self, character: str, start: int) -> Ranges:
        """The characters that stand at one place, their first one just read."""
        if character == "[":
            return self._class(start)
        if character == "\\":
            return self._escape(start)
        if character == ".":
            return _others(((0x0A, 0x0A),))
        return self._one(ord(character), start)

    def _skip_kind_of_group(self, start: int) -> None:
        """Read what follows the "(" of a group that is not a plain one."""
        if self._peek() != "?":
            return
        named = NAMED_GROUP.match(self.pattern, self.position)
        if named:
            self.position = named.end()
        elif self.pattern.startswith("?:", self.position):
            self.position += 2
        else:
            kind = self.pattern[start : start + 3]
            self._fail(
                f"{kind!r} is not supported; groups are (...), (?:...), (?P<name>...)", start
            )

    def _repeat(self, sign: str, start: int) -> tuple[int, int | None]:
        """The least and the most times; and skip what is lazy about it."""
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1), "{": (0, None)}[sign]
        if sign == "{":
            bounds = BOUNDS.match(self.pattern, start)
            if bounds is None or (bounds[3] and not bounds[2]):
                self._fail(r"'{' begins no repeat {m}, {m,} or {m,n}; the character is \{", start)
            self.position = bounds.end()
            least = int(bounds[1])
            most = int(bounds[3]) if bounds[3] else None if bounds[2] else least
            if most is not None and most < least:
                self._fail(f"the repeat {bounds[0]} has {least} > {most}", start)
        if self._peek() == "?":
            self._next()
        if self._peek() and self._peek() in "*+?{":
            self._fail(f"a repeat of a repeat, {self._peek()!r}, needs a group", self.position)
        return least, most

    def _class(self, start: int) -> Ranges:
        """What stands between [ and ]; a ] that stands first is a character."""
        negated = self._peek() == "^"
        self.position += negated
        found: list[Range] = []
        while self._peek() != "]" or not found:
            ranges = self._member(start)
            ahead = self.pattern[self.position : self.position + 2]
            if ahead[:1] == "-" and ahead not in ("-]", "--"):
                self._next()
                ranges = self._span(ranges, self._member(start))
            found.extend(ranges)
        self._next()
        return _others(tuple(found)) if negated else tuple(found)

    def _member(self, start: int) -> Ranges:
        here = self.position
        if here == len(self.pattern):
            self._fail("'[' is not closed", start)
        if self.pattern[here : here + 2] in SET_OPERATIONS or self._peek() == "[":
            sign = self.pattern[here : here + 2] if self._peek() != "[" else "["
            self._fail(rf"{sign!r} in a class is not supported; a character is \{sign[0]}", here)
        character = self._next()
        return self._escape(here) if character == "\\" else self._one(ord(character), here)

    def _span(self, low: Ranges, high: Ranges) -> Ranges:
        """From one member to another, which must be single characters."""
        first, last = low[0][0], high[-1][1]
        single = len(low) == len(high) == 1 and low[0][1] == first and high[0][0] == last
        if not single or first > last:
            self._fail("a range must lead from a character to a later one", self.position - 1)
        return ((first, last),)

    def _escape(self, start: int) -> Ranges:
        r"""What stands after a backslash at `start`, which has been read."""
        if self.position == len(self.pattern):
            self._fail("'\\' stands last", start)
        sign = self._next()
        if sign in CONTROLS:
            return self._one(CONTROLS[sign], start)
        if sign in CLASSES:
            return CLASSES[sign]
        if sign.lower() in CLASSES:
            return _others(CLASSES[sign.lower()])
        if sign in HEX_DIGITS:
            digits = self.pattern[self.position : self.position + HEX_DIGITS[sign]]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{HEX_DIGITS[sign]}}}", digits):
                self._fail(f"'\\{sign}' needs {HEX_DIGITS[sign]} hexadecimal digits", start)
            self.position += len(digits)
            return self._one(int(digits, 16), start)
        if sign.isascii() and sign.isalnum():
            self._fail(f"'\\{sign}' is not supported", start)
        return self._one(ord(sign), start)

    def _one(self, character: int, position: int) -> Ranges:
        if character > LARGEST_CHARACTER or character in SURROGATES:
            self._fail(f"U+{character:04X} is no character", position)
        return ((character, character),)

    def _peek(self) -> str:
        """The next character; empty at the end."""
        return self.pattern[self.position : self.position + 1]

    def _next(self) -> str:
        self.position += 1
        return self.pattern[self.position - 1]

    def _fail(self, problem: str, position: int) -> NoReturn:
        raise ValueError(f"{self.shown}: {problem}, at position {position}")


def _alternatives(options: list[list[Node]]) -> Node:
    """The node of a group; one that holds a single thing is that thing."""
    nodes = [option[0] if len(option) == 1 else Concatenation(tuple(option)) for option in options]
    return nodes[0] if len(nodes) == 1 else Alternatives(tuple(nodes))


def _others(ranges: Ranges) -> Ranges:
    """All characters that are in none of the ranges."""
    gaps, free = [], 0
    for first, last in sorted(ranges):
        if first > free:
            gaps.append((free, first - 1))
        free = max(free, last + 1)
    return (*gaps, (free, LARGEST_CHARACTER)) if free <= LARGEST_CHARACTER else tuple(gaps)


def utf8_sequences(first: int, last: int) -> Iterator[Ranges]:
    """The UTF-8 of the characters from `first` to `last`, as sequences of byte ranges.

    [U+0400, U+04FF] is one sequence, (D0-D3)(80-BF). Within a sequence every combination must be
    one of the characters, so a range is cut wherever the number of bytes changes, and where a byte
    changes while those behind it do not run through all of 80-BF. (As Rust's regex engines do it;
    the idea is from Russ Cox's RE2.) Surrogates have no UTF-8 and are left out.
    """
    for least, most in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF)):
        if max(first, least) <= min(last, most):
            yield from _same_length(max(first, least), min(last, most))
    if last > 0xFFFF:
        yield from _same_length(max(first, 0x10000), last)


def _same_length(first: int, last: int) -> Iterator[Ranges]:
    num_bytes = len(chr(first).encode())
    for bits in range(6, 6 * num_bytes, 6):  # behind the last byte but one, two, three
        low_bits = (1 << bits) - 1
        if first | low_bits < last:  # differ before these bits
            if first & low_bits:
                yield from _same_length(first, first | low_bits)
                yield from _same_length((first | low_bits) + 1, last)
                return
            if last & low_bits != low_bits:
                yield from _same_length(first, (last & ~low_bits) - 1)
                yield from _same_length(last & ~low_bits, last)
                return
    yield tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))


def _determinize(nfa: Nfa, end: int, shown: str) -> ByteAutomaton:
    """The subset construction: one state for each set of states that the NFA can be in at once.

    Of a set only those states count that read a byte, or in which the text is complete.
    """
    numbers: dict[frozenset[int], int] = {}
    sets: list[frozenset[int]] = []
    number_of: dict[frozenset[int], int] = {}  # the same, before jumps are followed
    num_steps = 0

    def number(targets: frozenset[int]) -> int:
        if targets not in number_of:
            reached = _follow_jumps(nfa, targets)
            found = frozenset(state for state in reached if nfa.edges[state] or state == end)
            if found not in numbers:
                numbers[found] = len(sets)
                sets.append(found)
            number_of[targets] = numbers[found]
            count(len(reached))
            _require_at_most("MAX_STATES", MAX_STATES, len(sets), "states", shown)
        return number_of[targets]

    def count(steps: int) -> None:
        nonlocal num_steps
        num_steps += steps
        _require_at_most("MAX_STEPS", MAX_STEPS, num_steps, "steps to compile", shown)

    rows = []
    number(frozenset([START]))
    for states in sets:  # grows within the loop
        edges = [edge for state in states for edge in nfa.edges[state]]
        cuts = sorted({first for first, _, _ in edges} | {last + 1 for _, last, _ in edges})
        count(len(edges) * len(cuts))
        row = np.full(256, DEAD, dtype=np.int32)
        for low, high in pairwise(cuts):
            targets = frozenset(to for first, last, to in edges if first <= low <= last)
            if targets:
                row[low:high] = number(targets)
        rows.append(row)
    accepting = np.array([end in states for states in sets])
    return ByteAutomaton.pruned(np.stack(rows), accepting)


def _follow_jumps(nfa: Nfa, states: frozenset[int]) -> set[int]:
    """These states, and those that they lead to without reading anything."""
    reached, waiting = set(states), list(states)
    while waiting:
        new = [state for state in nfa.jumps[waiting.pop()] if state not in reached]
        reached.update(new)
        waiting += new
    return reached


def _require_at_most(limit_name: str, limit: int, needed: int, what: str, shown: str) -> None:
    if needed > limit:
        raise ValueError(f"{shown}: at least {needed:,} {what}, and {limit_name}={limit:,}")
