"""How fast pdlab is, beside its peers and beside what the machine can do: the numbers.

Decoding is held against the bytes that it must read: the weights once a step, and K and V of each
context. A first token is held against the FLOPs of its prompt in fp32. Products in integers may
pass that mark, as code that reads better than a sum of floats may pass the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from pdlab.bench.files import write_by_line
from pdlab.costmodel import Chunk, Hardware, step_cost
from pdlab.costmodel.calibrate import measure
from pdlab.models import ModelConfig


class Case(NamedTuple):
    """Prompts that are continued together."""

    name: str
    batch: int
    context: int
    """Tokens of each prompt."""


CASES = (Case("b1 c128", 1, 128), Case("b1 c1024", 1, 1024), Case("b8 c128", 8, 128))


class Column(NamedTuple):
    """A number of the table, and the case it comes from."""

    name: str
    case: Case
    kind: Literal["decode", "ttft"]

    @property
    def unit(self) -> str:
        return "tok/s" if self.kind == "decode" else "s"

    def faster(self, first: float, second: float) -> float:
        """How many times as fast the first is."""
        return first / second if self.kind == "decode" else second / first


def columns_of(cases: Sequence[Case]) -> list[Column]:
    """How fast each case decodes, and when single prompts have their first token."""
    decode = [Column(f"decode b{c.batch}, ctx {c.context}", c, "decode") for c in cases]
    return decode + [Column(f"TTFT {c.context}", c, "ttft") for c in cases if c.batch == 1]


@dataclass(frozen=True)
class Contestant:
    """A mode of pdlab, or a peer, as it took part."""

    name: str
    is_pdlab: bool
    version: str
    settings: str
    weight_bytes: int
    """That a decode step reads."""
    kv_element_bytes: float


@dataclass(frozen=True)
class Sample:
    """One case, once."""

    round: int
    name: str
    case: str
    first_s: float
    rest_s: float
    rest_tokens: int

    def value(self, column: Column) -> float:
        """Tokens a second after the first one, or seconds until it."""
        return self.rest_tokens / self.rest_s if column.kind == "decode" else self.first_s


@dataclass(frozen=True)
class Ceilings:
    """What the machine reached at some moment of the run."""

    bandwidth_bytes_s: float
    flops_s: float
    processor_share: float
    """Below 1, other processes were at work."""

    @classmethod
    def measured(cls, threads: int) -> Ceilings:
        """In some seconds, on so many threads."""
        torch.set_num_threads(threads)
        return cls.of(measure("cpu", "fp32"))

    @classmethod
    def of(cls, hardware: Hardware) -> Ceilings:
        share = hardware.details.get("processor_share", 1.0)
        return cls(hardware.bandwidth_bytes_s, hardware.peak("fp32"), share)


class Spread(NamedTuple):
    """Of the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class SpeedBench:
    """All that was measured in one run."""

    model: str
    shape: dict[str, Any]
    machine: dict[str, Any]
    rounds: int
    num_tokens: int
    """Generated of each prompt."""
    threads: int
    cases: list[Case]
    contestants: list[Contestant]
    samples: list[Sample]
    ceilings: list[Ceilings]
    """Before each round, and after the last."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Who could not take part, or not to the end, and why."""
    token_ids: dict[str, dict[str, list[list[int]]]] = field(default_factory=dict)
    """What each contestant generated, by case."""

    # --- numbers ------------------------------------------------------------------------------

    def columns(self) -> list[Column]:
        """Those of which something was measured."""
        measured = {sample.case for sample in self.samples}
        return columns_of([case for case in self.cases if case.name in measured])

    def by_round(self, name: str, column: Column) -> dict[int, float]:
        """A contestant's numbers in a column."""
        return {
            sample.round: sample.value(column)
            for sample in self.samples
            if sample.name == name and sample.case == column.case.name
        }

    def spread(self, name: str, column: Column) -> Spread | None:
        """Median, least and most; None where there is no number."""
        values = list(self.by_round(name, column).values())
        return Spread.of(values) if values else None

    def ratio(self, first: str, second: str, column: Column) -> float | None:
        """How many times as fast the first is: the median of the ratios within each round."""
        ours, theirs = self.by_round(first, column), self.by_round(second, column)
        ratios = [column.faster(ours[n], theirs[n]) for n in ours.keys() & theirs.keys()]
        return median(ratios) if ratios else None

    def best(self, column: Column, *, pdlab: bool) -> Contestant | None:
        """The fastest mode of pdlab, or the fastest peer."""
        found = [
            (contestant, spread.median)
            for contestant in self.contestants
            if contestant.is_pdlab is pdlab and (spread := self.spread(contestant.name, column))
        ]
        if not found:
            return None
        pick = max if column.kind == "decode" else min
        return pick(found, key=lambda pair: pair[1])[0]

    # --- the floor ----------------------------------------------------------------------------

    def floor(self, contestant: Contestant, column: Column, round: int | None = None) -> float:
        """The number that a contestant would reach if nothing but the machine held it back.

        Args:
            round: the machine as it was about this round; None for the median of the run.
        """
        around = self.ceilings if round is None else self.ceilings[round : round + 2]
        batch, context = column.case.batch, column.case.context
        config = ModelConfig(**self.shape)
        if column.kind == "ttft":
            cost = step_cost(
                config,
                [Chunk(0, context)],
                num_sampled=1,
                weight_element_bytes=4,
                kv_element_bytes=4,
            )
            return sum(cost.flops.values()) / median(c.flops_s for c in around)
        tokens = batch * (context + self.num_tokens / 2)
        kv_bytes = tokens * config.kv_bytes_per_token(1) * contestant.kv_element_bytes
        step_bytes = contestant.weight_bytes + kv_bytes
        return batch * median(c.bandwidth_bytes_s for c in around) / step_bytes

    def share(self, contestant: Contestant, column: Column) -> float | None:
        """How much of its floor a contestant reached: the median of the shares of the rounds."""
        shares = [
            column.faster(value, self.floor(contestant, column, round))
            for round, value in self.by_round(contestant.name, column).items()
        ]
        return median(shares) if shares else None

    @property
    def busy(self) -> bool:
        """Whether other processes took a fifth of the processor or more."""
        return median(c.processor_share for c in self.ceilings) < 0.8

    # --- files --------------------------------------------------------------------------------

    def save(self, path: Path, agreement: Sequence[dict[str, Any]] = ()) -> None:
        """Write JSON, a sample a line.

        Args:
            agreement: what came of comparing the texts; kept beside the rest.
        """
        data = asdict(self) | {"agreement": list(agreement)}
        samples = [json.dumps(sample) for sample in data.pop("samples")]
        write_by_line(path, data, "samples", samples)

    @classmethod
    def load(cls, path: Path) -> SpeedBench:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data.pop("agreement")
        kinds = {"contestants": Contestant, "samples": Sample, "ceilings": Ceilings}
        lists = {name: [kind(**row) for row in data[name]] for name, kind in kinds.items()}
        return cls(**data | lists | {"cases": [Case(*row) for row in data["cases"]]})
