"""What an engine accepts, refuses and survives: one bad or unlucky request never costs another."""

from dataclasses import replace

import pytest

from pdlab import Engine, EngineConfig, SamplingParams
from tests.helpers import TINY, random_model, random_prompt

FOUR = SamplingParams(max_tokens=4)


def engine(**settings) -> Engine:
    return Engine(random_model(), EngineConfig(**settings))


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# --- lengths ----------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    """2 blocks of 4, 8 prompt tokens and 4 more: 11 slots are written, which need 3 blocks."""
    with engine(block_size=4, num_blocks=2) as small:
        with pytest.raises(ValueError, match=r"needs 3 KV blocks of 4 tokens, num_blocks is 2"):
            small.submit(random_prompt(8), FOUR)
        assert small.generate(random_prompt(5), FOUR)[0].finish_reason == "length"


def test_a_request_that_just_fits_finishes():
    """The last token is never fed back, so it needs no slot."""
    with engine(block_size=4, num_blocks=2) as small:
        output = small.generate(random_prompt(8), SamplingParams(max_tokens=1))[0]
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        output = small.generate(random_prompt(5), FOUR)[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")


@pytest.mark.parametrize(("below", "expected"), [(5, 5), (2, 2), (1, 1), (0, 1)])
def test_generation_stops_at_max_model_len(below, expected):
    """A prompt that fills the model's positions still gives the one token that follows it."""
    with engine(max_model_len=20) as limited:
        output = limited.generate(random_prompt(20 - below), SamplingParams(max_tokens=9))[0]
    assert (len(output.token_ids), output.finish_reason) == (expected, "length")


def test_a_prompt_longer_than_max_model_len_is_refused_with_both_numbers():
    with engine(max_model_len=20) as limited:
        with pytest.raises(ValueError, match="prompt has 21 tokens, max_model_len is 20"):
            limited.submit(random_prompt(21))
        with pytest.raises(ValueError, match=r"max_model_len=129 is more than .*: 128"):
            engine(max_model_len=TINY.max_model_len + 1)


def test_one_token_means_one_token():
    with engine() as one:
        assert len(one.generate(random_prompt(3), SamplingParams(max_tokens=1))[0].token_ids) == 1


# --- refusals ---------------------------------------------------------------------------------


def test_bad_requests_fail_alone():
    good = [random_prompt(5), random_prompt(9)]
    bad = [[], [TINY.vocab_size], [-1], random_prompt(21), "text", [1, "2"], [True], [1.5]]
    params = SamplingParams(max_tokens=8)
    with engine(max_model_len=20) as mixed:
        alone = tokens_of(mixed.generate(good, params))
        outputs = mixed.generate([good[0], *bad, good[1]], params)
        assert tokens_of(outputs) == [alone[0], *[[]] * len(bad), alone[1]]
        for output in outputs[1:-1]:
            assert output.finish_reason == "error"
            assert isinstance(output.error, ValueError)
        assert all(output.error is None for output in (outputs[0], outputs[-1]))
        assert not mixed.requests
        assert mixed.pool.num_free == mixed.config.num_blocks


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "prompt is empty: it needs at least 1 token"),
        ([3, 61], "prompt has token id 61, vocab_size is 61"),
        ([-1], "prompt has token id -1, vocab_size is 61"),
        ("text", "has no tokenizer: give token ids"),
        ([{"role": "user", "content": "hello"}], "has no tokenizer: give token ids"),
    ],
)
def test_a_bad_prompt_is_refused_at_submit_with_what_is_wrong_with_it(prompt, complaint):
    with engine() as one, pytest.raises(ValueError, match=complaint):
        one.submit(prompt)


def test_a_prompt_given_alone_raises_instead_of_being_marked():
    with engine() as one, pytest.raises(ValueError, match="prompt has token id 61"):
        one.generate([61])


@pytest.mark.parametrize("prompt", ["", [{"role": "user"}], [{"content": "no role"}], [1, "two"]])
def test_prompts_that_a_tokenizer_cannot_read_fail_alone(prompt, smollm2):
    with Engine(smollm2, EngineConfig(num_blocks=4)) as one:
        outputs = one.generate([prompt, "A"], SamplingParams(max_tokens=1))
        assert isinstance(outputs[0].error, ValueError)
        assert len(outputs[1].token_ids) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("seed", -1),
        ("seed", "42"),
        ("ignore_eos", "no"),
        ("n", 0),
        ("prefix_cache", None),
    ],
)
def test_a_bad_sampling_parameter_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("num_blocks", 1.5),
        ("max_num_seqs", -3),
        ("max_num_batched_tokens", 0),
        ("chunk_size", 0),
        ("max_model_len", 0),
        ("top_k_recorded", -1),
        ("seed", True),
        ("watermark", 1.5),
        ("num_swap_blocks", -1),
        ("preemption", "kill"),
        ("window", 0),
        ("sink_tokens", -1),
        ("heavy_tokens", 0.5),
        ("kv_head_groups", 0),
        ("enable_prefix_cache", 1),
        ("attention_backend", "magic"),
        ("exact", "no"),
        ("record_trace", 1),
    ],
)
def test_a_bad_knob_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_batched_tokens=8 is less than max_num_seqs=9",
        ),
        (
            {"exact": True, "attention_backend": "torch"},
            "exact=True needs attention_backend='exact', not 'torch'",
        ),
        (
            {"exact": True, "kv_format": "int8:channel"},
            "exact=True needs a kv_format with token scales, not 'int8:channel'",
        ),
        ({"preemption": "swap"}, "preemption='swap' needs num_swap_blocks of at least 1, not 0"),
        ({"sink_tokens": 4}, "sink_tokens=4 needs a window"),
        ({"heavy_tokens": 4}, "heavy_tokens=4 needs a window"),
        ({"heavy_tokens": 4, "window": 8}, "heavy_tokens=4 needs enable_prefix_cache=False"),
        (
            {"heavy_tokens": 4, "window": 8, "enable_prefix_cache": False, "exact": True},
            "heavy_tokens=4 cannot be exact",
        ),
    ],
)
def test_knobs_that_do_not_go_together_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        EngineConfig(**settings)


@pytest.mark.parametrize("kv_format", ["int3", "int8:token:7/fp32", "fp32:token", "int8//", 8])
def test_a_bad_kv_format_is_named_with_what_is_allowed(kv_format):
    with pytest.raises(ValueError, match="kv_format="), engine(kv_format=kv_format):
        pass


def test_more_samples_than_seats_are_refused():
    with (
        engine(max_num_seqs=2) as one,
        pytest.raises(ValueError, match="n=3 samples, max_num_seqs is 2"),
    ):
        one.submit([1, 2], SamplingParams(n=3))


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(ValueError, match="kv_head_groups=5 does not divide"):
        engine(kv_head_groups=5)


def test_unknown_parameters_are_refused_never_dropped():
    with pytest.raises(ValueError, match="best_of=3 is not supported"):
        SamplingParams(best_of=3)
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=0.9)
    with engine() as one, pytest.raises(ValueError, match="params"):
        one.submit([1, 2], {"max_tokens": 3})


def test_as_many_params_as_prompts_or_one_for_all():
    with engine() as one:
        with pytest.raises(ValueError, match="params has 3 entries for 2 prompts"):
            one.generate([[1], [2]], [FOUR] * 3)
        each = [SamplingParams(max_tokens=n) for n in (1, 3)]
        assert [len(t) for t in tokens_of(one.generate([[1], [2]], each))] == [1, 3]
        assert [len(t) for t in tokens_of(one.generate([[1], [2]], FOUR))] == [4, 4]
        assert one.generate([]) == []


# --- scheduling -------------------------------------------------------------------------------


def test_nothing_is_sampled_or_streamed_before_the_last_chunk():
    with engine(chunk_size=4) as chunked:
        request_id = chunked.submit(random_prompt(10), FOUR)
        for expected_start in (0, 4):
            [part] = chunked.step().sequences
            assert (part.start, part.num_tokens, part.sampled) == (expected_start, 4, None)
            assert not chunked.requests[request_id].chunks
        [part] = chunked.step().sequences
        assert (part.start, part.num_tokens) == (8, 2)
        assert [c.token_ids for c in chunked.requests[request_id].chunks] == [[part.sampled]]


def test_decodes_go_on_beside_a_long_prompt():
    with engine(chunk_size=4) as chunked:
        first = chunked.submit(random_prompt(3), SamplingParams(max_tokens=9))
        chunked.step()
        second = chunked.submit(random_prompt(17), FOUR)
        for _ in range(4):
            record = chunked.step()
            assert record.phase == "mixed"
            assert [part.sequence_id for part in record.sequences] == [first, second]
            assert record.sequences[0].sampled is not None


def submitted(served: Engine, num_steps: int) -> str:
    """A request with a company of two, `num_steps` steps later."""
    for length in (4, 6):
        served.submit(random_prompt(length), FOUR)
    request_id = served.submit(random_prompt(13), FOUR)
    for _ in range(num_steps):
        served.step()
    return request_id


@pytest.mark.parametrize(
    ("num_steps", "state"),
    [(0, "WAITING"), (2, "PREFILLING"), (6, "RUNNING"), (20, "FINISHED")],
)
def test_abort_frees_everything_at_any_moment_and_twice_is_once(num_steps, state):
    with engine(chunk_size=3, block_size=4, num_blocks=20) as served:
        request_id = submitted(served, num_steps)
        assert served.requests[request_id].samples[0].sequence.state.name == state
        for _ in range(2):
            served.abort(request_id)
        served.abort("never heard of")
        output = served.collect(request_id)
        assert output.finish_reason == ("length" if state == "FINISHED" else "abort")
        served.abort(request_id)
        while served.step():
            pass
        assert served.pool.num_free == 20
        others = [served.collect(i) for i in ("r0", "r1")]
        alone = served.generate([o.prompt_ids for o in others], FOUR)
        assert tokens_of(others) == tokens_of(alone)


def test_collect_takes_finished_requests_once():
    with engine() as served:
        request_id = served.submit([1, 2], FOUR)
        with pytest.raises(ValueError, match="'r0' has not finished"):
            served.collect(request_id)
        while served.step():
            pass
        assert len(served.collect(request_id).token_ids) == 4
        with pytest.raises(ValueError, match="'r0' is unknown or was collected before"):
            served.collect(request_id)


def test_a_batch_never_holds_more_than_max_num_seqs():
    with engine(max_num_seqs=2) as narrow:
        narrow.generate([random_prompt(n) for n in (3, 4, 5, 6, 7)], FOUR)
        sizes = {len(record.residents) for record in narrow.trace.steps}
    assert max(sizes) == 2


def test_the_end_token_ends_unless_it_is_ignored():
    """The end token of this model is the one it says second."""
    from dataclasses import replace

    prompt = random_prompt(7)
    with engine() as plain:
        [tokens] = tokens_of(plain.generate([prompt], FOUR))
    config = replace(TINY, eos_token_ids=(tokens[1],))
    with Engine(random_model(config)) as ending:
        output = ending.generate([prompt], FOUR)[0]
        assert (output.token_ids, output.finish_reason) == (tokens[:2], "stop")
        going_on = SamplingParams(max_tokens=4, ignore_eos=True)
        output = ending.generate([prompt], going_on)[0]
        assert (output.token_ids, output.finish_reason) == (tokens, "length")


def test_metrics_count_tokens_in_order_of_time():
    with engine(block_size=4, num_blocks=6) as served:
        outputs = served.generate(
            [random_prompt(9), random_prompt(8)], SamplingParams(max_tokens=9)
        )
        preempted = sum(len(record.preempted) for record in served.trace.steps)
    assert preempted == sum(o.metrics.num_preemptions for o in outputs) > 0
    for output in outputs:
        metrics = output.metrics
        times = [metrics.arrival_s, metrics.first_scheduled_s, *metrics.token_times_s]
        assert times == sorted(times)
        assert metrics.num_output_tokens == len(output.token_ids) == 9
        assert metrics.num_prompt_tokens == len(output.prompt_ids)
        assert metrics.queue_s + 0 <= metrics.ttft_s <= metrics.e2e_s
        assert metrics.tpot_s * 8 == pytest.approx(metrics.e2e_s - metrics.ttft_s)


def nested(depth: int) -> dict:
    made: dict = {}
    for _ in range(depth):
        made = {"items": made}
    return made


@pytest.mark.parametrize("name", ["json_schema", "stop", "choice", "logit_bias", "temperature"])
@pytest.mark.parametrize(
    "value",
    [nested(100_000), -(10**5000), b"x", {1: {2: b"x"}}],
    ids=["deep", "huge", "bytes", "nested"],
)
def test_values_of_any_kind_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 400


def test_an_end_token_that_the_model_has_no_logits_for_is_no_token():
    config = replace(TINY, eos_token_ids=(10**6, 3))
    params = SamplingParams(max_tokens=4, min_tokens=2)
    with Engine(random_model(config)) as one:
        assert one.generate([1, 2], params)[0].finish_reason in ("stop", "length")
