"""The plan shows what the cost model predicts, and why something does not go."""

import pytest

from pdlab.costmodel import predict_parallel
from pdlab.link import LINKS
from pdlab.models.catalog import shape
from pdlab.workbench import figures, plan_choices
from pdlab.workbench.figures.parallel_plan import short_reason

from .test_parallel_figures import source, title


def test_every_bar_is_a_prediction() -> None:
    plans = plan_choices("llama-8b", "a100-80gb", "NVLink4", [(1, 1), (2, 4)], batch=16)
    [_, choice] = plans.choices
    known = predict_parallel(
        shape("llama-8b"), plans.hardware, LINKS["NVLink4"], 2, 4, prompt_tokens=1024, batch=16
    )
    assert choice.prediction == known
    assert (choice.name, choice.num_devices) == ("2 x 4", 8)
    figure = figures.parallel_plan(plans)
    bars = [each for each in figure.data if each.type == "bar"]
    assert [bar.name for bar in bars] == [
        *["compute", "collectives", "bubbles and sends"] * 2, "weights", "K and V", "activations"
    ]  # fmt: skip
    assert sum(bar.x[1] for bar in bars[:3]) == pytest.approx(1e3 * known.ttft_s)
    assert sum(bar.x[1] for bar in bars[3:6]) == pytest.approx(1e3 * known.tpot_s)
    assert sum(bar.x[1] for bar in bars[6:]) == pytest.approx(
        max(rank.total for rank in known.ranks) / 1e9
    )
    assert title(figure).startswith("Predicted: soonest first token on 2 x 4")
    assert source(figure).startswith("predicted: roofline of published ceilings")
    assert "bf16, on NVIDIA A100" in source(figure)
    assert all("predicted" in bar.hovertemplate for bar in bars)


def test_what_does_not_go_says_why() -> None:
    plans = plan_choices("llama-8b", "l4", "PCIe4x16", [(1, 1), (2, 1)], batch=100)
    assert [short_reason(c) for c in plans.choices if not c.prediction] == ["does not fit"]
    assert plans.choices[0].kv_capacity < 100 * 1025 < plans.choices[1].kv_capacity
    figure = figures.parallel_plan(plans)
    reason = figure.data[-1]
    assert (reason.y, reason.text) == (("1 x 1",), (" does not fit",))
    assert "rank 0 needs" in reason.customdata[0]
    odd = plan_choices("smollm2-135m", "epyc-7763", "10GbE", [(4, 1), (1, 31)], prompt_tokens=64)
    assert [short_reason(c) for c in odd.choices] == ["only 3 KV heads", "only 30 layers"]
    assert odd.dtype == "fp32"
    assert (
        title(figures.parallel_plan(odd)) == "Predicted: on none of these grids does the model go"
    )
    long = plan_choices("smollm2-135m", "epyc-7763", "10GbE", [(1, 1)], prompt_tokens=9000)
    assert short_reason(long.choices[0]) == "too long"


def test_one_stage_takes_a_step_in_one_piece() -> None:
    """More micro-batches would only read the weights more often."""
    few, many = (
        plan_choices("llama-8b", "h100-sxm", "NVLink4", [(2, 1), (1, 2)], micro_batches=m)
        for m in (1, 8)
    )
    assert few.choices[0] == many.choices[0]
    assert few.choices[1] != many.choices[1]
    assert "up to 8 micro-batches" in many.line


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "gpt"}, "no shape is called 'gpt'"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"link": "string"}, "link is 'string'"),
        ({"batch": 0}, "batch=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"dtype": "fp8"}, "dtype='fp8' has no peak"),
    ],
)
def test_unknown_names_are_refused(values, message) -> None:
    begin = {"model": "llama-8b", "device": "t4", "link": "10GbE"}
    with pytest.raises(ValueError, match=message):
        plan_choices(**begin | values)
