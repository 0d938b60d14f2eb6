"""The LiveCluster: readers are served without end, workers are killed, and no answer suffers."""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from jupyter_client.manager import start_new_kernel

from pdlab import Engine, EngineConfig, load
from pdlab.disagg.hosts.host import Host, LocalHost
from pdlab.disagg.hosts.processes import ProcessHost
from pdlab.disagg.hosts.spec import TransportSpec, WorkerSpec, local_specs, make_worker
from pdlab.disagg.transport.in_process import Switchboard
from pdlab.workbench import live_cluster, live_cluster_run
from pdlab.workbench.live_cluster import LiveCluster
from pdlab.workbench.live_cluster_data import (
    MAX_TEXT_CHARS,
    Cut,
    Picture,
    Totals,
    lines_of,
    picture_of,
    pieces_of,
    recorded_picture,
)
from pdlab.workbench.live_cluster_prompts import document_ids
from pdlab.workbench.live_cluster_run import LiveRun
from pdlab.workbench.picture import find_browser, widget_page
from tests.helpers import random_prompt

MODEL = load("random:tiny-llama")
EXACT = EngineConfig(exact=True, num_blocks=160, max_num_seqs=16, record_trace=False)
PROMPTS = [random_prompt(9 + 7 * i, MODEL.config.vocab_size) for i in range(3)]
MAX_TOKENS = 120
WAIT_S = 120.0
needs_browser = pytest.mark.skipif(find_browser() is None, reason="needs Chromium or Chrome")


@pytest.fixture(autouse=True)
def quick_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_cluster_run, "THINK_S", 0.0)
    monkeypatch.setattr(live_cluster_run, "REFRESH_S", 0.01)


@pytest.fixture
def in_process() -> Callable[[WorkerSpec], Host]:
    """Starts workers in this process."""
    board = Switchboard()

    def launch(spec: WorkerSpec) -> Host:
        here = replace(spec, transport=TransportSpec("in-process"), cores=None)
        return LocalHost(make_worker(here, model=MODEL, board=board))

    return launch


class Watched:
    """A run, and what is to be done when a picture shows something: in the run's own thread."""

    def __init__(self, launch: Callable[[WorkerSpec], Host], **options: object):
        self.hosts: list[Host] = []
        self.steps: list[tuple[Callable[[Picture], bool], Callable[[], None]]] = []
        self.is_done = threading.Event()
        self.pictures: list[Picture] = []

        def begin(spec: WorkerSpec) -> Host:
            self.hosts.append(launch(spec))
            return self.hosts[-1]

        specs = local_specs(1, 2, model=MODEL.name, config=EXACT, num_threads=1, slowdown=2)
        self.run = LiveRun(
            MODEL,
            specs,
            PROMPTS,
            max_tokens=MAX_TOKENS,
            notify=self.look,
            launch=begin,
            **options,  # type: ignore[arg-type]
        )

    def when(self, holds: Callable[[Picture], bool], act: Callable[[], None]) -> None:
        self.steps.append((holds, act))

    def look(self) -> None:
        picture = self.run.picture
        if self.steps and self.steps[0][0](picture):
            self.pictures.append(picture)
            self.steps.pop(0)[1]()
        if not self.steps or self.run.is_over:
            self.is_done.set()

    def play(self) -> None:
        """Until all steps were taken; then stop."""
        self.run.start()
        assert self.is_done.wait(WAIT_S)
        self.run.stop()
        assert self.run.wait(WAIT_S)
        assert self.run.error is None
        assert self.run.state == "stopped"
        assert not self.steps


def rows(picture: Picture, **wanted: object) -> list[Picture]:
    return [row for row in picture["rows"] if all(row.get(k) == v for k, v in wanted.items())]


def log(picture: Picture) -> str:
    return "\n".join(line["text"] for line in picture["log"])


def worker(picture: Picture, name: str) -> Picture:
    [card] = [card for card in picture["workers"] if card["name"] == name]
    return card


def in_mid_answer(name: str) -> Callable[[Picture], bool]:
    """Whether a worker writes an answer that is long from its end."""
    return lambda picture: any(
        8 <= row["tokens"] <= row["most"] // 2 for row in rows(picture, decode_on=name)
    )


def check_answers(run: LiveRun) -> None:
    """Every answer is the one of an engine that nobody disturbs."""
    assert run.answers
    prompts, params, outputs = zip(*run.answers, strict=True)
    with Engine(MODEL, EXACT) as engine:
        alone = engine.generate(list(prompts), list(params))
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]


# --- a run ----------------------------------------------------------------------------------------


def kill_in_mid_answer(watched: Watched) -> None:
    cut: list[str] = []

    def remember_and_kill() -> None:
        cut.extend(row["request"] for row in rows(watched.pictures[-1], decode_on="d0"))
        watched.run.kill("d0")

    watched.when(in_mid_answer("d0"), remember_and_kill)
    watched.when(lambda p: bool(rows(p, attempt=1, stage="decoding")), lambda: None)
    watched.when(
        lambda _: set(cut) <= {answer.output.request_id for answer in watched.run.answers},
        lambda: None,
    )
    watched.play()
    again = watched.pictures[1]
    assert worker(again, "d0")["state"] == "lost"
    assert {line["kind"] for line in again["marks"]} >= {"kill", "lost"}
    told = "\n".join(line["text"] for line in watched.pictures[2]["log"])
    assert any(f"{name} goes on" in told for name in cut)
    check_answers(watched.run)


def test_a_killed_writer_changes_no_answer(in_process: Callable[[WorkerSpec], Host]) -> None:
    kill_in_mid_answer(Watched(in_process))


def test_kill_9_of_a_process_changes_no_answer_and_leaves_no_process() -> None:
    watched = Watched(ProcessHost)
    kill_in_mid_answer(watched)
    assert len(watched.hosts) == 3
    for host in watched.hosts:
        assert isinstance(host, ProcessHost)
        assert host.process.returncode is not None
    assert [card["state"] for card in watched.run.picture["workers"]] == ["ended"] * 3
    assert watched.run.first_token_s is not None


def test_readers_are_told_that_nobody_is_left_and_served_again(
    in_process: Callable[[WorkerSpec], Host],
) -> None:
    watched = Watched(in_process)
    run = watched.run

    def kill_all() -> None:
        for name in run.specs:
            run.kill(name)

    watched.when(in_mid_answer("d0"), kill_all)
    watched.when(lambda p: len(rows(p, stage="failed")) == 4, lambda: run.revive("d1"))
    watched.when(
        lambda p: worker(p, "d1")["state"] == "serving" and bool(rows(p, decode_on="d1")),
        lambda: run.revive("p0"),
    )
    watched.when(lambda p: bool(rows(p, prefill_on="p0")), lambda: None)
    watched.play()
    nobody = watched.pictures[1]
    assert {row["error"] for row in nobody["rows"]} == {"no worker is left"}
    assert {card["state"] for card in nobody["workers"]} == {"lost"}
    assert nobody["errors"] == 4
    errors = [answer for answer in run.answers if answer.output.error]
    assert len(errors) == 4
    assert worker(watched.pictures[3], "p0")["state"] == "serving"
    assert "d1 serves again" in "\n".join(line.text for line in run._lines)


def test_a_document_has_a_row_and_does_not_wait_for_others(
    in_process: Callable[[WorkerSpec], Host],
) -> None:
    watched = Watched(in_process)
    watched.when(in_mid_answer("d1"), lambda: watched.run.paste(500))
    watched.when(lambda p: worker(p, "p0")["reading"] >= 500, lambda: None)
    watched.when(lambda p: bool(rows(p, reader="document", stage="done")), lambda: None)
    watched.play()
    [row] = rows(watched.pictures[2], reader="document")
    assert row["prompt"] == "[500 tokens]"
    assert row["tokens"] == row["most"]
    assert "pastes a document of 500 tokens" in "\n".join(line.text for line in watched.run._lines)
    check_answers(watched.run)


def test_no_more_documents_than_there_are_seats(in_process: Callable[[WorkerSpec], Host]) -> None:
    watched = Watched(in_process)

    def paste_many() -> None:
        for _ in range(5):
            watched.run.paste(200)

    watched.when(in_mid_answer("d1"), paste_many)
    watched.when(lambda p: "no document now: 3 are" in log(p), lambda: None)
    watched.play()
    assert len(rows(watched.pictures[1], reader="document")) == 3


def test_killing_the_dead_and_reviving_the_living_is_nothing(
    in_process: Callable[[WorkerSpec], Host],
) -> None:
    watched = Watched(in_process)
    run = watched.run

    def wish() -> None:
        run.revive("d0")
        run.kill("p0")
        run.kill("p0")

    watched.when(in_mid_answer("d0"), wish)
    watched.when(lambda p: worker(p, "p0")["state"] == "lost", lambda: run.kill("p0"))
    watched.when(in_mid_answer("d1"), lambda: None)
    watched.play()
    assert [line.text for line in run._lines if line.kind == "lost"] == [
        "p0 is lost. It had nothing"
    ]
    assert len(watched.hosts) == 3


def test_workers_that_never_begin_end_the_run() -> None:
    specs = local_specs(1, 1, model="random:no-such-shape", config=EXACT, num_threads=1)
    run = LiveRun(MODEL, specs, PROMPTS)
    run.start()
    assert run.wait(WAIT_S)
    assert run.state == "failed"
    assert "no-such-shape" in str(run.error)


def test_it_can_be_stopped_before_the_processes_have_begun() -> None:
    begun: list[ProcessHost] = []

    def launch(spec: WorkerSpec) -> Host:
        begun.append(ProcessHost(spec))
        return begun[-1]

    run = LiveRun(MODEL, local_specs(1, 1, model=MODEL.name), PROMPTS, launch=launch)
    run.start()
    run.stop()
    assert run.wait(WAIT_S)
    assert run.state == "stopped"
    assert all(host.process.returncode is not None for host in begun)


# --- data -----------------------------------------------------------------------------------------


def test_the_end_of_a_text_is_shown_with_its_cuts() -> None:
    assert pieces_of("one two", []) == (["one two"], [])
    assert pieces_of("one two three", [Cut(3, "d0"), Cut(7, "d1")]) == (
        ["one", " two", " three"],
        ["d0", "d1"],
    )
    assert pieces_of("one", [Cut(0, "p0")]) == (["one"], [])  # nothing was written before


def test_a_long_text_begins_with_a_word_and_forgets_old_cuts() -> None:
    words = "word " * 60
    pieces, lost = pieces_of(words, [Cut(4, "d0"), Cut(290, "d1")])
    assert lost == ["d1"]
    assert pieces[0].startswith(" word")
    assert pieces[1] == words[290:]
    assert len("".join(pieces)) <= MAX_TEXT_CHARS
    shown = {len("".join(pieces_of("x" * n, [])[0])) for n in range(2000)}
    assert max(shown) <= MAX_TEXT_CHARS  # also without any space


def test_a_picture_without_a_past_is_plain_data() -> None:
    totals = Totals()
    totals.count([0.2, 0.4, 1.9])
    picture = picture_of(2.5, [], [], [], totals)
    assert picture["pace"] == [2, 1]
    assert json.loads(json.dumps(picture)) == picture


def test_pace_covers_the_last_minute() -> None:
    totals = Totals()
    totals.count(float(second) for second in range(100))
    totals.forget_before(90 - 60)
    picture = picture_of(100.0, [], [], [], totals)
    assert (picture["pace_from_s"], picture["pace"]) == (40, [1] * 60)
    assert min(totals.tokens) == 30


def test_a_document_is_as_long_as_asked_and_always_another(smollm2) -> None:
    first, second = (document_ids(smollm2, 333, seed) for seed in (1, 2))
    assert len(first) == len(second) == 333
    assert first[:16] != second[:16]  # no block of it is cached
    assert len(document_ids(MODEL, 50, 0)) == 50


def test_the_recorded_picture_shows_a_kill_and_its_recovery() -> None:
    picture = recorded_picture()
    assert "cores, 20" in picture["recorded"]
    assert {"kill", "lost", "recovered"} <= {line["kind"] for line in picture["log"]}
    assert any(row.get("attempt") and row["lost"] for row in picture["rows"])
    assert any("goes on" in line for line in lines_of(picture))


# --- the widget -----------------------------------------------------------------------------------


@pytest.fixture
def local_widgets(
    monkeypatch: pytest.MonkeyPatch, in_process: Callable[[WorkerSpec], Host]
) -> Iterator[None]:
    """Widgets whose workers are in this process."""
    monkeypatch.setattr(live_cluster_run, "ProcessHost", in_process)
    yield
    for thread in threading.enumerate():
        if isinstance(thread, LiveRun):
            thread.stop()
            assert thread.wait(WAIT_S)


def test_before_the_start_it_shows_what_was_recorded() -> None:
    live = LiveCluster(MODEL)
    assert live.state == "not started"
    assert "recorded" in live.picture
    assert live.answers == []
    data, _ = live._repr_mimebundle_()
    assert "not started; the picture was recorded" in data["text/plain"]
    assert "kill -9 d0" in data["text/html"]
    assert not [thread for thread in threading.enumerate() if isinstance(thread, LiveRun)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_decode": -1}, "num_decode=-1"),
        ({"num_prefill": 0, "num_decode": 0}, "at least 1 worker"),
        ({"num_readers": 0}, "num_readers=0"),
        ({"num_readers": 9}, "num_readers"),
        ({"max_tokens": 1}, "max_tokens=1"),
        ({"exact": "yes"}, "exact='yes'"),
        ({"prompts": []}, "prompts is empty"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LiveCluster(MODEL, **arguments)  # type: ignore[arg-type]


def test_wishes_are_checked_before_they_are_sent(local_widgets: None) -> None:
    live = LiveCluster(MODEL)
    with pytest.raises(ValueError, match="name='x1' is no worker: p0, d0, d1"):
        live.kill("x1")
    with pytest.raises(ValueError, match="num_tokens"):
        live.paste(5000)
    with pytest.raises(RuntimeError, match="not started: start it first"):
        live.revive("d0")
    live._on_message(live, {"type": "kill", "name": "d0"}, [])
    assert "start it first" in live.message
    live._on_message(live, {"type": "start"}, [])
    assert live.message == ""
    assert live.state in ("starting", "running")
    live.stop()
    assert live.state == "stopped"
    assert "recorded" not in live.picture


def test_another_start_ends_the_first(local_widgets: None) -> None:
    first, second = LiveCluster(MODEL), LiveCluster(MODEL)
    first.start()
    second.start()
    first.refresh()
    assert first.state == "stopped"
    second.start()  # runs already
    assert len([t for t in threading.enumerate() if isinstance(t, LiveRun)]) == 1
    second.stop()
    second.start()  # once more
    second.refresh()
    assert second.state in ("starting", "running")


def test_it_ends_with_its_last_view(local_widgets: None) -> None:
    live = LiveCluster(MODEL)
    for is_open in (True, True, False):
        live._on_message(live, {"type": "view", "open": is_open}, [])
    live.start()
    run = live._run
    assert run is not None
    assert run.is_alive()
    live._on_message(live, {"type": "view", "open": False}, [])
    assert run.wait(WAIT_S)


def test_traits_change_in_the_thread_of_the_event_loop_only(local_widgets: None) -> None:
    async def watch() -> None:
        live, seen = LiveCluster(MODEL), asyncio.Event()
        threads: set[threading.Thread] = set()

        def on_change(change: dict[str, object]) -> None:
            threads.add(threading.current_thread())
            if live.state == "running" and live.picture["answers"] and change["name"] == "picture":
                seen.set()
            if live.state == "stopped":
                ended.set()

        ended = asyncio.Event()
        live.observe(on_change, ["picture", "state", "message"])
        live.start()
        await asyncio.wait_for(seen.wait(), WAIT_S)
        live._on_message(live, {"type": "stop"}, [])
        await asyncio.wait_for(ended.wait(), WAIT_S)
        assert threads == {threading.main_thread()}

    asyncio.run(watch())


def test_the_saved_page_has_the_last_picture(
    local_widgets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []

    def keep(data: dict[str, str], **options: object) -> None:
        shown.append((str(options["display_id"]), data["text/html"]))

    monkeypatch.setattr(live_cluster, "display", keep)
    monkeypatch.setattr(live_cluster, "update_display", keep)
    live = LiveCluster(MODEL)
    live._ipython_display_()
    live.start()
    live.stop()
    [(name, before), (same, after)] = shown
    assert name == same
    assert "recorded" in before
    assert "recorded" not in after
    assert "d0 (decode) ended" in after


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [480, 760, 1120])
def test_nothing_sticks_out(page, width: int, theme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    live = LiveCluster(MODEL)
    for is_live in (False, True):
        if is_live:
            live.picture = {k: v for k, v in live.picture.items() if k != "recorded"}
            live.state = "running"
        page.set_content(widget_page(live, theme))
        page.wait_for_selector(".pd-live-cluster[data-state]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        disabled = page.locator(".pd-lc-act button:disabled").count()
        assert disabled == (0 if is_live else 3)
        tag = page.locator(".pd-foot .pd-tag").inner_text()
        assert tag == ("measured" if is_live else "recorded")


# --- the kernel -----------------------------------------------------------------------------------

START = """
import asyncio
from pdlab import load, workbench as wb
live = wb.LiveCluster(load("random:tiny-llama"), 1, 1, num_threads=1, slowdown=20)
served = asyncio.Event()
live.observe(lambda change: served.set() if change["new"] == "running" else None, "state")
live.start()
await asyncio.wait_for(served.wait(), 120)
while not all(worker["pid"] for worker in live.picture["workers"]):
    await asyncio.sleep(0)
print(*[worker["pid"] for worker in live.picture["workers"]])
"""
SLEEP = "import time\nprint('asleep', flush=True)\ntime.sleep(600)"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: waits for processes")
def test_it_outlives_an_interrupt_and_ends_with_the_kernel() -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        printed = run_in_kernel(client, START)
        processes = [os.pidfd_open(int(number)) for number in printed.split()]
        assert len(processes) == 2
        run_in_kernel(client, SLEEP, on_print=manager.interrupt_kernel)
        assert not select.select(processes, [], [], 0)[0]
        assert run_in_kernel(client, "print(live.state)") == "running\n"
        manager.shutdown_kernel(now=True)  # SIGKILL: the kernel tidies nothing up
        for process in processes:
            assert select.select([process], [], [], WAIT_S)[0]
            os.close(process)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_in_kernel(client, code: str, on_print: Callable[[], None] = lambda: None) -> str:
    """What a cell prints."""
    printed: list[str] = []

    def hear(message: dict) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])
            on_print()

    client.execute_interactive(code, output_hook=hear, timeout=WAIT_S)
    return "".join(printed)
