"""Reading config.json: defaults of each family, old and new spellings, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.models import SUPPORTED, read_config
from mistralrs_sdk.models.config import RopeConfig

BARE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}


def read(architecture: str, **changes: Any):
    return read_config({"architectures": [f"{architecture}ForCausalLM"], **BARE, **changes})


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "head_dim", "tied"),
    [
        ("Llama", 32, 2, False),
        ("Mistral", 8, 2, False),
        ("Qwen2", 32, 2, False),
        ("Qwen3", 32, 128, False),
        ("Gemma2", 4, 256, True),
        ("Gemma3", 4, 256, True),
    ],
)
def test_keys_left_out_mean_the_family_default(architecture, kv_heads, head_dim, tied):
    """A missing key has the value Hugging Face's config class gives it."""
    config = read(architecture)

    assert config.num_kv_heads == kv_heads
    assert config.head_dim == head_dim
    assert config.tie_word_embeddings is tied
    assert config.norm_eps == 1e-6


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_defaults_equal_the_reference_classes(architecture: str):
    """Reading the bare keys gives what transformers' own class fills in."""
    import transformers

    name = architecture.removesuffix("ForCausalLM").replace("Gemma3", "Gemma3Text")
    full = getattr(transformers, f"{name}Config")(**BARE).to_dict()

    bare = read_config({"architectures": [architecture], **BARE})

    assert bare == read_config({**full, "architectures": [architecture]})


@pytest.mark.parametrize("key", list(BARE))
def test_missing_required_key_is_named(key: str):
    """A model without its sizes is no model."""
    hf = {"architectures": ["LlamaForCausalLM"], **BARE}
    del hf[key]

    with pytest.raises(ModelLoadError, match=f"has no {key}"):
        read_config(hf)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -1),
        ("rms_norm_eps", "small"),
        ("rope_theta", 0),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_senseless_value_is_named(key: str, value: Any):
    """A wrong value is an error that says which, before anything is built."""
    with pytest.raises(ModelLoadError, match=f"{key} {value!r}"):
        read("Llama", **{key: value})


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Llama", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ("Qwen2", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("Llama", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ("Llama", {"num_key_value_heads": 5}, r"num_attention_heads \(32\).*\(5\)"),
        ("Llama", {"hidden_size": 65}, r"hidden_size \(65\).*\(32\)"),
        ("Llama", {"head_dim": 3}, r"head_dim \(3\) is odd"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "one entry per layer type"),
        ("Qwen2", {"is_causal": False}, "is_causal False"),
        ("Qwen3", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(architecture, changes, words):
    """A value that is not done here is refused by name, never left out silently."""
    with pytest.raises(UnsupportedError, match=words):
        read(architecture, **changes)


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "MixtralForCausalLM"])
def test_unknown_architecture_lists_the_known(name: str):
    """The message says what could be used instead."""
    with pytest.raises(UnsupportedError, match=rf"{name} is not supported.*LlamaForCausalLM"):
        read_config({**BARE, "architectures": [name]})


def test_model_type_stands_in_for_architectures():
    """Configs without `architectures` are known by their model type."""
    assert read_config({**BARE, "model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"
    with pytest.raises(ModelLoadError, match="neither architectures nor model_type"):
        read_config(BARE)


def test_old_and_new_rope_keys_are_one():
    """`rope_theta` with `rope_scaling` says what flat `rope_parameters` say."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512}
    old = read("Llama", rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    new = read("Llama", rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})

    assert old == new
    assert old.ropes == (RopeConfig(theta=5e5, scaling={"rope_type": "yarn", **scaling}),) * 4


def test_scaling_that_lacks_its_factor_is_named():
    """A scaling without what it needs cannot be guessed."""
    with pytest.raises(ModelLoadError, match="'linear' needs factor"):
        read("Llama", rope_scaling={"type": "linear"})


def test_original_length_defaults_to_the_context():
    """llama3 and yarn measure against the context length unless told otherwise."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = read(
        "Llama", max_position_embeddings=4096, rope_scaling={"rope_type": "llama3", **llama3}
    )

    assert config.ropes[0].scaling == {
        "rope_type": "llama3",
        "original_max_position_embeddings": 4096,
        **llama3,
    }


def test_null_window_is_no_window():
    """Mistral v0.3 writes null, v0.1 a number; a missing key is the class default."""
    assert read("Mistral", sliding_window=None).windows == (None,) * 4
    assert read("Mistral", sliding_window=7).windows == (7,) * 4
    assert read("Mistral").windows == (4096,) * 4


def test_qwen_window_needs_its_switch():
    """Qwen configs carry a window that holds only with use_sliding_window, in the late layers."""
    window = {"sliding_window": 9, "max_window_layers": 3}

    assert read("Qwen2", **window).windows == (None,) * 4
    assert read("Qwen2", **window, use_sliding_window=True).windows == (None, None, None, 9)
    types = ["sliding_attention", "full_attention"] * 2
    explicit = read("Qwen3", **window, use_sliding_window=True, layer_types=types)
    assert explicit.windows == (9, None, 9, None)


def test_gemma2_alternates():
    """Even layers have the window, and the scale has its own key."""
    config = read("Gemma2", sliding_window=9, query_pre_attn_scalar=64)

    assert config.windows == (9, None, 9, None)
    assert config.attention_scale == 0.125
    assert (config.attn_softcap, config.final_softcap) == (50.0, 30.0)


def test_gemma3_old_keys():
    """Older configs say the pattern as a number and the windowed base as rope_local_base_freq."""
    config = read(
        "Gemma3",
        sliding_window=9,
        sliding_window_pattern=2,
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )

    local, stretched = (
        RopeConfig(theta=3e4),
        RopeConfig(theta=2e6, scaling={"rope_type": "linear", "factor": 8.0}),
    )
    assert config.windows == (9, None, 9, None)
    assert config.ropes == (local, stretched, local, stretched)


def test_layer_types_must_fit_the_layers():
    """One entry per layer."""
    with pytest.raises(ModelLoadError, match="layer_types has 3 entries for num_hidden_layers 4"):
        read("Qwen3", layer_types=["full_attention"] * 3)
