"""Attention backends: one signature, several bodies."""

from pdlab.attention.exact import QUERY_TILE, ExactAttention
from pdlab.attention.fused import FusedAttention
from pdlab.attention.interface import AttentionBackend, AttentionInputs, visible
from pdlab.attention.reference import ReferenceAttention

BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (ReferenceAttention, FusedAttention, ExactAttention)
}

__all__ = [
    "BACKENDS",
    "QUERY_TILE",
    "AttentionBackend",
    "AttentionInputs",
    "ExactAttention",
    "FusedAttention",
    "ReferenceAttention",
    "visible",
]
