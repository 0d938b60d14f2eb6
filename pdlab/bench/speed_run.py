"""Measure pdlab's modes and their peers, round after round: `pdlab bench`.

Every mode of pdlab and every peer is a process of its own, asked through the same few lines. A
round measures each of them on each case, one after the other, each round beginning with another;
so a machine that is slow for a while slows all alike, and ratios are taken within a round. The
machine's own floor (bandwidth of a read, FLOP/s of a matrix product, all threads) is measured
before each round and after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tqdm.auto import tqdm

from pdlab.bench.contest import Entry, PeerError, PeerProcess
from pdlab.bench.prompts import passages
from pdlab.bench.speed import CASES, Case, Ceilings, Contestant, Sample, SpeedBench
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.requirements import require_int

OPEN_S, ANSWER_S = 900.0, 300.0
"""How long a peer may take to load and compile, and to answer; it is left out then."""
WARM_UP_TOKENS = 4
"""Each case is run once with so many, before anything counts."""
Tell = Callable[[str], None]
Start = Callable[[Entry, int], PeerProcess]
"""(who, threads): a process to be asked."""


def measure_speed(
    model: Model,
    entries: Sequence[Entry],
    *,
    rounds: int = 5,
    num_tokens: int = 48,
    threads: int,
    cases: Sequence[Case] = CASES,
    ceilings: Callable[[int], Ceilings] = Ceilings.measured,
    start: Start = PeerProcess,
    tell: Tell = lambda line: None,
    progress: bool = False,
) -> SpeedBench:
    """Measure all entries on all cases, round after round.

    Args:
        model: for its tokenizer and shape; its weights are not used.
        num_tokens: generated of each prompt.
        threads: for each entry alike.
        ceilings: measures the machine, on so many threads.
        tell: is told at once of an entry that is left out.

    Raises:
        ValueError: a number is out of range, or two entries have one name.
    """
    require_int("rounds", rounds, least=1, most=1000)
    require_int("num_tokens", num_tokens, least=2, most=4096)
    require_int("threads", threads, least=1, most=1024)
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"two entries have the same name: {', '.join(names)}")
    prompts = {case.name: passages(model, case.batch, case.context) for case in cases}
    contest = Contest(prompts, num_tokens, tell)
    machine = describe_machine()
    found: list[Ceilings] = []
    with ExitStack() as stack:
        for entry in tqdm(entries, desc="loading", disable=not progress, leave=False):
            contest.admit(entry, threads, start, stack)
        turns = list(_turns(names, cases, rounds))
        with tqdm(total=len(turns), desc="measuring", disable=not progress, leave=False) as bar:
            for number, name, case in turns:
                if number == len(found):
                    found.append(ceilings(threads))
                contest.run(number, name, case)
                bar.update()
        found.append(ceilings(threads))
    return SpeedBench(
        model=model.name,
        shape=model.config.to_dict(),
        machine=machine,
        rounds=rounds,
        num_tokens=num_tokens,
        threads=threads,
        cases=list(cases),
        ceilings=found,
        **contest.results(),
    )


def _turns(
    names: Sequence[str], cases: Sequence[Case], rounds: int
) -> Iterator[tuple[int, str, Case]]:
    """(round, who, case): every name on every case once a round, each beginning with another."""
    for number in range(rounds):
        for case in cases:
            for i in range(len(names)):
                yield number, names[(number + i) % len(names)], case


class Contest:
    """Those who take part, and what they did so far.

    Args:
        prompts: by case.
    """

    def __init__(self, prompts: Mapping[str, list[list[int]]], num_tokens: int, tell: Tell):
        self.contestants: list[Contestant] = []
        self.samples: list[Sample] = []
        self.skipped: dict[str, str] = {}
        self.token_ids: dict[str, dict[str, list[list[int]]]] = {}
        self._prompts, self._num_tokens, self._tell = prompts, num_tokens, tell
        self._most_tokens = max(
            sum(len(ids) + num_tokens for ids in batch) for batch in prompts.values()
        )
        self._running: dict[str, PeerProcess] = {}
        self.open_s, self.answer_s = OPEN_S, ANSWER_S

    def admit(self, entry: Entry, threads: int, start: Start, stack: ExitStack) -> None:
        """Start one, load its model, and run each case once for nothing."""
        try:
            peer = stack.enter_context(start(entry, threads))
        except PeerError as error:
            self._leave_out(entry.name, error)
            return
        try:
            [prompt, *_] = next(iter(self._prompts.values()))
            about = peer.open([prompt[:16]], self._most_tokens, self.open_s)
            for prompts in self._prompts.values():
                peer.generate(prompts, WARM_UP_TOKENS, self.open_s)
        except PeerError as error:
            peer.close()
            self._leave_out(entry.name, error)
            return
        peer.rest()
        self._running[entry.name] = peer
        known = {name: about[name] for name in Contestant.__dataclass_fields__ if name in about}
        self.contestants.append(Contestant(entry.name, entry.is_pdlab, **known))

    def run(self, number: int, name: str, case: Case) -> None:
        """Measure one, if it is still there."""
        if name not in self._running:
            return
        peer = self._running[name]
        peer.wake()
        try:
            answer = peer.generate(self._prompts[case.name], self._num_tokens, self.answer_s)
        except PeerError as error:
            self._running.pop(name).close()
            self._leave_out(name, error)
            return
        peer.rest()
        times = answer.first_s, answer.rest_s, answer.rest_tokens
        self.samples.append(Sample(number, name, case.name, *times))
        self.token_ids.setdefault(name, {}).setdefault(case.name, answer.token_ids)

    def retire(self, name: str) -> None:
        """End one that was measured."""
        if name in self._running:
            self._running.pop(name).close()

    def results(self) -> dict[str, Any]:
        """What a `SpeedBench` is made of."""
        names = ("contestants", "samples", "skipped", "token_ids")
        return {name: getattr(self, name) for name in names}

    def _leave_out(self, name: str, error: PeerError) -> None:
        self.skipped[name] = str(error)
        self._tell(f"{name}: left out: {error}")
