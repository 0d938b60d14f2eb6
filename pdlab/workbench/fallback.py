"""What a widget leaves in a saved notebook: a small card, readable where nothing runs."""

from __future__ import annotations

import html

from pdlab.workbench.palette import MEANING

NOT_LIVE = "[interactive: run this cell to make it live]"
CARD = "border-left:4px solid {color};padding:6px 14px;font-size:14px;line-height:1.6"


def fallback_card(*lines: str) -> str:
    """The first line in bold, the others below it, and how to get the live widget, as HTML."""
    head, *rest = (html.escape(line) for line in lines)
    body = "".join(f"<div>{line}</div>" for line in rest)
    return (
        f"<div style='{CARD.format(color=MEANING['transfer'])}'><b>{head}</b>{body}"
        f"<div style='opacity:.7'>{NOT_LIVE}</div></div>"
    )
