"""What weight formats cost: perplexity, KL divergence and greedy tokens, beside the bytes.

Each format reads the same text as the plain weights in float32, in windows that each start from
nothing, and is compared with them token by token. Then both continue the prompts that pdlab ships,
greedily. All of it runs in torch on the values that the codes stand for; what kernels round besides
is not in it.

A model that comes from a 4-bit file loses nothing to 4 bits. What it would lose if it did not is
measured on the same model with regrouped channels (`pdlab.quantize.regroup`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from pdlab.bench.files import write_by_line
from pdlab.bench.topics import topic_tokens
from pdlab.engine import Engine, SamplingParams
from pdlab.machine import describe_machine
from pdlab.models import Model, load
from pdlab.models.calibration_text import calibration_windows
from pdlab.models.decoder import Decoder
from pdlab.quantize import (
    causal_attention,
    fill_decoder,
    pack_decoder,
    parse_format,
    regroup,
    relative_errors,
)
from pdlab.requirements import require_int
from pdlab.shipped import shipped

FORMATS = ("int8", "q8_0", "int4", "int4/int4", "int4:gptq/int4")
REGROUPED = ("int4", "int4:gptq")
"""What is measured on regrouped channels unless told otherwise."""
NUM_TOKENS, WINDOW = 20_000, 512
GREEDY_TOKENS = 32
ROWS = 128
"""Positions whose distributions are held at once."""


@dataclass(frozen=True)
class GreedyPath:
    """The greedy continuation of one prompt, beside that of the plain weights."""

    equal: int
    """Tokens before the first that differs."""
    gap: float | None
    """There, how much more probable the plain weights' best token is than their second, in nats:
    near 0 it was a tie. None if all tokens are equal."""


@dataclass(frozen=True)
class FormatCost:
    """One format on one model, measured."""

    weights: str
    regrouped: bool
    nbytes: int
    """Of all matrices, as a decoding step reads them."""
    perplexity: float
    kl: float
    """Mean KL(plain || this) of the next-token distributions, in nats."""
    agreement: float
    """Share of positions with the same most probable token."""
    greedy: dict[str, GreedyPath]
    """By prompt."""
    errors: dict[str, float]
    """Relative errors of the matrices (`pdlab.quantize.relative_errors`)."""
    pack_s: float
    """Seconds it took to quantize."""

    @property
    def equal_prompts(self) -> int:
        """Prompts whose greedy tokens are all equal."""
        return sum(path.gap is None for path in self.greedy.values())

    @property
    def equal_tokens(self) -> float:
        """Mean number of greedy tokens before the first that differs."""
        return mean(path.equal for path in self.greedy.values()) if self.greedy else 0.0


@dataclass(frozen=True)
class WeightCosts:
    """All formats, and what they were measured on."""

    perplexity: float
    """Of the plain weights."""
    nbytes: int
    costs: list[FormatCost]
    model: str
    text: str
    num_tokens: int
    """Tokens that were predicted: all but the first of each window."""
    window: int
    greedy_tokens: int
    machine: dict[str, str | int]
    versions: dict[str, str]

    def increase(self, cost: FormatCost) -> float:
        """How much higher its perplexity is than the plain weights', as a share."""
        return cost.perplexity / self.perplexity - 1

    def save(self, path: Path) -> None:
        """Write JSON, a format a line."""
        data = asdict(self)
        costs = [json.dumps(cost) for cost in data.pop("costs")]
        write_by_line(path, data, "costs", costs)

    @classmethod
    def load(cls, path: Path) -> WeightCosts:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**data | {"costs": [_cost(cost) for cost in data["costs"]]})


def _cost(values: dict[str, Any]) -> FormatCost:
    greedy = {name: GreedyPath(**path) for name, path in values["greedy"].items()}
    return FormatCost(**values | {"greedy": greedy})


def measure_weights(
    name: str = "smollm2-135m",
    formats: Sequence[str] = FORMATS,
    *,
    regrouped: Sequence[str] = REGROUPED,
    num_tokens: int = NUM_TOKENS,
    window: int = WINDOW,
    greedy_tokens: int = GREEDY_TOKENS,
    progress: bool = False,
) -> WeightCosts:
    """Measure what formats cost a model, on the CPU in float32.

    Some 3 ms a token and format on one core of 2021.

    Args:
        formats: see `pdlab.quantize.formats`.
        regrouped: formats to measure on the model with regrouped channels.
        num_tokens: of the text, `pydoc_data.topics`.
        window: tokens that are read from one start.
        greedy_tokens: to continue each prompt with.

    Raises:
        ValueError: a number is out of range, a format is unknown, or the model has no tokenizer.
    """
    require_int("num_tokens", num_tokens, least=2)
    require_int("window", window, least=2)
    require_int("greedy_tokens", greedy_tokens, least=1)
    asked = [(each, False) for each in formats] + [(each, True) for each in regrouped]
    asked = [(parse_format(each).name, shuffled) for each, shuffled in asked]
    plain = load(name, device="cpu", dtype="fp32", progress=progress)
    token_ids = topic_tokens(plain, num_tokens)
    windows = [token_ids[i : i + window] for i in range(0, num_tokens, window)]
    reader = _Reader(plain, [ids for ids in windows if len(ids) > 1], greedy_tokens, progress)
    costs = []
    for format, shuffled in asked:
        model = replace(plain, decoder=deepcopy(plain.decoder))
        if shuffled:
            regroup(model.decoder)
        costs.append(reader.cost(model, format, shuffled))
    return WeightCosts(
        perplexity=reader.perplexity,
        nbytes=plain.weight_bytes,
        costs=costs,
        model=plain.name,
        text="pydoc_data.topics",
        num_tokens=reader.num_predicted,
        window=window,
        greedy_tokens=greedy_tokens,
        machine=describe_machine() | {"threads": torch.get_num_threads()},
        versions={"torch": torch.__version__},
    )


class _Reader:
    """Knows what the plain weights make of the text, and compares others with it.

    What it keeps is the hidden states before the head: the distributions of 20,000 tokens over a
    vocabulary of 49,152 would take 4 GB.
    """

    def __init__(
        self, plain: Model, windows: list[list[int]], greedy_tokens: int, progress: bool
    ) -> None:
        self._plain, self._windows, self._progress = plain, windows, progress
        self._hidden = [hidden for _, hidden in self._read(plain.decoder, "plain weights")]
        nll = 0.0
        for ids, hidden in zip(windows, self._hidden, strict=True):
            for targets, rows in _parts(ids, hidden):
                nll += _nll(_log_probabilities(plain.decoder, rows), targets)
        self.num_predicted = sum(len(ids) - 1 for ids in windows)
        self.perplexity = math.exp(nll / self.num_predicted)
        self._params = SamplingParams(max_tokens=greedy_tokens, ignore_eos=True, logprobs=2)
        self._greedy = self._continued(plain)

    def cost(self, model: Model, format: str, regrouped: bool) -> FormatCost:
        """Quantize a model, in place, and see what it costs."""
        calibration = calibration_windows(model.tokenizer, model.config)
        start_s = perf_counter()
        packed = pack_decoder(
            model.decoder, format, calibration=calibration, progress=self._progress
        )
        pack_s = perf_counter() - start_s
        errors = relative_errors(model.decoder, packed)
        fill_decoder(model.decoder, packed)
        model = replace(model, packed=packed)
        if regrouped or any(errors.values()):
            perplexity, kl, agreement = self._compare(model.decoder, format)
            continued = self._continued(model)
        else:  # these are the plain weights
            perplexity, kl, agreement, continued = self.perplexity, 0.0, 1.0, self._greedy
        return FormatCost(
            weights=format,
            regrouped=regrouped,
            nbytes=packed.nbytes,
            perplexity=perplexity,
            kl=kl,
            agreement=agreement,
            greedy={name: self._path(name, tokens) for name, (tokens, _) in continued.items()},
            errors=errors,
            pack_s=pack_s,
        )

    def _compare(self, decoder: Decoder, label: str) -> tuple[float, float, float]:
        """Perplexity, KL and agreement on the text."""
        nll = kl = same = 0.0
        for (ids, hidden), right in zip(self._read(decoder, label), self._hidden, strict=True):
            pairs = zip(_parts(ids, hidden), _parts(ids, right), strict=True)
            for (targets, rows), (_, right_rows) in pairs:
                ours = _log_probabilities(decoder, rows)
                theirs = _log_probabilities(self._plain.decoder, right_rows)
                nll += _nll(ours, targets)
                kl += float(F.kl_div(ours, theirs, reduction="sum", log_target=True))
                same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count = self.num_predicted
        return math.exp(nll / count), kl / count, same / count

    def _read(self, decoder: Decoder, label: str) -> Iterator[tuple[list[int], Tensor]]:
        """(token ids, hidden states [num_tokens, hidden_size]) of each window."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(q, k, v, decoder.config.window(layer))

        for ids in tqdm(self._windows, label, disable=not self._progress):
            yield ids, decoder(torch.tensor(ids), torch.arange(len(ids)), attend)

    def _continued(self, model: Model) -> dict[str, tuple[list[int], list[float]]]:
        """By prompt: greedy tokens, and how far each is more probable than the second, in nats."""
        prompts = json.loads((shipped("data") / "prompts.json").read_text(encoding="utf-8"))
        with Engine(model) as engine:
            outputs = engine.generate([each["prompt"] for each in prompts], self._params)
        found = {}
        for each, output in zip(prompts, outputs, strict=True):
            tops = [token.top for token in output.logprobs or []]
            gaps = [first.logprob - second.logprob for first, second in tops]
            found[each["name"]] = output.token_ids, gaps
        return found

    def _path(self, name: str, ours: list[int]) -> GreedyPath:
        theirs, gaps = self._greedy[name]
        pairs = enumerate(zip(ours, theirs, strict=True))
        first = next((i for i, (a, b) in pairs if a != b), None)
        return GreedyPath(len(ours), None) if first is None else GreedyPath(first, gaps[first])


def _parts(ids: list[int], hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some tokens, and the hidden states that each is predicted from."""
    return zip(torch.tensor(ids[1:]).split(ROWS), hidden[:-1].split(ROWS), strict=True)


def _log_probabilities(decoder: Decoder, hidden: Tensor) -> Tensor:
    return decoder.logits(hidden).log_softmax(dim=-1)


def _nll(log_probabilities: Tensor, targets: Tensor) -> float:
    return -float(log_probabilities.gather(1, targets[:, None]).double().sum())
