"""Reads importance matrices: how strongly each input of each weight was active on some text."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.gguf_config import gguf_matrix_name
from mistralrs_sdk.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from mistralrs_sdk.quant.ggml import ggml_type_name


def read_imatrix(path: Path | str) -> Mapping[str, Tensor]:
    """Read an importance matrix: by GGUF tensor name, such as "blk.0.attn_q.weight".

    The values are mean squared activations, float32 [in_features], up to a factor for each tensor;
    for a stack of experts [experts, in_features] where the file tells. Three formats are known:
    llama.cpp's GGUF files, its older .dat or .imatrix files, and mistral.rs' .cimatrix.

    Raises: ModelLoadError naming the file if it is missing, damaged or no importance matrix;
    UnsupportedError for a GGUF file with sums that are not float32.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelLoadError(f"{path} is empty: download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist") from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    with data:
        if data[:4] == b"GGUF":
            return _read_gguf_sums(read_gguf(path))
        records = _cimatrix if path.suffix == ".cimatrix" else _legacy
        result: dict[str, Tensor] = {}
        for name, values in records(_Reader(data, path)):
            if name in result:
                raise _damaged(path, f"{name!r} appears twice")
            result[name] = _checked(values, name, path)
    return result


def importance_of(checkpoint: Checkpoint, path: Path | str) -> Mapping[str, Tensor]:
    """What the file says of the matrices of a checkpoint, by their names there.

    Raises: ModelLoadError, also if the file is about another model; UnsupportedError.
    """
    found = read_imatrix(path)
    result: dict[str, Tensor] = {}
    for name, source in checkpoint.tensors.items():
        importance = found.get(gguf_matrix_name(name) or "")
        if importance is None:
            continue
        if tuple(importance.shape) != source.shape[1:]:
            raise ModelLoadError(
                f"{path} has {tuple(importance.shape)} values for {name}, which has "
                f"{source.shape[-1]} inputs: it was collected from another model"
            )
        result[name] = importance
    if not result:
        raise ModelLoadError(
            f"{path} has nothing for {checkpoint.name}: it names {', '.join(list(found)[:3])}, "
            "and was collected from another model"
        )
    return result


class _Reader:
    """Takes records front to back; never past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    def take(self, length: int, what: str) -> bytes:
        start, left = self.position, len(self.data) - self.position
        if not 0 <= length <= left:
            raise _damaged(
                self.path, f"{what} should take {length} bytes at {start}, and {left} are left"
            )
        self.position += length
        return self.data[start : self.position]

    def number(self, layout: str, what: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def name(self, length: int) -> str:
        return str(self.take(length, "a name"), "utf-8", "replace")

    def floats(self, count: int, name: str) -> Tensor:
        if count < 1:
            raise _damaged(self.path, f"{name!r} has {count} values")
        return torch.frombuffer(
            bytearray(self.take(4 * count, f"the values of {name!r}")), dtype=torch.float32
        )


def _legacy(reader: _Reader) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's older format: entries, then what the text was, which we do not need."""
    count = reader.number("<i", "the number of entries")
    if not 1 <= count <= len(reader.data) // 16:
        raise _damaged(reader.path, f"it says that it has {count} entries")
    for _ in range(count):
        name = reader.name(reader.number("<i", "the length of a name"))
        calls = reader.number("<i", f"the number of calls of {name!r}")
        values = reader.floats(reader.number("<i", f"the number of values of {name!r}"), name)
        yield name, values / calls if calls > 0 else values


def _cimatrix(reader: _Reader) -> Iterator[tuple[str, Tensor]]:
    """mistral.rs' format, by the names of its modules."""
    count = reader.number("<Q", "the number of entries")
    if not 1 <= count <= len(reader.data) // 20:
        raise _damaged(reader.path, f"it says that it has {count} entries")
    for _ in range(count):
        module = reader.name(reader.number("<Q", "the length of a name"))
        values = reader.floats(reader.number("<Q", f"the number of values of {module!r}"), module)
        for name in _gguf_names(module):
            yield name, values


_MODULES = {
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "self_attn.o_proj": ("attn_output",),
    "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_up",),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
    "mlp.down_proj": ("ffn_down",),
}
"""Modules of a layer, and GGUF's names of their weights: parts of a fused one share the input."""

_LAYER_MODULE = re.compile(r"(?:.+\.)?layers\.(\d+)\.(.+)")


def _gguf_names(module: str) -> tuple[str, ...]:
    """GGUF's tensor names of a Hugging Face module; one nobody knows keeps its own."""
    if module in ("lm_head", "output"):
        return ("output.weight",)
    match = _LAYER_MODULE.fullmatch(module)
    if match is None or match[2] not in _MODULES:
        return (module,)
    return tuple(f"blk.{match[1]}.{part}.weight" for part in _MODULES[match[2]])


_SUMS, _COUNTS = ".in_sum2", ".counts"


def _read_gguf_sums(file: GgufFile) -> Mapping[str, Tensor]:
    """llama.cpp's GGUF format: for each weight, sums of squares and how many were added."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        if weight + _COUNTS not in tensors:
            raise _damaged(file.path, f"{name} is there without {weight}{_COUNTS}")
        sums = _read_floats(file, tensor)
        counts = _read_floats(file, tensors[weight + _COUNTS]).view(-1, 1)
        if sums.numel() % len(counts) or not bool((counts.isfinite() & (counts >= 0)).all()):
            raise _damaged(
                file.path,
                f"the {len(counts)} counts of {weight} do not fit its {sums.numel()} sums",
            )
        # What was never active is as important as the next input.
        means = torch.where(counts > 0, sums.view(len(counts), -1) / counts, 1.0)
        result[weight] = _checked(means[0] if len(means) == 1 else means, weight, file.path)
    if not result:
        kind = file.metadata.get("general.type", "model")
        raise ModelLoadError(
            f"{file.path} is a GGUF file of the type {kind!r} without any {_SUMS} tensor, not an "
            "importance matrix: make one with llama.cpp's llama-imatrix"
        )
    return result


def _read_floats(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """A float32 tensor's values, flat; `read_gguf` has checked that they lie in the file."""
    if tensor.type_code != 0:
        raise UnsupportedError(
            f"{file.path}: {tensor.name} has type {ggml_type_name(tensor.type_code)}; in an "
            "importance matrix only F32 can be read: make it again with llama.cpp's llama-imatrix"
        )
    stored = file.data[tensor.start : tensor.start + 4 * math.prod(tensor.shape)]
    return torch.frombuffer(bytearray(stored), dtype=torch.float32)


def _checked(values: Tensor, name: str, path: Path) -> Tensor:
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise _damaged(path, f"{name!r} has values that are no mean squares")
    return values


def _damaged(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{path} is damaged or no importance matrix: {what}; read are llama.cpp's (GGUF, .dat, "
        ".imatrix) and mistral.rs' (.cimatrix, with layers by name): download or make it again"
    )
