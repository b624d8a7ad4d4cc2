"""A folder in Hugging Face's layout: config, safetensors (single or sharded), tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.loading.json_file import read_json, read_json_if_there
from mistralrs_sdk.loading.tokenizer import read_tokenizer

_DTYPES = ("BF16", "F16", "F32", "F64")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_folder(folder: Path, *, name: str, tokenizer_json: Path | None = None) -> Checkpoint:
    """Open the checkpoint in `folder`; reads headers and small files only.

    `tokenizer_json` takes the place of the folder's tokenizer, which then need not be there.

    Raises:
        ModelLoadError: a file is missing, truncated or not what its name says.
        UnsupportedError: a tensor has a number type this package does not read.
    """
    config = read_json(folder / "config.json")
    generation_config = read_json_if_there(folder / "generation_config.json")
    files = _weight_files(folder)
    tensors: dict[str, TensorSource] = {}
    home: dict[str, Path] = {}
    types: set[str] = set()
    for file in files:
        for tensor_name, dtype, source in _open_file(file):
            if tensor_name in home:
                raise ModelLoadError(
                    f"tensor {tensor_name!r} is in {home[tensor_name].name} and in {file.name}: "
                    f"the shards in {folder} do not belong together, download them again"
                )
            home[tensor_name] = file
            tensors[tensor_name] = source
            types.add(dtype)
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
        format=f"safetensors ({', '.join(sorted(types))})",
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


def _open_file(file: Path) -> list[tuple[str, str, TensorSource]]:
    """Name, number type and source of each tensor."""
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
    for name, dtype, _ in found:
        if dtype not in _DTYPES:
            raise UnsupportedError(
                f"tensor {name!r} in {file.name} has type {dtype}: supported are "
                f"{', '.join(_DTYPES)}"
            )

    def source(name: str, shape: tuple[int, ...]) -> TensorSource:
        return TensorSource(shape=shape, load=lambda: handle.get_tensor(name))

    return [(name, dtype, source(name, shape)) for name, dtype, shape in found]


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
