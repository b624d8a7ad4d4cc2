"""Writes tiny GGUF models for the tests, with the `gguf` package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB, LAYERS = 6, 2, 32, 96, 64, 40, 2


def metadata_for(arch: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a tiny model; a change to None drops the key."""
    values: dict[str, Any] = {
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": MLP,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(ord("a") + i) for i in range(26)] + ["ab", "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * 27 + [3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 27,
        "tokenizer.ggml.eos_token_id": 28,
        "tokenizer.chat_template": "{{ messages }}",
    }
    if arch.startswith("gemma"):
        values[f"{arch}.attention.sliding_window"] = 8
    if arch == "gemma2":
        values |= {"gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0}
    return {key: value for key, value in (values | changes).items() if value is not None}


def tensors_for(arch: str) -> dict[str, np.ndarray]:
    """Random weights of a tiny model, by GGUF name."""
    rng = np.random.default_rng(0)
    gemma = arch.startswith("gemma")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate.weight": (MLP, HIDDEN),
            "ffn_up.weight": (MLP, HIDDEN),
            "ffn_down.weight": (HIDDEN, MLP),
            "ffn_norm.weight": (HIDDEN,),
        }
        if arch in ("qwen3", "gemma3"):
            parts |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        if arch == "qwen2":
            parts |= {"attn_q.bias": (HEADS * HEAD_DIM,)}
            parts |= {f"attn_{part}.bias": (KV_HEADS * HEAD_DIM,) for part in "kv"}
        if gemma:
            parts |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def write_gguf(
    path: Path,
    arch: str,
    values: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    types: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file; tensors that have a type are quantised to it, or, if bytes, are its blocks."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name)
        if kind is None or tensor.dtype == np.uint8:
            writer.add_tensor(name, tensor, raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(tmp_path: Path, arch: str = "llama", **changes: Any) -> Path:
    return write_gguf(
        tmp_path / "tiny.gguf", arch, metadata_for(arch, **changes), tensors_for(arch)
    )


def set_type_code(path: Path, tensor: str, code: int) -> None:
    """Overwrite the type code in a tensor's header entry."""
    data = bytearray(path.read_bytes())
    entry = struct.pack("<Q", len(tensor)) + tensor.encode()
    dims_at = data.index(entry) + len(entry)
    (num_dims,) = struct.unpack_from("<I", data, dims_at)
    struct.pack_into("<I", data, dims_at + 4 + 8 * num_dims, code)
    path.write_bytes(data)
