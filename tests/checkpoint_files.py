"""Writes tiny checkpoints in Hugging Face's layout without transformers, for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_models import write_tokenizer

LAYERS, HIDDEN, MLP, VOCAB = 2, 72, 128, 512


def config_for(kind: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny llama (9 heads, 3 of them for keys) or qwen2; None drops a key."""
    heads = {"llama": (9, 3), "qwen2": (4, 2)}[kind]
    values = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return {key: value for key, value in (values | changes).items() if value is not None}


def tensors_of(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random float32 weights by Hugging Face name; no head if the config ties it."""
    generator = torch.Generator().manual_seed(0)
    head_dim = HIDDEN // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            "post_attention_layernorm.weight": (HIDDEN,),
            "mlp.gate_proj.weight": (MLP, HIDDEN),
            "mlp.up_proj.weight": (MLP, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, MLP),
        }
        if config["model_type"] == "qwen2":
            parts |= {"self_attn.q_proj.bias": (HIDDEN,)}
            parts |= {f"self_attn.{part}_proj.bias": (kv,) for part in "kv"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    if not config["tie_word_embeddings"]:  # drawn last: the rest is the same with and without
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


def write_folder(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """A complete checkpoint; by default the tiny llama in one file."""
    config = config_for("llama") if config is None else config
    tensors = tensors_of(config) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def folder_with(path: Path, *names: str) -> Path:
    """A folder with empty files of these names."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"")
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in values.items() if value is not None})
