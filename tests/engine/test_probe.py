"""What a probe shows is what the step used; what had to be recomputed says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.attention import BACKENDS
from pdlab.trace import Capture
from tests.helpers import SHAPES, TINY, random_model, random_prompt

PROMPTS = [random_prompt(length) for length in (11, 6)]
NAMES = ("attention", "q", "k", "v", "attended")
MORE = SamplingParams(max_tokens=20)


def probed(shape: str, backend: str, num_steps: int = 4) -> tuple[Engine, list[str]]:
    """An engine in mid-run, its chunks and decodes probed from the start."""
    config = EngineConfig(attention_backend=backend, chunk_size=5, block_size=4)
    engine = Engine(random_model(SHAPES[shape]), config)
    ids = [engine.submit(prompt, MORE) for prompt in PROMPTS]
    with engine.probe(names=NAMES):
        for _ in range(num_steps):
            engine.step()
    return engine, ids


def captures(engine: Engine, request_id: str, layer: int, name: str) -> list[Capture]:
    return [
        c
        for c in engine.trace.captures
        if (c.sequence_id, c.layer, c.name) == (request_id, layer, name)
    ]


def joined(engine: Engine, request_id: str, layer: int, name: str) -> np.ndarray:
    """A capture of every token, from position 0 on: [num_tokens, heads, head_dim]."""
    parts = captures(engine, request_id, layer, name)
    lengths = [len(part.array) for part in parts]
    assert [part.start for part in parts] == [sum(lengths[:i]) for i in range(len(parts))]
    return np.concatenate([part.array for part in parts])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["group-of-2", "windowed"])
def test_captured_k_and_v_are_what_stands_in_the_cache(shape, backend):
    engine, ids = probed(shape, backend)
    with engine:
        for request_id in ids:
            kv = engine.read_kv(request_id)
            for layer in range(TINY.num_layers):
                for which, name in enumerate(("k", "v")):
                    captured = torch.from_numpy(joined(engine, request_id, layer, name))
                    there = ~kv[which, layer, :, 0, 0].isnan()  # behind a window, blocks are gone
                    assert there[-1]
                    assert torch.equal(captured[there], kv[which, layer, there])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ["group-of-2", "9-over-3", "windowed"])
def test_captured_attention_equals_a_recomputation(shape, backend):
    """From the captured q, k and v alone: the weights, and with them the step's own output."""
    engine, ids = probed(shape, backend)
    engine.close()
    config = SHAPES[shape]
    for request_id in ids:
        for layer in range(config.num_layers):
            k, v, output = (
                joined(engine, request_id, layer, name) for name in ("k", "v", "attended")
            )
            queries = captures(engine, request_id, layer, "q")
            shown = captures(engine, request_id, layer, "attention")
            for q, weights in zip(queries, shown, strict=True):
                assert weights.start == q.start
                expected = recompute(q.array, k, q.start, config.window(layer))
                end = q.start + len(q.array)
                assert weights.array.shape == (config.num_heads, len(q.array), end)
                np.testing.assert_allclose(weights.array, expected, atol=1e-6)
                np.testing.assert_allclose(weights.array.sum(axis=-1), 1.0, rtol=1e-5)
                values = v[:end].repeat(config.group_size, axis=1)
                mixed = np.einsum("hqk,khd->qhd", expected, values)
                np.testing.assert_allclose(output[q.start : end], mixed, atol=1e-5)


def recompute(q: np.ndarray, k: np.ndarray, start: int, window: int | None) -> np.ndarray:
    """Weights [num_heads, num_queries, num_keys], one query and one head at a time."""
    num_queries, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    weights = np.zeros((num_heads, num_queries, start + num_queries))
    for head in range(num_heads):
        for row in range(num_queries):
            position = start + row
            oldest = 0 if window is None else max(0, position - window + 1)
            keys = k[oldest : position + 1, head // group].astype(np.float64)
            scores = keys @ q[row, head] / np.sqrt(head_dim)
            scores = np.exp(scores - scores.max())
            weights[head, row, oldest : position + 1] = scores / scores.sum()
    return weights


def test_what_was_recomputed_says_so():
    engine, _ = probed("group-of-2", "torch")
    engine.close()
    sources = {(c.name, c.source) for c in engine.trace.captures}
    assert sources == {("attention", "reference")} | {(n, "engine") for n in NAMES[1:]}


def test_a_probe_changes_no_token():
    outputs = []
    for names in ((), NAMES):
        with Engine(random_model()) as engine, engine.probe(names=names):
            outputs.append([o.token_ids for o in engine.generate(PROMPTS, MORE)])
    assert outputs[0] == outputs[1]


def test_only_chosen_layers_and_heads_are_kept_and_k_by_the_heads_that_read_it():
    with Engine(random_model()) as engine:
        with engine.probe(layers=[1], heads=[2, 0], names=("q", "k", "attention")):
            engine.generate(PROMPTS[0], SamplingParams(max_tokens=1))
        with engine.probe(names=NAMES):
            engine.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    some, whole = engine.trace.captures[:3], engine.trace.captures[3:]
    full = {c.name: c for c in whole if c.layer == 1}
    assert [(c.layer, c.name, c.heads) for c in some] == [
        (1, "q", [2, 0]),
        (1, "k", [0, 1]),
        (1, "attention", [2, 0]),
    ]
    assert np.array_equal(some[0].array, full["q"].array[:, [2, 0]])
    assert np.array_equal(some[1].array, full["k"].array)
    assert np.array_equal(some[2].array, full["attention"].array[[2, 0]])


def test_a_probe_ends_with_its_block_and_an_inner_one_gives_way_to_the_outer():
    with Engine(random_model()) as engine:
        engine.submit(PROMPTS[0], MORE)
        with engine.probe(layers=[0], names=["q"]):
            with engine.probe(layers=[1], names=["v"]):
                engine.step()
            engine.step()
        engine.step()
    kept = [(c.step, c.layer, c.name) for c in engine.trace.captures]
    assert kept == [(0, 1, "v"), (1, 0, "q")]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"layers": [0, 2]}, "layers: 2 is not one of 0, 1"),
        ({"layers": [-1]}, "layers: -1 is not one of"),
        ({"heads": [4]}, "heads: 4 is not one of 0, 1, 2, 3"),
        ({"names": ["attention", "scores"]}, "names: 'scores' is not one of attention"),
        ({"names": "attention"}, "names: 'a' is not one of"),
    ],
)
def test_what_there_is_not_cannot_be_probed(settings, complaint):
    with Engine(random_model()) as engine:
        with pytest.raises(ValueError, match=complaint):
            engine.probe(**settings).__enter__()
        engine.generate(PROMPTS[0], SamplingParams(max_tokens=1))
        assert not engine.trace.captures
