"""ParallelPlanner shows what the cost model predicts for its controls. The file takes seconds."""

from __future__ import annotations

import json

import pytest
import traitlets

from pdlab.costmodel import Hardware, load_hardware, predict_parallel
from pdlab.link import LINKS
from pdlab.models.catalog import shape
from pdlab.workbench import ParallelPlanner
from pdlab.workbench.parallel_planner import HERE, MODELS, Settings
from pdlab.workbench.picture import find_browser, widget_page
from pdlab.workbench.planner_data import GRIDS

has_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


def test_it_shows_the_cost_models_prediction() -> None:
    view = ParallelPlanner(device="a100-80gb", tensor_parallel=4, pipeline_parallel=2, batch=32)
    known = predict_parallel(
        shape("llama-8b"),
        load_hardware()["a100-80gb"],
        LINKS["NVLink4"],
        4,
        2,
        prompt_tokens=1024,
        batch=32,
    )
    assert view.choice.prediction == known
    own = view.result["choices"][view.result["chosen"]]
    assert own["name"] == "4 x 2"
    assert (own["ttft"]["time_s"], own["tpot"]["time_s"]) == (known.ttft_s, known.tpot_s)
    parts = [own["tpot"][part] for part in ("compute_s", "collective_s", "waiting_s")]
    assert sum(parts) == pytest.approx(known.tpot_s)
    assert "4 x 2: TTFT 10.4 ms" in view.summary()
    assert "predicted. llama-8b, bf16, on NVIDIA A100" in view.summary()


def test_every_control_is_a_trait() -> None:
    view = ParallelPlanner()
    values = {
        "model": "smollm2-135m",
        "device": "t4",
        "link": "10GbE",
        "tensor_parallel": 3,
        "pipeline_parallel": 3,
        "micro_batches": 6,
        "prompt_tokens": 300,
        "batch": 12,
    }
    for name, value in values.items():
        setattr(view, name, value)
    assert view.settings == Settings(**values)
    assert len(view.result["choices"]) == len(GRIDS) + 1
    assert view.result["dtype"] == "fp16"
    assert view.choice.name == "3 x 3"
    assert view.message == ""


def test_what_does_not_go_is_shown_and_says_why() -> None:
    view = ParallelPlanner(model="smollm2-135m")
    view.tensor_parallel = 4
    assert view.result["choices"][view.result["chosen"]]["short"] == "only 3 KV heads"
    assert "4 x 1 does not go: tensor_parallel=4 is more than" in view.summary()
    view.choose(tensor_parallel=1, prompt_tokens=10_000)
    assert "max_model_len=8192" in view.summary()
    view.choose(model="llama-8b", prompt_tokens=4096, batch=200, device="l4")
    own = view.result["choices"][view.result["chosen"]]
    assert (own["short"], own["ttft"]) == ("does not fit", None)
    assert own["kv_capacity"] < 200 * 4097


def test_what_is_wrong_is_said_and_changes_nothing() -> None:
    view = ParallelPlanner()
    for values, message in (
        ({"model": "gpt"}, "model='gpt'"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"link": "string"}, "link='string'"),
        ({"tensor_parallel": 17}, "tensor_parallel=17"),
        ({"batch": 0}, "batch=0"),
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"nothing": 1}, "nothing is not one of"),
    ):
        view.choose(**values)
        assert message in view.message
        assert view.settings == Settings()
    with pytest.raises((ValueError, traitlets.TraitError), match="batch=0"):
        view.batch = 0
    with pytest.raises(ValueError, match="model='tiny-llama'"):
        ParallelPlanner(model="tiny-llama")


def test_questions_of_the_page_are_answered() -> None:
    view = ParallelPlanner()
    content = {"type": "set", "number": 1, "values": {"batch": 64, "pipeline_parallel": 4}}
    view._handle_custom_msg(content, [])
    assert (view.answered, view.batch, view.choice.name) == (1, 64, "2 x 4")
    view._handle_custom_msg({"type": "set", "number": 2, "values": {"batch": -1}}, [])
    assert view.answered == 2
    assert "batch=-1" in view.message


def test_a_device_of_ones_own_stands_beside_the_table() -> None:
    machine = Hardware("my box", "cpu", {"fp32": 50e9}, 10e9, 8 * 10**9, "measured", measured=True)
    view = ParallelPlanner(machine, model="smollm2-135m", link="1GbE")
    assert view.device == HERE
    assert "fp32, on my box over 1GbE" in view.summary()
    assert "roofline of measured ceilings" in view.summary()
    view.device = "h100-sxm"
    assert "published" in view.summary()


def test_data_is_small_and_every_model_goes_somewhere() -> None:
    view = ParallelPlanner(batch=1)
    for name in MODELS:
        view.model = name
        assert any(choice["ttft"] for choice in view.result["choices"])
    assert len(json.dumps(view.view_state(), allow_nan=False)) < 20_000
    assert "pd-parallel-planner" in widget_page(view)


def show(page, widget) -> None:
    page.set_content(widget_page(widget))
    page.wait_for_selector("[data-grid]")


@has_browser
def test_the_page_marks_what_is_predicted_and_what_does_not_fit(page) -> None:
    show(page, ParallelPlanner(device="l4", link="PCIe4x16", prompt_tokens=4096, batch=16))
    assert page.inner_text(".pd-title").startswith("2 x 1 tensor x pipeline: 2 devices predicted")
    assert page.inner_text(".pd-pp-tile >> nth=0").startswith("TTFT\n324 ms")
    assert page.inner_text(".pd-pp-why") == "does not fit"
    assert page.get_attribute("[aria-checked=true]", "data-grid") == "2 x 1"
    assert page.inner_text(".pd-foot .pd-tag") == "predicted"


@has_browser
@pytest.mark.parametrize("width", [420, 700, 1080])
def test_nothing_leaves_the_widget(page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1200})
    show(page, ParallelPlanner(batch=256))
    root = page.query_selector(".pd-parallel-planner").bounding_box()
    for node in page.query_selector_all(
        ".pd-pp-rows > *, .pd-pp-tile, .pd-title, select, .pd-foot"
    ):
        box = node.bounding_box()
        if box:
            assert box["x"] + box["width"] <= root["x"] + root["width"] + 1
