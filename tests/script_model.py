"""Checkpoints whose greedy answer is written in advance, one token id after the other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

START = 198
"""The id a prompt must end with: the line feed of the SmolLM tokenizer."""
EOS = 2
RAW_TEMPLATE = "{{ messages[0]['content'] }}"
"""Makes a chat request a raw prompt, so that raw prompts can be streamed."""

_HIDDEN, _MLP = 256, 32


def script_folder(
    folder: Path,
    script: Sequence[int],
    *,
    tokenizer: Tokenizer,
    eos_token: str = "<|im_end|>",
    eos: int | None = EOS,
    generation_eos: int | list[int] | None = None,
) -> Path:
    """Write a Llama that answers a prompt ending in `START` with `script`, then `EOS`.

    The ids of `script` must be distinct. `eos` and `generation_eos` are the `eos_token_id` of
    config.json and generation_config.json; None leaves the key, or the file, out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = tokenizer.get_vocab_size()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
    }
    _write(folder / "config.json", config)
    settings = {"eos_token": eos_token, "chat_template": RAW_TEMPLATE}
    _write(folder / "tokenizer_config.json", settings)
    if generation_eos is not None:
        _write(folder / "generation_config.json", {"eos_token_id": generation_eos})
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(script, size), folder / "model.safetensors")
    return folder


def _weights(script: Sequence[int], vocab_size: int) -> dict[str, torch.Tensor]:
    """Layers that add nothing; the head knows for each id of the script which one follows."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab_size, _HIDDEN, generator=generator)
    embedding /= embedding.norm(dim=-1, keepdim=True)
    head = torch.zeros_like(embedding)
    for previous, following in itertools.pairwise([START, *script, EOS]):
        head[following] += 2 * embedding[previous]
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(2):
        square = torch.randn(_HIDDEN, _HIDDEN, generator=generator) * 0.05
        parts = {
            "input_layernorm": torch.ones(_HIDDEN),
            "post_attention_layernorm": torch.ones(_HIDDEN),
            **{f"self_attn.{part}_proj": square.clone() for part in "qkv"},
            "self_attn.o_proj": torch.zeros(_HIDDEN, _HIDDEN),
            "mlp.gate_proj": torch.ones(_MLP, _HIDDEN),
            "mlp.up_proj": torch.ones(_MLP, _HIDDEN),
            "mlp.down_proj": torch.zeros(_HIDDEN, _MLP),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in parts.items()}
    return {name: value.half() for name, value in weights.items()}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    present = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(present), encoding="utf-8")
