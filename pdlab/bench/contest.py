"""Peers of a bench as processes: started, asked, put to rest between turns, given up on.

Nothing a peer does ends the bench: one that cannot be started, answers with an error, dies or does
not answer in time raises `PeerError`, which says what it last wrote to stderr. Between its turns a
peer is stopped by signal, so that no thread of its own that waits in a loop takes a core from the
one that is measured.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

STARTER = Path(__file__).resolve().parent / "peers" / "start.py"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LEAD_HERE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would keep another environment's Python from its own packages."""
TUNED_HERE = ("GOMP_SPINCOUNT",)
"""Set by `import pdlab`, for pdlab: a peer runs as if it had been started alone."""
LAST_WORDS = 300
"""Characters of stderr that an error message keeps."""


class PeerError(RuntimeError):
    """A peer did not do what it was asked; the message says what came instead."""


@dataclass(frozen=True)
class Entry:
    """Who takes part, and how it is started."""

    name: str
    """In the table: `llama.cpp q8_0`."""
    kind: str
    """Its module in `pdlab.bench.peers`."""
    python: str
    model: str
    """What its `open_peer` loads: a name, a file or a directory."""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_pdlab(self) -> bool:
        return self.kind == "pdlab_engine"


@dataclass(frozen=True)
class Answer:
    """What a peer said of one batch."""

    token_ids: list[list[int]]
    first_s: float
    """Until every prompt had its first token."""
    rest_s: float
    """From then to the last token."""
    rest_tokens: int
    """That came in this time, of all prompts together."""


class PeerProcess:
    """One peer. Use it as a context manager: leaving ends the process.

    Args:
        command: what to start; None starts the entry's Python on its module.

    Raises:
        PeerError: it cannot be started.
    """

    def __init__(self, entry: Entry, num_threads: int, command: list[str] | None = None):
        self.entry = entry
        self.num_threads = num_threads
        self._asked = 0
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._stderr: TextIO = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command or [entry.python, str(STARTER), entry.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=_environment(entry, num_threads),
                process_group=0,  # a signal reaches what it starts; orphaned at rest, it is ended
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(f"cannot start {entry.python}: {error.strerror}") from error
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, warm_up: list[list[int]], tokens: int, timeout_s: float) -> dict[str, Any]:
        """Load and warm up; returns what it says about itself.

        Args:
            tokens: that it will have to hold at once, at most.
        """
        about = self._ask(
            timeout_s,
            do="open",
            model=self.entry.model,
            threads=self.num_threads,
            options=dict(self.entry.options),
            warm_up=warm_up,
            tokens=tokens,
        )
        missing = {"version", "settings", "weight_bytes", "kv_element_bytes"} - about.keys()
        if missing:
            raise PeerError(f"does not say its {', '.join(sorted(missing))}")
        return about

    def generate(self, prompts: list[list[int]], num_tokens: int, timeout_s: float) -> Answer:
        """Continue all prompts at once, greedily, by exactly so many tokens each."""
        found = self._ask(timeout_s, do="generate", prompts=prompts, num_tokens=num_tokens)
        try:
            answer = Answer(**{name: found[name] for name in Answer.__dataclass_fields__})
        except KeyError as error:
            raise PeerError(f"answers without {error}") from error
        lengths = [len(ids) for ids in answer.token_ids]
        if lengths != [num_tokens] * len(prompts):
            raise PeerError(f"gave {lengths} tokens where {num_tokens} a prompt were asked for")
        return answer

    def rest(self) -> None:
        """Stop all that it does, until `wake`."""
        self._signal(getattr(signal, "SIGSTOP", None))

    def wake(self) -> None:
        self._signal(getattr(signal, "SIGCONT", None))

    def close(self) -> None:
        """End the process, and what it started."""
        self._end()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream:
                with suppress(OSError):  # what was not yet written to a dead process
                    stream.close()

    def _signal(self, number: signal.Signals | None) -> None:
        """To the process and its children, which are a group; nothing where there is none."""
        if number is None or self._process.poll() is not None:
            return
        if hasattr(os, "killpg"):
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _ask(self, timeout_s: float, **question: Any) -> dict[str, Any]:
        self._asked += 1
        assert self._process.stdin
        try:
            print(json.dumps({"number": self._asked, **question}), file=self._process.stdin)
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"is gone{self._last_words()}") from error
        answer = self._answer(timeout_s)
        if "error" in answer:
            raise PeerError(str(answer["error"])[:LAST_WORDS])
        return answer

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the last question, whatever else stands between."""
        until = time.monotonic() + timeout_s
        try:
            while (line := self._lines.get(timeout=max(0.0, until - time.monotonic()))) is not None:
                answer = _parsed(line)
                if answer.get("to") == self._asked:
                    return answer
        except queue.Empty:
            self._end()
            raise PeerError(
                f"did not answer within {timeout_s:.0f} s{self._last_words()}"
            ) from None
        raise PeerError(f"died with status {self._process.wait()}{self._last_words()}")

    def _end(self) -> None:
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self._process.wait()

    def _last_words(self) -> str:
        self._stderr.seek(0)
        words = " ".join(self._stderr.read().split())
        return f": ... {words[-LAST_WORDS:]}" if words else ""


def _environment(entry: Entry, num_threads: int) -> dict[str, str]:
    """This process's variables, less those that mean pdlab or its environment, and the threads."""
    hidden: set[str] = set()
    if not entry.is_pdlab:
        hidden.update(TUNED_HERE)
    if entry.python != sys.executable:
        hidden.update(LEAD_HERE)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | dict.fromkeys(THREAD_VARIABLES, str(num_threads))


def _parsed(line: str) -> dict[str, Any]:
    """A line as an answer; an empty one where it is not."""
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
