"""The FormatLab widget: choose how K and V are stored, and see what that does to a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import traitlets

from pdlab.engine import EngineConfig, admission
from pdlab.engine.admission import Prompt
from pdlab.kvcache import parse_kv_format
from pdlab.kvcache.formats import FLOAT_DTYPES, LARGEST_CODE
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.workbench.format_trial import Trial, explain, largest_outlier, run_trial
from pdlab.workbench.kv_costs import first_difference
from pdlab.workbench.lesson import progress
from pdlab.workbench.widget import TraceWidget

MAX_PROMPT = 512
"""Tokens of the longest prompt: an answer should take about a second."""
REFERENCE = "fp32"


class FormatLab(TraceWidget):
    """K and V in any format, on a prompt of yours: errors, bytes, and the text beside fp32's.

    Every choice really runs: the prompt through a paged cache of that format, then a greedy
    continuation by the engine. Answers are kept, so going back is instant. `kv_format`, `layer` and
    `head` (a KV head) can also be set from Python.

    Args:
        prompt: text, token ids or chat messages, of 2 to 512 tokens.
        kv_format: what to begin with.
        max_tokens: tokens to generate.

    Raises:
        ValueError: the prompt or the format does not fit.
    """

    name = "format_lab"

    header = traitlets.Dict().tag(sync=True)
    """Constants: the prompt, the model's shape, bytes of fp32 and bf16, group sizes, machine."""
    kv_format = traitlets.Unicode().tag(sync=True)
    """The format shown, as in `EngineConfig.kv_format`."""
    result = traitlets.Dict().tag(sync=True)
    """What it did: errors, bytes, perplexities, texts, sentences that explain."""
    sizes = traitlets.Bytes().tag(sync=True)
    """float32 [2, num_layers, num_kv_heads, head_dim]: mean absolute value by channel, K first."""
    channel_errors = traitlets.Bytes().tag(sync=True)
    """The same shape: relative error by channel."""
    layer = traitlets.Int().tag(sync=True)
    head = traitlets.Int().tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    message = traitlets.Unicode().tag(sync=True)
    """What was wrong with the last choice, in words."""

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        kv_format: str = "int4:channel/int4:token:32",
        *,
        max_tokens: int = 24,
    ) -> None:
        self._model, self._max_tokens = model, max_tokens
        text, self._prompt_ids = admission.tokenize(model, prompt)
        if not 2 <= len(self._prompt_ids) <= MAX_PROMPT:
            raise ValueError(
                f"prompt has {len(self._prompt_ids)} tokens, FormatLab takes 2 to {MAX_PROMPT}"
            )
        self._trials: dict[str, Trial] = {}
        for first in progress([REFERENCE, "bf16", _canonical(kv_format, model)], "format lab"):
            self._trial(first)
        reference, bf16 = self._trial(REFERENCE), self._trial("bf16")
        self._outlier = largest_outlier(reference.sizes)
        super().__init__(
            header=self._header(text, reference, bf16),
            sizes=reference.sizes.astype("<f4").tobytes(),
            layer=self._outlier.layer,
            head=self._outlier.head,
        )
        self.on_msg(self._on_message)
        self.kv_format = kv_format

    @property
    def trial(self) -> Trial:
        """What is shown now."""
        return self._trials[_canonical(self.kv_format, self._model)]

    def choose(self, kv_format: str) -> None:
        """Show a format; what is wrong with it is said in `message`, and the old one stays."""
        try:
            self.kv_format = kv_format
            self.message = ""
        except ValueError as error:
            self.message = in_words(kv_format, self._model.config.head_dim) or str(error)
        except KeyboardInterrupt:
            self.message = f"Interrupted: {kv_format} was not computed."
            raise

    def summary(self) -> str:
        trial, right = self.trial, self._trials[REFERENCE]
        return (
            f"FormatLab, K and V in {trial.kv_format}: {trial.bytes_per_token:,.0f} bytes a token "
            f"({trial.bytes_per_token / right.bytes_per_token:.0%} of fp32), perplexity of the "
            f"prompt {trial.perplexity:.2f} instead of {right.perplexity:.2f}"
        )

    @traitlets.validate("kv_format")
    def _run(self, proposal: Any) -> str:
        """Run what is chosen before it counts as chosen: an interrupt leaves the old one."""
        kv_format = _canonical(proposal["value"], self._model)
        self.busy = True
        try:
            trial = self._trial(kv_format)
        finally:
            self.busy = False
        with self.hold_sync():
            self.channel_errors = trial.channel_errors.astype("<f4").tobytes()
            self.result = self._result(trial)
            self.message = ""
        return kv_format

    @traitlets.validate("layer", "head")
    def _check_index(self, proposal: Any) -> int:
        config, name = self._model.config, proposal["trait"].name
        limit = config.num_layers if name == "layer" else config.num_kv_heads
        if not 0 <= proposal["value"] < limit:
            raise ValueError(f"{name}={proposal['value']} is not one of 0 to {limit - 1}")
        return int(proposal["value"])

    def _trial(self, kv_format: str) -> Trial:
        if kv_format not in self._trials:
            self._trials[kv_format] = run_trial(
                self._model, self._prompt_ids, kv_format, max_tokens=self._max_tokens
            )
        return self._trials[kv_format]

    def _header(self, text: str, reference: Trial, bf16: Trial) -> dict[str, Any]:
        config, machine = self._model.config, describe_machine()
        divisors = [n for n in range(config.head_dim, 1, -1) if config.head_dim % n == 0]
        return {
            "prompt": text,
            "num_prompt": len(self._prompt_ids),
            "num_layers": config.num_layers,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "groups": [n for n in divisors if n % 2 == 0],
            "fp32_bytes": reference.bytes_per_token,
            "bf16_bytes": bf16.bytes_per_token,
            "model": self._model.name,
            "machine": f"{machine['processor']}, {machine['cores']} cores",
        }

    def _result(self, trial: Trial) -> dict[str, Any]:
        right = self._trials[REFERENCE]
        k_format, v_format = parse_kv_format(trial.kv_format, self._model.config.head_dim)
        return {
            "kv_format": trial.kv_format,
            "k_format": str(k_format),
            "v_format": str(v_format),
            "bytes": trial.bytes_per_token,
            "open_bytes": trial.open_bytes,
            "max_open": 2 * EngineConfig().max_num_seqs,  # KVMemory: the one, and the next
            "errors": {
                name: np.round(getattr(trial, f"{name}_error"), 6).tolist()
                for name in ("k", "v", "attended")
            },
            "perplexity": [right.perplexity, trial.perplexity],
            "texts": [self._texts(right.token_ids), self._texts(trial.token_ids)],
            "first_difference": first_difference(trial.token_ids, right.token_ids),
            "sentences": explain(k_format, v_format, self._outlier, trial.num_open),
        }

    def _texts(self, token_ids: list[int]) -> list[str]:
        tokenizer = self._model.tokenizer
        return [tokenizer.token_text(i) if tokenizer else f"<{i}>" for i in token_ids]

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("type") == "choose":
            self.choose(str(content.get("kv_format")))


def _canonical(kv_format: str, model: Model) -> str:
    """The one way to write a format: `int4` is int4:token:32, and `int8/int8` is int8.

    Raises:
        ValueError: it is not in the grammar, or does not fit the model's heads.
    """
    k, v = (str(half) for half in parse_kv_format(kv_format, model.config.head_dim))
    return k if k == v else f"{k}/{v}"


def in_words(kv_format: str, head_dim: int) -> str:
    """What is wrong with a format, as one would say it; nothing if this finds no fault."""
    halves = kv_format.split("/")
    if len(halves) > 2:
        return f"{kv_format} names {len(halves)} formats: one for K and one for V are enough."
    for half in halves:
        name, scales, group, *more = [*half.split(":"), "", ""]
        if name not in {**FLOAT_DTYPES, **LARGEST_CODE}:
            known = ", ".join({**FLOAT_DTYPES, **LARGEST_CODE})
            return f"There is no format {name!r}. There are {known}."
        if name in FLOAT_DTYPES and scales:
            return f"{name} keeps numbers as they are, so it has no scales: write {name} alone."
        if scales not in ("", "token", "head", "channel"):
            return f"A scale can be per token, per head or per channel, not per {scales!r}."
        if group and (scales != "token" or any(more)):
            return f"{half!r} says too much: a number of channels stands only after :token."
        if group and not (group.isdecimal() and int(group) and head_dim % int(group) == 0):
            return f"A head has {head_dim} channels: they cannot be cut into groups of {group}."
        if name == "int4" and group and int(group) % 2:
            return f"int4 packs two numbers into a byte: a group needs an even number, not {group}."
    return ""
