"""Workers in real processes: they serve as one engine does, and some of them are killed.

Processes take seconds to begin, so all begin at once, and tests share those that are not killed.
What happens at a certain moment happens when the router hears an event, not after some time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait

import pytest

from pdlab import Engine, EngineConfig, Policy, SamplingParams, load
from pdlab.child import SocketChannel, process
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts import processes
from pdlab.disagg.hosts.host import WorkerDied
from pdlab.disagg.hosts.loop import Answer, Ask, serve
from pdlab.disagg.hosts.processes import ProcessHost, process_cluster
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec, local_specs, make_worker
from pdlab.disagg.messages import (
    Abort,
    Arrival,
    Arrived,
    Event,
    Failed,
    Held,
    Hello,
    Prefill,
    Produced,
    Published,
    Reserve,
    Reserved,
    Serve,
)
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.transport.in_process import Switchboard
from pdlab.disagg.transport.sockets import new_token
from pdlab.disagg.worker import Worker
from pdlab.engine.moving import RequestState
from pdlab.link import Link
from tests.helpers import random_prompt

MODEL = load("random:tiny-llama")
EXACT = EngineConfig(
    exact=True, block_size=8, num_blocks=192, max_num_seqs=16, max_num_batched_tokens=256, seed=0
)
TOKEN = new_token()
SLOW = Link(2e6)
"""Of all that compute prompts and are killed. A prompt of 40 tokens takes 15 ms, so that K and V of
many are under way."""
NUM_REQUESTS = 32
PROMPTS = [random_prompt(5 + 2 * i, MODEL.config.vocab_size, seed=3) for i in range(NUM_REQUESTS)]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
    for i in range(NUM_REQUESTS)
]
LONG_PROMPT = random_prompt(700, MODEL.config.vocab_size)
"""Its K and V, 0.5 MB, are more than a socket takes from who sends, while nobody receives."""


def spec_of(name: str) -> WorkerSpec:
    is_slow = name in ("p1", "p2", "p3", "p6")
    transport = TransportSpec("socket", {"token": TOKEN}, SLOW if is_slow else None)
    return WorkerSpec(
        name,
        transport,
        role="prefill" if name.startswith("p") else "decode",
        model="random:tiny-llama" if name != "lost" else "random:no-such-shape",
        config=EXACT,
        num_threads=1,
    )


PAIR = local_specs(
    1,
    1,
    model="random:tiny-llama",
    config=EXACT,
    num_threads=1,
    transport=TransportSpec("socket", {"token": TOKEN}),
)
"""`p0` and `d0`, which nobody kills, each on its own core."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, ProcessHost]]:
    """All processes of these tests, by name."""
    names = ["p1", "p2", "p3", "p4", "p5", "p6", "d1", "d2", "lost"]
    started = {spec.name: ProcessHost(spec) for spec in PAIR}
    started |= {name: ProcessHost(spec_of(name)) for name in names}
    yield started
    for host in started.values():
        host.close()
        assert host.process.returncode is not None


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of one engine."""
    with Engine(MODEL, EXACT) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def cluster_of(hosts: dict[str, ProcessHost], *names: str, **config: object) -> Cluster:
    members = [(hosts[name], hosts[name].spec.role) for name in names]
    return Cluster(MODEL, members, RouterConfig(**config), seed=0)


@contextmanager
def when(cluster: Cluster, is_it: Callable[[str, Event], bool], act: Callable[[], None]):
    """Act once, as soon as the router has heard a certain event."""
    hear, acted = cluster.router.on_event, []

    def on_event(name: str, event: Event, *times: float) -> None:
        hear(name, event, *times)
        if not acted and is_it(name, event):
            acted.append(event)
            act()

    cluster.router.on_event = on_event  # type: ignore[method-assign]
    yield acted
    cluster.router.on_event = hear  # type: ignore[method-assign]
    assert acted, "it never happened"


def is_a(kind: type) -> Callable[[str, Event], bool]:
    return lambda _, event: isinstance(event, kind)


def run(cluster: Cluster) -> None:
    while cluster.step():
        pass


def check_whole(cluster: Cluster, *names: str) -> None:
    """Nothing is left on workers of a cluster that has nothing to do."""
    run(cluster)
    for name in names:
        host = cluster.hosts[name]
        assert isinstance(host, ProcessHost)
        load = host.load()
        assert (load.num_waiting, load.num_running, load.num_held, load.num_reserved) == (0,) * 4
        assert load.num_free_blocks == EXACT.num_blocks


def check_lost(cluster: Cluster, name: str) -> None:
    """One worker was lost, and all that it had went on."""
    [failure] = cluster.failures
    assert failure.worker == name
    assert "SIGKILL" in failure.reason
    assert "memory" not in failure.reason
    assert set(failure.recovered_s) == set(failure.request_ids)
    assert name not in cluster.hosts


# --- nobody dies --------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["stream", "push", "pull"])
def test_two_processes_draw_the_tokens_of_one_engine(hosts, alone, transfer):
    cluster = cluster_of(hosts, "p0", "d0", transfer=transfer)
    outputs = cluster.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == alone
    assert not cluster.failures
    assert cluster.transfers
    for record in cluster.transfers:
        assert (record.source, record.target) == ("p0", "d0")
        assert record.num_bytes == record.num_tokens * MODEL.config.kv_bytes_per_token(4)
    for output in outputs:
        times_s = output.metrics.token_times_s
        assert output.metrics.arrival_s < times_s[0] <= cluster.now_s()
        assert times_s == sorted(times_s)
    check_whole(cluster, "p0", "d0")


def test_a_process_keeps_to_its_cores_and_tells_what_it_did(hosts):
    for name in ("p0", "d0"):
        host = hosts[name]
        assert os.sched_getaffinity(host.process.pid) == set(host.spec.cores)
        trace = host.trace()
        assert trace.steps
        assert trace.machine["threads"] == 1
        assert host.clock_offset_s == 0.0


def test_an_interrupt_does_not_end_a_worker(hosts, alone):
    cluster = cluster_of(hosts, "p0", "d0")
    for host in cluster.hosts.values():
        assert (
            os.getsid(host.process.pid) == host.process.pid
        )  # a terminal's does not even reach it

    def interrupt() -> None:
        for host in cluster.hosts.values():
            host.process.send_signal(signal.SIGINT)

    with when(cluster, is_a(Produced), interrupt):
        outputs = cluster.generate(PROMPTS[:4], PARAMS[:4])
    assert [output.token_ids for output in outputs] == alone[:4]
    check_whole(cluster, "p0", "d0")


def test_an_abort_at_each_stage_frees_both_sides(hosts):
    cluster = cluster_of(hosts, "p0", "d0")
    for kind in (Reserved, Held, Arrived, Produced):
        request_id = cluster.submit(random_prompt(100), SamplingParams(max_tokens=500))
        with when(cluster, is_a(kind), partial(cluster.abort, request_id)):
            run(cluster)
        assert cluster.collect(request_id).finish_reason == "abort"
        check_whole(cluster, "p0", "d0")


# --- a worker is killed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "transfer", "stage"),
    [
        pytest.param("p1", "stream", Reserved, id="before"),
        pytest.param("p2", "stream", Held, id="during"),
        pytest.param("p3", "pull", Published, id="while it is pulled from"),
        pytest.param("p6", "stream", Arrived, id="after"),
        pytest.param("d1", "push", Produced, id="receiver, while it decodes"),
    ],
)
def test_killed_under_load_every_request_has_its_tokens(hosts, alone, name, transfer, stage):
    is_prefill = name.startswith("p")
    others = ("d0",) if is_prefill else ("p0",)
    cluster = cluster_of(hosts, name, *others, transfer=transfer)
    speaker = name if stage in (Held, Published) or not is_prefill else "d0"

    def is_it(who: str, event: Event) -> bool:
        if stage is Produced and len(cluster.transfers) < 4:
            return False
        return who == speaker and isinstance(event, stage)

    with when(cluster, is_it, lambda: cluster.kill(name)) as heard:
        outputs = cluster.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == alone
    assert not any(output.error for output in outputs)
    check_lost(cluster, name)
    assert cluster.failures[0].request_ids
    if stage is Arrived:  # whose K and V are there needs nobody else
        assert heard[0].request_id not in cluster.failures[0].request_ids
    check_whole(cluster, *others)


def test_killed_while_a_parcel_is_half_sent(hosts, alone):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        [wanted] = engine.generate(LONG_PROMPT, params)
    cluster = cluster_of(hosts, "p4", "d0")
    receiver = hosts["d0"].process

    def kill() -> None:
        cluster.kill("p4")
        hosts["p4"].process.wait()
        receiver.send_signal(signal.SIGCONT)

    stop = partial(receiver.send_signal, signal.SIGSTOP)
    with when(cluster, is_a(Reserved), stop), when(cluster, is_a(Held), kill):
        outputs = cluster.generate([LONG_PROMPT, *PROMPTS[:8]], [params, *PARAMS[:8]])
    assert [output.token_ids for output in outputs] == [wanted.token_ids, *alone[:8]]
    check_lost(cluster, "p4")
    assert not any(record.num_tokens == len(LONG_PROMPT) for record in cluster.transfers)
    check_whole(cluster, "d0")


def test_killed_while_idle_and_replaced(hosts, alone):
    cluster = cluster_of(hosts, "p5", "d0")
    cluster.kill("p5")
    hosts["p5"].process.wait()
    outputs = cluster.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == alone
    check_lost(cluster, "p5")
    cluster.add_worker(hosts["p0"], "prefill")
    cluster.generate([random_prompt(50, seed=9)], PARAMS[:1])
    assert [record.source for record in cluster.transfers] == ["p0"]
    check_whole(cluster, "p0", "d0")


def test_where_a_loss_is_to_fail_only_what_was_lost_fails(hosts, alone):
    cluster = cluster_of(hosts, "p0", "d2", on_failure="fail")
    with when(cluster, lambda *_: len(cluster.transfers) == 4, lambda: cluster.kill("d2")):
        outputs = cluster.generate(PROMPTS, PARAMS)
    [failure] = cluster.failures
    assert failure.request_ids
    assert not failure.recovered_s
    for output, tokens in zip(outputs, alone, strict=True):
        if output.request_id in failure.request_ids:
            assert output.finish_reason == "error"
            assert "worker d2 is lost: its process was ended by SIGKILL" in str(output.error)
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert output.token_ids == tokens
    check_whole(cluster, "p0")


# --- how a process begins and ends --------------------------------------------------------------


def test_who_cannot_begin_says_why(hosts):
    with pytest.raises(WorkerDied, match="no shape is called 'no-such-shape'") as caught:
        _ = hosts["lost"].hello
    assert caught.value.name == "lost"
    assert "ended with status 1" in caught.value.reason
    assert "Traceback" in caught.value.reason


@contextmanager
def stopped(**options: float) -> Iterator[ProcessHost]:
    """A process that does nothing from the first moment."""
    host = ProcessHost(spec_of("p9"), **options)
    host.process.send_signal(signal.SIGSTOP)
    try:
        yield host
    finally:
        host.process.kill()
        host.close()


def test_who_does_not_begin_in_time_is_given_up():
    with (
        stopped(start_timeout_s=0.05) as host,
        pytest.raises(WorkerDied, match=r"p9 is lost: it did not begin.* for 0\.05 s"),
    ):
        _ = host.hello


def test_what_is_not_read_holds_nobody_up():
    with stopped() as host:
        for _ in range(100):
            host.post([Abort("r" * 100_000)])
        assert host.poll() == []
        host.kill()
        host.process.wait()
        with pytest.raises(WorkerDied, match="ended by SIGKILL"):
            host.poll()
        host.post([])
        host.close()
        with pytest.raises(WorkerDied, match="was closed"):
            host.poll()


def test_who_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(process, "CLOSE_S", 0.05)
    with stopped() as host:
        host.close()
        assert host.process.returncode == -signal.SIGKILL


def test_leaving_a_cluster_ends_its_processes_in_good_order(hosts, alone, monkeypatch):
    pair = [hosts["p0"], hosts["d0"]]
    monkeypatch.setattr(processes, "start_processes", lambda specs, **_: pair)
    with process_cluster(MODEL, [], RouterConfig(transfer="push"), seed=0) as cluster:
        [output] = cluster.generate([PROMPTS[9]], PARAMS[9])
        assert output.token_ids == alone[9]
        assert [record.source for record in cluster.transfers] == ["p0"]
    assert [host.process.returncode for host in pair] == [0, 0]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is no child")
def test_a_worker_does_not_outlive_its_router():
    reader, writer = os.pipe()
    router = os.fork()
    if router == 0:
        try:
            host = ProcessHost(spec_of("p9"))
            assert host.load().num_running == 0
            os.write(writer, str(host.process.pid).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    worker = os.pidfd_open(int(os.read(reader, 100)))
    os.kill(router, signal.SIGKILL)
    os.waitpid(router, 0)
    assert select.select([worker], [], [], 20)[0]
    for descriptor in (reader, worker):
        os.close(descriptor)


def test_one_that_cannot_begin_ends_the_others(monkeypatch):
    made: list[ProcessHost] = []

    class Kept(ProcessHost):
        def __init__(self, spec: WorkerSpec, **options: float):
            super().__init__(spec, **options)
            made.append(self)

    monkeypatch.setattr(processes, "ProcessHost", Kept)
    bad = replace(spec_of("p8"), cores=(4096,))
    with pytest.raises(ValueError, match=r"cores=\(4096,\) of p8: .* may not use \[4096\]"):
        processes.start_processes([spec_of("p9"), bad])
    assert [host.process.returncode for host in made] == [-signal.SIGKILL]


def test_a_spec_must_be_able_to_leave():
    class Mine(Policy):
        def rank(self, waiting, now_s):
            return waiting

    with pytest.raises(ValueError, match=r"spec of p9 cannot leave this process.*Mine"):
        ProcessHost(replace(spec_of("p9"), config=EngineConfig(policy=Mine())))
    with pytest.raises(ValueError, match="kind 'in-process' does not leave a process"):
        ProcessHost(replace(spec_of("p9"), transport=TransportSpec("in-process")))


# --- the loop -----------------------------------------------------------------------------------


@contextmanager
def served(**options: float) -> Iterator[tuple[Worker, SocketChannel, threading.Thread]]:
    """A worker whose loop runs in a thread, and our end of its pipe."""
    here, there = map(SocketChannel, socket.socketpair())
    spec = replace(spec_of("p9"), transport=TransportSpec("in-process"), **options)
    worker = make_worker(spec, model=MODEL, board=Switchboard())
    thread = threading.Thread(target=serve, args=(worker, there))
    thread.start()
    try:
        yield worker, here, thread
    finally:
        here.close()
        thread.join(20)
        there.close()
    assert not thread.is_alive()
    assert worker.engine.memory is None


def hear(channel: SocketChannel, kind: type) -> Event:
    """The next event of a kind; what comes before it is passed over."""
    while True:
        assert wait([channel.fileno()], 20), f"no {kind.__name__} came"
        messages = channel.receive()
        events = [e for m in messages for e in (m if isinstance(m, list) else [m])]
        for event in events:
            if isinstance(event, kind):
                return event


def test_the_end_of_a_lease_wakes_an_idle_worker():
    with served(lease_s=0.05) as (_, channel, _):
        assert hear(channel, Hello).name == "p9"
        state = RequestState(PROMPTS[0], PARAMS[0], seed=0)
        channel.send([Prefill("r0", state, Arrival(0.0))])
        failed = hear(channel, Failed)
        assert "lease of 0.05 s ended" in failed.reason
        channel.send(Ask("load"))
        load = hear(channel, Answer).value
        assert (load.num_held, load.num_free_blocks) == (0, EXACT.num_blocks)


def test_without_a_router_the_loop_ends_and_frees_everything():
    with served() as (worker, channel, thread):
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        state = RequestState(PROMPTS[0], params, seed=0)
        channel.send([Serve("r0", state, Arrival(0.0))])
        hear(channel, Produced)
        channel.close()
        thread.join(20)
        assert not thread.is_alive()
        assert worker.engine.pool.num_free == EXACT.num_blocks


def test_what_was_asked_is_answered_after_the_commands_before_it():
    with served() as (_, channel, _):
        state = RequestState(PROMPTS[0], PARAMS[0], seed=0)
        channel.send([Reserve("r0", state, Arrival(0.0))])
        channel.send(Ask("load"))
        assert hear(channel, Answer).value.num_reserved == 1
        channel.send([Abort("r0")])
        channel.send(Ask("load"))
        assert hear(channel, Answer).value.num_reserved == 0


# --- the channel --------------------------------------------------------------------------------


def test_a_channel_keeps_messages_whole_and_in_order():
    here, there = map(SocketChannel, socket.socketpair())
    messages = [b"a" * size for size in (0, 1, 3_000_000, 2)]
    for message in messages:
        here.send(message)
    assert not here.flush()
    received: list[bytes] = []
    while len(received) < len(messages):
        here.flush()
        received += there.receive()
    assert received == messages
    assert there.receive() == []
    here.close()
    there.close()


def test_what_was_said_before_the_end_is_heard():
    here, there = map(SocketChannel, socket.socketpair())
    here.send("last words")
    here.close()
    assert there.receive() == ["last words"]
    with pytest.raises(EOFError):
        there.receive()
    there.send("too late")
    with pytest.raises(BrokenPipeError):
        there.drain()
    there.close()
