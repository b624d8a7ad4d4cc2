"""The reader of GGUF files: their header, checked, and where each tensor lies."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.quant.ggml import GGML_TYPES


@attrs.frozen
class GgufTensor:
    """Where one tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as torch counts: the reverse of the order in the file."""
    type_code: int
    start: int
    """First byte, from the beginning of the file."""


@attrs.frozen
class GgufFile:
    """One file, mapped into memory, its header read."""

    path: Path
    metadata: Mapping[str, Any] = attrs.field(repr=False)
    tensors: tuple[GgufTensor, ...] = attrs.field(repr=False)
    data: mmap.mmap = attrs.field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Map a file and read its header (versions 2 and 3, little endian).

    Tensor types are not judged here. Raises: ModelLoadError naming the file and what is wrong.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelLoadError(f"{path} is empty: download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    cursor = _Cursor(data, path)
    num_tensors, num_keys = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.corrupt(f"the key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.unsigned(4), key)
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.corrupt(f"general.alignment is {alignment!r}, not a power of two from 8 up")
    base = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        GgufTensor(tensor.name, tensor.shape, tensor.type_code, base + tensor.start)
        for tensor in infos
    )
    for tensor in infos:
        if tensor.start % alignment:
            raise cursor.corrupt(
                f"tensor {tensor.name} starts at {tensor.start}, not a multiple of {alignment}"
            )
    for tensor in tensors:
        _check_extent(tensor, cursor)
    return GgufFile(path, metadata, tensors, data)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the number of tensors and of keys."""
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        if bytes(cursor.data[:12]) == b"version http":
            raise ModelLoadError(
                f"{cursor.path} is a Git LFS pointer, not the file itself: run `git lfs pull`"
            )
        raise ModelLoadError(
            f"{cursor.path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'; "
            f"if it should be one, download it again"
        )
    cursor.position = 4
    version = cursor.unsigned(4)
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (2, 3):
            raise ModelLoadError(f"{cursor.path} is a big-endian GGUF; convert it to little-endian")
        raise ModelLoadError(
            f"{cursor.path} has GGUF version {version}; versions 2 and 3 can be read: "
            f"download a newer copy, or convert the model again"
        )
    num_tensors, num_keys = cursor.unsigned(8), cursor.unsigned(8)
    # A key takes at least 13 bytes and a tensor 32: absurd counts are seen before they are read.
    if num_keys * 13 + num_tensors * 32 > len(cursor.data):
        raise cursor.corrupt(f"{num_tensors} tensors and {num_keys} keys cannot fit into the file")
    return num_tensors, num_keys


def _read_tensor_info(cursor: _Cursor) -> GgufTensor:
    """Read a tensor's entry; its start still counts from the data section."""
    name = cursor.string()
    num_dims = cursor.unsigned(4)
    if not 1 <= num_dims <= 4:
        raise cursor.corrupt(f"tensor {name} has {num_dims} dimensions, not 1 to 4")
    dims = [cursor.unsigned(8) for _ in range(num_dims)]
    if 0 in dims:
        raise cursor.corrupt(f"tensor {name} has a dimension of 0")
    return GgufTensor(name, tuple(reversed(dims)), cursor.unsigned(4), cursor.unsigned(8))


def _check_extent(tensor: GgufTensor, cursor: _Cursor) -> None:
    """Raise unless the tensor lies inside the file; its size is only known for supported types."""
    kind = GGML_TYPES.get(tensor.type_code)
    size = len(cursor.data)
    if kind is None:
        return
    if tensor.shape[-1] % kind.block_size:
        raise cursor.corrupt(
            f"tensor {tensor.name} has rows of {tensor.shape[-1]} values, "
            f"which {kind.name} blocks of {kind.block_size} do not fill"
        )
    end = tensor.start + kind.num_bytes(math.prod(tensor.shape))
    if end > size:
        raise ModelLoadError(
            f"{cursor.path} is incomplete: tensor {tensor.name} ({kind.name}) needs "
            f"{end - tensor.start} bytes and {max(0, size - tensor.start)} are there; the file "
            f"should have at least {end} bytes and has {size}: download it again"
        )


_SCALARS = {
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
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


class _Cursor:
    """Reads the header front to back; never past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def corrupt(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged: {what}; download it again")

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def string(self) -> str:
        return str(self._take(self.unsigned(8)), "utf-8", "replace")

    def value(self, code: int, key: str) -> Any:
        """One value of the type with this code; arrays as tuples or, of strings, as lists."""
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            item_code, count = self.unsigned(4), self.unsigned(8)
            if item_code == _STRING:
                return self._strings(count, key)
            return self._scalars(item_code, count, key)
        return self._scalars(code, 1, key)[0]

    def _take(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise self._ends_early()
        return self.data[start : self.position]

    def _scalars(self, code: int, count: int, key: str) -> tuple[Any, ...]:
        if code not in _SCALARS:
            raise self.corrupt(f"the value of {key!r} has the unknown type {code}")
        width = struct.calcsize(f"<{_SCALARS[code]}")
        return struct.unpack(f"<{count}{_SCALARS[code]}", self._take(count * width))

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop: a vocabulary with its merges has hundreds of thousands of strings."""
        data, position, size = self.data, self.position, len(self.data)
        if count * 8 > size - position:
            raise self.corrupt(f"{key!r} has {count} strings, which cannot fit into the file")
        length_at = _U64.unpack_from
        strings = []
        append = strings.append
        for _ in range(count):
            if position + 8 > size:
                raise self._ends_early()
            start = position + 8
            position = start + length_at(data, position)[0]
            if position > size:
                raise self._ends_early()
            append(str(data[start:position], "utf-8", "replace"))
        self.position = position
        return strings

    def _ends_early(self) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path} is incomplete: it ends inside the header "
            f"({len(self.data)} bytes): download it again"
        )
