"""Opening GGUF files: tensor layout, damage, split files, the demo model."""

from __future__ import annotations

import gc
import os
import struct
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.gguf import open_gguf
from mistralrs_sdk.loading.gguf_config import hf_names, unpermute_heads
from mistralrs_sdk.loading.gguf_file import read_gguf
from tests.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    metadata_for,
    set_type_code,
    tensors_for,
    tiny,
    write_gguf,
)

# Tensors


def hf_model(arch: str) -> torch.nn.Module:
    import transformers

    config_class, model_class = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }[arch]
    config = getattr(transformers, config_class)(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return getattr(transformers, model_class)(config)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_tensors_have_the_names_and_shapes_of_the_hf_model(tmp_path, arch):
    """Every parameter of the Hugging Face model is there, and nothing else."""
    shapes = {
        name: source.shape for name, source in open_gguf(tiny(tmp_path, arch)).tensors.items()
    }

    expected = {name: tuple(p.shape) for name, p in hf_model(arch).named_parameters()}
    assert shapes == expected


def test_llama_query_and_key_rows_are_put_back_in_order(tmp_path):
    """q and k come out in Hugging Face's row order, each by its own head count; v is as stored."""
    rng = np.random.default_rng(3)
    stored = tensors_for("llama")
    originals = {}
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        weight = rng.standard_normal((heads * HEAD_DIM, HIDDEN)).astype(np.float32)
        originals[part] = weight
        # What converters do: the two halves of each head are interleaved.
        halves = weight.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
        stored[f"blk.0.attn_{part}.weight"] = halves.swapaxes(1, 2).reshape(weight.shape)
    path = write_gguf(tmp_path / "rows.gguf", "llama", metadata_for("llama"), stored)

    tensors = open_gguf(path).tensors

    for part in "qk":
        loaded = tensors[f"model.layers.0.self_attn.{part}_proj.weight"].load()
        assert np.array_equal(loaded.numpy(), originals[part])
    loaded = tensors["model.layers.0.self_attn.v_proj.weight"].load()
    assert np.array_equal(loaded.numpy(), stored["blk.0.attn_v.weight"])


@pytest.mark.parametrize("heads", [9, 3])
def test_row_order_agrees_with_transformers(heads):
    """Un-permuting equals transformers' own llama mapping, weights and biases."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    name = "blk.0.attn_q.weight" if heads == 9 else "blk.0.attn_k.weight"
    weight = np.random.default_rng(4).standard_normal((heads * 8, 24)).astype(np.float32)

    expected = processor.process(weight, name).weights

    assert np.array_equal(unpermute_heads(torch.from_numpy(weight), heads).numpy(), expected)
    column = torch.from_numpy(weight[:, 0].copy())
    assert np.array_equal(unpermute_heads(column, heads).numpy(), expected[:, 0])


def test_qwen_rows_are_left_as_they_are(tmp_path):
    """Only llama files store q and k permuted."""
    stored = tensors_for("qwen2")
    tensors = open_gguf(tiny(tmp_path, "qwen2")).tensors

    for name in ("weight", "bias"):
        loaded = tensors[f"model.layers.1.self_attn.q_proj.{name}"].load()
        assert np.array_equal(loaded.numpy(), stored[f"blk.1.attn_q.{name}"])


def test_gemma_norms_lose_the_one_that_gguf_adds(tmp_path):
    """GGUF keeps Gemma's norm weights with 1 added; all of them and nothing else are shifted."""
    stored = tensors_for("gemma3")
    tensors = open_gguf(tiny(tmp_path, "gemma3")).tensors
    names = hf_names(stored, "gemma3")

    for name, weight in stored.items():
        expected = weight - 1 if name.endswith("norm.weight") else weight
        assert np.array_equal(tensors[names[name]].load().numpy(), expected), name


def test_quantised_tensors_are_loaded_as_float32(tmp_path):
    """Blocks are decoded on load, float tensors keep their type."""
    tensors = tensors_for("llama")
    types = {
        "token_embd.weight": GGMLQuantizationType.Q8_0,
        "blk.0.attn_v.weight": GGMLQuantizationType.Q4_1,
        "blk.1.attn_v.weight": GGMLQuantizationType.F16,
    }
    path = write_gguf(tmp_path / "q.gguf", "llama", metadata_for("llama"), tensors, types=types)

    checkpoint = open_gguf(path)

    assert "Q8_0 x1" in checkpoint.format
    half = checkpoint.tensors["model.layers.1.self_attn.v_proj.weight"].load()
    assert half.dtype == torch.float16
    for gguf_name in ("token_embd.weight", "blk.0.attn_v.weight"):
        kind = types[gguf_name]
        loaded = checkpoint.tensors[hf_names([gguf_name], "llama")[gguf_name]].load()
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[gguf_name], kind), kind)
        assert np.array_equal(loaded.numpy(), expected)


def test_an_unknown_tensor_keeps_its_own_name(tmp_path):
    """The loader can then say what it could not place."""
    tensors = tensors_for("llama") | {"blk.0.mystery.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata_for("llama"), tensors)

    assert "blk.0.mystery.weight" in open_gguf(path).tensors


@pytest.mark.parametrize(
    ("code", "name"), [(39, "MXFP4"), (20, "IQ4_NL"), (34, "TQ1_0"), (200, "unknown type")]
)
def test_an_unsupported_type_is_named_with_its_code(tmp_path, code, name):
    """Tensor, type name, code and the supported list are in the message."""
    path = tiny(tmp_path)
    set_type_code(path, "blk.1.ffn_up.weight", code)

    with pytest.raises(UnsupportedError) as error:
        open_gguf(path)

    message = str(error.value)
    assert "blk.1.ffn_up.weight" in message
    assert f"{name} (code {code})" in message
    assert "Q4_K" in message


def test_loaded_tensors_outlive_their_file(tmp_path):
    """A load copies: the tensor can be written to and the file removed."""
    path = tiny(tmp_path)
    weight = open_gguf(path).tensors["model.norm.weight"].load()
    before = path.read_bytes()
    weight.zero_()

    assert path.read_bytes() == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_dropping_a_checkpoint_closes_its_file(tmp_path):
    """No descriptor stays open after the last reference, nor after a failed opening."""
    path = tiny(tmp_path)
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        open_gguf(path).tensors["model.norm.weight"].load()

    assert len(os.listdir("/proc/self/fd")) == before

    set_type_code(path, "output_norm.weight", 39)
    for _ in range(10):
        with pytest.raises(UnsupportedError):
            open_gguf(path)
    gc.collect()

    assert len(os.listdir("/proc/self/fd")) == before


# Damage


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: download it again"),
        (b"GG", "is not a GGUF file"),
        (b"<!DOCTYPE html>", "is not a GGUF file: it begins with b'<!DO'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF", "ends inside the header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), "cannot fit into the file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no general.architecture"),
    ],
)
def test_files_that_are_no_gguf_are_refused(tmp_path, content, message):
    """Whatever is in the file, the error names it and says what is wrong."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelLoadError, match=rf"bad\.gguf.*{message}"):
        open_gguf(path)


def test_a_missing_file_is_named(tmp_path):
    """A path that does not exist is a load error."""
    with pytest.raises(ModelLoadError, match=r"absent\.gguf does not exist"):
        open_gguf(tmp_path / "absent.gguf")


def test_a_folder_is_refused(tmp_path):
    """A folder is not a file."""
    with pytest.raises(ModelLoadError, match="is a folder"):
        open_gguf(tmp_path)


def test_an_interrupted_download_names_the_first_incomplete_tensor(tmp_path):
    """Missing bytes are found while opening, with both sizes."""
    path = tiny(tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1000)

    with pytest.raises(
        ModelLoadError, match=rf"tensor blk\.1\.\S+ \(F32\) needs .*has {size - 1000}: download"
    ):
        open_gguf(path)


def test_every_cut_through_the_header_is_a_load_error(tmp_path):
    """A header that ends anywhere raises ModelLoadError, never anything else."""
    path = tiny(tmp_path)
    content = path.read_bytes()
    end = content.index(b"blk.1.ffn_norm.weight")
    cut = tmp_path / "cut.gguf"
    for length in range(1, end, 37):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelLoadError):
            open_gguf(cut)


def test_flipped_header_bytes_never_crash(tmp_path):
    """A damaged header opens or raises ModelLoadError; nothing else comes out."""
    path = tiny(tmp_path)
    content = path.read_bytes()
    end = content.index(b"blk.1.ffn_norm.weight") + 60
    rng = np.random.default_rng(5)
    bad = tmp_path / "bad.gguf"
    for position in rng.integers(4, end, 250):
        changed = bytearray(content)
        changed[position] ^= int(rng.integers(1, 256))
        bad.write_bytes(changed)
        try:
            open_gguf(bad)
        except ModelLoadError:
            continue


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    """Each token needs a row, or an id could point outside the matrix."""
    tensors = tensors_for("llama")
    tensors["token_embd.weight"] = tensors["token_embd.weight"][:20]
    path = write_gguf(tmp_path / "small.gguf", "llama", metadata_for("llama"), tensors)

    with pytest.raises(ModelLoadError, match=r"29 tokens, token_embd\.weight only 20 rows"):
        open_gguf(path)


def test_version_2_and_a_custom_alignment_are_read(tmp_path):
    """Version 2 has the same layout, and general.alignment moves the data."""
    values = metadata_for("llama")
    writer_path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(writer_path, "llama")
    writer.add_custom_alignment(256)
    for key, value in values.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
    for name, tensor in tensors_for("llama").items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(writer_path.read_bytes())
    struct.pack_into("<I", data, 4, 2)
    writer_path.write_bytes(data)

    file = read_gguf(writer_path)

    assert file.metadata["general.alignment"] == 256
    assert all(tensor.start % 256 == 0 for tensor in file.tensors)


# Split files


def split_model(folder: Path, *, count: int = 3) -> list[Path]:
    tensors = tensors_for("llama")
    names = list(tensors)
    paths = []
    for number in range(count):
        values = metadata_for("llama") if number == 0 else {}
        values |= {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        part = {name: tensors[name] for name in names[number::count]}
        path = folder / f"model-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write_gguf(path, "llama", values, part))
    return paths


@pytest.mark.parametrize("given", [0, 2])
def test_a_split_model_opens_from_any_shard(tmp_path, given):
    """The shards are found by name, and their tensors put together."""
    paths = split_model(tmp_path)

    checkpoint = open_gguf(paths[given])

    assert checkpoint.files == tuple(paths)
    assert len(checkpoint.tensors) == len(tensors_for("llama"))
    loaded = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"].load()
    assert np.array_equal(loaded.numpy(), tensors_for("llama")["blk.1.ffn_down.weight"])


@pytest.mark.parametrize("given", [0, 1])
def test_a_missing_shard_is_named(tmp_path, given):
    """The error lists the files that are not there."""
    paths = split_model(tmp_path)
    missing = paths[2] if given == 0 else paths[0]
    missing.unlink()

    with pytest.raises(ModelLoadError, match=missing.name):
        open_gguf(paths[given])


def test_a_renamed_first_shard_is_refused(tmp_path):
    """Without its name the other shards cannot be found, and a part is never run as a whole."""
    paths = split_model(tmp_path)
    renamed = paths[0].rename(tmp_path / "model.gguf")

    with pytest.raises(ModelLoadError, match="first of 3 shards"):
        open_gguf(renamed)


def test_shards_of_another_split_are_refused(tmp_path):
    """The number of tensors must be the one the first shard states."""
    paths = split_model(tmp_path)
    one = {"extra.weight": np.ones(4, np.float32)}
    write_gguf(paths[1], "llama", {"split.no": 1, "split.count": 3}, one)

    with pytest.raises(ModelLoadError, match="do not belong together"):
        open_gguf(paths[0])


# The demo model


@pytest.fixture(scope="module")
def demo(demo_model):
    return open_gguf(demo_model)


@pytest.mark.real_model
def test_demo_model_config(demo):
    """SmolLM2-135M: 30 layers, 9 heads over 3, tied, rope base 100000."""
    config = demo.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["hidden_size"], config["intermediate_size"]) == (576, 1536)
    assert (config["head_dim"], config["vocab_size"]) == (64, 49152)
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert len(demo.tensors) == 272
    assert demo.format == "gguf, Q4_1 x210, F32 x61, Q8_0 x1"


@pytest.mark.real_model
def test_demo_tokenizer(demo):
    """No BOS is added to raw text, and the template's own markers become single tokens."""
    files = demo.tokenizer
    assert (files.bos_token, files.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert files.eos_token_ids == {2}
    assert files.adds_bos is False
    assert files.template_source == "GGUF metadata"
    assert files.tokenizer.encode("Hello").ids == [19556]

    prompt = jinja2.Template(files.chat_template).render(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    ids = files.tokenizer.encode(prompt).ids
    assert ids[:2] == [1, 9690]
    assert len(ids) == 37


@pytest.mark.real_model
def test_demo_tensors_equal_the_reference_reader(demo, demo_model):
    """A Q8_0, a Q4_1 and an F32 tensor of the file decode as the reference does."""
    stored = {tensor.name: tensor for tensor in read_gguf(demo_model).tensors}
    data = np.memmap(demo_model, mode="r", dtype=np.uint8)
    for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.29.ffn_norm.weight"):
        tensor = stored[name]
        kind = GGMLQuantizationType(tensor.type_code)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        length = int(np.prod(tensor.shape)) // block * size
        raw = data[tensor.start : tensor.start + length].reshape(rows, -1)
        expected = gguf.quants.dequantize(raw, kind).reshape(tensor.shape)

        loaded = demo.tensors[hf_names([name], "llama")[name]].load()

        assert np.array_equal(loaded.numpy(), expected), name
