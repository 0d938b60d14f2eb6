"""A decoder that is ready to compute: weights, tables and buffers around `step.run_program`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from . import step_tables as t
from .attention_plan import AttentionPlan, PagedKV, address
from .linear import FP32_ROWS, panels_per_chunk
from .step import TELLS_TIME, run_program
from .team import Team
from .weights import FORMATS, GROUP, PANEL, Weight

_ROWS_A_CHUNK = 64  # at most; a row is some microseconds of work
_PROGRAMS = 64  # that are kept
_STAGES = ("embed", "qkv", "attention", "output", "mlp", "logits")
_STAGE_OF = np.array([0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5])
"""Which stage a phase belongs to, by its number."""


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


class StepResult(NamedTuple):
    """`hidden` float32 [rows, hidden_size], before the final norm; `logits` [samples, vocab_size].

    `stage_s`: seconds by stage, empty where the system has no clock for it.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    stage_s: dict[str, float]


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
        self._floats = [embedding, final_norm, cos, sin]
        self._layer_table = np.array([_layer_words(layer) for layer in layers], np.int64)
        self._model_table = np.array(
            [
                *shape[:5],
                planes,
                *(_floats_at(x) for x in (embedding, cos, sin, final_norm)),
                *_weight_words(head),
            ],
            np.int64,
        )
        self._vocab_size = len(embedding)
        self._planes = planes
        self._buffers = _Buffers(shape, 0, planes)
        self._programs: dict[tuple[int, int, range], np.ndarray] = {}

    def takes(self, rows: int) -> bool:
        """Whether so many rows are computed sooner here than by torch."""
        return rows <= FP32_ROWS or all(w.format != "fp32" for w in self._weights())

    def _weights(self) -> list[Weight]:
        first = self.layers[0]
        return [first.qkv, first.output, first.gate_up, first.down]

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
        """
        layers = layers or range(len(self.layers))
        rows, last = len(token_ids), layers.stop == len(self.layers)
        samples = len(sample_rows) if last else 0
        if hidden is None:
            hidden = torch.empty(rows, self.shape.hidden_size)
        logits = torch.empty(samples, self._vocab_size)
        program = self._program(rows, samples, plan, layers)
        numbers = np.array([*token_ids, *positions, *sample_rows], np.int64)
        stamps = np.zeros((len(program), 2), np.int64)
        if rows > self._buffers.rows:
            self._buffers = _Buffers(self.shape, rows, self._planes)
        batch = np.empty(t.BATCH_WORDS, np.int64)
        at = address(numbers)
        batch[: t.AT_HIDDEN] = rows, samples, at, at + 8 * rows, at + 16 * rows
        batch[t.AT_HIDDEN] = address(hidden)
        batch[t.AT_NORMED : t.AT_LOGITS] = self._buffers.floats
        batch[t.AT_LOGITS], batch[t.AT_STAMPS] = address(logits), address(stamps)
        batch[t.NORMED_CODES :] = self._buffers.codes
        self.team.run(
            run_program, program, self._layer_table, self._model_table, batch, self.kv.table,
            plan.table, np.float32(self.shape.rms_norm_eps),
        )  # fmt: skip
        return StepResult(hidden, logits, _stage_s(program, stamps))

    def _program(self, rows: int, samples: int, plan: AttentionPlan, layers: range) -> np.ndarray:
        """The phases of a step, int64 [phases, PHASE_WORDS]."""
        key = rows, samples, layers
        if key not in self._programs:
            if len(self._programs) == _PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = np.array(self._phases(*key), np.int64)
        program = self._programs[key].copy()
        phases, chunks = program[:, t.PHASE], program[:, t.CHUNKS]
        chunks[phases == t.WRITE] = plan.write_chunks
        kinds = self._layer_table[layers.start : layers.stop, t.WINDOW_KIND]
        chunks[phases == t.ATTEND] = np.asarray(plan.attend_chunks)[kinds]
        chunks[phases == t.COMBINE] = np.asarray(plan.combine_chunks)[kinds]
        return program

    def _phases(self, rows: int, samples: int, layers: range) -> list[tuple[int, int, int, int]]:
        """All of a program but how many chunks attention has."""
        by_rows = _by_rows(rows, self.team.num_threads)
        phases = [(t.EMBED, 0, *by_rows)] if layers.start == 0 else []
        for number in layers:
            layer = self.layers[number]
            phases += [
                (t.INPUT_NORM, number, *by_rows),
                (t.PROJECT, number, *self._by_panels(layer.qkv, rows)),
                (t.ROTATE, number, *by_rows),
                (t.WRITE, number, 0, 1),
                (t.ATTEND, number, 0, 1),
                (t.COMBINE, number, 0, 1),
            ]
            if layer.output.format != "fp32":
                phases.append((t.ROUND_ATTENDED, number, *by_rows))
            phases += [
                (t.ADD_OUTPUT, number, *self._by_panels(layer.output, rows)),
                (t.MLP_NORM, number, *by_rows),
                (t.GATE, number, *self._by_gate_panels(layer.gate_up, rows)),
            ]
            if layer.down.format in ("int8", "q8_0"):  # whose scale is the whole row's
                phases.append((t.ROUND_GATED, number, *by_rows))
            phases.append((t.ADD_DOWN, number, *self._by_panels(layer.down, rows)))
        if samples:
            phases.append((t.FINAL_NORM, 0, *_by_rows(samples, self.team.num_threads)))
            phases.append((t.LOGITS, 0, *self._by_panels(self.head, samples)))
        return phases

    def _by_panels(self, weight: Weight, rows: int) -> tuple[int, int]:
        """How many chunks, and panels in each."""
        each = panels_per_chunk(weight, rows, self.team.num_threads)
        return -(-weight.panels // each), each

    def _by_gate_panels(self, weight: Weight, rows: int) -> tuple[int, int]:
        """The same for gate and up, of each a half; a chunk has whole groups of 32 outputs."""
        a_group = GROUP // PANEL
        each = panels_per_chunk(weight, rows, self.team.num_threads) // 2
        each = max(a_group, each // a_group * a_group)
        return -(-weight.panels // 2 // each), each


def _by_rows(rows: int, num_threads: int) -> tuple[int, int]:
    """How many chunks, and rows in each."""
    each = min(_ROWS_A_CHUNK, -(-rows // num_threads))
    return -(-rows // each), each


def _stage_s(program: np.ndarray, stamps: np.ndarray) -> dict[str, float]:
    """Seconds by stage, from when each phase began."""
    if not TELLS_TIME:
        return {}
    began = program[:, t.CHUNKS] > 0
    began_s = np.append(stamps[began] @ (1.0, 1e-9), time.perf_counter())
    spent = np.bincount(_STAGE_OF[program[began, t.PHASE]], np.diff(began_s), len(_STAGES))
    return {stage: float(s) for stage, s in zip(_STAGES, spent, strict=True) if s > 0}


# --- tables --------------------------------------------------------------------------------------


def _layer_words(layer: LayerWeights) -> list[int]:
    norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
    weights = (layer.output, layer.gate_up, layer.down)
    return [
        *(_floats_at(x) for x in norms),
        layer.window_kind,
        *_weight_words(layer.qkv, layer.qkv_bias),
        *(word for weight in weights for word in _weight_words(weight)),
    ]


def _weight_words(weight: Weight, bias: torch.Tensor | None = None) -> list[int]:
    return [
        FORMATS.index(weight.format),
        weight.out_features,
        weight.in_features,
        address(weight.data),
        address(weight.scales),
        _floats_at(bias),
    ]


def _floats_at(values: torch.Tensor | None) -> int:
    """The address of a float32 tensor; 0 where there is none."""
    if values is None:
        return 0
    if values.dtype != torch.float32 or not values.is_contiguous() or values.device.type != "cpu":
        raise ValueError(
            f"values: a contiguous float32 tensor on the CPU is needed, not {values.dtype} "
            f"{tuple(values.shape)} on {values.device}"
        )
    return address(values)


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
