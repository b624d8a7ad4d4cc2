"""GGUF files: the reader, and how a file (or all its shards) becomes a `Checkpoint`."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint, StoredBlocks, TensorSource
from mistralrs_sdk.loading.gguf_config import (
    check_is_language_model,
    hf_config,
    hf_names,
    tensor_fix,
)
from mistralrs_sdk.loading.gguf_metadata import GgufMetadata
from mistralrs_sdk.loading.gguf_tokenizer import tokenizer_from_gguf
from mistralrs_sdk.quant.ggml import (
    FLOAT_DTYPES,
    GGML_TYPES,
    ggml_type_name,
    read_stored,
    supported_ggml_types,
)


def open_gguf(path: Path, *, tokenizer: Tokenizer | None = None) -> Checkpoint:
    """Open a GGUF file: read and check its header, leave the weights on disk.

    `tokenizer` takes the place of the file's own, which then need not be one we can build.

    A split file is opened from any of its shards. The file stays mapped until the returned
    checkpoint and its tensors are dropped; every `load()` returns memory of its own.

    Raises: ModelLoadError if the file or a shard is missing, damaged or no model; UnsupportedError
    for an architecture, tensor type or tokenizer we cannot run.
    """
    first = _first_shard(Path(path))
    shards = [read_gguf(first)]
    metadata = GgufMetadata(shards[0].metadata, first.name)
    architecture = check_is_language_model(metadata)
    shards += [read_gguf(other) for other in _other_shards(first, metadata)]
    stored = _merge_tensors(shards, metadata)
    _check_types(stored, first.name)

    factors = None
    if "rope_freqs.weight" in stored:
        shard, tensor = stored.pop("rope_freqs.weight")
        factors = _load(shard.data, tensor, None).to(torch.float32).tolist()
    config = hf_config(
        metadata,
        {name: tensor.shape for name, (_, tensor) in stored.items()},
        rope_factors=factors,
    )
    names = hf_names(stored, architecture)
    tensors = {}
    for name, (shard, tensor) in stored.items():
        fix = _fix_of(name, architecture, config, tensor.shape)
        tensors[names[name]] = TensorSource(
            shape=tensor.shape,
            load=partial(_load, shard.data, tensor, fix),
            blocks=_blocks(shard.data, tensor, fix),
            load_part=partial(_load_part, shard.data, tensor, fix),
        )
    num_tokens = len(metadata.sequence("tokenizer.ggml.tokens") or ())
    if num_tokens > config["vocab_size"]:
        raise ModelLoadError(
            f"{first.name}: the tokenizer has {num_tokens} tokens, token_embd.weight only "
            f"{config['vocab_size']} rows: convert the model again"
        )
    return Checkpoint(
        name=str(path),
        files=tuple(shard.path for shard in shards),
        config=config,
        tensors=tensors,
        tokenizer=tokenizer_from_gguf(metadata, replaced=tokenizer),
        generation_config={},
        format=_describe(tensor for _, tensor in stored.values()),
    )


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


_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def _shard_path(match: re.Match[str], number: int, parent: Path) -> Path:
    return parent / f"{match['stem']}-{number:05d}-of-{match['count']}.gguf"


def _first_shard(path: Path) -> Path:
    if path.is_dir():
        raise ModelLoadError(f"{path} is a folder: give the .gguf file in it")
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["number"]) == 1:
        return path
    first = _shard_path(match, 1, path.parent)
    if not first.exists():
        raise ModelLoadError(
            f"{path.name} is shard {int(match['number'])} of a split model, and the first one is "
            f"missing: {first}"
        )
    return first


def _other_shards(first: Path, metadata: GgufMetadata) -> list[Path]:
    """The shards after the first; all of them must be there."""
    count = metadata.integer("split.count") or 1
    if count <= 1:
        return []
    match = _SHARD_NAME.fullmatch(first.name)
    if match is None or int(match["count"]) != count:
        raise ModelLoadError(
            f"{first.name} is the first of {count} shards; to find the others it must keep its "
            f"original name, NAME-00001-of-{count:05d}.gguf"
        )
    others = [_shard_path(match, number, first.parent) for number in range(2, count + 1)]
    missing = [other.name for other in others if not other.exists()]
    if missing:
        raise ModelLoadError(
            f"{first.name} is split into {count} files and {len(missing)} of them are missing in "
            f"{first.parent}: {', '.join(missing)}"
        )
    return others


def _merge_tensors(
    shards: list[GgufFile], metadata: GgufMetadata
) -> dict[str, tuple[GgufFile, GgufTensor]]:
    stored: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in stored:
                raise ModelLoadError(
                    f"{shard.path}: tensor {tensor.name} is already in "
                    f"{stored[tensor.name][0].path.name}: the shards do not belong together"
                )
            stored[tensor.name] = (shard, tensor)
    expected = metadata.integer("split.tensors.count")
    if expected is not None and expected != len(stored):
        raise ModelLoadError(
            f"{metadata.source}: split.tensors.count is {expected}, but its {len(shards)} files "
            f"hold {len(stored)} tensors: the shards do not belong together"
        )
    return stored


def _check_types(stored: Mapping[str, tuple[GgufFile, GgufTensor]], source: str) -> None:
    unknown = [tensor for _, tensor in stored.values() if tensor.type_code not in GGML_TYPES]
    if unknown:
        code = unknown[0].type_code
        raise UnsupportedError(
            f"{source}: tensor {unknown[0].name} has type {ggml_type_name(code)} (code {code}), "
            f"which is not supported ({len(unknown)} such tensors); "
            f"supported: {supported_ggml_types()}"
        )


def _describe(tensors: Iterable[GgufTensor]) -> str:
    counts = Counter(GGML_TYPES[tensor.type_code].name for tensor in tensors)
    return "gguf, " + ", ".join(f"{name} x{count}" for name, count in counts.most_common())


def _fix_of(
    name: str, architecture: str, config: Mapping[str, Any], shape: tuple[int, ...]
) -> Callable[[Tensor], Tensor] | None:
    """What turns a tensor, or some heads of it, from the file's layout into Hugging Face's."""

    def fix_for(rows: int) -> Callable[[Tensor], Tensor] | None:
        return tensor_fix(
            name,
            architecture,
            num_heads=config["num_attention_heads"] * rows // shape[0],
            num_kv_heads=config["num_key_value_heads"] * rows // shape[0],
        )

    if fix_for(shape[0]) is None:
        return None

    def fix(part: Tensor) -> Tensor:
        fitting = fix_for(part.shape[0])
        assert fitting is not None, "the same for all parts of a tensor"
        return fitting(part)

    return fix


def _load_part(
    data: mmap.mmap,
    tensor: GgufTensor,
    fix: Callable[[Tensor], Tensor] | None,
    rows: slice,
    columns: slice,
) -> Tensor:
    kind = GGML_TYPES[tensor.type_code]
    cut = columns
    if len(tensor.shape) == 1 or columns.start % kind.block_size or columns.stop % kind.block_size:
        cut = slice(0, math.prod(tensor.shape[1:]))  # blocks are read whole
    count = rows.stop - rows.start
    shape = (count,) if len(tensor.shape) == 1 else (count, cut.stop - cut.start)
    result = read_stored(_raw_part(data, tensor, rows, cut).flatten(), kind, shape)
    if len(shape) == 2 and cut != columns:
        result = result[:, columns].contiguous()
    return result if fix is None else fix(result)


def _load(data: mmap.mmap, tensor: GgufTensor, fix: Callable[[Tensor], Tensor] | None) -> Tensor:
    result = read_stored(_raw(data, tensor), GGML_TYPES[tensor.type_code], tensor.shape)
    return result if fix is None else fix(result)


def _blocks(
    data: mmap.mmap, tensor: GgufTensor, fix: Callable[[Tensor], Tensor] | None
) -> StoredBlocks | None:
    """How a matrix is read without dequantising; fixes of matrices only move whole rows."""
    kind = GGML_TYPES[tensor.type_code]
    if len(tensor.shape) != 2 or kind.name in FLOAT_DTYPES:
        return None

    def load() -> Tensor:
        rows = _raw(data, tensor).view(tensor.shape[0], -1)
        return rows if fix is None else fix(rows)

    def load_part(rows: slice, columns: slice) -> Tensor:
        part = _raw_part(data, tensor, rows, columns)
        return part if fix is None else fix(part)

    return StoredBlocks(ggml_type=kind.name, load=load, load_part=load_part)


def _raw(data: mmap.mmap, tensor: GgufTensor) -> Tensor:
    """The tensor's bytes, copied out of the map: they outlive the file and may be written to."""
    end = tensor.start + GGML_TYPES[tensor.type_code].num_bytes(math.prod(tensor.shape))
    with memoryview(data) as view, view[tensor.start : end] as stored:
        return torch.frombuffer(bytearray(stored), dtype=torch.uint8)


def _raw_part(data: mmap.mmap, tensor: GgufTensor, rows: slice, columns: slice) -> Tensor:
    """The bytes of some rows, and of columns that fill blocks: copied, uint8 [rows, bytes]."""
    kind = GGML_TYPES[tensor.type_code]
    row_bytes = kind.num_bytes(math.prod(tensor.shape[1:]))
    start, end = (tensor.start + row * row_bytes for row in (rows.start, rows.stop))
    first, last = kind.num_bytes(columns.start), kind.num_bytes(columns.stop)
    with memoryview(data) as view, view[start:end] as stored:
        matrix = np.frombuffer(stored, dtype=np.uint8).reshape(-1, row_bytes)
        part = torch.from_numpy(matrix[:, first:last].copy())
        del matrix  # it holds on to the map
    return part
