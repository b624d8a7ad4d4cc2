"""The weights of `peers.py` in the formats that contenders read, made from one GGUF file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType
from peers_numbers import Weights

_FORMS = {
    "Q4_0": (Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "Q8_0": (Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "F16": (Type.F16, LlamaFileType.MOSTLY_F16),
}
GGUF_FORMS = tuple(_FORMS)
HEADS = ("output.weight", "token_embd.weight")
"""The tensor that logits come from: the first of these that a file has."""


def measure_weights(path: Path) -> Weights:
    """Count the matrices of a GGUF file."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    head = next(tensors[name] for name in HEADS if name in tensors)
    layers = [t for name, t in tensors.items() if name not in HEADS]
    return Weights(
        layer_params=sum(int(t.n_elements) for t in layers if len(t.shape) > 1),
        head_params=int(head.n_elements),
        num_bytes=sum(int(t.n_bytes) for t in (*layers, head)),
    )


def prepare(source: Path, folder: Path, *, forms: set[str]) -> dict[str, Path]:
    """Make what is missing of `forms` in `folder`; returns the place of each form.

    "gguf" is the file itself, "folder" a folder with float16 safetensors, and the others are GGUF
    files. Files are kept: the name has a digest of the source's path, size and time.
    """
    status = source.stat()
    mark = f"{source.resolve()}{status.st_size}{status.st_mtime_ns}"
    kept = folder / f"{source.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:8]}"
    kept.mkdir(parents=True, exist_ok=True)
    places = {"gguf": source}
    for form in sorted(forms - {"gguf"}):
        name = "f16" if form == "folder" else f"{form}.gguf"
        write = write_folder if form == "folder" else write_gguf
        places[form] = _made(kept / name, lambda to, w=write, f=form: w(source, to, f))
    return places


def _made(place: Path, write: Callable[[Path], None]) -> Path:
    """Write to a name aside and rename, so that nothing half-written is ever taken."""
    if not place.exists():
        aside = place.with_name(f"{os.getpid()}-{place.name}")
        write(aside)
        aside.rename(place)
    return place


def write_gguf(source: Path, target: Path, form: str) -> None:
    """Write the same model with its matrices in another type; a 4-bit one keeps an 8-bit head."""
    reader = gguf.GGUFReader(source)
    layer_type, file_type = _FORMS[form]
    head_type = Type.Q8_0 if layer_type == Type.Q4_0 else layer_type
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer adds them
        is_list = field.types[0] == gguf.GGUFValueType.ARRAY
        value = file_type.value if name == "general.file_type" else field.contents()
        writer.add_key_value(
            name, value, field.types[0], sub_type=field.types[-1] if is_list else None
        )
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.tensor_type if len(tensor.shape) == 1 else layer_type
        if tensor.name in HEADS:
            kind = head_type
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, target: Path, form: str) -> None:
    """Write a Hugging Face folder in float16, by transformers."""
    import torch
    import transformers

    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    if hasattr(transformers, "GgufConfig"):  # it would leave the weights as they are stored
        place["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float16)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    file = target / "config.json"
    config = json.loads(file.read_text())
    # mistral.rs reads it where transformers wrote it up to version 4
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta"))
    file.write_text(json.dumps(config, indent=2))
