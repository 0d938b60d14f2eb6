"""One sequence on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from pdlab.engine.output import FinishReason
from pdlab.kvcache import Prefix
from pdlab.sampling import Matcher, SamplingParams, Tally
from pdlab.trace import Phase


class SequenceState(Enum):
    """Where a sequence is in its life.

    WAITING -> PREFILLING -> RUNNING -> FINISHED
                   ^   \\________|
                   |            v
                   +------ PREEMPTED

    Where the prompt is computed by one engine and the output by another (disaggregation):

    WAITING -> PREFILLING -> HELD -> FINISHED      here, until its K and V have been fetched
                   RESERVED -> RUNNING             there, until they have come
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    PREEMPTED = "preempted"
    HELD = "held"
    RESERVED = "reserved"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """Tokens so far, how many of them have K and V in the cache, and the blocks that hold these.

    The invariant that makes one loop serve prefill, chunked prefill, decode and recomputation:
    every token up to `num_computed_tokens` has its K and V in `block_table`; the tokens after it
    are what the next steps compute; when none is left uncomputed, the next token is sampled. So a
    decoding sequence always has exactly one uncomputed token, its newest.
    """

    sequence_id: str
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int = 0
    uses_prefix_cache: bool = False
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens that the prefix cache spared when it was admitted, until that step is booked."""
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    """Blocks in host memory that hold the computed tokens while the sequence is swapped out."""
    prefixes: list[Prefix] = field(default_factory=list)
    """What the full blocks hold, for those that others may find."""
    block_mass: list[float] = field(default_factory=list)
    """Attention that each block has received; kept only where blocks are dropped by it."""
    forks: list[Sequence] = field(default_factory=list)
    """Further samples of the same prompt, which start when the prompt is computed."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    constraint: Matcher | None = None
    bad_words: Matcher | None = None
    holds: bool = False
    """To be held once its next token is drawn: another engine goes on with it."""
    paused: bool = False
    """Not to run for now: its reader has not taken what is there."""
    arrival: int = 0
    """Its place in the order in which requests came; samples of one request share it."""
    turn: int = 0
    """Its place in the order in which requests were first admitted; 0 before."""
    arrival_s: float = 0.0
    """When it came."""
    priority: int = 0
    """What the policy `priority` goes by: the lower, the sooner."""
    ttft_slo_s: float | None = None
    """What the policy `deadline` goes by: the latest first token, counted from the arrival."""
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @cached_property
    def tally(self) -> Tally:
        """The tokens it has seen, counted when penalties first ask."""
        return Tally(self.num_prompt_tokens)

    @property
    def may_stop(self) -> bool:
        """Whether the output is long enough to end."""
        return self.num_output_tokens >= self.params.min_tokens

    @property
    def is_stopped_by_token(self) -> bool:
        """Whether the newest token ends it. Before `min_tokens` were there, none could."""
        is_stop = self.token_ids[-1] in self.stop_ids
        return is_stop and self.num_output_tokens > self.params.min_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def phase(self) -> Phase:
        """`decode` for the one newest output token, `prefill` for anything else.

        Recomputing a preempted sequence is a prefill: many known tokens in one pass.
        """
        decoding = self.num_output_tokens > 0 and self.num_uncomputed_tokens == 1
        return "decode" if decoding else "prefill"

    def add_mass(self, block_mass: list[float]) -> None:
        """Add the attention that each block of the table received in a step."""
        self.block_mass += [0.0] * (len(block_mass) - len(self.block_mass))
        for i, mass in enumerate(block_mass):
            self.block_mass[i] += mass
