"""A folder in Hugging Face's layout: config, safetensors (single or sharded), tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.json_file import read_json, read_json_if_there
from mistralrs_sdk.loading.quantised_safetensors import (
    CONFIG_KEYS,
    dequantised,
    quantization_settings,
)
from mistralrs_sdk.loading.stored_tensor import StoredTensor, float_source
from mistralrs_sdk.loading.tokenizer import read_tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_folder(folder: Path, *, name: str, tokenizer_json: Path | None = None) -> Checkpoint:
    """Open the checkpoint in `folder`; reads headers and small files only.

    `tokenizer_json` takes the place of the folder's tokenizer, which then need not be there.
    Weights that were quantised (GPTQ, AWQ, FP8, compressed-tensors) are read as float weights, and
    the returned config says nothing of it.

    Raises:
        ModelLoadError: a file is missing, truncated or not what its name says.
        UnsupportedError: a tensor has a number type, or the checkpoint a quantisation, that this
            package does not read.
    """
    config = read_json(folder / "config.json")
    generation_config = read_json_if_there(folder / "generation_config.json")
    files = _weight_files(folder)
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in open_file(file):
            if tensor.name in stored:
                raise ModelLoadError(
                    f"tensor {tensor.name!r} is in {stored[tensor.name].file} and in {file.name}: "
                    f"the shards in {folder} do not belong together, download them again"
                )
            stored[tensor.name] = tensor
    words = ", ".join(sorted({tensor.dtype for tensor in stored.values()}))
    quantization = quantization_settings(config, folder, names=stored)
    if quantization is None:
        tensors = {name: float_source(tensor) for name, tensor in stored.items()}
    else:
        tensors, kind = dequantised(stored, quantization, config=config)
        config = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
        words = f"{words}; {kind}"
    return Checkpoint(
        name=name,
        files=tuple(files),
        config=config,
        tensors=tensors,
        tokenizer=read_tokenizer(
            folder,
            config=config,
            generation_config=generation_config,
            tokenizer_json=tokenizer_json,
        ),
        generation_config=generation_config,
        format=f"safetensors ({words})",
    )


def _weight_files(folder: Path) -> list[Path]:
    """The single file, or the shards that the index names."""
    index, single = folder / _INDEX, folder / _SINGLE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelLoadError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}: weights in other formats "
            "(pytorch_model.bin) are not read"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map: download it again")
    names = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ModelLoadError(
                f"{index} places {tensor!r} in {name!r}, which is no file name in that folder"
            )
        names.add(name)
    missing = [name for name in sorted(names) if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {len(names)} shards are missing in {folder}, {_INDEX} names "
            f"them: {', '.join(missing)}; from the hub, `hf download REPOSITORY` fetches them"
        )
    return [folder / name for name in sorted(names)]


def open_file(file: Path) -> list[StoredTensor]:
    """What the file holds, by its header."""
    from safetensors import SafetensorError, safe_open

    found = []
    try:
        handle = safe_open(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            header = handle.get_slice(name)
            found.append((name, header.get_dtype(), tuple(header.get_shape())))
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ModelLoadError(
            f"{file} is damaged or incomplete ({_sizes(file)}; {error}): delete it and download it "
            f"again, from the hub with `hf download REPOSITORY {file.name} --force-download`"
        ) from error
    return [
        StoredTensor(
            name=name,
            file=file.name,
            dtype=dtype,
            shape=shape,
            load=partial(handle.get_tensor, name),
            load_part=partial(_load_part, handle, name, len(shape)),
        )
        for name, dtype, shape in found
    ]


def _load_part(handle: Any, name: str, dimensions: int, rows: slice, columns: slice) -> Tensor:
    part = handle.get_slice(name)
    return part[rows] if dimensions == 1 else part[rows, columns]


def _sizes(file: Path) -> str:
    """How many bytes the file has and, if its header can be read, how many it should have."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if not 0 < length <= size - 8:
            return f"it has {size} bytes"
        try:
            header = json.loads(content.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_"]
            return f"it has {size} bytes and should have {8 + length + max(ends)}"
        except (ValueError, LookupError, TypeError, AttributeError):
            return f"it has {size} bytes"
