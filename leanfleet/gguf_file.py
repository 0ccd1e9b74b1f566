"""Reads GGUF files: the metadata, and where each tensor's bytes stand. Needs numpy; the weights stay in the file until used."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
# struct's letters of the types of metadata, by GGUF's numbers
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
# (name, weights a block, bytes a block) of the types of tensors, by GGUF's numbers
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class Array:
    """An array of the metadata. type: GGUF's number of its elements' type."""

    type: int
    values: list[Any]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. shape: as in PyTorch, rows first. data: uint8 [*shape[:-1], bytes of a row], in the file."""

    name: str
    type: int
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def kind(self) -> str:
        """The name of the type, such as Q4_0."""
        return TYPES[self.type][0]


@dataclass(frozen=True)
class File:
    """metadata: {key: (GGUF's number of its type, value)}, strings as bytes. tensors: by name."""

    path: Path
    metadata: dict[str, tuple[int, Any]]
    tensors: dict[str, Tensor]


def read(path: str | Path) -> File:
    """Reads a file's header. Raises OSError, ValueError for what is no GGUF file, of another version, damaged or cut off."""
    import numpy as np

    path = Path(path)
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is no GGUF file: it has {path.stat().st_size} bytes")
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    view = memoryview(content)  # type: ignore[arg-type]  # an array is a buffer
    if bytes(view[:4]) != MAGIC:
        raise ValueError(f"{path} is no GGUF file: it begins with {bytes(view[:4])!r}, not with {MAGIC!r}")
    reader = _Reader(view, 4)
    try:
        version = reader.scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"{path} is a GGUF file of version {version}; versions 2 and 3, little-endian, are read")
        count, entries = reader.scalar("Q"), reader.scalar("Q")
        metadata = {}
        for _ in range(entries):
            key = reader.string().decode()
            kind = reader.scalar("I")
            metadata[key] = kind, reader.value(kind)
        infos = [
            (reader.string().decode(), reader.sizes(reader.scalar("I")), reader.scalar("I"), reader.scalar("Q"))
            for _ in range(count)
        ]
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not whole: its header ends or makes no sense at byte {reader.at}") from error
    alignment = metadata.get("general.alignment", (4, ALIGNMENT))[1]
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"{path} is damaged: general.alignment is {str(alignment)[:40]}")
    start = -(-reader.at // alignment) * alignment
    tensors = {info[0]: _tensor(path, content, start, *info) for info in infos}
    return File(path, metadata, tensors)


def _tensor(path: Path, content: np.ndarray, start: int, name: str, sizes: tuple[int, ...], kind: int, offset: int) -> Tensor:
    if kind not in TYPES:
        raise ValueError(f"{path}: tensor {name} is of GGUF's type {kind}, which leanfleet does not know")
    label, block, width = TYPES[kind]
    shape = sizes[::-1]
    if not shape or shape[-1] % block:
        raise ValueError(f"{path} is damaged: rows of {name} have {shape[-1:]} weights, no multiple of {label}'s {block}")
    if not all(shape):
        raise ValueError(f"{path} is damaged: {name} has the shape {list(shape)}, which holds nothing")
    rows = (*shape[:-1], shape[-1] // block * width)
    size = 1
    for n in rows:
        size *= n
    begin = start + offset
    if begin + size > len(content):
        raise ValueError(
            f"{path} is not whole: tensor {name} ends at byte {begin + size}, the file at {len(content)}; get the file again"
        )
    return Tensor(name, kind, shape, content[begin : begin + size].reshape(rows))


class _Reader:
    """Takes values from a header, one after the other."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view, self.at = view, at

    def scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self.view, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def string(self) -> bytes:
        size = self.scalar("Q")
        if size > len(self.view) - self.at:
            raise struct.error("a text beyond the end")
        self.at += size
        return bytes(self.view[self.at - size : self.at])

    def sizes(self, count: int) -> tuple[int, ...]:
        if count > 8:
            raise struct.error("too many dimensions")
        return tuple(self.scalar("Q") for _ in range(count))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.view) - self.at:
            raise struct.error("an array beyond the end")
        if inner in _SCALARS:
            text = f"<{count}{_SCALARS[inner]}"
            values = list(struct.unpack_from(text, self.view, self.at))
            self.at += struct.calcsize(text)
            return Array(inner, values)
        take: Callable[[], Any] = self.string if inner == _STRING else lambda: self.value(inner)
        return Array(inner, [take() for _ in range(count)])
