"""Files that come with pdlab: `data/` and `notebooks/`, in a checkout or installed."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def shipped(folder: str) -> Path:
    """The folder `data` or `notebooks`, in a checkout or in an installation."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return checkout / folder
    return Path(str(resources.files(f"pdlab_{folder}").joinpath("")))
