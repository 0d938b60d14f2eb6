"""Streams: chunks carry all there is, slow readers pause their own request, and loops can wait."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from pdlab import Engine, EngineConfig, NaiveGenerator, SamplingParams, Trace
from pdlab.engine.fake import FakeRunner, expected_tokens
from tests.helpers import TINY, random_model, random_prompt

TEN = SamplingParams(max_tokens=10, logprobs=2)


def fake_engine(**settings) -> Engine:
    config = EngineConfig(**{"block_size": 2, "num_blocks": 64} | settings)
    engine = Engine(random_model(), config)
    engine.runner = FakeRunner(
        config.num_blocks,
        config.block_size,
        TINY.vocab_size,
        num_swap_blocks=config.num_swap_blocks,
    )
    return engine


def tokens(chunks: list) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def said(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, TINY.vocab_size)


# --- chunks -------------------------------------------------------------------------------------


def test_each_chunk_has_its_tokens_logprobs_and_times():
    with Engine(random_model()) as engine:
        chunks = list(engine.stream(random_prompt(5), TEN))
        [output] = engine.generate([random_prompt(5)], TEN)
    assert tokens(chunks) == output.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * 10 + ["length"]
    for chunk in chunks[:-1]:
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.times_s) == 1
        assert chunk.logprobs[0].token_id == chunk.token_ids[0]
        assert len(chunk.logprobs[0].top) == 2
    times = [time_s for chunk in chunks for time_s in chunk.times_s]
    assert times == sorted(times)
    assert [each.token_id for each in output.logprobs] == output.token_ids
    assert output.completions[0].sum_logprob == pytest.approx(
        sum(each.logprob for each in output.logprobs)
    )


def test_chunks_of_several_samples_name_theirs():
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=1)
    with Engine(random_model()) as engine:
        chunks = list(engine.stream(random_prompt(5), params))
        [output] = engine.generate([random_prompt(5)], params)
    for completion in output.completions:
        mine = [chunk for chunk in chunks if chunk.index == completion.index]
        assert tokens(mine) == completion.token_ids
        assert mine[-1].finish_reason == "length"


def test_metrics_have_every_latency():
    with Engine(random_model()) as engine:
        metrics = engine.generate(random_prompt(5), TEN)[0].metrics
        again = engine.generate(random_prompt(40), TEN)[0].metrics
        cached = engine.generate(random_prompt(40), TEN)[0].metrics
    told = metrics.to_dict()
    assert 0 <= told["queue_s"] <= told["ttft_s"] <= told["e2e_s"]
    assert len(told["itl_s"]) == 9
    assert told["tpot_s"] == pytest.approx(sum(told["itl_s"]) / 9)
    assert told["e2e_s"] == pytest.approx(told["ttft_s"] + sum(told["itl_s"]))
    assert (again.num_cached_tokens, cached.num_cached_tokens) == (0, 39 // 16 * 16)


# --- back-pressure ----------------------------------------------------------------------------


def test_a_request_that_is_not_read_pauses_and_goes_on_when_it_is():
    with fake_engine() as engine:
        slow = engine.stream([1, 2], SamplingParams(max_tokens=30), max_unread=4)
        quick = list(engine.stream([3, 4], SamplingParams(max_tokens=20)))
        assert tokens(quick) == said([3, 4], 20)
        [request] = engine.requests.values()
        assert request.num_unread == 4
        assert request.samples[0].sequence.paused
        assert engine.step() is None, "all that is left is paused"
        assert tokens([next(slow) for _ in range(4)]) == said([1, 2], 4)
        assert tokens(list(slow)) == said([1, 2], 30)[4:]
        assert engine.pool.num_free == 64


@pytest.mark.parametrize("num_swap_blocks", [0, 32])
def test_a_paused_request_gives_its_blocks_to_those_who_run(num_swap_blocks):
    """The pool holds one request at a time; the paused one was there first."""
    long = SamplingParams(max_tokens=20)
    with fake_engine(num_blocks=12, num_swap_blocks=num_swap_blocks) as engine:
        slow = engine.stream([1, 2], long, max_unread=3)
        first = [next(slow) for _ in range(2)]
        outputs = engine.generate([[3, 4], [5, 6]], long)
        assert [o.token_ids for o in outputs] == [said([3, 4], 20), said([5, 6], 20)]
        assert tokens(first + list(slow)) == said([1, 2], 20), "nothing lost, nothing twice"
        assert engine.pool.num_free == 12


def test_a_paused_request_gives_up_its_seat():
    long = SamplingParams(max_tokens=20)
    with fake_engine(max_num_seqs=1) as engine:
        slow = engine.stream([1, 2], long, max_unread=3)
        first = [next(slow) for _ in range(2)]
        assert engine.generate([3, 4], long)[0].token_ids == said([3, 4], 20)
        assert tokens(first + list(slow)) == said([1, 2], 20)


def test_a_resumed_request_has_its_old_place_in_the_order():
    with fake_engine(max_num_seqs=1) as engine:
        slow = engine.stream([1, 2], SamplingParams(max_tokens=20), max_unread=1)
        next(slow)
        others = [engine.submit([n], SamplingParams(max_tokens=6)) for n in (3, 4)]
        for _ in range(4):
            engine.step()
        assert engine.requests[others[0]].samples[0].sequence.num_output_tokens > 0
        chunks = list(slow)
        assert tokens(chunks) == said([1, 2], 20)[1:]
        assert not engine.requests[others[1]].finished, "the older went first"


def test_an_unread_request_can_be_aborted_while_it_is_paused():
    with fake_engine() as engine:
        slow = engine.stream([1, 2], SamplingParams(max_tokens=30), max_unread=2)
        engine.generate([3, 4], SamplingParams(max_tokens=9))
        slow.close()
        assert engine.pool.num_free == 64
        assert not engine.scheduler.has_work


@pytest.mark.parametrize("max_unread", [0, -1, 1.5, None])
def test_max_unread_must_be_at_least_one(max_unread):
    with fake_engine() as engine, pytest.raises(ValueError, match="max_unread"):
        engine.stream([1], TEN, max_unread=max_unread)


def test_pausing_changes_no_bit():
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    prompts = [random_prompt(6), random_prompt(9)]
    results = []
    for max_unread in (64, 1):
        config = EngineConfig(exact=True, block_size=2, num_blocks=9)
        with Engine(random_model(), config) as engine:
            streams = [engine.stream(p, params, max_unread=max_unread) for p in prompts]
            read = [[next(streams[0])], [next(streams[1])]]
            read[1] += streams[1]
            read[0] += streams[0]
            results.append([tokens(chunks) for chunks in read])
    assert results[0] == results[1]


# --- event loops ------------------------------------------------------------------------------


async def read_all(stream) -> list:
    return [chunk async for chunk in stream]


def test_an_async_stream_says_what_a_stream_says():
    with Engine(random_model()) as engine:
        expected = list(engine.stream(random_prompt(5), TEN))
        chunks = asyncio.run(read_all(engine.astream(random_prompt(5), TEN)))
    assert [(c.text, c.token_ids, c.finish_reason) for c in chunks] == [
        (c.text, c.token_ids, c.finish_reason) for c in expected
    ]


def test_readers_on_one_loop_share_the_steps():
    prompts = [[n, n + 1] for n in range(1, 9)]
    with fake_engine() as engine:

        async def main() -> list[list]:
            streams = [engine.astream(p, SamplingParams(max_tokens=12)) for p in prompts]
            return await asyncio.gather(*map(read_all, streams))

        results = asyncio.run(main())
        assert [tokens(chunks) for chunks in results] == [said(p, 12) for p in prompts]
        assert len(engine.trace.steps) <= 12 + 8, "one step serves all who wait"
        assert engine.pool.num_free == 64
        assert not engine.requests


def test_the_loop_goes_on_while_a_step_computes():
    with fake_engine() as engine:
        computing, may_end = threading.Event(), threading.Event()
        run = engine.runner.run

        def slow(batch, clock, step):
            computing.set()
            assert may_end.wait(10)
            return run(batch, clock, step)

        engine.runner.run = slow

        async def main() -> list:
            reading = asyncio.ensure_future(read_all(engine.astream([1, 2], TEN)))
            while not computing.is_set():
                await asyncio.sleep(0.001)
            may_end.set()  # nothing would come here if the loop were blocked
            return await reading

        assert tokens(asyncio.run(main())) == said([1, 2], 10)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "cancel at once"])
def test_leaving_an_async_stream_aborts_its_request(how):
    with fake_engine() as engine:

        async def main() -> None:
            stream = engine.astream([1, 2], SamplingParams(max_tokens=40))
            if how == "break":
                async for _ in stream:
                    break
                del stream
                await asyncio.sleep(0.05)
            elif how == "aclose":
                await anext(stream)
                await stream.aclose()
            else:
                reading = asyncio.ensure_future(read_all(stream))
                await asyncio.sleep(0 if how == "cancel at once" else 0.01)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                await asyncio.sleep(0.05)
            other = await read_all(engine.astream([3, 4], TEN))
            assert tokens(other) == said([3, 4], 10)

        asyncio.run(main())
        assert not engine.requests
        assert engine.pool.num_free == 64


def test_a_refused_prompt_raises_when_the_stream_is_read():
    with fake_engine() as engine, pytest.raises(ValueError, match="prompt is empty"):
        asyncio.run(read_all(engine.astream([])))


def test_an_error_of_a_step_reaches_the_reader_and_the_engine_goes_on():
    with fake_engine() as engine:
        run, fails = engine.runner.run, [True]

        def once(batch, clock, step):
            if fails:
                fails.pop()
                raise RuntimeError("a bad step")
            return run(batch, clock, step)

        engine.runner.run = once
        with pytest.raises(RuntimeError, match="a bad step"):
            asyncio.run(read_all(engine.astream([1, 2], TEN)))
        assert engine.pool.num_free == 64
        assert tokens(asyncio.run(read_all(engine.astream([1, 2], TEN)))) == said([1, 2], 10)


def test_a_slow_async_reader_pauses_its_request_only():
    with fake_engine() as engine:

        async def main() -> None:
            slow = engine.astream([1, 2], SamplingParams(max_tokens=30), max_unread=2)
            first = await anext(slow)
            quick = await read_all(engine.astream([3, 4], SamplingParams(max_tokens=20)))
            assert tokens(quick) == said([3, 4], 20)
            assert max(request.num_unread for request in engine.requests.values()) == 2
            assert tokens([first, *[chunk async for chunk in slow]]) == said([1, 2], 30)

        asyncio.run(main())


# --- log probabilities of the prompt ----------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 7])
def test_prompt_logprobs_are_those_of_the_whole_prompt(chunk_size):
    model, prompt = random_model(), random_prompt(30)
    params = SamplingParams(max_tokens=2, prompt_logprobs=3)

    right = NaiveGenerator(model, exact=True).logits(prompt).log_softmax(dim=-1)
    config = EngineConfig(exact=True, chunk_size=chunk_size, block_size=4)
    with Engine(model, config) as engine:
        engine.generate(prompt, SamplingParams(max_tokens=1))  # in the prefix cache now
        [output] = engine.generate([prompt], params)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 30
    for position in range(1, 30):
        told, row = output.prompt_logprobs[position], right[position - 1]
        assert told.token_id == prompt[position]
        assert told.logprob == pytest.approx(row[prompt[position]].item(), abs=1e-5)
        assert [each.token_id for each in told.top] == row.topk(3).indices.tolist()
        assert told.rank == 1 + (row > row[prompt[position]]).sum()


def test_prompt_logprobs_survive_preemption():
    params = SamplingParams(max_tokens=6, prompt_logprobs=0)
    prompts = [random_prompt(9), random_prompt(11)]
    told = []
    for num_blocks in (60, 6):
        config = EngineConfig(exact=True, block_size=4, num_blocks=num_blocks)
        with Engine(random_model(), config) as engine:
            outputs = engine.generate(prompts, params)
        told.append([o.prompt_logprobs for o in outputs])
    assert outputs[1].metrics.num_preemptions > 0
    assert told[0] == told[1]


def test_a_prompt_of_one_token_has_no_logprob_to_tell():
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with Engine(random_model()) as engine:
        assert engine.generate([5], params)[0].prompt_logprobs == [None]


def test_the_logits_of_a_prompt_are_counted_as_work():
    params = SamplingParams(max_tokens=1)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with Engine(random_model(), EngineConfig(enable_prefix_cache=False)) as engine:
        engine.generate([random_prompt(20)], params)
        engine.generate([random_prompt(20)], asked)
    plain, told = (record.flops["logits"] for record in engine.trace.steps)
    assert told == 20 * plain


# --- what must not be lost in between ---------------------------------------------------------


def test_a_reader_cancelled_while_its_request_is_queued_leaves_none_behind():
    with fake_engine() as engine:

        async def main() -> None:
            reading = asyncio.ensure_future(read_all(engine.astream([1, 2], TEN)))
            await asyncio.sleep(0)  # its thread now waits for the lock
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            engine._lock.release()

        engine._lock.acquire()
        asyncio.run(main())
        assert not engine.requests
        assert not engine.scheduler.has_work


def test_a_ctrl_c_while_a_request_is_queued_leaves_none_behind(monkeypatch):
    with fake_engine() as engine:
        add = engine.scheduler.add

        def interrupted(sequence):
            add(sequence)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(engine.scheduler, "add", interrupted)
        for call in (engine.submit, engine.stream, engine.generate):
            with pytest.raises(KeyboardInterrupt):
                call([1, 2], TEN)
            assert not engine.requests
            assert not engine.scheduler.has_work


def test_a_request_has_finished_only_when_its_last_chunk_is_there(monkeypatch):
    with fake_engine() as engine:
        request_id = engine.submit([1, 2], SamplingParams(max_tokens=1))
        request, seen = engine.requests[request_id], []
        finish = engine.scheduler.finish

        def watched(sequence, reason):
            freed = finish(sequence, reason)
            seen.append(request.finished)
            return freed

        monkeypatch.setattr(engine.scheduler, "finish", watched)
        engine.step()
        assert seen == [False]
        assert request.finished


def test_a_stream_refuses_prompt_logprobs():
    params = SamplingParams(prompt_logprobs=1)
    with fake_engine() as engine:
        with pytest.raises(ValueError, match="prompt_logprobs=1"):
            engine.stream([1, 2], params)
        with pytest.raises(ValueError, match="prompt_logprobs=1"):
            asyncio.run(read_all(engine.astream([1, 2], params)))


def test_threads_that_stream_at_once_each_get_their_own():
    prompts = [[n, n + 1] for n in range(1, 9)]
    results: dict[int, list] = {}
    with fake_engine() as engine:

        def read(n: int) -> None:
            results[n] = list(
                engine.stream(prompts[n], SamplingParams(max_tokens=15), max_unread=2)
            )

        threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.pool.num_free == 64
    assert [tokens(results[n]) for n in range(8)] == [said(p, 15) for p in prompts]


def test_parameters_come_back_from_a_saved_trace(tmp_path):
    params = SamplingParams(
        temperature=1.0,
        stop_token_ids=[3],
        bad_words=[(4, 5)],
        logit_bias={7: -1.5},
        top_k=3,
        max_tokens=2,
    )
    with Engine(random_model()) as engine:
        engine.generate([random_prompt(5)], params)
    engine.trace.save(tmp_path / "t.json")
    loaded = Trace.load(tmp_path / "t.json")
    assert loaded.requests == engine.trace.requests
    assert loaded.requests["r0"].params["logit_bias"] == {"7": -1.5}
