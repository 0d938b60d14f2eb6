"""The peer's side of a bench: questions on stdin, answers on stdout, JSON, one a line.

Needs nothing but Python 3.9, for it runs in the environments of others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any, Callable, Protocol  # noqa: UP035 (Python 3.9)

Emit = Callable[..., None]
"""Called with the numbers of the prompts that have just received a token each."""


class Peer(Protocol):
    """A loaded model that has been warmed up."""

    about: dict[str, Any]
    """version, settings (in words), weight_bytes (that a decode step reads), kv_element_bytes."""

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        """Greedy continuations of exactly `num_tokens` tokens each, the prompts all at once."""
        ...


class Clock:
    """Seconds since it was made, for each token of each prompt."""

    def __init__(self, num_prompts: int):
        self._start = time.perf_counter()
        self._times: list[list[float]] = [[] for _ in range(num_prompts)]

    def emit(self, *prompts: int) -> None:
        now = time.perf_counter() - self._start
        for prompt in prompts:
            self._times[prompt].append(now)

    def summary(self) -> dict[str, Any]:
        """The moment when every prompt had its first token, the last moment, and what came between.

        With a scheduler of its own a peer may have started to decode some prompts before that
        moment; these tokens count as part of the wait.
        """
        first_s = max(times[0] for times in self._times)
        moments = [moment for times in self._times for moment in times]
        return {
            "first_s": first_s,
            "rest_s": max(moments) - first_s,
            "rest_tokens": sum(moment > first_s for moment in moments),
        }


def serve(name: str) -> None:
    """Answer until stdin ends. What libraries print to stdout goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "open":
                peer = import_module(f"{__package__}.{name}").open_peer(question)
                answer = peer.about
            else:
                assert peer is not None, "asked before it was opened"
                answer = _generate(peer, question["prompts"], question["num_tokens"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"to": question["number"], **answer}), file=answers, flush=True)


def _generate(peer: Peer, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    clock = Clock(len(prompts))
    token_ids = peer.generate(prompts, num_tokens, clock.emit)
    return {"token_ids": token_ids, **clock.summary()}


def files_bytes(folder: str, suffixes: tuple[str, ...]) -> int:
    """Bytes of the files with these endings in a folder, or of the one file that it is."""
    if os.path.isfile(folder):
        return os.path.getsize(folder)
    with os.scandir(folder) as entries:
        return sum(e.stat().st_size for e in entries if e.name.endswith(suffixes))
