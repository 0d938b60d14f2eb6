"""The export says what the trace says, in the format that trace viewers read."""

import json
from pathlib import Path

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.trace import save_perfetto, to_perfetto

from ..helpers import random_model, random_prompt
from ..workbench.handmade_memory import memory_moves

NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "M": {"name", "pid", "args"},
}
"""Fields that each kind of event must have ("Trace Event Format")."""
ENGINE, SEQUENCES = 1, 2


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Three requests over a pool that is too small for them: chunks, waiting and a preemption."""
    config = EngineConfig(
        block_size=4, num_blocks=11, max_num_seqs=3, max_num_batched_tokens=12, chunk_size=8
    )
    with Engine(random_model(), config) as engine:
        prompts = [random_prompt(length) for length in (9, 14, 5)]
        engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    assert any(record.preempted for record in engine.trace.steps)
    return engine.trace


def slices(trace: Trace, process: int) -> list[dict]:
    events = to_perfetto(trace)["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def test_every_event_has_what_its_kind_needs(trace: Trace) -> None:
    for event in to_perfetto(trace)["traceEvents"]:
        assert event.keys() >= NEEDED[event["ph"]]
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0


def test_events_are_in_order_of_time(trace: Trace) -> None:
    times = [event["ts"] for event in to_perfetto(trace)["traceEvents"]]
    assert times == sorted(times)


def test_steps_and_stages_last_as_long_as_in_the_trace(trace: Trace) -> None:
    found = slices(trace, ENGINE)
    for record in trace.steps:
        step, *stages = found[: 1 + len(record.stage_s)]
        found = found[1 + len(record.stage_s) :]
        assert step["dur"] == record.wall_s * 1e6
        assert step["args"]["flops"] == record.total_flops
        assert step["args"]["bytes_moved"] == record.total_bytes
        assert {s["name"]: s["dur"] for s in stages} == {
            name: duration_s * 1e6 for name, duration_s in record.stage_s.items()
        }
    assert not found


def test_stages_lie_inside_their_step(trace: Trace) -> None:
    rounding_us = 1e-3
    inside = None
    for event in slices(trace, ENGINE):
        end = event["ts"] + event["dur"]
        if event["name"].startswith("step"):
            inside = (event["ts"], end)
        else:
            assert inside is not None
            assert inside[0] <= event["ts"]
            assert end <= inside[1] + rounding_us


def test_stages_of_every_layer_say_that_they_are_sums(trace: Trace) -> None:
    num_layers = trace.model["config"]["num_layers"]
    for event in slices(trace, ENGINE):
        if event["name"] in ("qkv", "attention", "mlp"):
            assert event["args"]["sum_over_layers"] == num_layers


def test_each_request_has_a_track_that_tells_its_life(trace: Trace) -> None:
    lives: dict[int, list[str]] = {}
    for event in slices(trace, SEQUENCES):
        lives.setdefault(event["tid"], []).append(event["name"].split()[0])
    assert len(lives) == len(trace.requests)
    for life in lives.values():
        assert life[0] == "waiting"
        assert life[1] == "prefill"
        assert life[-1] == "decode"
    assert any("preempted" in life for life in lives.values())


def test_slices_of_one_request_do_not_overlap(trace: Trace) -> None:
    ends: dict[int, float] = {}
    for event in slices(trace, SEQUENCES):
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-3
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_counters_follow_the_kv_cache_and_the_batch(trace: Trace) -> None:
    events = to_perfetto(trace)["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [event["args"] for event in counters if event["name"] == "KV bytes"] == [
        {
            "used": record.kv_used_bytes,
            "wasted": record.kv_wasted_bytes,
            "swapped": record.kv_swapped_bytes,
        }
        for record in trace.steps
    ]
    batches = [event["args"] for event in counters if event["name"] == "sequences"]
    assert [batch["prefill"] + batch["decode"] for batch in batches] == [
        len(record.sequences) for record in trace.steps
    ]


def test_the_file_is_json_and_survives_saving_the_trace(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "run.json.gz")
    save_perfetto(Trace.load(tmp_path / "run.json.gz"), tmp_path / "run.perfetto.json")
    text = (tmp_path / "run.perfetto.json").read_text(encoding="utf-8")
    assert json.loads(text) == json.loads(json.dumps(to_perfetto(trace)))


def test_a_request_that_never_ran_waits_to_the_end() -> None:
    config = EngineConfig(block_size=4, num_blocks=8, max_num_seqs=1, max_num_batched_tokens=4)
    with Engine(random_model(), config) as engine:
        params = SamplingParams(max_tokens=4)
        engine.submit(random_prompt(8), params)
        engine.submit(random_prompt(4), params)
        engine.step()
        engine.step()
    waiting = [e for e in slices(engine.trace, SEQUENCES) if e["name"] == "waiting"]
    last = engine.trace.steps[-1]
    assert waiting[-1]["ts"] + waiting[-1]["dur"] == pytest.approx(
        (last.start_s + last.wall_s) * 1e6
    )


def test_an_empty_trace_gives_a_file_too() -> None:
    assert all(event["ph"] == "M" for event in to_perfetto(Trace())["traceEvents"])


def test_forks_swaps_and_copies_are_on_the_track_of_their_sequence() -> None:
    trace = memory_moves()
    events = to_perfetto(trace)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lives: dict[str, list[str]] = {}
    for event in events:
        if event["pid"] == SEQUENCES and event["ph"] != "M":
            lives.setdefault(names[event["tid"]], []).append(event["name"])
    assert list(lives["r0.1"])[:2] == ["fork from r0", "decode"]
    assert "copy: block 3 to 4" in lives["r0"]
    assert "swap out: block 6 to 3" in lives["r1"]
    assert "swapped out" in lives["r1"]
    assert "swap in: block 0 to 8" in lives["r1"]
    assert "preempted" in lives["r2"]
