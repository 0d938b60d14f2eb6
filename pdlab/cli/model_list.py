"""`pdlab models`: what can be loaded by name."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pdlab.cli.text import si
from pdlab.models import available
from pdlab.models.cache import cache_dir


def list_models() -> None:
    """Print every model that has a name. Needs no network."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("weights", justify="right", no_wrap=True)
    table.add_column("in fp32", justify="right", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    table.add_column("cached", no_wrap=True)
    table.add_column("source", overflow="fold")
    for entry in available():
        table.add_row(
            entry.name,
            si(entry.parameters, ""),
            si(entry.weight_bytes, "B"),
            entry.licence,
            "yes" if entry.cached else "no",
            entry.source,
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\nAlso: the path of a GGUF file or of a Hugging Face model directory, or a hub id "
        "(organization/model).\nA random: model has a real model's shape and no language: for "
        f"work on speed.\nCache: {cache_dir()} (PDLAB_CACHE names another)",
        soft_wrap=True,
    )
