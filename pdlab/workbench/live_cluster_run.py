"""A cluster that serves readers without end, in a thread of its own, and may lose its workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, cycle
from multiprocessing.connection import wait
from queue import SimpleQueue

from pdlab.disagg import Cluster, RouterConfig, WorkerDied, WorkerSpec
from pdlab.disagg.hosts.host import Host
from pdlab.disagg.hosts.processes import ProcessHost
from pdlab.disagg.jobs import Stage
from pdlab.engine import Prompt, SamplingParams
from pdlab.models import Model
from pdlab.trace import FailureRecord
from pdlab.workbench.live_cluster_data import (
    PACE_S,
    Answer,
    Cut,
    Line,
    Picture,
    Reader,
    Totals,
    picture_of,
    text_of,
    worker_of,
)
from pdlab.workbench.live_cluster_prompts import document_ids

REFRESH_S = 0.2
"""Between two pictures: often enough for the eye, and seldom enough for the kernel."""
THINK_S = 1.5
"""Between the end of an answer and the reader's next question."""
KEEP_S = 5.0
"""How long the row of a document stays when its answer is over."""
MAX_DOCUMENTS = 3
"""That are served at once."""
DOCUMENT_ANSWER_TOKENS = 8
MAX_ANSWERS, MAX_LINES = 100, 200


class LiveRun(threading.Thread):
    """Workers, readers who always want something, and wishes that come from other threads.

    Wishes (`kill`, `revive`, `paste`, `stop`) are carried out between two steps of the cluster.
    However the thread ends, all processes end with it; they also end with this process.

    Args:
        specs: of the workers.
        prompts: that readers ask, one after the other.
        notify: called in the thread when `picture` or `state` is new.
        launch: starts a worker; None for a process of its own.
    """

    def __init__(
        self,
        model: Model,
        specs: Sequence[WorkerSpec],
        prompts: Sequence[Prompt],
        *,
        router: RouterConfig | None = None,
        num_readers: int = 4,
        max_tokens: int = 64,
        notify: Callable[[], None] = lambda: None,
        launch: Callable[[WorkerSpec], Host] | None = None,
    ):
        super().__init__(name="live cluster", daemon=True)
        self.specs = {spec.name: spec for spec in specs}
        self.state = "starting"
        """Then `running`, `stopping`, and `stopped` or `failed`."""
        self.error: Exception | None = None
        self.answers: deque[Answer] = deque(maxlen=MAX_ANSWERS)
        """The newest that are over, whole."""
        self.first_token_s: float | None = None
        """From the beginning of the run, the processes' start included."""
        self._model, self._router, self._max_tokens = model, router, max_tokens
        self._notify, self._launch = notify, launch or ProcessHost
        self._prompts, self._seeds = cycle(prompts), count()
        self._readers = [Reader(f"reader {i + 1}", i) for i in range(num_readers)]
        self._documents: list[Reader] = []
        self._starting: dict[str, Host] = {}
        self._wishes: SimpleQueue[Callable[[Cluster], None]] = SimpleQueue()
        self._stopping = threading.Event()
        self._lines: deque[Line] = deque(maxlen=MAX_LINES)
        self._totals = Totals()
        self._told: list[int] = []
        """Of each failure: requests whose going on was told."""
        self._began_s, self._shown_s = time.perf_counter(), 0.0
        self.picture = self._picture(None)

    # --- from any thread ------------------------------------------------------------------------

    def stop(self) -> None:
        """Let it end; returns at once."""
        self._stopping.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; whether it has come, and with it that of all processes."""
        self.join(timeout_s)
        return not self.is_alive()

    @property
    def is_over(self) -> bool:
        return self.state in ("stopped", "failed")

    def kill(self, name: str) -> None:
        """SIGKILL for a worker; nothing where it is lost already."""
        self._wishes.put(lambda cluster: self._kill(cluster, name))

    def revive(self, name: str) -> None:
        """Start a lost worker anew, in another process; nothing where it lives."""
        self._wishes.put(lambda cluster: self._revive(cluster, name))

    def paste(self, num_tokens: int) -> None:
        """A document of so many tokens arrives, of which a few words are to be written."""
        self._wishes.put(lambda cluster: self._paste(cluster, num_tokens))

    # --- the thread -----------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's own; see `start`."""
        try:
            for name in self.specs:
                self._begin(name)
            cluster = self._first_cluster()
            if cluster is not None:
                with cluster:
                    self._serve(cluster)
            self._end("stopped")
        except Exception as error:
            self.error = error
            self._end("failed")

    def _begin(self, name: str) -> None:
        self._starting[name] = self._launch(self.specs[name])

    def _end(self, state: str) -> None:
        for host in self._starting.values():
            host.kill()
            host.close()
        self._starting.clear()
        ended = {"state": "ended", "pid": None, "jobs": 0, "fill": 0.0}
        cards = [card | ended for card in self.picture["workers"]]
        self.picture = self.picture | {"workers": cards}
        self.state = state
        self._notify()

    def _first_cluster(self) -> Cluster | None:
        """Of all workers that begin; None if it is to stop before that.

        Raises:
            WorkerDied: none began.
        """
        begun: list[Host] = []
        death: WorkerDied | None = None
        try:
            while self._starting:
                if self._stopping.is_set():
                    return None
                self._show(None)
                for name in self._ready(timeout_s=0.1):
                    host = self._starting.pop(name)
                    try:
                        _ = host.hello
                        begun.append(host)
                    except WorkerDied as error:
                        host.close()
                        death = error
                        self._lines.append(Line(0.0, "lost", str(error).splitlines()[0]))
            if death is not None and not begun:
                raise death
            members = [(host, self.specs[host.hello.name].role) for host in begun]
            cluster, begun = Cluster(self._model, members, self._router, seed=0), []
        finally:
            for host in begun:
                host.close()
        took_s = time.perf_counter() - self._began_s
        self._note(cluster, f"{len(members)} workers are ready, {took_s:.1f} s after the start")
        return cluster

    def _ready(self, timeout_s: float = 0.0) -> list[str]:
        """Those of the starting workers that have said something, or are gone."""
        waited_for = {name: host.waitable() for name, host in self._starting.items()}
        if any(thing is None for thing in waited_for.values()):
            return list(waited_for)
        heard = wait(list(waited_for.values()), timeout_s)  # type: ignore[arg-type]
        return [name for name, thing in waited_for.items() if thing in heard]

    def _serve(self, cluster: Cluster) -> None:
        self.state = "running"
        while not self._stopping.is_set():
            while not self._wishes.empty():
                self._wishes.get()(cluster)
            self._welcome(cluster)
            self._ask(cluster)
            if not cluster.step():
                time.sleep(0.02)
            self._look(cluster)
            self._show(cluster)
        self.state = "stopping"
        self._show(cluster, at_once=True)

    def _show(self, cluster: Cluster | None, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._shown_s < REFRESH_S:
            return
        self._shown_s = time.monotonic()
        self.picture = self._picture(cluster)
        self._notify()

    def _picture(self, cluster: Cluster | None) -> Picture:
        peers = cluster.router.peers if cluster else {}
        hosts = self._starting | (cluster.hosts if cluster else {})
        now_s = cluster.now_s() if cluster else 0.0
        self._totals.forget_before(int(now_s) - PACE_S)
        cards = [
            worker_of(
                spec,
                peers.get(name),
                hosts.get(name),
                is_starting=name in self._starting or cluster is None,
            )
            for name, spec in self.specs.items()
        ]
        readers = [*self._readers, *self._documents]
        return picture_of(now_s, cards, readers, list(self._lines), self._totals)

    def _note(self, cluster: Cluster, text: str, kind: str = "note") -> None:
        self._lines.append(Line(cluster.now_s(), kind, text))

    # --- wishes ---------------------------------------------------------------------------------

    def _kill(self, cluster: Cluster, name: str) -> None:
        if name in cluster.hosts:
            cluster.kill(name)
        elif name in self._starting:
            self._starting[name].kill()
        else:
            return
        self._note(cluster, f"kill -9 {name}", "kill")

    def _revive(self, cluster: Cluster, name: str) -> None:
        if name not in cluster.hosts and name not in self._starting:
            self._begin(name)
            self._note(cluster, f"{name} is started anew")

    def _paste(self, cluster: Cluster, num_tokens: int) -> None:
        if len(self._documents) >= MAX_DOCUMENTS or not cluster.hosts:
            why = "nobody is there" if not cluster.hosts else f"{MAX_DOCUMENTS} are being served"
            self._note(cluster, f"no document now: {why}")
            return
        self._note(cluster, f"somebody pastes a document of {num_tokens} tokens")
        reader = Reader("document", len(self._readers) + len(self._documents))
        self._documents.append(reader)
        ids = document_ids(self._model, num_tokens, seed=next(self._seeds))
        self._submit(cluster, reader, ids, DOCUMENT_ANSWER_TOKENS)

    # --- between two steps ----------------------------------------------------------------------

    def _welcome(self, cluster: Cluster) -> None:
        """Let those join that have begun."""
        for name in self._ready() if self._starting else []:
            host = self._starting.pop(name)
            try:
                cluster.add_worker(host, self.specs[name].role)
            except WorkerDied as death:
                host.close()
                self._note(cluster, str(death).splitlines()[0], "lost")
            else:
                self._note(cluster, f"{name} serves again")

    def _ask(self, cluster: Cluster) -> None:
        """Let readers who have read their answers ask on, if there is somebody to ask."""
        for reader in self._readers if cluster.hosts else []:
            if reader.over_s is not None and cluster.now_s() - reader.over_s < THINK_S:
                continue
            if reader.job is None:  # shorter ones first, or all would end at the same time
                part = (reader.color + 1) / len(self._readers)
                most = max(2, round(part * self._max_tokens))
            elif reader.over_s is not None:
                most = self._max_tokens
            else:
                continue
            self._submit(cluster, reader, next(self._prompts), most)

    def _submit(self, cluster: Cluster, reader: Reader, prompt: Prompt, max_tokens: int) -> None:
        seed = next(self._seeds)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.7 * (seed % 2), seed=seed)
        name = cluster.submit(prompt, params)
        reader.job, reader.prompt = cluster.router.jobs[name], prompt
        reader.cuts, reader.num_counted, reader.over_s = [], 0, None

    def _look(self, cluster: Cluster) -> None:
        """Book what has come of the step."""
        for reader in [*self._readers, *self._documents]:
            if reader.job is not None and reader.over_s is None:
                self._follow(cluster, reader)
        self._documents = [
            reader
            for reader in self._documents
            if reader.over_s is None or cluster.now_s() - reader.over_s < KEEP_S
        ]
        self._totals.transfers += len(cluster.transfers)
        self._totals.transfer_bytes += sum(moved.num_bytes for moved in cluster.transfers)
        cluster.transfers.clear()  # or it would grow without end
        for number, failure in enumerate(cluster.failures):
            self._tell(cluster, number, failure)

    def _follow(self, cluster: Cluster, reader: Reader) -> None:
        job = reader.job
        assert job is not None
        times_s = job.metrics.token_times_s
        if times_s and self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self._began_s
        self._totals.count(times_s[reader.num_counted :])
        reader.num_counted = len(times_s)
        if job.attempt > len(reader.cuts):
            losers = [f.worker for f in cluster.failures if job.request_id in f.request_ids]
            reader.cuts.append(Cut(len(text_of(job)), losers[-1] if losers else ""))
        if job.stage is not Stage.DONE:
            return
        reader.over_s = cluster.now_s()
        self._totals.answers += job.error is None
        self._totals.errors += job.error is not None
        answer = Answer(reader.prompt, job.state.params, cluster.collect(job.request_id))
        self.answers.append(answer)

    def _tell(self, cluster: Cluster, number: int, failure: FailureRecord) -> None:
        """That a worker is lost, and who of those it had goes on."""
        if number == len(self._told):
            self._told.append(0)
            had = ", ".join(failure.request_ids) or "nothing"
            self._lines.append(
                Line(failure.time_s, "lost", f"{failure.worker} is lost. It had {had}")
            )
        for name, at_s in list(failure.recovered_s.items())[self._told[number] :]:
            self._told[number] += 1
            gap_s = at_s - failure.time_s
            self._lines.append(Line(at_s, "recovered", f"{name} goes on, {gap_s:.2f} s after that"))
