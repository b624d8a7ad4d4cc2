"""Folders of embedding models: what must be there, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.embedding import EmbeddingCheckpoint, open_embedding
from mistralrs_sdk.models.embedding import Normalize, Pooling
from tests.checkpoint_files import change_json, write_json
from tests.embedding_models import bare_folder, change_module, embedder, embedding_folder
from tests.gguf_files import tiny
from tests.model_helpers import tiny_folder

IDENTITY = "linear.Identity"


def opened(folder: Path, **settings) -> EmbeddingCheckpoint:
    return open_embedding(ModelSource(model_id=folder, **settings))


def folder_in(path: Path, **settings) -> Path:
    return embedding_folder(path / "model", "qwen3", **settings)


def test_a_folder_that_does_not_say_how_it_pools_is_refused(tmp_path):
    """Nothing is guessed; the error names what is missing."""
    folder = folder_in(tmp_path, pooling=None)

    with pytest.raises(
        ModelLoadError, match=r"does not say how it pools: there is no modules.json"
    ):
        opened(folder)


def test_a_bare_qwen3_embedding_is_known(tmp_path):
    """By its name: it takes the last token and normalises."""
    folder = embedding_folder(tmp_path / "Qwen3-Embedding-0.6B", "qwen3", pooling=None)

    head = opened(folder).head

    assert head.pooling == Pooling(("lasttoken",))
    assert [type(step) for step in head.steps] == [Normalize]


async def test_a_head_that_generates_is_left_out(tmp_path):
    """A checkpoint saved with a head embeds like one without; nothing of it is read."""
    folder = folder_in(tmp_path, pooling="mean")
    shutil.copy(tiny_folder("llama") / "model.safetensors", folder)
    shutil.copy(tiny_folder("llama") / "config.json", folder)
    model = await embedder(folder).serve()
    await model.aclose()

    assert "lm_head.weight" not in model.info.forms
    assert model.info.architecture == "LlamaForCausalLM"


def test_the_longest_input_is_the_smallest_limit(tmp_path):
    """sentence_bert_config.json, else the tokenizer's; the model's own caps both."""
    folder = folder_in(tmp_path)
    assert opened(folder).settings.max_seq_length == 512

    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64})
    assert opened(folder).settings.max_seq_length == 64

    (folder / "sentence_bert_config.json").unlink()
    change_json(folder / "tokenizer_config.json", model_max_length=int(1e30))
    assert opened(folder).settings.max_seq_length == int(1e30)


async def test_a_limit_beyond_the_model_is_capped(tmp_path):
    """Positions the model was not made for are not used."""
    folder = folder_in(tmp_path, max_seq_length=10_000)

    model = await embedder(folder).serve()
    await model.aclose()

    assert model.info.max_model_len == 512


def test_old_pooling_flags_are_read_in_their_order(tmp_path):
    """Several flags are several modes, side by side; none is the mean."""
    flags = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}
    folder = folder_in(tmp_path, pooling_config={**flags, "pooling_mode_mean_tokens": False})
    assert opened(folder).head.pooling.modes == ("cls", "lasttoken")
    assert opened(folder).dimensions == 128

    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 64})
    assert opened(folder).head.pooling.modes == ("mean",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Softplus"}, "Softplus"),
        ({"use_residual": True}, "use_residual True"),
        ({"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings'"),
    ],
)
def test_a_dense_layer_that_does_more_is_refused(tmp_path, changes, message):
    """The error names the key and the file."""
    folder = folder_in(tmp_path, dense=[(64, 8, True, IDENTITY)])
    change_json(folder / "2_Dense/config.json", **changes)

    with pytest.raises(UnsupportedError, match=rf"2_Dense/config.json has .*{message}"):
        opened(folder)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (0, "models.CLIPModel", "lists CLIPModel, Pooling, Normalize"),
        (1, "models.WordWeights", "lists Transformer, WordWeights"),
        (2, "models.CNN", "module CNN in '2_Normalize'"),
    ],
)
def test_unknown_modules_are_refused(tmp_path, number, kind, message):
    """What a model does between its tokens and its vector is never skipped."""
    folder = folder_in(tmp_path)
    change_module(folder, number, type=f"sentence_transformers.{kind}")

    with pytest.raises(UnsupportedError, match=message):
        opened(folder)


def test_settings_that_change_the_text_are_refused(tmp_path):
    """Lower case and another task are not ignored."""
    folder = folder_in(tmp_path)
    for key, value in (("do_lower_case", True), ("transformer_task", "fill-mask")):
        write_json(folder / "sentence_bert_config.json", {key: value})
        with pytest.raises(UnsupportedError, match=key):
            opened(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [{"type": "x"}], "is no list of modules"),
        ("modules.json", {"a": 1}, "is no list of modules"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode"),
        ("config_sentence_transformers.json", {"prompts": [1]}, "must be texts by name"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "q"}, "default_prompt_name": "doc"},
            "default_prompt_name 'doc', which is none of its prompts: query",
        ),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "must be 1 or more"),
    ],
    ids=str,
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    """A value that makes no sense is an error, not a default."""
    folder = folder_in(tmp_path)
    write_json(folder / name, content)

    with pytest.raises(ModelLoadError, match=message):
        opened(folder)


def test_layers_that_do_not_fit_together_are_refused(tmp_path):
    """A dense layer must take what comes before it."""
    folder = folder_in(tmp_path, dense=[(65, 8, False, IDENTITY)])

    with pytest.raises(ModelLoadError, match="takes 65 values and gets 64"):
        opened(folder)


def test_a_dense_file_with_other_tensors_is_refused(tmp_path):
    """It names the file and what belongs into it."""
    folder = folder_in(tmp_path, dense=[(64, 8, False, IDENTITY)])
    save_file({"weight": torch.zeros(8, 64)}, folder / "2_Dense/model.safetensors")

    with pytest.raises(ModelLoadError, match=r"must hold linear\.weight"):
        opened(folder)


def test_a_missing_module_file_is_named(tmp_path):
    """On this machine nothing is fetched."""
    folder = folder_in(tmp_path)
    (folder / "1_Pooling/config.json").unlink()

    with pytest.raises(ModelLoadError, match=r"1_Pooling/config\.json is missing"):
        opened(folder)


def test_other_architectures_are_named(tmp_path):
    """An encoder of another kind is refused by its name."""
    folder = folder_in(tmp_path)
    change_json(folder / "config.json", architectures=["BertModel"], model_type="bert")

    with pytest.raises(UnsupportedError, match="BertModel is not supported"):
        opened(folder)


def test_a_gguf_file_is_refused(tmp_path):
    """The error says what to load instead."""
    with pytest.raises(UnsupportedError, match="GGUF file: an embedding model is loaded from"):
        opened(tiny(tmp_path))


# On the hub


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A download without its subfolders, as one of a model is; what is fetched then."""
    whole = folder_in(tmp_path, dense=[(64, 8, False, IDENTITY)])
    commit = tmp_path / "snapshots" / ("a" * 40)
    shutil.copytree(whole, commit, ignore=shutil.ignore_patterns("?_*"))
    asked = []

    def download(repo, name, **settings):
        asked.append((repo, name, settings["revision"], settings["cache_dir"], settings["token"]))
        if not (whole / name).is_file():
            raise OSError("no such file there")
        return str(whole / name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mistralrs_sdk.loading.loader.locate", lambda *_: commit)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return whole, asked


def test_module_files_are_fetched_from_the_hub(snapshot):
    """At the commit that was downloaded, into the same cache."""
    _, asked = snapshot

    found = opened(Path("org/embedder"), cache_path="cache")

    assert found.dimensions == 8
    names = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    assert [name for _, name, *_ in asked] == names
    assert asked[0] == ("org/embedder", names[0], "a" * 40, "cache", None)


def test_a_module_file_that_cannot_be_fetched_is_named(snapshot):
    """With the cause and the command that gets it."""
    whole, _ = snapshot
    (whole / "2_Dense/model.safetensors").unlink()

    with pytest.raises(ModelLoadError, match=r"2_Dense/model.safetensors .*hf download org/embed"):
        opened(Path("org/embedder"))


def test_the_bare_folder_has_names_without_a_prefix():
    """The fixtures are like the published files: saved without a head."""
    from safetensors import safe_open

    with safe_open(bare_folder("qwen3") / "model.safetensors", "pt") as file:
        assert "embed_tokens.weight" in file.keys()  # noqa: SIM118
