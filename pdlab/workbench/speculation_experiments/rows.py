"""What a step costs by the tokens it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.models import Model
from pdlab.workbench.experiments import random_prompt
from pdlab.workbench.lesson import progress
from pdlab.workbench.speculation_experiments.guessing import Blind

ROWS = (1, 2, 3, 4, 6, 9, 12, 16)
CONTEXT = 128
STEPS = 3
"""Of each size, a round."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of one sequence, by the model's name and the rows computed; medians."""

    seconds: dict[str, dict[int, float]]

    def plain_s(self, name: str) -> float:
        """A step with one row: plain decoding."""
        return self.seconds[name][1]

    def ratio(self, name: str, rows: int) -> float:
        """A step with so many rows, in plain steps."""
        return self.seconds[name][rows] / self.plain_s(name)

    def slope(self, name: str) -> float:
        """What each further row adds, in plain steps: the median over all sizes."""
        others = [rows for rows in self.seconds[name] if rows > 1]
        return max(0.0, median((self.ratio(name, rows) - 1) / (rows - 1) for rows in others))


def step_costs(
    models: Mapping[str, Model], rows: Sequence[int] = ROWS, rounds: int = 5, backend: str = "cpu"
) -> StepCosts:
    """Steps of one sequence with drafts of every length, in turns; the drafts are nonsense.

    Args:
        rows: tokens that a step computes: the newest, and a draft of one less.
    """
    times: dict[str, dict[int, list[float]]] = {m: {n: [] for n in rows} for m in models}
    engines: dict[str, tuple[Engine, Blind]] = {}
    try:
        for name, model in models.items():
            blind = Blind()
            config = EngineConfig(num_blocks=80, backend=backend, speculation=blind)
            engines[name] = Engine(model, config), blind
            params = SamplingParams(max_tokens=1 << 10, ignore_eos=True, temperature=0)
            engines[name][0].submit(random_prompt(model, CONTEXT), params)
            for size in (0, max(rows) - 1):  # the prompt, and what is compiled for both
                blind.set(size)
                engines[name][0].step()
        for turn in progress(range(rounds), "rows"):
            for size in rows[:: -1 if turn % 2 else 1]:
                for name, (engine, blind) in engines.items():
                    blind.set(size - 1)
                    for _ in range(STEPS):
                        record = engine.step()
                        if record and record.num_tokens == size:
                            times[name][size].append(record.wall_s)
    finally:
        for engine, _ in engines.values():
            engine.close()
    return StepCosts({m: {n: median(t) for n, t in of.items() if t} for m, of in times.items()})
