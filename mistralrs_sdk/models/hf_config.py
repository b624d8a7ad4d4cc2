"""Reads Hugging Face's `config.json`: what is required, what has a default, what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.models.config import Activation, ModelConfig, RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")

BOTH_WAYS = "attends_both_ways"
"""Key that stands for `use_bidirectional_attention` where a model is loaded to embed: nothing that
generates tokens could use one that sees the tokens ahead."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",  # the same formula under its older name
}

_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "factors": ("factors",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}

_ROPE_MAY = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
# Written by some tools, without a part in the arithmetic.
_ROPE_INERT = {"rope_type", "type", "rope_theta", "finetuned", "partial_rotary_factor"}
_ROPE_KNOWN = _ROPE_MAY.union(_ROPE_INERT, *_ROPE_NEEDS.values())


def read_dense(
    hf: Mapping[str, Any],
    *,
    architecture: str,
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    tied: bool = False,
    window: int | None = None,
    layer_types: Sequence[str] | None = None,
    ropes: Mapping[str, RopeConfig] | None = None,
    attention_scale: float | None = None,
    **differences: Any,
) -> ModelConfig:
    """The config of a dense decoder; arguments are what the family takes for keys left out.

    `layer_types` (default: all full attention, or all sliding if there is a window) says which
    layers have the `window` and, with `ropes`, which rotation each has. `differences` are fields
    of `ModelConfig`.

    Raises:
        ModelLoadError: a required key is missing or has no sensible value.
        UnsupportedError: a value asks for arithmetic that is not there.
    """
    refuse_unsupported(hf)
    layers, heads = required(hf, "num_hidden_layers"), required(hf, "num_attention_heads")
    hidden_size = required(hf, "hidden_size")
    kv_heads = positive(hf, "num_key_value_heads", kv_heads) or heads
    if heads % kv_heads:
        raise UnsupportedError(
            f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    dim = positive(hf, "head_dim", head_dim)
    if dim is None:
        if hidden_size % heads:
            raise UnsupportedError(
                f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({heads}), "
                "and the config has no head_dim"
            )
        dim = hidden_size // heads
    if dim % 2:
        raise UnsupportedError(f"head_dim ({dim}) is odd: rotary embedding needs pairs")
    if layer_types is None:
        layer_types = ["full_attention" if window is None else "sliding_attention"] * layers
    _check_layer_types(layer_types, layers)
    ropes = ropes or read_ropes(hf, max_positions=max_positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=required(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required(hf, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm_eps=number(hf, "rms_norm_eps", 1e-6) or 1e-6,
        max_position_embeddings=positive(hf, "max_position_embeddings", max_positions)
        or max_positions,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", tied),
        activation=_activation(hf, activation_key, activation),
        ropes=tuple(ropes[kind] for kind in layer_types),
        windows=tuple(window if kind == "sliding_attention" else None for kind in layer_types),
        attention_scale=dim**-0.5 if attention_scale is None else attention_scale,
        **differences,
    )


def required(hf: Mapping[str, Any], key: str) -> int:
    """A positive integer without which there is no model."""
    value = positive(hf, key)
    if value is None:
        raise ModelLoadError(f"the model's config has no {key}")
    return value


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """A positive integer or null; `default` if the key is left out."""
    value = hf.get(key, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ModelLoadError(f"the model's config has {key} {value!r}, not a positive integer")
    return value


def number(hf: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
    """A positive number or null; `default` if the key is left out."""
    value = hf.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelLoadError(f"the model's config has {key} {value!r}, not a positive number")
    return float(value)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A boolean; null and a key left out mean `default`."""
    value = hf.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"the model's config has {key} {value!r}, not true or false")
    return value


def read_layer_types(hf: Mapping[str, Any], default: Sequence[str]) -> Sequence[str]:
    """`layer_types`, or `default` if the config has none."""
    return hf.get("layer_types") or default


def late_window(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's rule: a window only if `use_sliding_window`, from layer `max_window_layers` on."""
    window = positive(hf, "sliding_window", 4096) if flag(hf, "use_sliding_window") else None
    first = hf.get("max_window_layers", 28)
    if type(first) is not int:
        raise ModelLoadError(f"the model's config has max_window_layers {first!r}, not an integer")
    layers = range(required(hf, "num_hidden_layers"))
    default = [LAYER_TYPES[window is not None and i >= first] for i in layers]
    return {"window": window, "layer_types": read_layer_types(hf, default)}


def read_ropes(hf: Mapping[str, Any], *, max_positions: int) -> dict[str, RopeConfig]:
    """Rotation by layer type, from `rope_parameters` (flat or nested) or the older keys."""
    # The older key wins where both stand, as it does for transformers.
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    nested = set(given) & set(LAYER_TYPES)
    return {
        kind: read_rope(
            hf,
            (given.get(kind) or {}) if nested else given,
            theta=number(hf, "rope_theta", 10_000.0) or 10_000.0,
            max_positions=max_positions,
        )
        for kind in LAYER_TYPES
    }


def read_rope(
    hf: Mapping[str, Any], given: Mapping[str, Any], *, theta: float, max_positions: int
) -> RopeConfig:
    """One rotation; `given` is a flat `rope_parameters`, `theta` holds if that has none."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_NEEDS:
        raise UnsupportedError(
            f"rope_type {kind!r} is not supported; supported are {', '.join(sorted(_ROPE_NEEDS))}"
        )
    if unknown := sorted(set(given) - _ROPE_KNOWN):
        raise UnsupportedError(f"rope parameter {unknown[0]} ({given[unknown[0]]!r}) is not known")
    if (part := given.get("partial_rotary_factor")) not in (None, 1.0):
        raise UnsupportedError(f"partial_rotary_factor {part!r} is not supported; only 1.0 is")
    base = number(given, "rope_theta", theta) or theta
    if kind == "default":
        return RopeConfig(theta=base)
    scaling = {key: value for key, value in given.items() if key not in _ROPE_INERT}
    scaling["rope_type"] = kind
    longest = positive(hf, "max_position_embeddings", max_positions) or max_positions
    if "original_max_position_embeddings" in _ROPE_NEEDS[kind]:
        original = hf.get("original_max_position_embeddings")
        original = original or given.get("original_max_position_embeddings") or longest
        scaling["original_max_position_embeddings"] = original
        if kind == "yarn" and "factor" in given and given["factor"] is None:
            scaling["factor"] = longest / original
    for key in _ROPE_NEEDS[kind]:
        if scaling.get(key) is None:
            raise ModelLoadError(f"rope_type {kind!r} needs {key}, which the config does not have")
    return RopeConfig(theta=base, scaling=scaling)


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Refuse keys that change the arithmetic of any family and are not done here."""
    quantization = hf.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "an unnamed method")
        raise UnsupportedError(
            f"quantization_config asks for {method}, which is not supported: use a checkpoint "
            "with float weights or a GGUF file"
        )
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedError(
            "use_bidirectional_attention True in the model's config: it attends both ways, so it "
            "cannot generate; load it with EmbeddingModelBuilder"
        )
    for key, only in (
        ("is_causal", (None, True)),
        ("add_cross_attention", (None, False)),
        ("use_mrope", (None, False)),
        ("partial_rotary_factor", (None, 1.0)),
        ("per_layer_config", (None, {}, [])),
    ):
        if hf.get(key) not in only:
            raise UnsupportedError(f"{key} {hf[key]!r} in the model's config is not supported")


def _activation(hf: Mapping[str, Any], key: str, default: str) -> Activation:
    name = hf.get(key) or default
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{key} {name!r} is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}"
        )
    return _ACTIVATIONS[name]


def _check_layer_types(layer_types: Sequence[str], layers: int) -> None:
    if len(layer_types) != layers:
        raise ModelLoadError(
            f"layer_types has {len(layer_types)} entries for num_hidden_layers {layers}"
        )
    for kind in layer_types:
        if kind not in LAYER_TYPES:
            raise UnsupportedError(
                f"layer_types has {kind!r}; supported are {', '.join(LAYER_TYPES)}"
            )
