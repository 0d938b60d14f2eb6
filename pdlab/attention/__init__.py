"""Attention backends: one signature, several bodies."""

from pdlab.attention.exact import QUERY_TILE, ExactAttention
from pdlab.attention.fused import FusedAttention
from pdlab.attention.interface import AttentionBackend, AttentionInputs, gather_visible
from pdlab.attention.reference import ReferenceAttention
from pdlab.attention.window import Window, narrower, visible, visible_blocks

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
    "Window",
    "gather_visible",
    "narrower",
    "visible",
    "visible_blocks",
]
