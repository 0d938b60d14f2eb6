"""Constrained text is what was asked for, whatever happens to the sequence on its way."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import torch

from pdlab import Engine, EngineConfig, NaiveGenerator, SamplingParams
from pdlab.sampling import Compiler, LogitsProcessor
from tests.helpers import random_model, random_prompt

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é世"]}, "maxItems": 2},
        "sure": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags", "sure"],
    "additionalProperties": False,
}
ASK = "Describe a person as JSON:"
ARITHMETIC = """
start: sum
sum: product ("+" product)*
product: NUMBER ("*" NUMBER)*
NUMBER: /[0-9]{1,2}/
"""
BACKENDS = ["llguidance", "pdlab"]


def sampled(engine: Engine, count: int, **params) -> list:
    return engine.generate(
        [ASK] * count,
        [SamplingParams(temperature=1.0, seed=seed, **params) for seed in range(count)],
    )


@pytest.fixture(scope="module")
def engine(speaker):
    with Engine(speaker, EngineConfig(num_blocks=2800, max_num_seqs=200)) as engine:
        yield engine


def check_json(outputs: list) -> None:
    for output in outputs:
        assert (output.finish_reason, output.stop_reason) == ("stop", "constraint")
        jsonschema.validate(json.loads(output.text), PERSON)
    assert len({output.text for output in outputs}) > len(outputs) / 2


def test_json_always_parses_and_validates_over_200_samples(engine):
    """At temperature 1, of a model that says anything. All parts of the schema have a greatest
    length: a `number` has not, and its digits may go on till `max_tokens`."""
    check_json(sampled(engine, 200, json_schema=PERSON, max_tokens=200))


def test_json_of_the_real_model_parses_and_validates(smollm2):
    with Engine(smollm2, EngineConfig(num_blocks=200)) as engine:
        check_json(sampled(engine, 8, json_schema=PERSON, max_tokens=80))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expression_is_matched_whole(speaker, backend):
    pattern = r"(yes|no|maybe): [0-9]{2}(\.[0-9])? (世界|é|😀){1,2}"
    with Engine(speaker, EngineConfig(constraint_backend=backend)) as engine:
        outputs = sampled(engine, 6, regex=pattern, max_tokens=30)
    for output in outputs:
        assert re.fullmatch(pattern, output.text)
        assert output.finish_reason == "stop"


def test_both_backends_draw_the_same_tokens_from_the_same_seeds(speaker):
    texts = []
    for backend in BACKENDS:
        config = EngineConfig(constraint_backend=backend, exact=True)
        with Engine(speaker, config) as engine:
            regex = sampled(engine, 6, regex="[a-f]{3,5}(-[0-9]+){2}", max_tokens=8)
            choice = sampled(engine, 6, choice=["red", "green", "greenish", "世"], max_tokens=8)
            texts.append([(o.token_ids, o.stop_reason) for o in regex + choice])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_the_choices_is_made_and_a_longer_one_is_not_cut_off(speaker, backend):
    choices = ["a", "ab", "abc", 'say "hi"\n', "世界"]
    with Engine(speaker, EngineConfig(constraint_backend=backend)) as engine:
        outputs = sampled(engine, 40, choice=choices, max_tokens=20)
    texts = [output.text for output in outputs]
    assert set(texts) <= set(choices)
    assert len(set(texts)) > 1
    assert {output.finish_reason for output in outputs} == {"stop"}


def test_a_grammar_is_followed(engine):
    for output in sampled(engine, 8, grammar=ARITHMETIC, max_tokens=16):
        text = output.text if output.finish_reason == "stop" else output.text.rstrip("+*")
        assert re.fullmatch(r"[0-9]{1,2}([+*][0-9]{1,2})*", text)


def test_the_end_token_comes_only_where_the_text_may_end(speaker):
    end = speaker.config.eos_token_ids[0]
    eager = {"logit_bias": {end: 100.0}, "max_tokens": 30}
    with Engine(speaker) as engine:
        [output] = engine.generate([ASK], SamplingParams(regex="a{4}b*", **eager))
        assert (output.text, output.stop_reason) == ("aaaa", None)
        assert output.token_ids[-1] == end
        [ignored] = engine.generate([ASK], SamplingParams(regex="a{4}b?", ignore_eos=True, **eager))
        assert ignored.text in ("aaaa", "aaaab")
        assert end not in ignored.token_ids


def test_a_stop_token_is_allowed_where_the_text_may_end(speaker):
    special = next(
        i for i in speaker.tokenizer.special_ids if i not in speaker.config.eos_token_ids
    )
    params = SamplingParams(
        regex="ab*", stop_token_ids=[special], logit_bias={special: 100.0}, max_tokens=9
    )
    with Engine(speaker) as engine:
        [output] = engine.generate([ASK], params)
    assert re.fullmatch("ab*", output.text)
    assert (len(output.token_ids), output.stop_reason) == (2, special)


def test_max_tokens_cuts_a_constrained_text_and_says_so(engine):
    [output] = engine.generate([ASK], SamplingParams(json_schema=PERSON, max_tokens=3))
    assert output.finish_reason == "length"


def test_the_state_survives_preemption_and_swap(speaker):
    params = [
        SamplingParams(temperature=1.0, seed=s, regex="[a-z]{4}(-[0-9]){5}", max_tokens=20)
        for s in range(3)
    ]
    texts = []
    for small in ({}, {"num_blocks": 7}, {"num_blocks": 7, "num_swap_blocks": 64}):
        config = EngineConfig(**{"num_blocks": 256} | small, block_size=4, exact=True)
        with Engine(speaker, config) as engine:
            outputs = engine.generate([[1, 2, s] for s in range(3)], params)
            preemptions = sum(output.metrics.num_preemptions for output in outputs)
            assert (preemptions > 0) == bool(small)
            assert engine.pool.num_free == engine.pool.num_blocks
        texts.append([output.text for output in outputs])
    assert texts[0] == texts[1] == texts[2]


def test_each_of_several_samples_has_a_state_of_its_own(engine):
    params = SamplingParams(temperature=1.0, seed=1, n=4, json_schema=PERSON, max_tokens=200)
    [output] = engine.generate([ASK], params)
    for completion in output.completions:
        jsonschema.validate(json.loads(completion.text), PERSON)
    assert len({completion.text for completion in output.completions}) == 4


def test_without_a_cache_the_same_text_comes(speaker):
    params = SamplingParams(temperature=1.0, seed=3, regex="[a-z]{3}-[0-9]{3}", max_tokens=12)
    prompt = speaker.tokenizer.encode(ASK)
    naive = NaiveGenerator(speaker, exact=True).generate(prompt, params)
    with Engine(speaker, EngineConfig(exact=True)) as engine:
        [output] = engine.generate([prompt], params)
    assert (naive.token_ids, naive.text) == (output.token_ids, output.text)


# --- what is impossible ---------------------------------------------------------------------------

IMPOSSIBLE = {
    "regex that does not parse": {"regex": "(yes|no"},
    "regex that matches nothing": {"regex": r"[^\s\S]"},
    "schema that contradicts itself": {
        "json_schema": {"type": "integer", "minimum": 5, "maximum": 3}
    },
    "schema of no type": {"json_schema": {"type": "text"}},
    "schema with what is not supported": {"json_schema": {"not": {}}},
    "grammar with an unknown name": {"grammar": 'start: "a" other'},
    "grammar without a start": {"grammar": 'a: "b"'},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_constraint_is_an_error_of_that_request_alone(engine, name):
    [parameter] = IMPOSSIBLE[name]
    bad = SamplingParams(**IMPOSSIBLE[name], max_tokens=5)
    good, failed = engine.generate([ASK, ASK], [SamplingParams(max_tokens=5), bad])
    assert good.finish_reason == "length"
    assert failed.finish_reason == "error"
    assert str(failed.error).startswith(f"{parameter}=")
    with pytest.raises(ValueError, match=f"{parameter}="):
        engine.stream(ASK, bad)
    assert not engine.requests
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("params", [{"json_schema": {"type": "null"}}, {"grammar": 'start: "a"'}])
def test_our_own_backend_refuses_what_it_does_not_know(speaker, params):
    compiler = Compiler(speaker.tokenizer, speaker.config.vocab_size, "pdlab")
    with pytest.raises(ValueError, match="needs constraint_backend='llguidance'"):
        compiler.constraint(SamplingParams(**params))


@pytest.mark.parametrize("params", [{"regex": "a"}, {"bad_words": ["a"]}, {"stop": "a"}])
def test_without_a_tokenizer_texts_are_refused(params):
    name = next(iter(params))
    with Engine(random_model()) as engine, pytest.raises(ValueError, match=f"{name}.*tokenizer"):
        engine.generate([1, 2], SamplingParams(**params))


def test_two_constraints_at_once_are_refused():
    with pytest.raises(ValueError, match="regex and choice are both given"):
        SamplingParams(regex="a", choice=["a"])


# --- sequences that cannot go on ------------------------------------------------------------------


class Dead(LogitsProcessor):
    """Forbids everything from the third token on."""

    name = "dead"

    def process(self, logits, drawers):
        for row, drawer in zip(logits, drawers, strict=True):
            if drawer.num_output_tokens >= 2:
                row.fill_(-torch.inf)
        return logits


@pytest.mark.parametrize("n", [1, 2])
def test_a_sequence_without_an_allowed_token_fails_alone_and_frees_its_blocks(n):
    stuck = SamplingParams(max_tokens=8, logits_processors=(Dead(),), n=n, temperature=1.0)
    with Engine(random_model(), EngineConfig(block_size=2, num_blocks=40)) as engine:
        prompts = [random_prompt(5), random_prompt(6)]
        other, failed = engine.generate(prompts, [SamplingParams(max_tokens=8), stuck])
        assert (other.finish_reason, len(other.token_ids)) == ("length", 8)
        for completion in failed.completions:
            assert (completion.finish_reason, len(completion.token_ids)) == ("error", 2)
            assert "no token is allowed after 2 tokens: logits_processors leave none" in str(
                completion.error
            )
        assert failed.error is failed.completions[0].error
        assert engine.pool.num_free == 40
        with pytest.raises(ValueError, match="no token is allowed after 2 tokens"):
            engine.generate(random_prompt(5), stuck)
        with pytest.raises(ValueError, match="no token is allowed after 2 tokens"):
            list(engine.stream(random_prompt(5), stuck))
        assert engine.pool.num_free == 40
        assert not engine.requests


def test_the_chunks_before_an_error_are_streamed():
    stuck = SamplingParams(max_tokens=8, logits_processors=(Dead(),))
    with Engine(random_model()) as engine:
        stream = engine.stream(random_prompt(5), stuck)
        chunks = [next(stream) for _ in range(3)]
        with pytest.raises(ValueError, match="no token is allowed"):
            next(stream)
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 1, 0]
    assert chunks[-1].finish_reason == "error"


def test_min_tokens_beyond_what_the_constraint_can_say_is_an_error(speaker):
    params = SamplingParams(choice=["yes"], min_tokens=5, max_tokens=9)
    with Engine(speaker) as engine:
        [ok, failed] = engine.generate(["a", "b"], [SamplingParams(max_tokens=9), params])
    assert ok.finish_reason in ("length", "stop")
    assert failed.finish_reason == "error"
    assert "choice and min_tokens=5 leave none" in str(failed.error)


LIMITS = {
    "refused when consumed": {"regex": "(a?){400}a{400}(a|b)*"},
    "refused later": {"grammar": 'start: a+\na: b | c\nb: "x" b | "x"\nc: c "x" | "x"'},
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_grammar_that_grows_over_a_limit_fails_alone(speaker, name):
    bad = SamplingParams(temperature=1.0, seed=1, max_tokens=120, ignore_eos=True, **LIMITS[name])
    with Engine(speaker) as engine:
        good, failed = engine.generate([ASK, ASK], [SamplingParams(max_tokens=4), bad])
        assert len(good.token_ids) == 4
        assert engine.pool.num_free == engine.pool.num_blocks
    assert failed.finish_reason in ("error", "length")
    if failed.finish_reason == "error":
        assert "constraint cannot follow" in str(failed.error) or "leave none" in str(failed.error)


FAULTY = {
    "deep schema": {"json_schema": '{"items":' * 300 + "{}" + "}" * 300},
    "schema with NaN": {"json_schema": '{"const": NaN}'},
    "a bound of more than 64 bits": {"json_schema": {"type": "integer", "minimum": 2**70}},
    "an exclusive bound of a number": {"json_schema": {"type": "number", "exclusiveMinimum": 0}},
    "an expression of a megabyte": {"regex": "a" * 1_000_000},
    "thousands of choices": {"choice": [f"c{i}" for i in range(3000)]},
    "no Unicode": {"regex": "\ud800"},
    "no Unicode in bad_words": {"bad_words": ["\ud800"]},
    "no Unicode in stop": {"stop": "\ud800"},
    "an end token in the grammar": {"grammar": 'start: "a" <|im_end|> "b"'},
    "a control token in bad_words": {"bad_words": ["x<|im_end|>"]},
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_name_their_parameter(engine, name):
    [parameter] = FAULTY[name]
    with pytest.raises(ValueError, match=f"^{parameter}"):
        engine.submit(ASK, SamplingParams(**FAULTY[name]))
    assert not engine.requests
