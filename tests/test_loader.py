"""Filling a model with the weights of a checkpoint: every tensor, in its place, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import load_model, open_checkpoint
from tests.batches import generate_uncached
from tests.checkpoint_files import HIDDEN, VOCAB, config_for, tensors_of, write_folder
from tests.gguf_files import tiny, write_gguf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CPU = torch.device("cpu")


def open_path(path: Path) -> Checkpoint:
    return open_checkpoint(ModelSource(model_id=path))


def checkpoint_of(folder: Path, config: Mapping[str, Any] | None = None, **tensors: Any):
    """An opened tiny llama; `tensors` are put in, or, if None, left out."""
    config = config_for("llama") if config is None else config
    found = tensors_of(config) | tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    return open_path(write_folder(folder, config, kept))


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, **settings: Any):
    return load_model(checkpoint, dtype=dtype, device=CPU, **settings)


def refusal(checkpoint: Checkpoint, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(checkpoint, **settings)
    return str(caught.value)


def logits(model: Any) -> Tensor:
    """After each of three ids behind a prompt of forty."""
    (row,) = generate_uncached(model, [range(3, 43)], 3)
    return torch.stack(row.logits)


def assert_same_weights(one: Any, other: Any) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# Weights


def test_weights_land_in_their_places(tmp_path):
    """Fused weights are their parts one under the other, in the order of packed_modules."""
    tensors = tensors_of(config_for("qwen2"))

    model = load(open_path(write_folder(tmp_path, config_for("qwen2"))))

    assert torch.equal(model.lm_head.weight, tensors[HEAD])
    attention = model.model.layers[1].self_attn
    for leaf in ("weight", "bias"):
        parts = [tensors[f"model.layers.1.self_attn.{n}_proj.{leaf}"] for n in "qkv"]
        assert torch.equal(getattr(attention.qkv_proj, leaf), torch.cat(parts))
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())


def test_shards_hold_the_same_model_as_one_file(tmp_path):
    """Whatever tensors lie in whatever shard."""
    one = load(open_path(write_folder(tmp_path / "one")))

    assert_same_weights(one, load(open_path(write_folder(tmp_path / "five", shards=5))))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_float_type_keep_their_values(tmp_path, stored):
    """Stored in bf16 and loaded to f32, a weight is the bf16 value."""
    tensors = {n: t.to(stored) for n, t in tensors_of(config_for("llama")).items()}

    model = load(checkpoint_of(tmp_path, **tensors))

    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, tensors[HEAD].float())
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_have_the_type_that_was_asked_for(tmp_path, dtype):
    """All parameters, and the model computes in it."""
    model = load(checkpoint_of(tmp_path), dtype)

    assert {p.dtype for p in model.parameters()} == {dtype}
    assert logits(model).isfinite().all()


def test_the_model_does_not_need_the_files_any_more(tmp_path):
    """Parameters are memory of their own: the file may be replaced after loading."""
    model = load(checkpoint_of(tmp_path))
    before = logits(model)

    file = tmp_path / "model.safetensors"
    with file.open("r+b") as content:
        content.write(b"\0" * file.stat().st_size)

    assert torch.equal(logits(model), before)


def test_progress_counts_the_bytes_of_the_parameters(tmp_path):
    """From 0 to all of them, in the type they are loaded as; the folder names them."""
    calls = []

    model = load(checkpoint_of(tmp_path), torch.bfloat16, progress=lambda *call: calls.append(call))

    total = sum(p.numel() for p in model.parameters()) * 2
    assert calls[0] == (f"loading {tmp_path.name}", 0, total)
    assert calls[-1] == (f"loading {tmp_path.name}", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_loading_stops_between_tensors_when_cancelled(tmp_path):
    """Whoever waits for the model may give up; the rest of the weights is not read."""
    done = []

    message = refusal(
        checkpoint_of(tmp_path),
        progress=lambda what, count, total: done.append(count),
        cancelled=lambda: len(done) == 3,
    )

    assert message == f"loading {tmp_path} was cancelled"
    assert len(done) == 3


# The ledger


def test_missing_unused_and_misshapen_tensors_are_named_all_at_once(tmp_path):
    """One look shows everything that does not match."""
    message = refusal(
        checkpoint_of(
            tmp_path,
            **{
                "model.norm.weight": None,
                "model.layers.0.self_attn.k_proj.weight": None,
                "model.layers.9.extra.weight": torch.zeros(1),
                "model.layers.1.mlp.down_proj.weight": torch.zeros(HIDDEN, 7),
            },
        )
    )

    for part in (
        str(tmp_path),
        "missing: model.layers.0.self_attn.k_proj.weight, model.norm.weight",
        "not used by the architecture: model.layers.9.extra.weight",
        f"of the wrong shape: model.layers.1.mlp.down_proj.weight [({HIDDEN}, 7)] for ({HIDDEN},",
    ):
        assert part in message


@pytest.mark.parametrize("shape", [(), (HIDDEN,), (24, HIDDEN, 1), (25, HIDDEN), (24, HIDDEN + 1)])
def test_a_part_of_a_fused_weight_with_another_shape_is_named(tmp_path, shape):
    """Too few or too many dimensions, rows or columns; the shapes of all parts are shown."""
    name = "model.layers.0.self_attn.k_proj.weight"

    message = refusal(checkpoint_of(tmp_path, **{name: torch.zeros(shape)}))

    assert f"of the wrong shape: {name.replace('k_proj', 'q_proj')} + {name} + " in message
    assert str(shape) in message


def test_a_long_list_of_tensors_is_cut(tmp_path):
    """Eight names and how many more."""
    extra = {f"extra.{i}": torch.zeros(1) for i in range(11)}

    assert "extra.5, extra.6 and 3 more" in refusal(checkpoint_of(tmp_path, **extra))


def test_a_bias_the_config_does_not_mention_is_not_dropped(tmp_path):
    """It would change every token in silence."""
    name = "model.layers.0.self_attn.q_proj.bias"

    message = refusal(checkpoint_of(tmp_path, **{name: torch.zeros(HIDDEN)}))

    assert f"not used by the architecture: {name}" in message


def test_rotary_frequencies_of_older_checkpoints_are_left_out(tmp_path):
    """The config says the same, and transformers does not read them either."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"

    model = load(checkpoint_of(tmp_path / "old", **{name: torch.ones(4)}))

    assert_same_weights(model, load(checkpoint_of(tmp_path / "new")))


def test_an_unknown_architecture_is_named_with_what_is_supported(tmp_path):
    """Before anything is read."""
    config = config_for("llama", architectures=["FalconForCausalLM"])

    with pytest.raises(UnsupportedError, match=r"FalconForCausalLM.*LlamaForCausalLM"):
        load(open_path(write_folder(tmp_path, config, tensors_of(config))))


# Tied heads


TIED = config_for("llama", tie_word_embeddings=True)


@pytest.fixture
def tied_logits(tmp_path) -> Tensor:
    """Of a tied model without a head in its file."""
    model = load(checkpoint_of(tmp_path / "tied", TIED))
    assert model.lm_head is None
    return logits(model)


def test_a_redundant_head_changes_nothing(tmp_path, tied_logits, caplog):
    """Tied, and the file repeats the embedding as head."""
    embedding = tensors_of(TIED)[EMBEDDING]

    model = load(checkpoint_of(tmp_path / "m", TIED, **{HEAD: embedding.clone()}))

    assert model.lm_head is None
    assert torch.equal(logits(model), tied_logits)
    assert not caplog.records


def test_a_head_of_its_own_is_not_thrown_away(tmp_path, tied_logits, caplog):
    """Tied in the config, another head in the file: that head is used, with a warning."""
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))

    model = load(checkpoint_of(tmp_path / "m", TIED, **{HEAD: head}))

    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(logits(model), tied_logits)
    (record,) = caplog.records
    assert HEAD in record.getMessage()


def test_a_head_of_another_shape_is_refused(tmp_path):
    """Tied in the config: it is no copy of the embedding, and no head either."""
    checkpoint = checkpoint_of(tmp_path, TIED, **{HEAD: torch.zeros(VOCAB - 1, HIDDEN)})

    assert f"of the wrong shape: {HEAD}" in refusal(checkpoint)


def test_a_head_that_is_not_there_is_the_embedding(tmp_path, tied_logits, caplog):
    """Untied in the config, no head in the file: never random numbers, and a warning."""
    config = config_for("llama")

    model = load(checkpoint_of(tmp_path / "m", config, **{HEAD: None}))

    assert torch.equal(logits(model), tied_logits)
    (record,) = caplog.records
    assert HEAD in record.getMessage()


def test_without_an_embedding_the_ledger_names_it(tmp_path):
    """Tied or not."""
    for config in (TIED, config_for("llama")):
        assert f"missing: {EMBEDDING}" in refusal(
            checkpoint_of(tmp_path, config, **{EMBEDDING: None})
        )


# GGUF


def gguf_copy(path: Path, kind: str) -> Path:
    """The tiny model of `write_folder` as a GGUF file; llama's q and k in ggml's rotary order."""
    config = config_for(kind)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }
    tensors = {}
    for name, tensor in tensors_of(config).items():
        part = name.rpartition("_proj")[0][-1:]
        if kind == "llama" and part in heads and "self_attn" in name:
            pairs = tensor.view(heads[part], 2, -1, HIDDEN).transpose(1, 2)
            tensor = pairs.reshape(tensor.shape)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.numpy()
    metadata = {
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": HIDDEN,
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": heads["q"],
        f"{kind}.attention.head_count_kv": heads["k"],
        f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{kind}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [chr(ord("a") + i) for i in range(26)],
        "tokenizer.ggml.token_type": [1] * 26,
        "tokenizer.ggml.merges": ["a b"],
    }
    metadata["tokenizer.ggml.tokens"].append("ab")
    metadata["tokenizer.ggml.token_type"].append(1)
    return write_gguf(path, kind, metadata, tensors)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_gguf_and_safetensors_copies_of_a_model_agree(tmp_path, kind):
    """Also with 9 heads over 3, whose rows GGUF keeps in another order."""
    folder = write_folder(tmp_path / "folder", config_for(kind))
    file = gguf_copy(tmp_path / "copy.gguf", kind)

    expected, model = load(open_path(folder)), load(open_path(file))

    assert_same_weights(expected, model)
    assert torch.allclose(logits(expected), logits(model), atol=1e-4)
    assert model.config.norm_eps == pytest.approx(expected.config.norm_eps)
    same = attrs.evolve(model.config, norm_eps=expected.config.norm_eps)
    assert same == expected.config


def test_a_checkpoint_is_called_what_the_user_called_it(tmp_path, monkeypatch):
    """A folder and a file alike; not the path it was resolved to."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "folder")
    tiny(tmp_path)

    assert open_path(Path("folder")).name == "folder"
    assert open_path(Path("tiny.gguf")).name == "tiny.gguf"
    assert open_path(Path("tiny.gguf")).format.startswith("gguf")
