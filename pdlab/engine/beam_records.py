"""What a beam search found and what it did on the way: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from pdlab.trace import BlockMove


@dataclass(frozen=True)
class Hypothesis:
    """A finished text."""

    token_ids: list[int]
    """Without the prompt; with the end token, if there is one."""
    text: str
    """Without special tokens; empty where the model has no tokenizer."""
    sum_logprob: float
    """Natural logarithm of the text's probability."""
    score: float
    """What hypotheses are ordered by: `sum_logprob / len(token_ids) ** length_penalty`."""
    finish_reason: str
    """`stop` at an end token, `length` otherwise."""


@dataclass(frozen=True)
class BeamNode:
    """A beam as a step chose it: a node of the tree of beams."""

    parent: int
    """Place among the beams of the step before; 0, the prompt, in the first step."""
    token_id: int
    logprob: float
    """Of this token."""
    sum_logprob: float
    """Of all tokens up to this one."""
    score: float
    """What it would count for if it ended here."""
    block_table: list[int]
    """The KV blocks of all tokens before this one, as taken over from the parent; -1 where a block
    fell out of the window. This token is written in the next step, which may copy the last one."""


@dataclass(frozen=True)
class BeamStep:
    """What one step chose, and the memory it had."""

    beams: list[BeamNode]
    """Those that go on, the best first; or would have, had the search not ended with this step."""
    finished: list[BeamNode]
    """Those that ended with this step, the best first, whether they are among the output or not."""
    copies: list[BlockMove]
    """Blocks copied on write, before this step computed: K and V of the beams chosen last."""
    num_blocks: int
    """Blocks held while it computed, each counted once; in the first step, the most of all the
    prompt's chunks."""
    num_blocks_unshared: int
    """The same, a block counted for each beam that held it: what it would be without sharing."""


@dataclass(frozen=True)
class BeamOutput:
    """What a beam search found, and what the memory did."""

    prompt: str
    prompt_ids: list[int]
    hypotheses: list[Hypothesis]
    """As many as beams, the best first."""
    steps: list[BeamStep]
    """One for each token; the search as a tree."""
    block_size: int

    @property
    def peak_blocks(self) -> int:
        """Most KV blocks held at once."""
        return max(step.num_blocks for step in self.steps)

    @property
    def peak_blocks_unshared(self) -> int:
        """What the peak would be if no two beams shared a block."""
        return max(step.num_blocks_unshared for step in self.steps)

    @property
    def final_blocks(self) -> int:
        """KV blocks held in the last step."""
        return self.steps[-1].num_blocks

    @property
    def final_blocks_unshared(self) -> int:
        return self.steps[-1].num_blocks_unshared

    @property
    def blocks_saved(self) -> int:
        """What sharing takes off the peak."""
        return self.peak_blocks_unshared - self.peak_blocks

    @property
    def num_copies(self) -> int:
        """Blocks copied on write."""
        return sum(len(step.copies) for step in self.steps)

    @property
    def num_forks(self) -> int:
        """Beams that began as another's twin. The last step's choice never began."""
        going_on = [step.beams for step in self.steps[:-1]]
        return sum(len(beams) - len({node.parent for node in beams}) for beams in going_on)
