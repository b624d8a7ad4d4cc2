"""GGUF metadata as a Hugging Face style config: values, defaults, refusals."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.gguf import open_gguf
from mistralrs_sdk.models import read_config
from tests.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    metadata_for,
    tensors_for,
    tiny,
    write_gguf,
)


def test_llama_metadata_becomes_an_hf_config(tmp_path):
    """Every number of the config is the file's, the vocabulary counts embedding rows."""
    config = open_gguf(tiny(tmp_path)).config

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["vocab_size"] == VOCAB
    assert config["hidden_size"] == HIDDEN
    assert config["intermediate_size"] == MLP
    assert config["num_hidden_layers"] == LAYERS
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"] == {"rope_theta": 50000.0, "rope_type": "default"}
    assert config["sliding_window"] is None
    assert config["layer_types"] == ["full_attention"] * LAYERS
    assert config["tie_word_embeddings"] is True
    assert config["attention_bias"] is False
    assert config["hidden_act"] == "silu"
    assert (config["bos_token_id"], config["eos_token_id"]) == (27, 28)


@pytest.mark.parametrize(
    ("arch", "changes", "windows"),
    [
        ("llama", {}, (None, None)),
        ("llama", {"llama.attention.sliding_window": 32}, (32, 32)),
        ("qwen2", {}, (None, None)),
        ("qwen3", {}, (None, None)),
        ("gemma2", {}, (8, None)),
        ("gemma3", {}, (8, 8)),
    ],
)
def test_the_models_understand_the_config(tmp_path, arch, changes, windows):
    """What we write into the config is what the model code reads from one."""
    config = read_config(open_gguf(tiny(tmp_path, arch, **changes)).config)

    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert config.windows == windows
    assert config.qkv_bias is (arch == "qwen2")


def test_an_output_tensor_unties_the_head(tmp_path):
    """The head is tied exactly when the file has no output.weight."""
    tensors = tensors_for("llama") | {"output.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "untied.gguf", "llama", metadata_for("llama"), tensors)

    checkpoint = open_gguf(path)

    assert checkpoint.config["tie_word_embeddings"] is False
    assert torch.equal(checkpoint.tensors["lm_head.weight"].load(), torch.ones(VOCAB, HIDDEN))


def test_llama_with_a_window_is_mistral(tmp_path):
    """Mistral models come as llama files; the sliding window tells them apart."""
    config = open_gguf(tiny(tmp_path, **{"llama.attention.sliding_window": 32})).config

    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 32
    assert "layer_types" not in config


def test_qwen2_biases_are_seen_in_the_tensors(tmp_path):
    """Whether q, k and v have biases is not in the metadata."""
    config = open_gguf(tiny(tmp_path, "qwen2")).config

    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["attention_bias"] is True


def test_gemma2_alternates_windows_and_caps_logits(tmp_path):
    """Gemma 2: even layers are local, both soft caps, scaled by head_dim."""
    config = open_gguf(tiny(tmp_path, "gemma2")).config

    assert config["architectures"] == ["Gemma2ForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 8
    assert config["attn_logit_softcapping"] == 50.0
    assert config["final_logit_softcapping"] == 30.0
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["hidden_activation"] == "gelu_pytorch_tanh"


def test_gemma3_has_a_rope_for_each_layer_type(tmp_path):
    """Gemma 3: local layers turn at 10000 unscaled, global ones by the file's base and scaling."""
    changes = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    config = open_gguf(tiny(tmp_path, "gemma3", **changes)).config

    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["rope_parameters"] == {
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 50000.0, "rope_type": "linear", "factor": 8.0},
    }
    assert config["attn_logit_softcapping"] is None


def test_yarn_scaling_keeps_its_original_context(tmp_path):
    """YaRN needs the factor and the context the model was trained with."""
    changes = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    rope = open_gguf(tiny(tmp_path, "qwen2", **changes)).config["rope_parameters"]

    assert rope == {
        "rope_theta": 50000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def test_rope_frequency_factors_go_into_the_config(tmp_path):
    """Llama 3's rope_freqs.weight is no parameter: its values are rope parameters."""
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    tensors = tensors_for("llama") | {"rope_freqs.weight": factors}
    checkpoint = open_gguf(write_gguf(tmp_path / "f.gguf", "llama", metadata_for("llama"), tensors))

    assert checkpoint.config["rope_parameters"]["rope_type"] == "factors"
    assert checkpoint.config["rope_parameters"]["factors"] == factors.tolist()
    assert not [name for name in checkpoint.tensors if "rope" in name]


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("llama.attention.head_count_kv", "num_key_value_heads", HEADS),
        ("llama.rope.freq_base", "rope_parameters", {"rope_theta": 1e4, "rope_type": "default"}),
    ],
)
def test_a_documented_default_is_taken_with_a_warning(tmp_path, caplog, key, field, value):
    """A missing key with a well-known default costs a warning that names it, not the model."""
    with caplog.at_level(logging.WARNING, "mistralrs_sdk.loading"):
        config = open_gguf(tiny(tmp_path, **{key: None})).config

    assert config[field] == value
    assert key in caplog.text


@pytest.mark.parametrize(
    "key",
    [
        "llama.context_length",
        "llama.block_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    ],
)
def test_a_missing_key_without_a_default_is_named(tmp_path, key):
    """What cannot be guessed is an error that names the key and the file."""
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf.*{key}"):
        open_gguf(tiny(tmp_path, **{key: None}))


def test_a_key_of_the_wrong_type_is_named(tmp_path):
    """A string where a number belongs is an error, not a crash later."""
    with pytest.raises(ModelLoadError, match=r"llama\.block_count is 'two'"):
        open_gguf(tiny(tmp_path, **{"llama.block_count": "two"}))


def test_layers_that_differ_are_refused(tmp_path):
    """A per-layer head count is accepted only if all layers agree."""
    same = open_gguf(tiny(tmp_path, **{"llama.attention.head_count": [HEADS, HEADS]}))
    assert same.config["num_attention_heads"] == HEADS
    with pytest.raises(UnsupportedError, match="head_count differs from layer to layer"):
        open_gguf(tiny(tmp_path, **{"llama.attention.head_count": [HEADS, 3]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
    ],
)
def test_features_we_would_compute_wrongly_are_refused(tmp_path, changes, message):
    """What the model code cannot honour is refused while opening."""
    with pytest.raises(UnsupportedError, match=message):
        open_gguf(tiny(tmp_path, **changes))


def test_an_unknown_architecture_is_named_with_the_supported_ones(tmp_path):
    """The message lists what does work."""
    with pytest.raises(UnsupportedError, match=r"'qwen35'.*llama, qwen2, qwen3, gemma2, gemma3"):
        open_gguf(tiny(tmp_path, "qwen35"))


@pytest.mark.parametrize("changes", [{"general.type": "mmproj"}, {"general.type": "adapter"}])
def test_files_beside_the_model_are_told_apart(tmp_path, changes):
    """A projector or an adapter is no model: the message asks for the model's own file."""
    with pytest.raises(ModelLoadError, match="give the model's own"):
        open_gguf(tiny(tmp_path, **changes))
