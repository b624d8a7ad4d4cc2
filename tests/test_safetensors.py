"""Opening a folder of safetensors: what is read, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.safetensors import open_folder
from tests.checkpoint_files import config_for, tensors_of, write_folder, write_json

INDEX = "model.safetensors.index.json"


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_folder(folder, name="tiny")
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_found_with_its_shape_and_values(tmp_path, shards):
    """A sharded checkpoint holds the same as a single file."""
    expected = tensors_of(config_for("llama"))

    checkpoint = open_folder(write_folder(tmp_path, shards=shards), name="tiny")

    assert checkpoint.tensors.keys() == expected.keys()
    for name, source in checkpoint.tensors.items():
        assert source.shape == tuple(expected[name].shape)
        assert torch.equal(source.load(), expected[name])
    assert len(checkpoint.files) == shards
    assert all(file.is_file() for file in checkpoint.files)


def test_config_and_generation_config_are_kept(tmp_path):
    """Also the keys this package does not know."""
    write_json(write_folder(tmp_path) / "generation_config.json", {"top_k": 7, "else": 1})

    checkpoint = open_folder(tmp_path, name="tiny")

    assert checkpoint.name == "tiny"
    assert checkpoint.config == config_for("llama")
    assert checkpoint.generation_config == {"top_k": 7, "else": 1}


def test_without_a_generation_config_it_is_empty(tmp_path):
    """The file is optional."""
    assert open_folder(write_folder(tmp_path), name="tiny").generation_config == {}


def test_format_names_every_weight_type(tmp_path):
    """For `describe()`: all types that occur, in order."""
    tensors = tensors_of(config_for("llama"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()

    checkpoint = open_folder(write_folder(tmp_path, tensors=tensors), name="tiny")

    assert checkpoint.format == "safetensors (BF16, F16, F32)"
    assert checkpoint.tensors["model.norm.weight"].load().dtype == torch.bfloat16


def test_config_missing(tmp_path):
    """The message names file and folder."""
    (write_folder(tmp_path) / "config.json").unlink()

    assert refusal(tmp_path) == f"config.json is missing in {tmp_path}"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b'{"vocab_size": 5', b"[1, 2]", b"\xff\xfe{}"])
def test_a_damaged_json_file_is_named(tmp_path, name, content):
    """Empty, cut off, no object, no UTF-8."""
    (write_folder(tmp_path) / name).write_bytes(content)

    assert str(tmp_path / name) in refusal(tmp_path)


def test_no_weights_at_all(tmp_path):
    """The message says which files would be read."""
    (write_folder(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")

    message = refusal(tmp_path)

    for part in ("neither model.safetensors nor", INDEX, "pytorch_model.bin"):
        assert part in message


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_truncated_weights_are_named_with_both_sizes(tmp_path, left):
    """Cut anywhere: in the length, in the header, in the last tensor."""
    file = write_folder(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:left])

    message = refusal(tmp_path)

    assert f"{file} is damaged or incomplete" in message
    assert f"it has {len(whole[:left])} bytes" in message
    assert "hf download REPOSITORY model.safetensors --force-download" in message
    if left == -1:
        assert f"should have {len(whole)}" in message


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        (2).to_bytes(8, "little") + b"[]",
        (13).to_bytes(8, "little") + b'{"x": {"a":1}}',
        (8).to_bytes(8, "little") + b"not json",
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path, content):
    """A Git LFS pointer, or a header of anything else."""
    file = write_folder(tmp_path) / "model.safetensors"
    file.write_bytes(content)

    assert f"{file} is damaged or incomplete (it has {len(content)} bytes" in refusal(tmp_path)


def test_missing_shards_are_named(tmp_path):
    """All of them, with how many there should be."""
    write_folder(tmp_path, shards=3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()

    message = refusal(tmp_path)

    assert "2 of 3 shards are missing" in message
    assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in message


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_weight_map_is_named(tmp_path, index):
    """Without it nobody knows which files belong to the model."""
    write_json(write_folder(tmp_path, shards=2) / INDEX, index)

    assert f"{tmp_path / INDEX} has no weight_map" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/x", "", None, ["x"]])
def test_an_index_that_names_anything_but_a_file_in_the_folder_is_refused(tmp_path, name):
    """A checkpoint cannot make the loader open other files."""
    write_json(
        write_folder(tmp_path / "m", shards=2) / INDEX, {"weight_map": {"lm_head.weight": name}}
    )
    (tmp_path / "other.safetensors").write_bytes(b"")

    message = refusal(tmp_path / "m")

    assert f"places 'lm_head.weight' in {name!r}" in message


def test_links_are_followed(tmp_path):
    """The hub's cache is a folder of links into another."""
    write_folder(tmp_path / "blobs", shards=2)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)

    assert len(open_folder(tmp_path / "snapshot", name="tiny").files) == 2


def test_a_single_file_wins_over_an_index(tmp_path):
    """As in transformers; an index can be left from an older download."""
    write_json(write_folder(tmp_path) / INDEX, {"weight_map": {"x": "gone.safetensors"}})

    assert [f.name for f in open_folder(tmp_path, name="tiny").files] == ["model.safetensors"]


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """Which of them is meant cannot be known."""
    write_folder(tmp_path, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())

    message = refusal(tmp_path)

    for part in (first.name, second.name, "do not belong together"):
        assert part in message


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.uint8])
def test_a_tensor_of_another_number_type_is_refused(tmp_path, dtype):
    """Quantised checkpoints: tensor, type and what is supported are named."""
    tensors = {"a.weight": torch.zeros(4), "b.qweight": torch.zeros(4).to(dtype)}
    save_file(tensors, write_folder(tmp_path) / "model.safetensors")

    with pytest.raises(UnsupportedError) as caught:
        open_folder(tmp_path, name="tiny")

    for part in ("'b.qweight'", "model.safetensors has type", "BF16, F16, F32, F64"):
        assert part in str(caught.value)


def test_header_metadata_is_no_tensor(tmp_path):
    """save_file(metadata=...) is what transformers writes."""
    tensors = tensors_of(config_for("llama"))
    file = write_folder(tmp_path) / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.write_bytes(file.read_bytes()[:-1])

    assert "should have" in refusal(tmp_path)

    save_file(tensors, file, metadata={"format": "pt"})

    assert open_folder(tmp_path, name="tiny").tensors.keys() == tensors.keys()
