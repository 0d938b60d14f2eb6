"""What the lesson on kernels and speed runs, and its pictures."""

import linecache

import pytest
from pdlab_kernels.cpu.target import TARGET

from pdlab.costmodel import Hardware
from pdlab.models.catalog import SHAPES
from pdlab.workbench import figures
from pdlab.workbench import speed_experiments as lab
from pdlab.workbench.speed_experiments import modes, rows, timelines, traffic, triton_trial
from tests.helpers import random_model

compiled = pytest.mark.skipif(TARGET == "torch", reason="no compiled kernels here")
MODEL = random_model(SHAPES["tiny-llama"], seed=3)
LAYERS = MODEL.config.num_layers
Span = timelines.Span


def handmade() -> lab.Timeline:
    """Two layers; half a second passes before each operator, and each takes a whole one."""
    order = [("qkv", 0), ("qkv", 0), ("mlp", 0), ("qkv", 1), ("mlp", 1), ("logits", None)]
    return lab.Timeline(
        "handmade",
        [Span(f"aten::{s}", s, n, 1.5 * i + 0.5, 1.5 * i + 1.5) for i, (s, n) in enumerate(order)],
        9.0,
    )


# --- timelines -----------------------------------------------------------------------------------


def test_stages_follow_each_other_and_cover_the_step() -> None:
    stages = handmade().stages
    assert [(s.stage, s.layer) for s in stages] == [
        ("qkv", 0), ("mlp", 0), ("qkv", 1), ("mlp", 1), ("logits", None)
    ]  # fmt: skip
    assert [s.start_s for s in stages] == [0, *(s.end_s for s in stages[:-1])]
    assert stages[-1].end_s == 9.0


def test_between_operators_is_what_is_left() -> None:
    assert handmade().between_s == 3.0
    assert handmade().layer(1).between_s == 1.0


def test_a_layer_begins_where_the_one_before_ends() -> None:
    layer = handmade().layer(1)
    assert [(s.start_s, s.end_s) for s in layer.spans] == [(0.5, 1.5), (2.0, 3.0)]
    assert layer.wall_s == 3.0
    with pytest.raises(ValueError, match="number=7"):
        handmade().layer(7)


def test_torch_is_seen_operator_by_operator() -> None:
    line = lab.torch_timeline(MODEL, steps=3)
    products = [s for s in line.spans if s.name == "aten::linear"]
    assert len(products) == 4 * LAYERS + 1
    assert {s.layer for s in line.spans} == {*range(LAYERS), None}
    starts = [s.start_s for s in line.spans]
    assert starts == sorted(starts)
    assert line.wall_s > line.between_s > 0


@compiled
def test_the_compiled_step_is_seen_phase_by_phase() -> None:
    line = lab.compiled_timeline(MODEL, steps=3)
    assert [s.stage for s in line.stages] == [
        "embed", *["qkv", "attention", "output", "mlp"] * LAYERS, "logits"
    ]  # fmt: skip
    assert abs(line.between_s) < 1e-9
    assert line.usual_layer in range(LAYERS)


# --- bytes ---------------------------------------------------------------------------------------


def test_a_step_reads_each_matrix_once() -> None:
    found = lab.count_step(MODEL)
    assert found.by_name["linear"] == 4 * LAYERS + 1
    decoder = MODEL.decoder
    linears = sum(m.numel() for kind in traffic._kinds(MODEL).values() for m in kind)
    norms = sum(p.numel() for p in decoder.parameters() if p.dim() == 1)
    assert found.weight_bytes == 4 * (linears + norms)
    assert found.operators == sum(found.by_name.values())
    assert found.views > 0


@compiled
def test_modes_are_measured_in_turns() -> None:
    chosen = [modes.Mode("plain", "fp32", "torch"), modes.Mode("small", "int8", "cpu")]
    session = lab.Modes("random:tiny-llama", chosen)
    points = session.measure([modes.Case(1, 8, 3), modes.Case(4, 6, 2)], rounds=2)
    session.close()
    alone = lab.pick(points)
    assert [alone[name].num_steps for name in ("plain", "small")] == [6, 6]
    assert alone["small"].bytes < alone["plain"].bytes
    assert alone["small"].flops == alone["plain"].flops
    assert set(lab.pick(points, "prefill")) == set(lab.pick(points, batch=4)) == {"plain", "small"}
    assert session.weight_bytes["small"] < session.weight_bytes["plain"]


@compiled
def test_rows_are_timed_in_each_format() -> None:
    costs = lab.row_costs(MODEL, rows=(1, 2), rounds=2)
    assert costs.nbytes["fp32"] > costs.nbytes["int8"] > costs.nbytes["int4"]
    assert all(set(times) == {1, 2} for times in costs.seconds.values())


def test_a_product_turns_where_its_rows_cost_what_its_bytes_do() -> None:
    costs = rows.RowCosts((8, 8), {"x": 1}, {"x": {1: 2.0, 2: 2.0, 4: 2.5, 8: 4.0, 16: 8.0}})
    assert costs.turning_point("x") == 4
    assert costs.free_rows("x") == 4


@compiled
def test_two_planes_round_finer_than_one(smollm2) -> None:
    errors = {e.name: e for e in lab.rounding_errors(smollm2, num_tokens=8)}
    assert errors["rows as two planes of int8 (beside int4)"].worst < 1e-3
    assert errors["rows as int16 (beside weights in int8)"].worst < 1e-3
    one = errors["rows as one plane of int8"].mean
    assert one > 50 * errors["rows as two planes of int8 (beside int4)"].mean


# --- the learner's kernel ------------------------------------------------------------------------

RIGHT = """
def kernel(out_ptr, x_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(x_ptr + row * x_stride + at, mask=inside).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + at, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, gate / (1 + tl.exp(-gate)) * up, mask=inside)
"""


def kernel_of(source: str):
    """What a cell with this source defines."""
    name = f"<{hash(source)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    names = {"tl": lab.triton_language()}
    exec(compile(source, name, "exec"), names)
    return names["kernel"]


@pytest.mark.skipif(not triton_trial.HAS_TRITON, reason="there is no Triton here")
@pytest.mark.parametrize(
    ("right", "wrong", "hint"),
    [
        ("* up, mask=inside)", "* up)", "needs a mask"),
        ("row * x_stride", "row * 2 * SIZE", "row 0 is right and row 1 is not"),
        (".to(tl.float32)", "", "tl.float32"),
        ("tl.program_id(1) * BLOCK + ", "", "never written"),
        ("gate / (1", "1 / (1", "this is sigmoid"),
        ("tl.store", "tl.stroe", "stroe"),
    ],
)
def test_a_wrong_kernel_gets_a_hint(right: str, wrong: str, hint: str) -> None:
    with pytest.raises(triton_trial.KernelError, match=hint.replace("(", r"\(")):
        lab.try_silu_mul(kernel_of(RIGHT.replace(right, wrong)))


@pytest.mark.skipif(not triton_trial.HAS_TRITON, reason="there is no Triton here")
def test_a_right_kernel_passes_as_often_as_it_is_tried() -> None:
    kernel = kernel_of(RIGHT)
    assert len(lab.try_silu_mul(kernel)) == len(lab.try_silu_mul(kernel)) == 7


# --- pictures ------------------------------------------------------------------------------------


def points() -> dict[str, modes.Point]:
    return {
        "slow": modes.Point("slow", "decode", 1, 1, 10**9, 10**9, 0.4, 3),
        "fast": modes.Point("fast", "decode", 1, 1, 10**9, 10**8, 0.05, 3),
    }


def test_bars_stand_beside_their_floors(hardware: Hardware) -> None:
    bars, floors = figures.mode_bars(points(), hardware, "a test").data
    assert list(bars.x) == [400, 50]
    assert list(floors.x) == [100, 10]


def test_the_roofline_has_every_point(hardware: Hardware) -> None:
    figure = figures.mode_roofline(list(points().values()), hardware, "a test")
    shown = {t.name: (t.x[0], t.y[0]) for t in figure.data}
    assert shown["slow"] == (1.0, 2.5e9)
    assert shown["fast"] == (10.0, 2e10)


def test_timelines_are_drawn_as_they_were() -> None:
    figure = figures.layer_timelines([handmade()], 1, "a test")
    bars = {t.name: t for t in figure.data}
    assert list(bars["mlp"].base) == [2000]
    assert list(bars["mlp"].x) == [1000]
    assert "33%" in figure.layout.title.text
    assert sum(len(t.x) for t in figures.step_timelines([handmade()], "a test").data) == 5


def test_rows_are_drawn_with_the_floor_of_their_bytes(hardware: Hardware) -> None:
    costs = rows.RowCosts((8, 8), {"fp32": 10**7}, {"fp32": {1: 0.002, 2: 0.003}})
    line, floor = figures.rows_figure(costs, hardware, "a test").data
    assert list(line.y) == [2, 3]
    assert list(floor.y) == [1, 1]


def test_pictures_of_nothing_are_refused(hardware: Hardware) -> None:
    with pytest.raises(ValueError, match="timelines is empty"):
        figures.step_timelines([], "a test")
    for draw in (figures.mode_bars, figures.mode_roofline):
        with pytest.raises(ValueError, match="points is empty"):
            draw({}, hardware, "a test")


def test_what_is_recorded_can_be_read() -> None:
    trial = lab.recorded_compile()
    assert trial.warm_up_s > trial.eager_s > 0
    assert {row["sm"] for row in lab.recorded_resources()} == {80, 90}
    assert not any(row["problems"] for row in lab.recorded_resources())
    assert "recorded on" in lab.recorded_line()
    quality = lab.recorded_weights()
    assert quality is None or quality.perplexity > 1
