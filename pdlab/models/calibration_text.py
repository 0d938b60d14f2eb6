"""What a model reads while its weights are quantized, so that its activations are seen.

The docstrings of some modules of Python's standard library: English prose, lists and code, a
hundred thousand characters that are there wherever Python is. A model without a tokenizer gets
random tokens.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pdlab.models.config import ModelConfig
from pdlab.models.tokenizer import Tokenizer

MODULES = (
    "statistics", "argparse", "heapq", "datetime", "pickletools", "random", "email.message",
    "collections", "fractions", "logging", "textwrap", "threading", "zipfile", "difflib",
    "calendar", "asyncio.locks", "turtle", "typing", "subprocess", "shutil",
)  # fmt: skip
NUM_WINDOWS, WINDOW = 16, 256


def calibration_windows(tokenizer: Tokenizer | None, config: ModelConfig) -> list[list[int]]:
    """Token ids of `NUM_WINDOWS` stretches of `WINDOW` tokens, or as many as the model takes."""
    length = min(WINDOW, config.max_model_len)
    wanted = NUM_WINDOWS * length
    ids = _random_ids(config.vocab_size, wanted) if tokenizer is None else []
    for text in calibration_texts() if tokenizer is not None else ():
        assert tokenizer is not None
        ids += tokenizer.encode(text)[: -(-wanted // len(MODULES))]
    return [ids[start : start + length] for start in range(0, min(wanted, len(ids)), length)]


def calibration_texts() -> Iterator[str]:
    """All docstrings of each of `MODULES`."""
    for name in MODULES:
        spec = find_spec(name)
        if spec and spec.origin and spec.origin.endswith(".py"):
            tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
            yield "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


def _random_ids(vocab_size: int, count: int) -> list[int]:
    draw = random.Random(0)
    return [draw.randrange(vocab_size) for _ in range(count)]
