"""Tiny random checkpoints and the Hugging Face answers they are compared with.

Every optional feature of an architecture is switched on in at least one of them. Weights are drawn
wide, so that leaving a feature out changes the tokens, not only the last decimals.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}
_NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

_TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_gqa93": (
        "LlamaConfig",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama_bias": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "rope_parameters": _LLAMA3},
    ),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral_swa": ("MistralConfig", {"sliding_window": 32}),
    "mistral_full": (
        "MistralConfig",
        {
            "sliding_window": None,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_swa": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_bias": (
        "Qwen3Config",
        {
            "hidden_size": 96,
            "head_dim": 24,
            "num_attention_heads": 6,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "hidden_size": 96,
            "head_dim": 24,
            "num_attention_heads": 6,
            "num_hidden_layers": 6,
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 2.0,
            "rope_parameters": _NESTED,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
}

TINY_MODELS = tuple(_TINY)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_config(name: str) -> Any:
    """The Hugging Face config of a tiny model; `name` is one of `TINY_MODELS`."""
    import transformers

    kind, changes = _TINY[name]
    return getattr(transformers, kind)(**json.loads(json.dumps({**_BASE, **changes})))


@functools.cache
def tiny_model(name: str) -> Any:
    """The Hugging Face model in float32 with eager attention, weights drawn from seed 0."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(name), attn_implementation="eager", dtype=torch.float32
    ).eval()
    gemma = name.startswith("gemma")
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("bias"):
                weight.normal_()
            elif "norm" in key:
                weight.uniform_(0.5, 2).sub_(1.0 if gemma else 0.0)
        if gemma:
            # Tied and multiplied by sqrt(hidden), the embedding would drown the layers.
            model.get_input_embeddings().weight.mul_(0.2)
    return model


def tiny_checkpoint(name: str, folder: Path) -> Path:
    """Write config, safetensors weights and a byte-level tokenizer of 512 ids into `folder`."""
    tiny_model(name).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Ids 0, 1, 2 are <pad>, <bos>, <eos>; then 256 bytes, then merges of two letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    letters = "etaoinshrdlucmfw"
    merges = [(a, b) for a in letters for b in letters][: 512 - len(vocab)]
    vocab.update({a + b: len(vocab) + i for i, (a, b) in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def hf_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits after each id, [len(ids), vocab] float32, in one forward without a cache.

    `model` is a Hugging Face model, the name of a tiny one or the folder of a checkpoint.
    """
    with torch.inference_mode():
        return _hf(model)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def hf_greedy(model: Any, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The n most likely next ids, one whole forward each; EOS ends nothing."""
    model, ids = _hf(model), list(prompt_ids)
    for _ in range(n):
        ids.append(int(hf_logits(model, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]


def _hf(model: Any) -> Any:
    if isinstance(model, str) and model in _TINY:
        return tiny_model(model)
    return _load(Path(model)) if isinstance(model, (str, Path)) else model


@functools.cache
def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
