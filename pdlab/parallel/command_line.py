"""What commands that start engines elsewhere take for prompts, and what they print."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, NoReturn

from pdlab.engine import Prompt, RequestOutput
from pdlab.models import Model


class Terminated(BaseException):
    """SIGTERM: torchrun ends a job of which a rank has failed."""


def heed_sigterm() -> None:
    """Raise `Terminated` when it comes; once."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def prompt_of(text: str, model: Model) -> Prompt:
    """What was asked: as a chat turn, where the model knows chats, else as text; or, for a model
    without a tokenizer, as `3,14,15`."""
    if model.tokenizer is not None:
        has_chats = model.tokenizer.chat_template is not None
        return [{"role": "user", "content": text}] if has_chats else text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"prompts: {text!r:.60} must be token ids, as in 3,14,15: {model.name} has no tokenizer"
        ) from None


def outputs_as_json(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    return [
        {
            "request_id": output.request_id,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "text": output.text,
            "error": str(output.error or ""),
        }
        for output in outputs
    ]


def print_outputs(outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        print(f"{output.request_id}  {len(output.token_ids)} tokens, {output.finish_reason}")
        print(f"    {output.text or output.token_ids}")
        if output.error:
            print(f"    {output.error}")
