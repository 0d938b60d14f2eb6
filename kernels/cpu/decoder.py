"""A decoder that is ready to compute: weights, tables and buffers around `step.run_program`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from . import step
from . import step_tables as t
from .ahead import addresses
from .attention_plan import AttentionPlan, PagedKV, address
from .chunks import MOST_CHUNKS
from .linear import FP32_ROWS, panels_per_chunk
from .team import Team
from .weights import FORMATS, GROUP, Weight

_ROWS_A_CHUNK = 64  # at most; a row is some microseconds of work
_OUTLINES = 64  # that are kept
_PARTS: dict[str, tuple[str, Any]] = {
    "embed": ("embed", step.embed),
    "input norm": ("qkv", step.norm),
    "project": ("qkv", step.multiply_panels),
    "rotate": ("qkv", step.rotate),
    "write": ("attention", step.write),
    "attend": ("attention", step.attend),
    "combine": ("attention", step.combine),
    "round attended": ("output", step.round_rows),
    "output": ("output", step.multiply_panels),
    "MLP norm": ("mlp", step.norm),
    "gate and up": ("mlp", step.multiply_panels),
    "gate": ("mlp", step.gate),
    "down": ("mlp", step.multiply_panels),
    "final norm": ("logits", step.norm),
    "logits": ("logits", step.multiply_panels),
}
"""Phases by their name: the stage that each belongs to, and what computes it."""
NAMES = tuple(_PARTS)
_STAGES = tuple(dict.fromkeys(stage for stage, _ in _PARTS.values()))
_STAGE_OF = np.array([_STAGES.index(stage) for stage, _ in _PARTS.values()])


class Shape(NamedTuple):
    """Sizes of a Llama-family decoder."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class LayerWeights:
    """One layer. `qkv` has the rows of q, k and v, `gate_up` those of gate and up; norms float32.

    `window_kind` says which of the plan's windows the layer looks through.
    """

    input_norm: torch.Tensor
    qkv: Weight
    output: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window_kind: int = 0


class PhaseTime(NamedTuple):
    """When a phase of a step began, by the system's monotonic clock."""

    name: str
    """One of NAMES."""
    stage: str
    layer: int
    began_s: float


@dataclass(frozen=True)
class StepResult:
    """What a step computed.

    Attributes:
        hidden: float32 [rows, hidden_size], before the final norm.
        logits: float32 [samples, vocab_size].
        ended_s: when its last phase ended, by the same clock.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    ended_s: float
    _program: np.ndarray = field(repr=False)
    _stages: np.ndarray = field(repr=False)
    _stamps: np.ndarray = field(repr=False)

    @property
    def phases(self) -> list[PhaseTime]:
        """Its phases in order; none where the system has no clock for it."""
        began_s = self._stamps[:, 0] + 1e-9 * self._stamps[:, 1]
        rows = self._program[:, [t.NAME, t.LAYER, t.CHUNKS]].tolist()
        return [
            PhaseTime(NAMES[name], _PARTS[NAMES[name]][0], layer, began)
            for (name, layer, chunks), began in zip(rows, began_s.tolist(), strict=True)
            if chunks and step.TELLS_TIME
        ]

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds by stage; empty where the system has no clock for it."""
        if not step.TELLS_TIME:
            return {}
        began_s = self._stamps[:, 0] + 1e-9 * self._stamps[:, 1]
        # a phase without chunks has no time of its own: it begins with the one before, of its stage
        np.maximum.accumulate(began_s, out=began_s)
        spent_s = np.full(len(began_s), self.ended_s)
        spent_s[:-1] = began_s[1:]
        spent_s -= began_s
        sums = np.bincount(self._stages, spent_s, len(_STAGES)).tolist()
        return {stage: seconds for stage, seconds in zip(_STAGES, sums, strict=True) if seconds > 0}


@dataclass(frozen=True)
class _Outline:
    """A program, but for how many chunks attention has; and where that is to be entered."""

    program: np.ndarray
    kinds: np.ndarray
    """Of the layers."""

    @cached_property
    def stages(self) -> np.ndarray:
        return _STAGE_OF[self.program[:, t.NAME]]

    @cached_property
    def attention(self) -> list[np.ndarray]:
        """The rows of `write`, `attend` and `combine`."""
        names = self.program[:, t.NAME]
        return [np.flatnonzero(names == NAMES.index(x)) for x in ("write", "attend", "combine")]

    def filled(self, plan: AttentionPlan) -> np.ndarray:
        program = self.program.copy()
        writes, attends, combines = self.attention
        program[writes, t.CHUNKS] = plan.write_chunks
        program[attends, t.CHUNKS] = np.array(plan.attend_chunks)[self.kinds]
        program[combines, t.CHUNKS] = np.array(plan.combine_chunks)[self.kinds]
        return program


def why_not(shape: Shape) -> str | None:
    """What keeps a decoder of this shape from being compiled; None if nothing does."""
    for name in ("hidden_size", "intermediate_size", "q_size"):
        if getattr(shape, name) % GROUP:
            return f"{name}={getattr(shape, name)} is not a multiple of {GROUP}"
    if shape.head_dim % 16 or shape.head_dim > 256:
        return f"head_dim={shape.head_dim} is not a multiple of 16 up to 256"
    return None


class CompiledDecoder:
    """Runs steps of a decoder over paged K and V.

    Args:
        embedding: float32 [vocab_size, hidden_size].
        cos, sin: float32 [positions, head_dim / 2].
        kv: where K and V lie.
        team: the threads that compute.
        planes: of rounded activations, see `linear`.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[LayerWeights],
        embedding: torch.Tensor,
        final_norm: torch.Tensor,
        head: Weight,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: PagedKV,
        team: Team,
        *,
        planes: int = 2,
    ) -> None:
        if reason := why_not(shape):
            raise ValueError(reason)
        self.shape, self.layers, self.head, self.kv, self.team = shape, layers, head, kv, team
        self._kept: list[torch.Tensor] = []  # whose memory the tables name
        self._layer_table = np.array([self._layer_words(layer) for layer in layers], np.int64)
        self._addresses = addresses()
        self._model_table = np.array(
            [
                *shape[:5],
                planes,
                *(self._floats_at(x) for x in (embedding, cos, sin, final_norm)),
                *_weight_words(head),
            ],
            np.int64,
        )
        self._vocab_size, self._num_positions = len(embedding), len(cos)
        self._planes = planes
        self._buffers = _Buffers(shape, 0, planes)
        self._outlines: dict[tuple[int, int, range], _Outline] = {}

    def takes(self, rows: int) -> bool:
        """Whether so many rows are computed sooner here than by torch."""
        first = self.layers[0]  # as all others
        weights = (first.qkv, first.output, first.gate_up, first.down)
        return rows <= FP32_ROWS or all(weight.format != "fp32" for weight in weights)

    def _check(self, numbers: np.ndarray, rows: int, plan: AttentionPlan) -> None:
        """Compiled code looks nothing up: what is out of range is refused here."""
        parts = numbers[:rows], numbers[rows : 2 * rows], numbers[2 * rows :]
        limits = self._vocab_size, self._num_positions, rows
        names = "token_ids", "positions", "sample_rows"
        if not rows or len(parts[1]) != rows or plan.num_rows != rows or plan.kv is not self.kv:
            raise ValueError(f"plan: of {plan.num_rows} rows, for {rows} tokens of this decoder")
        for name, part, limit in zip(names, parts, limits, strict=True):
            if len(part) and not 0 <= part.min() <= part.max() < limit:
                raise ValueError(f"{name}: {part.min()} to {part.max()}, must be 0 to {limit - 1}")

    def _layer_words(self, layer: LayerWeights) -> list[int]:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        weights = (layer.output, layer.gate_up, layer.down)
        return [
            *(self._floats_at(x) for x in norms),
            *_weight_words(layer.qkv, self._floats_at(layer.qkv_bias)),
            *(word for weight in weights for word in _weight_words(weight)),
        ]

    def _floats_at(self, values: torch.Tensor | None) -> int:
        """The address of a float32 tensor, whose memory is kept; 0 where there is none."""
        if values is None:
            return 0
        if values.dtype != torch.float32 or not values.is_contiguous() or values.is_cuda:
            raise ValueError(
                f"values: a contiguous float32 tensor on the CPU is needed, not {values.dtype} "
                f"{tuple(values.shape)} on {values.device}"
            )
        self._kept.append(values.detach())  # a parameter may be given other memory
        return address(values)

    def run(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        plan: AttentionPlan,
        sample_rows: Sequence[int],
        *,
        layers: range | None = None,
        hidden: torch.Tensor | None = None,
    ) -> StepResult:
        """Compute a batch, one row a token; K and V of its tokens are written on the way.

        Args:
            plan: where their K and V go and what they attend to.
            sample_rows: rows whose logits are wanted.
            layers: only these, on `hidden` of those before; logits come with the last layer.

        Raises:
            ValueError: there is no row, a token, position or row is out of range, the plan is
                another decoder's, or the batch is too large for one step.
            MemoryError: a chunk found no room for what it computes in between.
        """
        layers = layers or range(len(self.layers))
        rows, last = len(token_ids), layers.stop == len(self.layers)
        samples = len(sample_rows) if last else 0
        if hidden is None:
            hidden = torch.empty(rows, self.shape.hidden_size)
        logits = torch.empty(samples, self._vocab_size)
        numbers = np.array([*token_ids, *positions, *sample_rows], np.int64)
        self._check(numbers, rows, plan)
        outline = self._outline(rows, samples, layers)
        program = outline.filled(plan)
        if (chunks := int(program[:, t.CHUNKS].sum())) > MOST_CHUNKS:
            raise ValueError(f"token_ids: {rows} in one step make {chunks} chunks of {MOST_CHUNKS}")
        stamps = np.zeros((len(program), 2), np.int64)
        if rows > self._buffers.rows:
            self._buffers = _Buffers(self.shape, rows, self._planes)
        buffers = self._buffers  # kept until the step is over
        batch = np.empty(t.BATCH_WORDS, np.int64)
        at = address(numbers)
        batch[: t.AT_HIDDEN] = rows, samples, at, at + 8 * rows, at + 16 * rows
        batch[t.AT_HIDDEN] = address(hidden)
        batch[t.AT_NORMED : t.AT_LOGITS] = buffers.floats
        batch[t.AT_LOGITS], batch[t.AT_STAMPS] = address(logits), address(stamps)
        batch[t.FAILED] = 0
        batch[t.NORMED_CODES :] = buffers.codes
        self.team.run(
            step.run_program, program, self._model_table, batch, self.kv.table, plan.table,
            np.float32(self.shape.rms_norm_eps),
        )  # fmt: skip
        ended_s = step.now_s()
        if batch[t.FAILED]:
            raise MemoryError(f"no memory to compute {rows} rows in")
        return StepResult(hidden, logits, ended_s, program, outline.stages, stamps)

    def _outline(self, rows: int, samples: int, layers: range) -> _Outline:
        """The program of such a step; of those used last, some are kept."""
        key = rows, samples, layers
        if key in self._outlines:
            self._outlines[key] = self._outlines.pop(key)  # the last one to be forgotten
        else:
            if len(self._outlines) == _OUTLINES:
                del self._outlines[next(iter(self._outlines))]
            kinds = [layer.window_kind for layer in self.layers[layers.start : layers.stop]]
            program = np.array(self._phases(*key), np.int64)
            self._outlines[key] = _Outline(program, np.array(kinds))
        return self._outlines[key]

    def _phases(self, rows: int, samples: int, layers: range) -> list[list[int]]:
        """All of a program but how many chunks attention has."""
        phases = []
        if layers.start == 0:
            phases.append(self._phase("embed", *_by_rows(rows, self.team.num_threads)))
        for number in layers:
            phases += self._layer_phases(number, rows)
        if samples:
            weight = {"AT_WEIGHT": address(self._model_table) + 8 * t.HEAD, "CODES": t.NORMED_CODES}
            norm, by_panels = (
                int(self._model_table[t.AT_FINAL_NORM]),
                self._by_panels(self.head, samples),
            )
            weight["ROWS"] = t.NUM_SAMPLES
            chunks = _by_rows(samples, self.team.num_threads)
            phases.append(self._phase("final norm", *chunks, **weight, AT_MORE=norm))
            phases.append(self._phase("logits", *by_panels, **weight, X=t.AT_NORMED, Y=t.AT_LOGITS))
        return phases

    def _layer_phases(self, number: int, rows: int) -> Iterator[list[int]]:
        layer, words = self.layers[number], self._layer_table[number]
        by_rows = _by_rows(rows, self.team.num_threads)
        at = address(words)
        input_norm, mlp_norm = int(words[t.AT_INPUT_NORM]), int(words[t.AT_MLP_NORM])
        qkv = {"LAYER": number, "AT_WEIGHT": at + 8 * t.QKV, "CODES": t.NORMED_CODES}
        yield self._phase("input norm", *by_rows, **qkv, AT_MORE=input_norm)
        yield self._phase(
            "project", *self._by_panels(layer.qkv, rows), **qkv, X=t.AT_NORMED, Y=t.AT_QKV
        )
        yield self._phase("rotate", *by_rows, LAYER=number, AT_MORE=at)
        for name in ("write", "attend", "combine"):
            yield self._phase(name, 0, 1, LAYER=number, WINDOW_KIND=layer.window_kind)
        output = qkv | {"AT_WEIGHT": at + 8 * t.OUTPUT, "X": t.AT_ATTENDED}
        if layer.output.format != "fp32":
            yield self._phase("round attended", *by_rows, **output)
        add = {"Y": t.AT_HIDDEN, "ACCUMULATE": 1}
        yield self._phase("output", *self._by_panels(layer.output, rows), **output, **add)
        gate_up = qkv | {"AT_WEIGHT": at + 8 * t.GATE_UP}
        yield self._phase("MLP norm", *by_rows, **gate_up, AT_MORE=mlp_norm)
        by_panels = self._by_panels(layer.gate_up, rows)
        yield self._phase("gate and up", *by_panels, **gate_up, X=t.AT_NORMED, Y=t.AT_GATE_UP)
        down = {"LAYER": number, "AT_WEIGHT": at + 8 * t.DOWN, "CODES": t.GATED_CODES}
        yield self._phase("gate", *by_rows, **down)
        by_panels = self._by_panels(layer.down, rows)
        yield self._phase("down", *by_panels, **down, **add, X=t.AT_GATED)

    def _phase(self, name: str, chunks: int, each: int, **words: int) -> list[int]:
        """A row of a program; `words` by their names in `step_tables`."""
        row = [0] * t.PHASE_WORDS
        row[t.AT_FUNCTION] = self._addresses[_PARTS[name][1]]
        row[t.NAME], row[t.CHUNKS], row[t.EACH] = NAMES.index(name), chunks, each
        for word, value in words.items():
            row[getattr(t, word)] = value
        return row

    def _by_panels(self, weight: Weight, rows: int) -> tuple[int, int]:
        """How many chunks, and panels in each."""
        each = panels_per_chunk(weight, rows, self.team.num_threads)
        return -(-weight.panels // each), each


def _by_rows(rows: int, num_threads: int) -> tuple[int, int]:
    """How many chunks, and rows in each."""
    each = max(1, min(_ROWS_A_CHUNK, -(-rows // num_threads)))
    return -(-rows // each), each


# --- tables --------------------------------------------------------------------------------------


def _weight_words(weight: Weight, at_bias: int = 0) -> list[int]:
    return [
        FORMATS.index(weight.format),
        weight.out_features,
        weight.in_features,
        address(weight.data),
        address(weight.scales),
        at_bias,
    ]


@dataclass
class _Buffers:
    """Room for what a step of up to `rows` rows computes between its phases."""

    shape: Shape
    rows: int
    planes: int
    memory: list[np.ndarray] = field(init=False, repr=False)
    floats: list[int] = field(init=False, repr=False)
    """Addresses of the first five, which hold floats."""
    codes: list[int] = field(init=False, repr=False)
    """Addresses of the others: rounded activations, of hidden width and of that within the MLP."""

    def __post_init__(self) -> None:
        s, rows = self.shape, self.rows
        inner, widest = s.intermediate_size, max(s.hidden_size, s.q_size)
        widths = (s.hidden_size, s.q_size + 2 * s.num_kv_heads * s.head_dim, s.q_size)
        widths += (2 * inner, inner)
        self.memory = [np.empty(rows * width, np.float32) for width in widths]
        for width in (widest, inner):
            groups = rows * width // GROUP
            self.memory += [
                np.empty(self.planes * rows * width, np.int8),
                np.empty(self.planes * groups, np.float32),
                np.empty(groups, np.float32),
                np.empty(rows * width, np.int16),
                np.empty(rows, np.float32),
            ]
        addresses = [address(x) for x in self.memory]
        self.floats, self.codes = addresses[:5], addresses[5:]
