"""From a path to the folder or the GGUF file it means; nothing here needs the hub."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ConfigError, ModelLoadError
from mistralrs_sdk.loading.hub import locate
from tests.checkpoint_files import folder_with

FOLDER_FILES = ("config.json", "tokenizer.json", "model.safetensors")
SPLIT = tuple(f"big-{number:05d}-of-00003.gguf" for number in (1, 2, 3))


def find(model_id: str | Path, **settings) -> Path:
    return locate(ModelSource(model_id=model_id, **settings), None)


def refusal(model_id: str | Path, **settings) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find(model_id, **settings)
    return str(caught.value)


def test_a_gguf_file_is_taken_as_it_is(tmp_path):
    """A path of a file needs no more."""
    folder_with(tmp_path, "m.gguf")

    assert find(tmp_path / "m.gguf") == tmp_path / "m.gguf"


def test_home_is_expanded(tmp_path, monkeypatch):
    """`~` is the user's home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_with(tmp_path, "m.gguf")

    assert find("~/m.gguf") == tmp_path / "m.gguf"


def test_a_folder_of_safetensors_is_taken_although_a_gguf_lies_in_it(tmp_path):
    """Safetensors with a config win."""
    assert find(folder_with(tmp_path, *FOLDER_FILES, "m.gguf")) == tmp_path


def test_a_config_without_safetensors_leaves_the_gguf(tmp_path):
    """Many GGUF repositories carry the config of the model they were made from."""
    assert find(folder_with(tmp_path, "config.json", "m.gguf")) == tmp_path / "m.gguf"


def test_the_first_shard_of_the_only_model_is_found(tmp_path):
    """Shards are one model; the vision part beside it is none."""
    folder_with(tmp_path, *SPLIT, "mmproj-F16.gguf")

    assert find(tmp_path) == tmp_path / SPLIT[0]


def test_later_shards_alone_are_still_that_model(tmp_path):
    """Opening it names the first shard, which is missing."""
    folder_with(tmp_path, *SPLIT[1:])

    assert find(tmp_path) == tmp_path / SPLIT[1]


def test_several_gguf_models_must_be_chosen_from(tmp_path):
    """The message lists them, split ones once, and says how to choose."""
    message = refusal(folder_with(tmp_path, "a-Q4_0.gguf", "a-Q8_0.gguf", *SPLIT))

    for part in ("a-Q4_0.gguf", "a-Q8_0.gguf", SPLIT[0], "GgufModelBuilder("):
        assert part in message
    assert SPLIT[1] not in message


def test_a_vision_part_alone_is_no_model(tmp_path):
    """The message says what is missing."""
    assert "language model is missing" in refusal(folder_with(tmp_path, "mmproj-F16.gguf"))


def test_the_file_of_a_gguf_builder_is_chosen(tmp_path):
    """`files` chooses among several; of shards, the first."""
    folder_with(tmp_path, "a.gguf", "b.gguf", *SPLIT)

    assert find(tmp_path, files=["b.gguf"]) == tmp_path / "b.gguf"
    assert find(tmp_path, files=reversed(SPLIT)) == tmp_path / SPLIT[0]


def test_a_file_that_is_not_in_the_folder_is_named_with_what_is(tmp_path):
    """A wrong file name shows the right ones."""
    message = refusal(folder_with(tmp_path, "a.gguf"), files=["b.gguf"])

    assert "'b.gguf' is not in" in message
    assert "a.gguf" in message


def test_files_of_different_models_are_refused(tmp_path):
    """Only one of them could be used; none is ignored in silence."""
    folder_with(tmp_path, "a.gguf", "b.gguf")

    with pytest.raises(ConfigError, match=r"a\.gguf.*b\.gguf.*different models"):
        find(tmp_path, files=["a.gguf", "b.gguf"])


def test_files_of_something_that_is_a_file_are_refused(tmp_path):
    """A file holds no files."""
    folder_with(tmp_path, "a.gguf")

    with pytest.raises(ConfigError, match="is a file, so it cannot hold"):
        find(tmp_path / "a.gguf", files=["a.gguf"])


def test_a_safetensors_file_is_refused_with_its_folder_as_the_way_out(tmp_path):
    """The config and the tokenizer are beside it."""
    folder_with(tmp_path, *FOLDER_FILES)

    assert "give its folder" in refusal(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_half_a_folder_is_left_to_the_one_who_opens_it(tmp_path, name):
    """Opening the folder names the file that is missing."""
    assert find(folder_with(tmp_path, name)) == tmp_path


def test_a_folder_without_any_model_file_is_no_model(tmp_path):
    """The message says what would make it one."""
    message = refusal(folder_with(tmp_path, "readme.md"))

    assert f"{tmp_path} holds neither config.json nor a .gguf file" in message


def test_a_missing_absolute_path_is_named():
    """An absolute path is never taken for a hub id."""
    assert refusal("/nowhere/model") == "'/nowhere/model' does not exist"


@pytest.mark.parametrize("name", ["./models/m", "models/deep/m", "m.gguf", "org/m.gguf"])
def test_a_missing_relative_path_is_named_with_the_folder_it_was_looked_for_in(
    tmp_path, monkeypatch, name
):
    """The current folder is in the message: it is often not the one people think."""
    monkeypatch.chdir(tmp_path)

    message = refusal(name)

    assert name in message
    assert str(tmp_path) in message


def test_a_revision_of_something_local_is_not_used_and_says_so(tmp_path, caplog):
    """A setting without effect is never ignored in silence."""
    with caplog.at_level(logging.WARNING):
        find(folder_with(tmp_path, *FOLDER_FILES), revision="v1")

    assert "'v1' is not used" in caplog.text
