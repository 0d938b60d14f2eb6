"""Models: shapes, weights, tokenizers, and `load`.

torch is imported only when something that needs it is asked for, so that listing the catalog or
reading a shape stays quick.
"""

from typing import TYPE_CHECKING, Any

from pdlab.models.cache import FetchError
from pdlab.models.catalog import CatalogEntry, available
from pdlab.models.config import ModelConfig
from pdlab.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pdlab.models.loading import Model, default_model_directory, load

__all__ = [
    "CatalogEntry",
    "FetchError",
    "Model",
    "ModelConfig",
    "Tokenizer",
    "available",
    "default_model_directory",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in ("Model", "default_model_directory", "load"):
        from pdlab.models import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
