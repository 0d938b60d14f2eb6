"""The Stepper's frames say what the records say."""

import json

import pytest

from pdlab import Trace
from pdlab.workbench.frames import stepper_frames, token_strings

from .handmade import two_requests


def test_frames_begin_with_the_tokenized_prompt(recorded: Trace) -> None:
    for name, request in recorded.requests.items():
        frame = stepper_frames(recorded, name)[0]
        assert (frame["kind"], frame["step"], frame["computed"]) == ("tokenize", None, 0)
        assert frame["known"] == len(request.prompt_ids)


def test_frames_repeat_the_records(recorded: Trace) -> None:
    for name in recorded.requests:
        frames = {f["step"]: f for f in stepper_frames(recorded, name)[1:]}
        for record, mine in recorded.sequence_steps(name):
            frame = frames[record.step]
            assert (frame["kind"], frame["start"], frame["end"]) == (
                mine.phase,
                mine.start,
                mine.end,
            )
            assert frame["computed"] == mine.end
            assert frame["wall_s"] == record.wall_s
            assert frame["stage_s"] == record.stage_s
            assert (frame["flops"], frame["bytes"]) == (record.total_flops, record.total_bytes)
            assert frame["kv_used_bytes"] == record.kv_used_bytes
            assert frame["kv_wasted_bytes"] == record.kv_wasted_bytes
            assert frame["num_free_blocks"] == record.num_free_blocks
            assert [(c["id"], c["p"]) for c in frame["top"]] == [tuple(c) for c in mine.top]
            assert frame["finish_reason"] == mine.finish_reason


def test_frames_hold_every_block_table(recorded: Trace) -> None:
    name = next(iter(recorded.requests))
    steps = {r.step: r for r in recorded.steps}
    for frame in stepper_frames(recorded, name)[1:]:
        expected = {
            r.sequence_id: [r.block_table, r.num_computed_tokens]
            for r in steps[frame["step"]].residents
        }
        assert frame["tables"] == expected


def test_last_frame_has_all_tokens_and_all_text(recorded: Trace) -> None:
    for name in recorded.requests:
        last = stepper_frames(recorded, name)[-1]
        assert last["known"] == len(token_strings(recorded, name))
        assert last["text"] == "".join(s.text for _, s in recorded.sequence_steps(name))
        assert last["finish_reason"] == "length"


def test_sampled_position_is_the_token_drawn(recorded: Trace) -> None:
    for name in recorded.requests:
        tokens = token_strings(recorded, name)
        drawn = {r.step: s.sampled for r, s in recorded.sequence_steps(name)}
        for frame in stepper_frames(recorded, name)[1:]:
            if frame["sampled"] is None:
                assert drawn[frame["step"]] is None
            else:
                assert tokens[frame["sampled"]][0] == drawn[frame["step"]]


def test_waiting_and_preempted_steps_have_frames() -> None:
    kinds = [f["kind"] for f in stepper_frames(two_requests(), "second")]
    assert kinds == [
        "tokenize",
        "waiting",
        "prefill",
        "prefill",
        "decode",
        "decode",
        "decode",
        "preempted",
        "waiting",
        "waiting",
        "prefill",
        "decode",
        "decode",
    ]


def test_preempted_request_has_nothing_computed() -> None:
    frames = stepper_frames(two_requests(), "second")
    preempted = next(f for f in frames if f["kind"] == "preempted")
    assert preempted["computed"] == 0
    assert "second" not in preempted["tables"]
    assert preempted["known"] == 10


def test_frames_are_json(recorded: Trace) -> None:
    frames = stepper_frames(recorded, next(iter(recorded.requests)))
    assert json.loads(json.dumps(frames)) == frames


def test_unknown_request_is_named() -> None:
    with pytest.raises(
        ValueError, match="sequence_id='third' is not in this trace; it holds: first"
    ):
        stepper_frames(two_requests(), "third")
