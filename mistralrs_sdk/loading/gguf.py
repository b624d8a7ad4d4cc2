"""How a GGUF file, or all shards of one, becomes a `Checkpoint`."""

from __future__ import annotations

import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

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
from mistralrs_sdk.loading.gguf_file import GgufFile, GgufTensor, read_gguf
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
