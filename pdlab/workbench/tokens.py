"""A text as its tokenizer cuts it."""

from __future__ import annotations

import html

from IPython.display import display

from pdlab.models import Tokenizer
from pdlab.workbench.palette import MEANING, THEME

CHIP = (
    "display:inline-block;text-align:center;margin:2px 3px;padding:3px 8px;border-radius:6px;"
    "border:1px solid {border};vertical-align:top;font-family:monospace;line-height:1.5"
)


def token_table(tokenizer: Tokenizer, text: str) -> None:
    """Show each token of a text: what it reads like, its id, and its bytes."""
    ids = tokenizer.encode(text)
    rows = [(tokenizer.token_text(i), i, (tokenizer.token_bytes(i) or b"").hex(" ")) for i in ids]
    note = (
        f"{len(text)} characters, {len(text.encode())} bytes, {len(ids)} tokens"
        " (a dot stands for a space)"
    )
    chips = "".join(
        f"<span style='{CHIP.format(border=MEANING['prefill'])}'>"
        f"<b style='font-size:16px'>{html.escape(_visible(shown))}</b><br>{token_id}<br>"
        f"<span style='font-size:12px;opacity:.7'>{octets}</span></span>"
        for shown, token_id, octets in rows
    )
    body = f"<div>{chips}</div><div style='color:{THEME['light'].muted};padding:4px'>{note}</div>"
    plain = "\n".join(f"{token_id:6}  {octets:24}  {shown!r}" for shown, token_id, octets in rows)
    display({"text/html": body, "text/plain": f"{plain}\n{note}"}, raw=True)


def _visible(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "⏎") or "∅"
