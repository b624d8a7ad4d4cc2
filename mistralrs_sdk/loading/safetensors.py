"""A folder in Hugging Face's layout: config, safetensors (single or sharded), tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.loading.tokenizer import read_tokenizer

_DTYPES = {"F64", "F32", "F16", "BF16"}


def open_folder(folder: Path, *, name: str) -> Checkpoint:
    """Open the checkpoint in `folder`; reads headers and small files only.

    Raises:
        ModelLoadError: a file is missing, truncated or not what its name says.
        UnsupportedError: a tensor has a number type this package does not read.
    """
    config = read_json(folder / "config.json")
    generation_config = (
        read_json(folder / "generation_config.json")
        if (folder / "generation_config.json").is_file()
        else {}
    )
    files = _weight_files(folder)
    tensors: dict[str, TensorSource] = {}
    types: set[str] = set()
    for file in files:
        for tensor_name, source, dtype in _open_file(file):
            tensors[tensor_name] = source
            types.add(dtype)
    return Checkpoint(
        name=name,
        files=tuple(files),
        config=config,
        tensors=tensors,
        tokenizer=read_tokenizer(folder, config=config, generation_config=generation_config),
        generation_config=generation_config,
        format=f"safetensors ({', '.join(sorted(types))})",
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelLoadError: the file is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return [single]
        raise ModelLoadError(
            f"{folder} holds neither model.safetensors nor {index.name}: weights in other formats "
            "(pytorch_model.bin) are not read"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.resolve().parent != folder.resolve() and file.parent != folder:
            raise ModelLoadError(f"{index} names {file}, which lies outside the folder")
        if not file.is_file():
            raise ModelLoadError(f"shard {file.name} is missing in {folder}, {index.name} names it")
    return files


def _open_file(file: Path) -> list[tuple[str, TensorSource, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(file, framework="pt")
        found = []
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            header = handle.get_slice(name)
            found.append((name, tuple(header.get_shape()), header.get_dtype()))
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{file} is damaged or incomplete ({file.stat().st_size} bytes: {error}): download it again"
        ) from error
    for name, _, dtype in found:
        if dtype not in _DTYPES:
            raise UnsupportedError(
                f"tensor {name!r} in {file.name} has type {dtype}: supported are "
                f"{', '.join(sorted(_DTYPES))}"
            )

    def source(name: str, shape: tuple[int, ...]) -> TensorSource:
        return TensorSource(shape=shape, load=lambda: handle.get_tensor(name))

    return [(name, source(name, shape), dtype) for name, shape, dtype in found]
