"""Writes LoRA adapters in PEFT's layout, without peft."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLACES = {leaf: f"{'self_attn' if leaf in LEAVES[:4] else 'mlp'}.{leaf}" for leaf in LEAVES}


def module(layer: int, leaf: str) -> str:
    """The name a matrix has in a checkpoint."""
    return f"model.layers.{layer}.{PLACES[leaf]}"


def key(name: str, which: str) -> str:
    """The name one of a module's two matrices has in an adapter's file."""
    return f"base_model.model.{name}.lora_{which}.weight"


def shapes_of(config: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of each matrix that can be changed, from a Hugging Face config's values."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    hidden, inner = values["hidden_size"], values["intermediate_size"]
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_dim = values.get("head_dim") or hidden // heads
    one = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    layers = range(values["num_hidden_layers"])
    return {module(i, leaf): shape for i in layers for leaf, shape in one.items()}


def random_pairs(
    shapes: Mapping[str, tuple[int, int]],
    ranks: Mapping[str, int] | int = 4,
    *,
    leaves: Iterable[str] = LEAVES,
    seed: int = 0,
    size: float = 0.1,
) -> dict[str, Tensor]:
    """Random matrices for these leaves, by their names in the file."""
    generator = torch.Generator().manual_seed(seed)
    leaves = tuple(leaves)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        if not name.endswith(leaves):
            continue
        rank = ranks if isinstance(ranks, int) else ranks[name.rpartition(".")[2]]
        tensors[key(name, "A")] = torch.randn(rank, columns, generator=generator) * size
        tensors[key(name, "B")] = torch.randn(rows, rank, generator=generator) * size
    return tensors


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    leaves: Iterable[str] | str | None = LEAVES,
    rank: int = 4,
    **changes: Any,
) -> Path:
    """A complete adapter; `changes` are set in its config."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = leaves if leaves is None or isinstance(leaves, str) else list(leaves)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def tiny_adapter(
    folder: Path, name: str = "llama", *, leaves: Iterable[str] = LEAVES, **settings: Any
) -> Path:
    """A random adapter of rank 4 for a tiny model of `tests.tiny_models`."""
    from tests.tiny_models import tiny_config

    config, leaves = tiny_config(name), tuple(leaves)
    tensors = random_pairs(shapes_of(config), leaves=leaves, **settings)
    return write_adapter(folder, tensors, leaves=leaves)


def peft_merged(name: str, folder: Path) -> Any:
    """The oracle: the tiny Hugging Face model into which PEFT has merged the adapter."""
    import peft

    from tests.tiny_models import tiny_model

    with warnings.catch_warnings():  # PEFT asks transformers for what goes in its next version
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_model(name)), str(folder))
        return wrapped.merge_and_unload().eval()
