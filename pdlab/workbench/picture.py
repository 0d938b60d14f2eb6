"""Static pictures: what a saved notebook shows where no JavaScript runs (GitHub, nbviewer, PDF).

A browser takes one screenshot of the very figure or widget, so the picture cannot differ from the
live view. That costs seconds, so it happens only where a notebook is made for others to read:
`execute_notebook` sets PDLAB_PICTURES=1. Without a browser everything still works, picture-less.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdlab.workbench.palette import THEME, Theme, all_colors, rgb

if TYPE_CHECKING:
    from PIL import Image

    from pdlab.workbench.widget import TraceWidget

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APPS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
MARGIN = 12
"""Pixels left around a cropped picture."""


def find_browser() -> str | None:
    """A Chromium or Chrome: PDLAB_BROWSER, else the first on the path, else a macOS application."""
    chosen = os.environ.get("PDLAB_BROWSER")
    if chosen:
        return chosen
    on_path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    return on_path or next((app for app in APPS if Path(app).exists()), None)


def pictures_wanted() -> bool:
    """Whether outputs should carry a static picture (PDLAB_PICTURES=1)."""
    return os.environ.get("PDLAB_PICTURES") == "1"


def figure_png(figure: Any, scale: float = 1.0) -> bytes | None:
    """A plotly figure as a palette-quantised PNG, or None without a browser."""
    from plotly.offline import get_plotlyjs

    width, height = figure.layout.width or 900, figure.layout.height or 450
    data = figure.to_json()
    html = (
        f"<script>{get_plotlyjs()}</script><div id=p style='width:{width}px'></div>"
        f"<script>const f = {data}; f.layout.width = {width};"
        "Plotly.newPlot('p', f.data, f.layout, {staticPlot: true})</script>"
    )
    return _screenshot(html, int(width), int(height), scale)


def widget_png(
    widget: TraceWidget, width: int = 920, theme: Theme = "light", scale: float = 1.0
) -> bytes | None:
    """A widget, drawn by its own JavaScript, as a palette-quantised PNG; None without a browser."""
    return _screenshot(widget_page(widget, theme), width, 1600, scale)


def widget_page(widget: TraceWidget, theme: Theme = "light") -> str:
    """A page of its own that shows a widget in its present state, with no kernel behind it."""
    state = json.dumps(widget.view_state(), default=_json_bytes)
    parts = {
        "%STYLES%": widget.styles(),
        "%LIGHT%": "true" if theme == "light" else "false",
        "%BACK%": THEME[theme].surface,
        "%MODULE%": widget.module().replace("</", "<\\/"),
        "%STATE%": state.replace("</", "<\\/"),
    }
    page = (Path(__file__).parent / "static" / "page.html").read_text(encoding="utf-8")
    return re.sub("|".join(parts), lambda match: parts[match[0]], page)


def _json_bytes(value: Any) -> Any:
    return {"base64": base64.b64encode(bytes(value)).decode("ascii")}


def _screenshot(html: str, width: int, height: int, scale: float) -> bytes | None:
    browser = find_browser()
    if browser is None:
        return None
    with tempfile.TemporaryDirectory(prefix="pdlab-picture-") as folder:
        page, image = Path(folder, "page.html"), Path(folder, "page.png")
        page.write_text(html, encoding="utf-8")
        command = [
            browser,
            *FLAGS,
            f"--user-data-dir={folder}/profile",
            f"--window-size={width},{height}",
            f"--force-device-scale-factor={scale}",
            "--virtual-time-budget=2000",
            f"--screenshot={image}",
            page.as_uri(),
        ]
        try:
            subprocess.run(command, capture_output=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return quantise(image.read_bytes()) if image.exists() else None


def quantise(png: bytes, colors: int = 160) -> bytes:
    """The same picture cropped to its content and reduced to few colours: 10 to 40 KB.

    The reduced palette holds every colour of ours, so a small swatch keeps its exact meaning.
    """
    from PIL import Image

    picture = _crop(Image.open(io.BytesIO(png)).convert("RGB"))
    found = picture.quantize(colors, dither=Image.Dither.NONE).getpalette() or []
    ours = np.array([rgb(color) for color in all_colors()])
    palette = np.concatenate([ours, np.array(found).reshape(-1, 3)])
    pixels = np.asarray(picture)
    seen, where = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True)
    distance = ((seen[:, None, :].astype(int) - palette[None, :, :]) ** 2).sum(-1)
    nearest = distance.argmin(1).astype(np.uint8)[where].reshape(pixels.shape[:2])
    small = Image.fromarray(nearest, "P")
    small.putpalette(palette.astype(np.uint8).tobytes())
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


def _crop(picture: Image.Image) -> Image.Image:
    """Cut the empty rows below the content."""
    from PIL import Image, ImageChops

    corner = picture.getpixel((0, picture.height - 1))
    empty = Image.new("RGB", picture.size, corner)
    box = ImageChops.difference(picture, empty).getbbox()
    bottom = box[3] + MARGIN if box else picture.height
    return picture.crop((0, 0, picture.width, min(picture.height, bottom)))
