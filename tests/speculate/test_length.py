"""Adaptive draft lengths, in a simulated world whose costs and acceptance are known."""

import random
from statistics import mean

import numpy as np
import pytest

from pdlab import SamplingParams
from pdlab.engine import Sequence
from pdlab.engine.drafting import Outcome
from pdlab.speculate import AdaptiveLength, FixedLength, best_num_tokens
from pdlab.speculate.length import MOST_AUTO, Acceptance, Times


class World:
    """Steps whose times, and drafts whose fates, are drawn from what is known."""

    def __init__(self, token_s: float, check_s: float = 0.0, plain_s: float = 1.0):
        self.token_s, self.check_s, self.plain_s = token_s, check_s, plain_s
        self.draw = random.Random(0)
        self.prompt_s = 0.0
        """What a prompt beside the decodes takes, in a quarter of the steps."""
        self.time_s = 0.0
        self.num_tokens = 0

    def step_s(self, num_drafted: int) -> float:
        return self.plain_s + self.check_s * num_drafted

    def step(self, length, sequences, acceptances, limit=64) -> list[int]:
        lengths = length.choose(sequences, [limit] * len(sequences))
        outcomes = []
        for sequence, acceptance, drafted in zip(sequences, acceptances, lengths, strict=True):
            accepted = 0
            while accepted < drafted and self.draw.random() < acceptance:
                accepted += 1
            outcomes += [Outcome(sequence, drafted, accepted)] * (drafted > 0)
            self.num_tokens += accepted + 1
        step_s = self.step_s(sum(lengths))
        step_s += self.prompt_s * (self.draw.random() < 0.25)
        draft_s = self.token_s * max(lengths)
        self.time_s += step_s + draft_s
        length.learn(outcomes, draft_s, step_s)
        return lengths

    def steps(self, length, number, acceptances) -> list[list[int]]:
        sequences = [sequence(f"r{i}") for i in range(len(acceptances))]
        return [self.step(length, sequences, acceptances) for _ in range(number)]


def sequence(name: str = "r0") -> Sequence:
    return Sequence(name, name, [1], SamplingParams())


@pytest.mark.parametrize(
    ("acceptance", "token_s", "check_s"),
    [(0.9, 0.1, 0.02), (0.6, 0.3, 0.05), (0.9, 0.02, 0.3), (0.75, 0.0, 0.1), (0.3, 0.01, 0.01)],
)
def test_the_rate_comes_near_that_of_the_best_fixed_length(acceptance, token_s, check_s) -> None:
    length, world = AdaptiveLength(), World(token_s, check_s)
    world.steps(length, 2000, [acceptance])
    best = best_num_tokens(acceptance, token_s, check_s, most=MOST_AUTO)
    fixed = World(token_s, check_s)
    fixed.steps(FixedLength(best), 2000, [acceptance])
    assert best > 0
    assert world.num_tokens / world.time_s > 0.93 * fixed.num_tokens / fixed.time_s


def test_drafts_that_do_not_pay_end_and_are_tried_now_and_then() -> None:
    length, world = AdaptiveLength(), World(token_s=0.5, check_s=0.1)
    lengths = [each[0] for each in world.steps(length, 1500, [0.2])]
    drafting = [i for i, drafted in enumerate(lengths) if drafted]
    late = [i for i in drafting if i > 300]
    assert 2 <= len(late) <= 12
    assert world.num_tokens / world.time_s > 0.93  # of plain decoding


def test_it_recovers_when_drafts_begin_to_pay() -> None:
    length, world = AdaptiveLength(), World(token_s=0.1, check_s=0.05)
    world.steps(length, 600, [0.05])
    assert length.depth == 0
    lengths = [each[0] for each in world.steps(length, 600, [0.95])]
    assert mean(lengths[-100:]) > 4


def test_each_sequence_has_the_length_that_it_deserves() -> None:
    length, world = AdaptiveLength(), World(token_s=0.0, check_s=0.15)
    lengths = world.steps(length, 400, [0.95, 0.1])
    copies, chats = (mean(column) for column in zip(*lengths[-100:], strict=True))
    assert copies > 4
    assert chats < 1.5


def test_steps_that_compute_a_prompt_besides_do_not_hide_what_drafts_cost() -> None:
    length, world = AdaptiveLength(), World(token_s=0.1, check_s=0.02)
    world.prompt_s = 20.0
    lengths = [each[0] for each in world.steps(length, 1500, [0.8])]
    best = best_num_tokens(0.8, 0.1, 0.02, most=MOST_AUTO)
    assert abs(mean(lengths[-500:]) - best) < 2.5


def test_limits_hold_and_nothing_is_learned_of_nobody() -> None:
    length = AdaptiveLength()
    one, two = sequence(), sequence("r1")
    assert length.choose([], []) == []
    assert length.choose([one, two], [0, 0]) == [0, 0]
    assert length.choose([one, two], [1, 0]) == [0, 0]  # a plain step first
    length.learn([], 0.0, 1.0)
    assert length.choose([one, two], [1, 0]) == [1, 0]
    assert not length.own
    assert FixedLength(3).choose([one, two], [5, 2]) == [3, 2]


def test_tokens_behind_a_rejected_one_say_nothing() -> None:
    acceptance = Acceptance(memory=1.0)
    acceptance.add(2, 8)
    acceptance.add(3, 3)
    assert (acceptance.accepted, acceptance.looked_at) == (5, 6)
    assert acceptance.estimate(prior=0.0, weight=4) == 0.5


def test_times_are_those_of_most_measurements() -> None:
    times = Times()
    times.add(4, 3.0)
    assert times.slope == 0
    assert times.at(np.array([0, 4, 9])).tolist() == [3, 3, 3]
    for amount in (0, 1, 2, 4, 6, 8):
        for seconds in (1 + 0.5 * amount, 100.0, 1 + 0.5 * amount):
            times.add(amount, seconds)
    assert times.slope == 0.5
    assert times.at(np.array([0, 3, 5, 12])).tolist() == [1, 2.5, 3.5, 7]
    for amount in range(20, 40):
        times.add(amount, 7.0)
    assert times.at(np.array([1])).tolist() == [7]  # what it was long ago is forgotten


def test_a_step_up_in_cost_is_seen() -> None:
    """Rows up to 8 cost nothing, and then much: as where other kernels compute."""
    length, world = AdaptiveLength(), World(token_s=0.0)
    world.step_s = lambda num_rows: 1.0 if num_rows <= 8 else 4.0  # type: ignore[method-assign]
    lengths = [each[0] for each in world.steps(length, 600, [0.97])]
    assert mean(lengths[-200:]) == pytest.approx(8, abs=1)


def test_a_draft_is_not_twice_as_long_as_any_before_in_such_a_batch() -> None:
    length, world = AdaptiveLength(), World(token_s=0.0)
    lengths = [each[0] for each in world.steps(length, 8, [1.0])]
    assert lengths == [0, 1, 2, 4, 8, 16, 16, 16]
    both = [max(each) for each in world.steps(length, 3, [1.0, 1.0])]
    assert both == [0, 1, 2]
