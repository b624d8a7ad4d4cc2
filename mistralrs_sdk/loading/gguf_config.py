"""GGUF metadata as a Hugging Face style config, and GGUF tensor names as Hugging Face's."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.gguf_metadata import GgufMetadata

_LOGGER = logging.getLogger("mistralrs_sdk.loading")


@attrs.frozen(kw_only=True)
class _Family:
    """What tells one GGUF architecture from another."""

    architecture: str
    model_type: str
    activation: str = "silu"
    permuted: bool = False
    """Rows of q and k are stored in ggml's rotary order (pairs next to each other)."""
    gemma: bool = False
    """Norm weights are stored with 1 added, and there are norms after attention and MLP too."""
    window_pattern: int | None = None
    """Every how many layers one attends to everything; None: all layers alike."""


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family(architecture="LlamaForCausalLM", model_type="llama", permuted=True),
        "qwen2": _Family(architecture="Qwen2ForCausalLM", model_type="qwen2"),
        "qwen3": _Family(architecture="Qwen3ForCausalLM", model_type="qwen3"),
        "gemma2": _Family(
            architecture="Gemma2ForCausalLM",
            model_type="gemma2",
            activation="gelu_pytorch_tanh",
            gemma=True,
            window_pattern=2,
        ),
        "gemma3": _Family(
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            activation="gelu_pytorch_tanh",
            gemma=True,
            window_pattern=6,
        ),
    }
)

# GGUF does not store Gemma's query_pre_attn_scalar: it is head_dim, but in these two models (told
# apart by their layer count, as llama.cpp does) it is hidden_size / heads.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA2_SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3_LOCAL_THETA = 10000.0


def check_is_language_model(metadata: GgufMetadata) -> str:
    """Return the GGUF architecture name if it is one we can build.

    Raises: ModelLoadError if the file is no language model; UnsupportedError for another one.
    """
    kind = metadata.text("general.type")
    name = metadata.text("general.architecture")
    if name == "clip" or kind == "mmproj":
        raise ModelLoadError(
            f"{metadata.source} is a multimodal projector (mmproj), not a language model: "
            f"give the model's own .gguf file"
        )
    if kind not in (None, "model"):
        raise ModelLoadError(
            f"{metadata.source} holds {kind!r} (general.type), not a model: "
            f"give the model's own .gguf file"
        )
    if name is None:
        raise metadata.missing("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedError(
            f"{metadata.source}: GGUF architecture {name!r} is not supported; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    num_experts = metadata.integer(f"{name}.expert_count")
    if num_experts:
        raise UnsupportedError(
            f"{metadata.source}: {name}.expert_count is {num_experts}: "
            f"mixture-of-experts models are not supported as GGUF"
        )
    return name


def hf_config(
    metadata: GgufMetadata,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_factors: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Build the contents of `config.json`.

    `shapes` are the tensors' by GGUF name: whether the head is tied and which biases exist is seen
    there. `rope_factors` are the values of `rope_freqs.weight`, if the file has it: they become
    `rope_type` "factors", inverse frequency i divided by factor i.

    Defaults, each with a warning: `head_count_kv` is `head_count`, `rope.freq_base` 10000,
    Gemma 2's soft caps 50 and 30. Whatever else is missing (the context length, too) is a
    ModelLoadError naming the key.
    """
    name = check_is_language_model(metadata)
    family = _FAMILIES[name]
    hidden_size = metadata.positive(f"{name}.embedding_length")
    num_layers = metadata.positive(f"{name}.block_count")
    num_heads = metadata.positive(f"{name}.attention.head_count")
    num_kv_heads = _kv_heads(metadata, name, num_heads)
    head_dim = _head_dim(metadata, name, hidden_size // num_heads)
    epsilon = metadata.number(f"{name}.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise metadata.missing(f"{name}.attention.layer_norm_rms_epsilon")
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(
            f"{metadata.source} has no token_embd.weight: it is not a complete model"
        )
    window = metadata.integer(f"{name}.attention.sliding_window") or None
    layer_types = _layer_types(metadata, name, num_layers=num_layers, window=window)
    rope = _rope(metadata, name, head_dim=head_dim, factors=rope_factors)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.positive(f"{name}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": family.activation,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": metadata.positive(f"{name}.context_length"),
        "rope_parameters": rope,
        "sliding_window": window,
        "layer_types": layer_types,
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    if name == "llama" and window is not None:
        # Mistral has no GGUF architecture of its own; a window is what tells it from Llama.
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        del config["layer_types"]  # as in Hugging Face's: the window holds for every layer
    if name.startswith("qwen"):
        config["use_sliding_window"] = window is not None
    if family.gemma:
        config |= _gemma_extras(metadata, name, config)
    for key in ("bos", "eos"):
        token_id = metadata.integer(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{key}_token_id"] = token_id
    return config


def _kv_heads(metadata: GgufMetadata, name: str, num_heads: int) -> int:
    key = f"{name}.attention.head_count_kv"
    if key not in metadata:
        _LOGGER.warning(
            "%s: no %s; taking as many as query heads (%d)", metadata.source, key, num_heads
        )
        return num_heads
    num_kv_heads = metadata.positive(key)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{metadata.source}: {num_heads} query heads cannot share {num_kv_heads} ({key})"
        )
    return num_kv_heads


def _head_dim(metadata: GgufMetadata, name: str, default: int) -> int:
    head_dim = metadata.integer(f"{name}.attention.key_length") or default
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.integer(f"{name}.{key}")
        if value not in (None, head_dim):
            raise UnsupportedError(
                f"{metadata.source}: {name}.{key} is {value}, but a head has {head_dim} "
                f"dimensions; only models in which both are equal are supported"
            )
    return head_dim


def _layer_types(
    metadata: GgufMetadata, name: str, *, num_layers: int, window: int | None
) -> list[str]:
    pattern = _FAMILIES[name].window_pattern
    if window is None:
        if pattern is not None:
            raise metadata.missing(f"{name}.attention.sliding_window")
        return ["full_attention"] * num_layers
    if pattern is None:
        return ["sliding_attention"] * num_layers
    stored = metadata.values.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(stored, Sequence) and len(stored) == num_layers:
        local = [bool(layer) for layer in stored]
    else:
        every = stored if isinstance(stored, int) and stored > 0 else pattern
        local = [(layer + 1) % every != 0 for layer in range(num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in local]


def _rope(
    metadata: GgufMetadata, name: str, *, head_dim: int, factors: Sequence[float] | None
) -> dict[str, Any]:
    theta = metadata.number(f"{name}.rope.freq_base")
    if theta is None:
        theta = 10000.0
        _LOGGER.warning("%s: no %s.rope.freq_base; taking 10000", metadata.source, name)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    rope |= _rope_scaling(metadata, name)
    if factors is not None:
        if rope["rope_type"] != "default" or len(factors) != head_dim // 2:
            raise UnsupportedError(
                f"{metadata.source}: rope_freqs.weight has {len(factors)} factors for heads of "
                f"{head_dim} dimensions and rope scaling {rope['rope_type']!r}; supported is one "
                f"factor for two dimensions, without other scaling"
            )
        rope |= {"rope_type": "factors", "factors": [float(factor) for factor in factors]}
    if name != "gemma3":
        return rope
    local_theta = metadata.number(f"{name}.rope.freq_base_swa") or _GEMMA3_LOCAL_THETA
    return {
        "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
        "full_attention": rope,
    }


def _rope_scaling(metadata: GgufMetadata, name: str) -> dict[str, Any]:
    """The entries scaling adds to `rope_parameters`; a factor without a type means linear."""
    prefix = f"{name}.rope.scaling"
    factor = metadata.number(f"{prefix}.factor") or metadata.number(f"{name}.rope.scale_linear")
    kind = metadata.text(f"{prefix}.type") or ("linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{metadata.source}: {prefix}.type {kind!r} is not supported; "
            f"supported: none, linear, yarn"
        )
    if kind == "none" or factor in (None, 0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.integer(f"{prefix}.original_context_length")
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or metadata.positive(f"{name}.context_length"),
    }
    for key, hf_key in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        value = metadata.number(f"{prefix}.{key}")
        if value is not None:
            yarn[hf_key] = value
    strength = metadata.number(f"{prefix}.yarn_attn_factor")
    if strength is None:
        strength = metadata.number(f"{prefix}.attn_factor")
    if strength not in (None, 1.0):
        # llama.cpp multiplies YaRN's own factor by this one; Hugging Face stores the product.
        yarn["attention_factor"] = strength * (0.1 * math.log(factor) + 1.0)
    return yarn


def _gemma_extras(metadata: GgufMetadata, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    scale = metadata.number(f"{name}.attention.scale")
    if scale:
        scalar: float = scale**-2
    elif config["num_hidden_layers"] == _GEMMA_27B_LAYERS[name]:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    else:
        scalar = config["head_dim"]
    extras: dict[str, Any] = {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": scalar,
    }
    for key in _GEMMA2_SOFTCAPS:
        cap = metadata.number(f"{name}.{key}")
        if cap is None and name == "gemma2":
            cap = _GEMMA2_SOFTCAPS[key]
            _LOGGER.warning("%s: no %s.%s; taking %g", metadata.source, name, key, cap)
        extras[key] = cap or None
    return extras


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_MATRICES = {hf: name for name, hf in _TOP_NAMES.items() if "norm" not in name}
_LAYER_MATRICES = {hf: name for name, hf in _LAYER_NAMES.items() if "norm" not in name}
_LAYER_PARAMETER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.weight")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_names(names: Iterable[str], architecture: str) -> dict[str, str]:
    """Hugging Face parameter name of each GGUF tensor; one nobody knows keeps its own."""
    layer_names = _GEMMA_LAYER_NAMES if _FAMILIES[architecture].gemma else _LAYER_NAMES
    result = {}
    for name in names:
        match = _LAYER_TENSOR.fullmatch(name)
        if match and match[2] in layer_names:
            result[name] = f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
        else:
            result[name] = _TOP_NAMES.get(name, name)
    return result


def gguf_matrix_name(name: str) -> str | None:
    """The GGUF name of a matrix with this Hugging Face parameter name; None if there is none."""
    match = _LAYER_PARAMETER.fullmatch(name)
    if match is None:
        return _TOP_MATRICES.get(name)
    short = _LAYER_MATRICES.get(match[2])
    return None if short is None else f"blk.{match[1]}.{short}.weight"


def tensor_fix(
    name: str, architecture: str, *, num_heads: int, num_kv_heads: int
) -> Callable[[Tensor], Tensor] | None:
    """What turns a tensor's GGUF layout into Hugging Face's; None if they are the same."""
    family = _FAMILIES[architecture]
    if family.gemma and name.endswith("norm.weight"):
        return _subtract_one
    match = _LAYER_TENSOR.fullmatch(name)
    if family.permuted and match and match[2] in ("attn_q", "attn_k"):
        heads = num_heads if match[2] == "attn_q" else num_kv_heads
        return lambda tensor: unpermute_heads(tensor, heads)
    return None


def unpermute_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo ggml's rotary row order: within each head, even rows first and then the odd ones.

    Takes the weight [num_heads * head_dim, columns] or the bias of a q or k projection.
    """
    pairs = tensor.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _subtract_one(weight: Tensor) -> Tensor:
    return weight.to(torch.float32) - 1.0
