"""A peer that needs no model, for tests: answers, or fails in the way that its options name."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from .serve import Emit


def open_peer(asked: dict[str, Any]) -> FakePeer:
    """Options: fails (hangs, dies, refuses, short), at (open, generate)."""
    return FakePeer(asked)


class FakePeer:
    """Counts on from the last token of each prompt."""

    def __init__(self, asked: dict[str, Any]):
        self._options = asked["options"]
        self.about = {
            "version": "1",
            "settings": f"{asked['threads']} threads, {os.environ['OMP_NUM_THREADS']} for OpenMP",
            "weight_bytes": 1_000_000,
            "kv_element_bytes": 2,
        }
        print("a library says hello on stdout")
        os.write(1, b'{"to": 1, "version": "forged"}\n')
        self._fail("open")

    def _fail(self, at: str) -> None:
        fails = self._options.get("fails")
        if self._options.get("at", "generate") != at or fails is None:
            return
        print(f"about to: {fails}", file=sys.stderr, flush=True)
        if fails == "hangs":
            time.sleep(600)
        if fails == "dies":
            os._exit(7)
        if fails == "refuses":
            raise ValueError("no such model")

    def generate(self, prompts: list[list[int]], num_tokens: int, emit: Emit) -> list[list[int]]:
        print("{not json")
        if num_tokens > 4:  # not while it is warmed up
            self._fail("generate")
        if self._options.get("fails") == "short":
            num_tokens -= 1
        for _ in range(num_tokens):
            time.sleep(0.001)
            emit(*range(len(prompts)))
        return [[prompt[-1] + i for i in range(num_tokens)] for prompt in prompts]
