"""Our own masker: an automaton that reads bytes, and from it a mask over tokens.

A model writes tokens, a constraint speaks of text. Between them stand bytes: a constraint becomes a
finite automaton that reads one byte at a time, and in any of its states a token may come next if
all its bytes can be read from there. Willard & Louf (2023, "Efficient Guided Generation for Large
Language Models") work out that set of tokens for every state beforehand. Here it is worked out when
a state is first met, for all tokens at once, and then kept: a text meets few of the states.

    TokenBytes      what each token spells
    ByteAutomaton   which texts are wanted; `regex` makes them, and `avoid`
    TokenMasker     state -> allowed tokens, and state + token -> state
    AutomatonMatcher  how far one sequence has come
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdlab.sampling.matcher import Matcher

if TYPE_CHECKING:
    from pdlab.models import Tokenizer

START = 0
DEAD = -1
"""Where no text leads on to what is wanted."""
MAX_STATES = 16_384
"""A state's row takes 1 KiB."""
MAX_CACHED_BYTES = 64 * 2**20
"""What a masker spends on masks: 1,365 of them for a vocabulary of 49,152."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenBytes:
    """The vocabulary as bytes, laid out so that all its tokens can be read at once.

    Tokens are sorted by length. Column j holds byte j of every token that has one; as those are the
    longest, they are the last len(column) of `token_ids`:

        token_ids    5    2    9    1
        column 0     a    t    t    c
        column 1          o    h    a
        column 2               e    t
    """

    spellings: tuple[bytes, ...]
    """By token id, [vocab_size]; empty for what is no text: control tokens, ids without token."""
    token_ids: npt.NDArray[np.intp]
    """Those that have bytes, the shortest first."""
    columns: tuple[npt.NDArray[np.uint8], ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
        """What the first `vocab_size` ids spell. Takes a while: make it once for each tokenizer."""
        special = tokenizer.special_ids
        return cls.from_spellings(
            b"" if token_id in special else tokenizer.token_bytes(token_id) or b""
            for token_id in range(vocab_size)
        )

    @classmethod
    def from_spellings(cls, spellings: Iterable[bytes]) -> TokenBytes:
        """From each token's bytes, in order of id."""
        spellings = tuple(spellings)
        lengths = np.array([len(spelling) for spelling in spellings], dtype=np.intp)
        order = np.argsort(lengths, kind="stable")
        token_ids = order[np.count_nonzero(lengths == 0) :]
        columns = [
            bytes(spellings[i][j] for i in order[np.count_nonzero(lengths <= j) :])
            for j in range(lengths.max(initial=0))
        ]
        return cls(
            spellings, token_ids, tuple(np.frombuffer(column, np.uint8) for column in columns)
        )

    @property
    def vocab_size(self) -> int:
        return len(self.spellings)

    @cached_property
    def alphabet(self) -> npt.NDArray[np.bool_]:
        """Which bytes stand in a token at all, [256]."""
        known = np.zeros(256, dtype=np.bool_)
        for column in self.columns:
            known[column] = True
        return known


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic finite automaton over bytes: which texts are wanted, in UTF-8.

    It starts in state 0. From every other state something wanted can still be reached, so whoever
    stays out of DEAD never gets stuck. Where nothing is wanted at all, only the start is there, and
    it does not accept.
    """

    table: npt.NDArray[np.int32]
    """The next state, [num_states, 256]."""
    accepting: npt.NDArray[np.bool_]
    """Whether a text that leads here is complete, [num_states]."""

    @classmethod
    def pruned(
        cls, table: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]
    ) -> ByteAutomaton:
        """Without the states from which no accepting one can be reached: those become DEAD."""
        kept = _leading_to(accepting, table)
        kept[START] = True
        number = np.append(np.cumsum(kept, dtype=np.int32) - 1, np.int32(DEAD))
        number[:-1][~kept] = DEAD
        return cls(number[table[kept]], accepting[kept])

    def restricted(self, alphabet: npt.NDArray[np.bool_]) -> ByteAutomaton:
        """Only the texts that can be written with these bytes, [256]."""
        table = np.where(alphabet, self.table, np.int32(DEAD))
        return ByteAutomaton.pruned(table, self.accepting)

    @property
    def num_states(self) -> int:
        return len(self.table)

    def run(self, data: bytes, state: int = START) -> int:
        """The state after reading these bytes, DEAD from the first that does not fit."""
        for byte in data:
            if state == DEAD:
                break
            state = int(self.table[state, byte])
        return state

    def matches(self, data: bytes) -> bool:
        """Whether the automaton accepts this text as a whole."""
        state = self.run(data)
        return state != DEAD and bool(self.accepting[state])

    def minimized(self) -> ByteAutomaton:
        """The smallest automaton for the same texts; equal texts give equal tables.

        States that no continuation tells apart become one (Hopcroft 1971, "An n log n algorithm
        for minimizing states in a finite automaton"), numbered in the order of a breadth-first
        walk over the bytes.
        """
        # Bytes that do the same everywhere count as one.
        columns, class_of_byte = _byte_classes(self.table)
        block_of = _equivalent(columns, self.accepting)
        _, member = np.unique(block_of, return_index=True)  # one state of each block
        table = np.append(block_of, DEAD)[columns[member]]
        order = _breadth_first(table, int(block_of[START]))
        number = np.full(len(member) + 1, DEAD, dtype=np.int32)
        number[order] = np.arange(len(order))
        table = number[table[order]]
        return ByteAutomaton(table[:, class_of_byte], self.accepting[member[order]])


class TokenMasker:
    """Which tokens may come next in each state of an automaton. Sequences may share one.

    Args:
        automaton: over the text of the output. Ways that need a byte which no token has are left
            out, as they lead nowhere.
        token_bytes: the vocabulary.
        textless: whether tokens that are no text (control tokens, ids without token) are allowed,
            everywhere and without effect. A constraint that says what the text *is* leaves them
            out; one that says what it is *not* has nothing against them.
        max_cached_bytes: masks take at most this much; the one unused for longest goes first.
    """

    def __init__(
        self,
        automaton: ByteAutomaton,
        token_bytes: TokenBytes,
        *,
        textless: bool = False,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ):
        self.automaton = automaton.restricted(token_bytes.alphabet)
        self.token_bytes = token_bytes
        self.textless = textless
        self.max_cached_bytes = max_cached_bytes
        # Index DEAD, -1, means the last row: what is dead stays so.
        self._table = np.vstack([self.automaton.table, np.full((1, 256), DEAD, dtype=np.int32)])
        self._masks: dict[int, npt.NDArray[np.bool_]] = {}

    def allowed(self, state: int) -> npt.NDArray[np.bool_]:
        """Tokens that can be read from this state on, [vocab_size]; shared, so read-only.

        There may be none at all in a state that does not accept: where the next byte stands only
        within tokens that do not fit.
        """
        mask = self._masks.pop(state, None)
        if mask is None:
            mask = self._read_all(state)
        self._masks[state] = mask  # last in the dict: used last
        while len(self._masks) > max(1, self.max_cached_bytes // mask.nbytes):
            del self._masks[next(iter(self._masks))]
        return mask

    def step(self, state: int, token_id: int) -> int:
        """The state after this token, DEAD if it is not allowed."""
        known = 0 <= token_id < self.token_bytes.vocab_size
        spelling = self.token_bytes.spellings[token_id] if known else b""
        if not spelling:
            return state if known and self.textless else DEAD
        return self.automaton.run(spelling, state)

    @property
    def cached_bytes(self) -> int:
        """What the masks kept now take."""
        return sum(mask.nbytes for mask in self._masks.values())

    def _read_all(self, state: int) -> npt.NDArray[np.bool_]:
        """Run every token through the automaton, one byte column after the other."""
        token_ids = self.token_bytes.token_ids
        states = np.full(len(token_ids), state, dtype=np.int32)
        for column in self.token_bytes.columns:
            longest = states[-len(column) :]  # a view: the tokens that have this column
            alive = np.flatnonzero(longest != DEAD)
            longest[alive] = self._table[longest[alive], column[alive]]
        mask = np.full(self.token_bytes.vocab_size, self.textless)
        mask[token_ids] = states != DEAD
        mask.flags.writeable = False
        return mask


class AutomatonMatcher(Matcher):
    """Where one sequence stands in an automaton."""

    def __init__(self, masker: TokenMasker, state: int = START, num_synced: int = 0):
        self.masker = masker
        self.state = state
        self._num_synced = num_synced

    def sync(self, output_ids: Sequence[int]) -> None:
        for position in range(self._num_synced, len(output_ids)):
            state = self.masker.step(self.state, output_ids[position])
            if state == DEAD:
                raise ValueError(f"token {output_ids[position]} is not allowed at {position}")
            self.state = state
            self._num_synced = position + 1

    def allowed(self) -> npt.NDArray[np.bool_]:
        return self.masker.allowed(self.state)

    @property
    def may_end(self) -> bool:
        return bool(self.masker.automaton.accepting[self.state])

    @property
    def is_over(self) -> bool:
        return self.may_end and not self.allowed().any()

    def fork(self) -> AutomatonMatcher:
        return AutomatonMatcher(self.masker, self.state, self._num_synced)


def avoid(words: Sequence[bytes]) -> ByteAutomaton:
    """Accepts every text that contains none of the words (Aho & Corasick 1975).

    The state is the longest end of the text that some word begins with. Where no word goes on from
    there with the next byte, the longest *shorter* such end decides: with the words "abc" and "bd",
    after "ab" that is "b", so a "d" would complete "bd".

    Raises:
        ValueError: a word is empty, or there are too many of them.
    """
    if b"" in words:
        raise ValueError("bad_words: one is empty, and every text contains it")
    children, forbidden = trie(words, "bad_words")
    table = np.full((len(children), 256), START, dtype=np.int32)
    shorter = [START] * len(children)
    queue = [START]
    for node in queue:  # beginnings of words, the shortest first
        table[node] = table[shorter[node]]
        for byte, child in children[node].items():
            shorter[child] = START if node == START else int(table[node, byte])
            forbidden[child] |= forbidden[shorter[child]]
            table[node, byte] = child
            queue.append(child)
    table[forbidden] = DEAD
    return ByteAutomaton.pruned(table, ~forbidden)


def trie(
    texts: Sequence[bytes], parameter: str
) -> tuple[list[dict[int, int]], npt.NDArray[np.bool_]]:
    """The tree of all beginnings of texts: each one's children by byte, and whether it is a text.

    Raises:
        ValueError: there are more than MAX_STATES beginnings; it names the parameter.
    """
    children: list[dict[int, int]] = [{}]
    ends = set()
    for text in texts:
        node = START
        for byte in text:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
            node = children[node][byte]
        ends.add(node)
        if len(children) > MAX_STATES:
            raise ValueError(
                f"{parameter}: {len(children):,} or more different beginnings of texts, in bytes, "
                f"are more than MAX_STATES={MAX_STATES:,}"
            )
    is_text = np.zeros(len(children), dtype=np.bool_)
    is_text[list(ends)] = True
    return children, is_text


def _byte_classes(
    table: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.intp]]:
    """The different columns of a table, [num_states, num_classes], and which one each byte has."""
    number: dict[bytes, int] = {}
    by_byte = np.ascontiguousarray(table.T)
    classes = [number.setdefault(column.tobytes(), len(number)) for column in by_byte]
    class_of_byte, first = np.array(classes), [classes.index(index) for index in range(len(number))]
    return by_byte[first].T, class_of_byte


def _predecessors(column: npt.NDArray[np.int32]) -> dict[int, list[int]]:
    """Which states a state is reached from, through one column of a table."""
    sources: dict[int, list[int]] = {}
    for source, target in enumerate(column.tolist()):
        if target != DEAD:
            sources.setdefault(target, []).append(source)
    return sources


def _leading_to(
    accepting: npt.NDArray[np.bool_], table: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """From which states an accepting one can be reached."""
    columns, _ = _byte_classes(table)
    source, byte_class = np.nonzero(columns != DEAD)
    edges = np.unique(columns[source, byte_class].astype(np.int64) * len(table) + source)
    target, source = np.divmod(edges, len(table))  # in order of target
    bounds = np.searchsorted(target, np.arange(len(table) + 1))
    leading = accepting.copy()
    queue = np.flatnonzero(accepting).tolist()
    for state in queue:
        sources = source[bounds[state] : bounds[state + 1]]
        new = sources[~leading[sources]]
        leading[new] = True
        queue += new.tolist()
    return leading


def _equivalent(
    columns: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int32]:
    """A number for each state, the same for two that no continuation tells apart.

    States start in two blocks, accepting and not. A block splits those blocks of which some states
    lead into it by a byte, and some do not. Of the halves only the smaller one has to do so too:
    what the larger one would tell apart, the two together already have.
    """
    sources_by_class = [_predecessors(column) for column in columns.T]
    halves = (set(np.flatnonzero(accepting).tolist()), set(np.flatnonzero(~accepting).tolist()))
    blocks = [half for half in halves if half]
    block_of = np.where(accepting, 0, len(blocks) - 1).tolist()
    waiting = set(range(len(blocks)))
    while waiting:
        splitter = tuple(blocks[waiting.pop()])
        for sources in sources_by_class:
            touched: dict[int, set[int]] = {}
            for target in splitter:
                for source in sources.get(target, ()):
                    touched.setdefault(block_of[source], set()).add(source)
            for block, inside in touched.items():
                if len(inside) == len(blocks[block]):
                    continue
                blocks[block] -= inside
                smaller, blocks[block] = sorted((inside, blocks[block]), key=len)
                for state in smaller:
                    block_of[state] = len(blocks)
                waiting.add(len(blocks))
                blocks.append(smaller)
    return np.array(block_of, dtype=np.int32)


def _breadth_first(table: npt.NDArray[np.int32], start: int) -> list[int]:
    """The states that can be reached, nearest first, and in order of bytes."""
    order = {start: None}
    queue = [start]
    for state in queue:
        new = [target for target in dict.fromkeys(table[state].tolist()) if target not in order]
        new = [target for target in new if target != DEAD]
        order |= dict.fromkeys(new)
        queue += new
    return queue
