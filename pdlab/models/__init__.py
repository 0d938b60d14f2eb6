"""Models: shapes, weights, tokenizers, and `load`."""

from pdlab.models.cache import FetchError
from pdlab.models.catalog import CatalogEntry, available
from pdlab.models.config import ModelConfig
from pdlab.models.loading import Model, default_model_directory, load, load_outline
from pdlab.models.tokenizer import Tokenizer

__all__ = [
    "CatalogEntry",
    "FetchError",
    "Model",
    "ModelConfig",
    "Tokenizer",
    "available",
    "default_model_directory",
    "load",
    "load_outline",
]
