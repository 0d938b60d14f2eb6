"""A trace that is saved and loaded is the same trace; what is no trace is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from pdlab import Engine, EngineConfig, ModelConfig, SamplingParams, Trace
from pdlab.trace.trace import TRACE_VERSION
from tests.helpers import SHAPES, random_model, random_prompt


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A run with chunks, a preemption, an abort, a refusal, sampling, and captures."""
    config = EngineConfig(block_size=4, num_blocks=8, chunk_size=5, top_k_recorded=3)
    with Engine(random_model(SHAPES["windowed"]), config) as engine:
        aborted = engine.submit(random_prompt(4), SamplingParams(max_tokens=3))
        with engine.probe(layers=[1], names=("attention", "q", "k", "v", "attended")):
            engine.step()
        engine.abort(aborted)
        params = SamplingParams(temperature=0.7, seed=2**62, max_tokens=9)
        engine.generate([random_prompt(12), random_prompt(9), []], params)
        assert any(record.preempted for record in engine.trace.steps)
        assert len(engine.trace.captures) == 5
        return engine.trace


def assert_equal(one: Trace, other: Trace) -> None:
    """Field by field; arrays by dtype, shape and bytes."""
    for field in fields(Trace):
        if field.name != "captures":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert len(one.captures) == len(other.captures)
    for mine, theirs in zip(one.captures, other.captures, strict=True):
        assert mine.array.dtype == theirs.array.dtype
        assert np.array_equal(mine.array, theirs.array)
        assert replace(mine, array=None) == replace(theirs, array=None)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_saved_trace_loads_as_it_was(trace, name, tmp_path):
    trace.save(tmp_path / name)
    loaded = Trace.load(tmp_path / name)
    assert_equal(loaded, trace)
    assert all(isinstance(token_id, int) for token_id in loaded.tokens)
    assert loaded.steps[0].sequences[0].top == trace.steps[0].sequences[0].top


def test_a_trace_saved_again_has_the_same_bytes(trace, tmp_path):
    paths = [tmp_path / name for name in ("a.json.gz", "b.json.gz")]
    trace.save(paths[0])
    Trace.load(paths[0]).save(paths[1])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_gz_is_compressed_and_plain_is_json(trace, tmp_path):
    trace.save(tmp_path / "run.json")
    trace.save(tmp_path / "run.json.gz")
    plain = (tmp_path / "run.json").read_bytes()
    assert json.loads(plain)["version"] == TRACE_VERSION
    assert gzip.decompress((tmp_path / "run.json.gz").read_bytes()) == plain


def test_the_model_shape_comes_back_from_a_trace(trace, tmp_path):
    trace.save(tmp_path / "run.json")
    config = ModelConfig(**Trace.load(tmp_path / "run.json").model["config"])
    assert config == SHAPES["windowed"]


@pytest.mark.parametrize("version", [0, TRACE_VERSION + 1, None, "1"])
def test_another_version_is_refused_with_both_numbers(trace, version, tmp_path):
    path = tmp_path / "run.json"
    trace.save(path)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"version": version}))
    with pytest.raises(ValueError, match=f"version {version}; this reads {TRACE_VERSION}"):
        Trace.load(path)


def truncated(path: Path) -> bytes:
    return path.read_bytes()[:-20]


def flipped(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    return bytes(data)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
@pytest.mark.parametrize("damage", [truncated, flipped], ids=lambda f: f.__name__)
def test_a_damaged_file_is_refused(trace, name, damage, tmp_path):
    path = tmp_path / name
    trace.save(path)
    path.write_bytes(damage(path))
    with pytest.raises(ValueError, match="pdlab trace"):
        Trace.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b"\x1f\x8bnot gzip",
        gzip.compress(b"{}", mtime=0),
        b'{"version": 1}',
        b'{"version":1,"machine":{},"model":{},"engine":{},"tokens":[],"requests":[],"steps":[],'
        b'"captures":[]}',
    ],
)
def test_garbage_is_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="trace"):
        Trace.load(tmp_path / "file")


@pytest.mark.parametrize("part", ["requests", "steps", "captures"])
@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_record_with_other_fields_is_refused(trace, part, change, tmp_path):
    path = tmp_path / "run.json"
    trace.save(path)
    raw = json.loads(path.read_bytes())
    if change == "missing":
        raw[part][0].pop(next(iter(raw[part][0])))
    else:
        raw[part][0]["surprise"] = 1
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="damaged pdlab trace"):
        Trace.load(path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nothing.json")


def test_output_and_steps_of_one_request_are_found(trace):
    for request_id in trace.requests:
        pairs = trace.sequence_steps(request_id)
        assert [r.step for r, _ in pairs] == sorted(r.step for r, _ in pairs)
        assert {s.sequence_id for _, s in pairs} == {request_id}
        sampled = [s.sampled for _, s in pairs if s.sampled is not None]
        assert trace.output_ids(request_id) == sampled
    assert [len(trace.output_ids(i)) for i in trace.requests] == [1, 9, 9]
