"""Show a figure: interactive in a live notebook, a picture where no JavaScript runs."""

from __future__ import annotations

import base64
import json
from typing import Any

import plotly.graph_objects as go

from pdlab.workbench.picture import figure_png, pictures_wanted

PLOTLY = "application/vnd.plotly.v1+json"
MAX_JSON_BYTES = 400_000
"""A figure larger than this would make a notebook heavy; figures thin their data before."""


def show(figure: go.Figure) -> None:
    """Display a figure in a notebook.

    The output holds the figure as plotly JSON, which JupyterLab draws without a network, its title
    as text and, with PDLAB_PICTURES=1 and a browser installed, a PNG for GitHub and nbviewer.
    """
    from IPython.display import display

    display(mimebundle(figure), raw=True)


def mimebundle(figure: go.Figure) -> dict[str, Any]:
    """The output of `show` by MIME type.

    Raises:
        ValueError: the figure holds too much data for a notebook.
    """
    text = figure.to_json()
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"figure has {len(text)} bytes of JSON, more than {MAX_JSON_BYTES}")
    content = json.loads(text)
    content["layout"].pop("template", None)  # 7 KB of defaults that `styled` replaces
    # a responsive figure shrinks to nothing when JupyterLab changes its theme
    content["config"] = {"displayModeBar": False, "responsive": False}
    title = str(figure.layout.title.text or "figure").replace("<br>", " ")
    bundle = {PLOTLY: content, "text/plain": title}
    picture = static_png(figure) if pictures_wanted() else None
    if picture is not None:
        bundle["image/png"] = base64.b64encode(picture).decode("ascii")
    return bundle


def static_png(figure: go.Figure) -> bytes | None:
    """The figure as a palette-quantised PNG of 10 to 30 KB; None where no browser is installed."""
    return figure_png(figure)
