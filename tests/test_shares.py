"""How a model is divided over ranks, and what each of them reads of a checkpoint."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk import ConfigError
from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.loading.forms import choose_forms
from mistralrs_sdk.loading.loader import open_checkpoint, prepare_model
from mistralrs_sdk.loading.shards import (
    refuse_split_blocks,
    shard_checkpoint,
    shard_importance,
    whole_target,
)
from mistralrs_sdk.models import read_config
from mistralrs_sdk.models.parallel import Part, parts_of, share_of, share_on_meta
from tests.checkpoint_files import config_for, write_folder
from tests.gguf_files import metadata_for, tensors_for, write_gguf
from tests.packed_models import gguf_of

CONFIG = read_config(config_for("llama"))


def shares(size, **changes):
    config = attrs.evolve(CONFIG, **changes)
    return [share_of(config, TensorParallel(rank, size)) for rank in range(size)]


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(64, 6000),
    st.integers(64, 2000),
)
@settings(max_examples=200, deadline=None)
def test_shares_cover_the_model_once(size, kv_heads, group, inner, vocab):
    """Heads, inner columns and words each belong to one rank, in order; queries to their keys."""
    heads = max(kv_heads, size) * group
    found = shares(
        size, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner, vocab_size=vocab
    )

    for name, total in {"heads": heads, "inner": inner, "vocab": vocab}.items():
        parts = [getattr(share, name) for share in found]
        assert [i for part in parts for i in part] == list(range(total))
        assert all(parts)
    for share in found:
        per_key = len(share.heads) // len(share.kv_heads)
        for place, head in enumerate(share.heads):
            assert share.kv_heads[place // per_key] == head * kv_heads // heads


def test_inner_columns_are_divided_where_blocks_end():
    """Eleven times 256 columns make six and five blocks, where an even division would split one."""
    found = shares(2, num_heads=8, num_kv_heads=2, intermediate_size=11 * 256)

    assert [len(share.inner) for share in found] == [5 * 256, 6 * 256]


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (2, {}, r"tensor_parallel \(2\) .* 9 attention heads; possible are 1, 3, 9"),
        (5, {"num_heads": 12}, r"12 attention heads; possible are 1, 3, 6, 12$"),
        (2, {"num_heads": 12}, r"tensor_parallel \(2\) .* 3 heads of keys and values"),
        (
            4,
            {"num_heads": 8, "num_kv_heads": 1, "vocab_size": 3},
            r"\(4\) leaves a rank .* 3 words",
        ),
        (4, {"num_heads": 8, "num_kv_heads": 1, "intermediate_size": 2}, "2 columns inside"),
    ],
)
def test_what_cannot_be_divided_is_refused(size, changes, words):
    """The message names both numbers, and the sizes that are possible."""
    with pytest.raises(ConfigError, match=words):
        shares(size, **changes)


@pytest.fixture
def safetensors(tmp_path):
    """A checkpoint of four heads, two of keys, with biases."""
    return open_checkpoint(ModelSource(model_id=str(write_folder(tmp_path, config_for("qwen2")))))


def cut(checkpoint, rank, size=2):
    """What a rank reads, and its model."""
    parallel = TensorParallel(rank, size)
    whole = prepare_model(checkpoint)
    parts = parts_of(whole, parallel)
    return shard_checkpoint(checkpoint, parts), share_on_meta(whole, parallel), parts


def test_parts_of_a_checkpoint_make_the_whole(safetensors):
    """Put together again, what the ranks read is what the file holds, biases too."""
    ranks = [cut(safetensors, rank)[0].tensors for rank in range(2)]

    for name, source in safetensors.tensors.items():
        parts = [tensors[name].load() for tensors in ranks]
        assert [tuple(part.shape) for part in parts] == [tensors[name].shape for tensors in ranks]
        leaf = name.split(".")[-2]
        if "norm" in leaf:
            assert torch.equal(parts[1], source.load())
            continue
        along = 1 if leaf in ("o_proj", "down_proj") else 0
        assert torch.equal(torch.cat(parts, along), source.load())


def test_parts_fit_the_model_of_the_rank(safetensors):
    """Every parameter of a rank's model has the shape of what is read for it."""
    for rank in range(2):
        tensors, model, _ = cut(safetensors, rank)
        forms = choose_forms(model, tensors, dtype=torch.float32, packing="none")
        for name, form in forms.items():
            shapes = [tensors.tensors[part].shape for part in form.parts]
            assert sum(shape[0] for shape in shapes) == model.get_parameter(name).shape[0]
            assert shapes[0][1:] == tuple(model.get_parameter(name).shape[1:])


def test_the_bias_of_summed_outputs_is_rank_0s(tmp_path):
    """Otherwise the sum over the ranks would hold it once for each of them."""
    config = config_for("llama", attention_bias=True, num_attention_heads=4, num_key_value_heads=2)
    whole = prepare_model_of(config)
    first, second = (share_on_meta(whole, TensorParallel(rank, 2)) for rank in range(2))

    assert first.get_submodule("model.layers.0.self_attn.o_proj").bias is not None
    assert second.get_submodule("model.layers.0.self_attn.o_proj").bias is None


def prepare_model_of(config):
    from mistralrs_sdk.models import build_model

    with torch.device("meta"):
        return build_model(read_config(config))


def test_no_more_is_read_than_the_part(safetensors, monkeypatch):
    """A rank reads slices of the file; nothing loads a tensor that it has a part of."""

    def refuse():
        raise AssertionError("the whole tensor was read")

    guarded = attrs.evolve(
        safetensors,
        tensors={n: attrs.evolve(s, load=refuse) for n, s in safetensors.tensors.items()},
    )
    parts = parts_of(prepare_model(safetensors), TensorParallel(1, 2))
    tensors = shard_checkpoint(guarded, parts).tensors

    for name in parts.keys() & tensors.keys():
        assert tensors[name].load().shape == tensors[name].shape


def test_a_tensor_that_is_only_read_whole_is_cut(safetensors):
    """What was quantised for other programs has no parts: the whole is read, and a part kept."""
    name = "model.layers.0.mlp.down_proj.weight"
    source = safetensors.tensors[name]
    whole = attrs.evolve(safetensors, tensors={name: attrs.evolve(source, load_part=None)})
    found = shard_checkpoint(whole, {name: Part(columns=range(64, 128))}).tensors[name]

    assert torch.equal(found.load(), source.load()[:, 64:128])


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_heads_of_a_gguf_are_put_in_order_part_by_part(arch, tmp_path):
    """The rows that ggml moves within heads, and norms it adds one to, come out as in the whole."""
    path = write_gguf(tmp_path / "model.gguf", arch, metadata_for(arch), tensors_for(arch))
    checkpoint = open_checkpoint(ModelSource(model_id=str(path)))
    whole = prepare_model(checkpoint)
    sizes = [n for n in (2, 3) if whole.config.num_heads % n == 0 == whole.config.num_kv_heads % n]
    ranks = [cut(checkpoint, rank, sizes[0])[0].tensors for rank in range(sizes[0])]

    for name, source in checkpoint.tensors.items():
        leaf = name.split(".")[-2]
        parts = [tensors[name].load() for tensors in ranks]
        if leaf.endswith("norm"):
            assert torch.equal(parts[1], source.load())
            continue
        along = 1 if leaf in ("o_proj", "down_proj") else 0
        assert torch.equal(torch.cat(parts, along), source.load()), name


def test_quantised_blocks_are_cut_without_being_read(tmp_path):
    """A rank has the bytes of the file: rows of whole heads, columns of whole blocks."""
    path = gguf_of(tmp_path / "model.gguf", "Q8_0")
    checkpoint = open_checkpoint(ModelSource(model_id=str(path)))
    tensors = [cut(checkpoint, rank)[0].tensors for rank in range(2)]

    for leaf, along in {"self_attn.q_proj": 0, "self_attn.o_proj": 1, "mlp.down_proj": 1}.items():
        name = f"model.layers.1.{leaf}.weight"
        blocks = [t[name].blocks for t in tensors]
        whole = checkpoint.tensors[name].blocks
        assert whole is not None
        parts = [block.load() for block in blocks if block is not None]
        assert torch.equal(torch.cat(parts, along), whole.load())
        assert torch.equal(
            torch.cat([t[name].load() for t in tensors], along), checkpoint.tensors[name].load()
        )


def test_a_border_inside_a_block_is_refused(tmp_path):
    """128 of 256 columns of a Q4_K weight: the message names the column and the block."""
    path = gguf_of(tmp_path / "model.gguf", "Q4_K")
    checkpoint = open_checkpoint(ModelSource(model_id=str(path)))
    parts = parts_of(prepare_model(checkpoint), TensorParallel(0, 2))

    def refuse(packing, target=lambda name, columns: None):
        refuse_split_blocks(checkpoint, parts, TensorParallel(0, 2), packing=packing, target=target)

    refuse("none")  # dense weights have no blocks
    refuse("native", lambda name, columns: "Q8_0")  # nor are the file's kept
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel \(2\) would cut .*o_proj.* at column 128, inside of a Q4_K block "
        "of 256 values",
    ):
        refuse("native")
    with pytest.raises(ConfigError, match="inside of a Q6_K block"):
        refuse("none", lambda name, columns: "Q6_K")


def test_dense_weights_are_cut_anywhere(tmp_path):
    """Kept as floats, half a block is read from the whole one."""
    path = gguf_of(tmp_path / "model.gguf", "Q4_K")
    checkpoint = open_checkpoint(ModelSource(model_id=str(path)))
    name = "model.layers.0.self_attn.o_proj.weight"
    found = [cut(checkpoint, rank)[0].tensors[name].load() for rank in range(2)]

    assert torch.equal(torch.cat(found, 1), checkpoint.tensors[name].load())


def test_ranks_choose_the_type_of_the_whole(safetensors):
    """A share too narrow for a type does not silently get another one than a single process."""
    asked = []
    target = whole_target(lambda name, columns: asked.append(columns), safetensors)
    target("model.layers.0.mlp.down_proj", 64)

    assert asked == [128]


def test_importance_goes_with_the_columns():
    """A rank weighs the errors of its own inputs."""
    values = {"down": torch.arange(4.0), "up": torch.arange(2.0)}
    found = shard_importance(values, {"down": Part(columns=range(2, 4)), "up": Part(rows=range(1))})

    assert found["down"].tolist() == [2.0, 3.0]
    assert found["up"].tolist() == [0.0, 1.0]
