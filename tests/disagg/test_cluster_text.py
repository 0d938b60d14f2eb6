"""What travels besides K and V: grammars, stop strings, penalties, half characters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.disagg.router import RouterConfig
from tests.disagg.clusters import check_idle, engine_of, local_cluster
from tests.helpers import TINY, random_model

CONFIG = EngineConfig(exact=True, num_blocks=64, max_num_seqs=6, max_model_len=128, seed=0)
ASKED = {
    "regex": ("A date:", SamplingParams(max_tokens=12, regex=r" 20\d\d-[01]\d-[0-3]\d", seed=5)),
    "json": (
        "A user as JSON:",
        SamplingParams(
            max_tokens=24,
            seed=6,
            json_schema={"type": "object", "properties": {"age": {"type": "integer"}}},
        ),
    ),
    "half characters": (
        "我是谁？ 你好，世界！ 😀😀",
        SamplingParams(max_tokens=12, temperature=1.4, seed=2, ignore_eos=True),
    ),
    "penalties": (
        "the the the the the",
        SamplingParams(
            max_tokens=8,
            temperature=0,
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=0.5,
            logit_bias={260: 2.0},
        ),
    ),
}


@pytest.fixture(scope="module")
def model(smollm2):
    """Small and random, with the real tokenizer."""
    shape = replace(TINY, vocab_size=smollm2.config.vocab_size, max_model_len=256)
    return replace(random_model(shape), tokenizer=smollm2.tokenizer)


@pytest.fixture(scope="module")
def asked(model):
    """Also stop strings: one over the middle of a text, one that its first token begins."""
    plain = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    with Engine(model, CONFIG) as engine:
        [output] = engine.generate(["One, two,"], plain)
    text = output.text
    cases = ASKED | {
        "stop string": ("One, two,", replace(plain, stop=[text[len(text) // 2 :][:5]])),
        "held at the first token": ("One, two,", replace(plain, stop=[text[:3] + "?", text[2:12]])),
    }
    return [prompt for prompt, _ in cases.values()], [params for _, params in cases.values()]


@pytest.mark.parametrize("transfer", ["stream", "push"])
def test_text_is_that_of_one_engine(model, asked, transfer):
    prompts, params = asked
    with Engine(model, CONFIG) as engine:
        alone = engine.generate(prompts, params)
    with local_cluster(
        model,
        {"p0": ("prefill", CONFIG), "d0": ("decode", CONFIG)},
        RouterConfig(transfer=transfer),
    ) as cluster:
        outputs = cluster.generate(prompts, params)
        check_idle(engine_of(cluster, "d0"))
        check_idle(engine_of(cluster, "p0"))
    for one, output in zip(alone, outputs, strict=True):
        assert output.token_ids == one.token_ids
        assert output.text == one.text
        assert (output.finish_reason, output.stop_reason) == (one.finish_reason, one.stop_reason)
    assert len(cluster.transfers) == sum(len(one.token_ids) > 1 for one in alone) >= 5


def test_a_request_that_was_lost_goes_on_as_if_nothing_had_been(model, asked):
    prompts, params = asked
    with Engine(model, CONFIG) as engine:
        alone = engine.generate(prompts, params)
    workers = {"p0": ("prefill", CONFIG), "d0": ("decode", CONFIG), "d1": ("decode", CONFIG)}
    with local_cluster(model, workers) as cluster:
        ids = [cluster.submit(*each) for each in zip(prompts, params, strict=True)]
        while not any(len(job.state.output_ids) > 3 for job in cluster.router.jobs.values()):
            cluster.step()
        cluster.kill("d0")
        while cluster.step():
            pass
        outputs = [cluster.collect(request_id) for request_id in ids]
        [failure] = cluster.failures
    assert [output.text for output in outputs] == [one.text for one in alone]
    assert [output.token_ids for output in outputs] == [one.token_ids for one in alone]
    assert failure.worker == "d0"
    assert failure.request_ids
    assert set(failure.recovered_s) <= set(failure.request_ids)
    assert all(time_s >= failure.time_s for time_s in failure.recovered_s.values())
