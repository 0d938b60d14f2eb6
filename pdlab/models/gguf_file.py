"""Read a GGUF file: its metadata, and its tensors as float32 or as they are stored.

GGUF (ggml project, docs/gguf.md, versions 2 and 3) is: a header, typed key/value metadata, a table
of tensors, then the tensor bytes, aligned. The package `gguf` knows how to dequantize every block
format; its own reader takes seconds for a vocabulary, so the few lines of parsing are done here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT_BYTES = 32


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """As torch has it: the last dimension is contiguous (GGUF lists dimensions the other way)."""
    type_id: int
    offset_bytes: int
    """From the start of the tensor data."""


class GGUFFile:
    """A memory-mapped GGUF file.

    Attributes:
        metadata: key -> value; arrays are lists.
        tensors: name -> GGUFTensor, in file order.

    Raises:
        ValueError: the file is no GGUF file, is cut short, or is of an unknown version.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file (it does not start with 'GGUF')")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 4
        try:
            self._read_tables()
        except struct.error as error:
            raise ValueError(f"{path} is cut short: {error}") from error

    def _read_tables(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path} has GGUF version {version}; supported: 2, 3")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors: dict[str, GGUFTensor] = {}
        for _ in range(num_tensors):
            name = self._string()
            dims = [self._scalar("Q") for _ in range(self._scalar("I"))]
            type_id, offset = self._scalar("I"), self._scalar("Q")
            self.tensors[name] = GGUFTensor(name, tuple(reversed(dims)), type_id, offset)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        self._data_start = -(-self._position // alignment) * alignment

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantized to float32, in the shape of its GGUFTensor.

        Raises:
            ValueError: the storage format is unknown, or the file ends before the tensor does.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        stored, kind = self.stored(name)
        try:
            values = dequantize(stored, GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise ValueError(f"{name} is stored as {kind}, which cannot be read") from error
        return np.array(values, dtype=np.float32, order="C").reshape(self.tensors[name].shape)

    def stored(self, name: str) -> tuple[np.ndarray, str]:
        """The bytes of a tensor as they lie in the file, uint8 [..., row bytes], and their format.

        The format has GGUF's name, say `Q4_1`. Raises ValueError as `read` does.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.type_id)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} has unknown GGUF tensor type {tensor.type_id}") from error
        *rows, columns = tensor.shape
        row_bytes = columns // block_elements * block_bytes
        size, start = int(np.prod(rows)) * row_bytes, self._data_start + tensor.offset_bytes
        if start + size > len(self._bytes):
            raise ValueError(f"{self.path} is cut short: {name} ends beyond its {len(self._bytes)}")
        stored = np.frombuffer(self._bytes, np.uint8, size, start).reshape(*rows, row_bytes)
        return stored, kind.name

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._bytes):
            raise struct.error(f"a string at byte {start} is {length} bytes long")
        return self._bytes[start : self._position].decode("utf-8", "replace")

    def _value(self, type_id: int) -> Any:
        if type_id == STRING:
            return self._string()
        if type_id == ARRAY:
            element, length = self._scalar("I"), self._scalar("Q")
            if element in SCALARS:
                values = struct.unpack_from(
                    f"<{length}{SCALARS[element]}", self._bytes, self._position
                )
                self._position += struct.calcsize(f"<{length}{SCALARS[element]}")
                return list(values)
            return [self._value(element) for _ in range(length)]
        if type_id not in SCALARS:
            raise ValueError(f"{self.path} has metadata of unknown type {type_id}")
        return self._scalar(SCALARS[type_id])
