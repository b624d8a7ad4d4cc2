"""The tokenizer of a folder: its files, BOS and EOS, and where the chat template comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint, TokenizerFiles
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.loading.tokenizer import eos_ids, load_tokenizer, read_tokenizer
from tests.checkpoint_files import change_json, write_folder, write_json
from tests.gguf_files import tiny
from tests.tiny_models import CHAT_TEMPLATE, write_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tokenizer: <pad> <bos> <eos> are 0 1 2, "a" is 67, and a template in its settings."""
    path = tmp_path / "model"
    path.mkdir()
    write_tokenizer(path)
    return path


def read(folder: Path, config=None, generation_config=None) -> TokenizerFiles:
    return read_tokenizer(folder, config=config or {}, generation_config=generation_config or {})


def settings(folder: Path, **changes) -> None:
    change_json(folder / "tokenizer_config.json", **changes)


def put_in_front(file: Path, token: str, token_id: int, *, behind: str = "") -> None:
    """Let encoding put `token` in front of raw text."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A {behind}".strip(), special_tokens=[(token, token_id), ("<eos>", 2)]
    )
    tokenizer.save(str(file))


def opened(path: Path, **source) -> Checkpoint:
    return open_checkpoint(ModelSource(model_id=path, **source))


# Tokenizer files


def test_a_folder_gives_tokenizer_special_tokens_and_template(folder):
    """Everything a chat needs, with where the template came from."""
    files = read(folder, {"eos_token_id": 2})

    assert files.tokenizer.encode("a").ids == [67]
    assert (files.bos_token, files.eos_token) == ("<bos>", "<eos>")
    assert files.eos_token_ids == {2}
    assert files.adds_bos is False
    assert files.chat_template == CHAT_TEMPLATE
    assert files.template_source == "tokenizer_config.json"


def test_the_unknown_token_is_read_for_templates(folder, tmp_path):
    """Templates may write it; a GGUF names it by its id."""
    settings(folder, unk_token={"content": "<unk>"})

    assert read(folder).unk_token == "<unk>"
    gguf = tiny(tmp_path, **{"tokenizer.ggml.unknown_token_id": 26})
    assert opened(gguf).tokenizer.unk_token == "ab"


def test_no_tokenizer_names_what_is_looked_for_and_the_way_out(folder):
    """The folder, the three file names, and with_tokenizer_json."""
    (folder / "tokenizer.json").unlink()

    with pytest.raises(ModelLoadError) as caught:
        read(folder)

    for part in (str(folder), "tokenizer.json", "tokenizer.model", "with_tokenizer_json"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"model": {"type": "None"}}', b"\xff"])
def test_a_damaged_tokenizer_is_named(folder, content):
    """Empty, cut off, or another kind of JSON."""
    (folder / "tokenizer.json").write_bytes(content)

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is no tokenizer\.json: "):
        read(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_tokenizer_settings_are_named(folder, name, content):
    """They are not taken for absent."""
    (folder / name).write_text(content)

    with pytest.raises(ModelLoadError, match=name):
        read(folder)


def test_a_tokenizer_alone_is_enough(folder):
    """Without settings there is no template and no BOS, and the config knows the EOS."""
    (folder / "tokenizer_config.json").unlink()

    files = read(folder, {"eos_token_id": 2})

    assert (files.bos_token, files.eos_token, files.chat_template) == (None, None, None)
    assert files.template_source is None
    assert files.eos_token_ids == {2}


def test_truncation_and_padding_for_training_are_dropped(folder):
    """A tokenizer.json may ask to cut or fill up; a prompt is neither cut nor filled."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(file))

    assert len(load_tokenizer(file).encode("b" * 20).ids) == 20


def test_a_tokenizer_file_that_does_not_exist_is_named(tmp_path):
    """With its path."""
    with pytest.raises(ModelLoadError, match=r"gone\.json does not exist"):
        load_tokenizer(tmp_path / "gone.json")


def test_an_older_tokenizer_is_converted(folder):
    """vocab.json and merges.txt, without tokenizer.json, give the same ids."""
    file = folder / "tokenizer.json"
    expected = load_tokenizer(file)
    model = json.loads(file.read_text())["model"]
    write_json(folder / "vocab.json", model["vocab"])
    lines = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines))
    file.unlink()
    settings(folder, tokenizer_class="GPT2Tokenizer", unk_token="<pad>", add_bos_token=False)

    files = read(folder)

    for text in ("the tea", "Grüße, 世界"):
        assert files.tokenizer.encode(text).ids == expected.encode(text).ids
    assert files.adds_bos is False


def test_an_older_tokenizer_that_cannot_be_converted_is_named(folder):
    """The way out is a tokenizer.json."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{")

    with pytest.raises(ModelLoadError, match=r"(?s)cannot be converted .*with_tokenizer_json"):
        read(folder)


# BOS


def test_special_tokens_may_be_objects(folder):
    """Older settings write a token with its flags; `false` and null are no token."""
    settings(folder, bos_token={"content": "<bos>", "lstrip": False}, eos_token=False)

    files = read(folder)

    assert (files.bos_token, files.eos_token) == ("<bos>", None)


def test_the_special_tokens_map_fills_in(folder):
    """tokenizer_config.json wins where both say something, also that there is none."""
    write_json(folder / "special_tokens_map.json", {"bos_token": "<pad>", "eos_token": "<pad>"})
    settings(folder, eos_token=None)

    files = read(folder)

    assert (files.bos_token, files.eos_token) == ("<bos>", "<pad>")

    path = folder / "tokenizer_config.json"
    write_json(path, json.loads(path.read_text()) | {"eos_token": None})

    assert read(folder).eos_token is None


def test_a_tokenizer_that_puts_the_bos_in_front_says_so(folder):
    """Whether it also puts an EOS behind or not."""
    for behind in ("", "<eos>"):
        put_in_front(folder / "tokenizer.json", "<bos>", 1, behind=behind)

        assert read(folder).adds_bos is True


def test_an_eos_behind_is_no_bos_in_front(folder):
    """Only what is in front counts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings(folder, bos_token=None)

    assert (read(folder).bos_token, read(folder).adds_bos) == (None, False)


def test_the_token_in_front_is_the_bos_if_nothing_names_one(folder):
    """A folder without tokenizer_config.json still encodes as its tokenizer does."""
    put_in_front(folder / "tokenizer.json", "<bos>", 1)
    (folder / "tokenizer_config.json").unlink()

    files = read(folder)

    assert (files.bos_token, files.adds_bos) == ("<bos>", True)


# EOS: a turn ends at any of the ids that the files name


@pytest.mark.parametrize(
    ("generation", "config", "eos_token", "expected"),
    [
        ([0, 16], None, "<eos>", {0, 2, 16}),
        (16, None, "<eos>", {2, 16}),
        ([0], None, "<eos>", {0, 2}),
        (None, 16, None, {16}),
        (None, [16, 17], "<eos>", {2, 16, 17}),
        (None, None, None, set()),
        (None, None, "<not in the vocabulary>", set()),
    ],
    ids=["list", "int", "tokenizer's", "config's", "config's list", "none", "unknown text"],
)
def test_eos_ids_are_collected_from_every_place(folder, generation, config, eos_token, expected):
    """The generation config's, the config's and the tokenizer's, together."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")

    found = eos_ids(
        tokenizer,
        eos_token,
        config={"eos_token_id": config},
        generation_config={"eos_token_id": generation},
    )

    assert found == expected


@pytest.mark.parametrize("value", ["2", [2, "3"], 2.0, True])
def test_an_eos_id_that_is_no_number_is_refused(folder, value):
    """It would never match, and the text would run on."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")

    with pytest.raises(ModelLoadError, match=r"eos_token_id in generation_config\.json is"):
        eos_ids(tokenizer, None, config={}, generation_config={"eos_token_id": value})


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [0, 300]}, {}, {0, 2, 300}),
        ({"eos_token_id": 300}, {}, {2, 300}),
        ({"eos_token_id": [0]}, {}, {0, 2}),
        (None, {"eos_token_id": 300}, {2, 300}),
    ],
)
def test_eos_ids_of_a_whole_checkpoint(tmp_path, generation, config, expected):
    """A checkpoint ends its turns at all of them, wherever they are written."""
    write_folder(tmp_path)
    change_json(tmp_path / "config.json", **({"eos_token_id": None} | config))
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)

    assert opened(tmp_path).tokenizer.eos_token_ids == expected


# with_tokenizer_json


@pytest.fixture
def other_tokenizer(tmp_path) -> Path:
    """It has the tokens of the GGUF files, puts <s> in front, and ends turns at id 3."""
    (tmp_path / "other").mkdir()
    write_tokenizer(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(file))
    put_in_front(file, "<s>", tokenizer.token_to_id("<s>"))
    return file


def test_with_tokenizer_json_replaces_the_folders_tokenizer(tmp_path, other_tokenizer):
    """The folder's need not even be there; its settings hold."""
    model = write_folder(tmp_path / "model")
    put_in_front(other_tokenizer, "<bos>", 1)
    (model / "tokenizer.json").unlink()

    files = opened(model, tokenizer_json=other_tokenizer).tokenizer

    assert files.tokenizer.token_to_id("<s>") == 512
    assert files.adds_bos is True
    assert files.eos_token_ids == {2}
    assert files.chat_template == CHAT_TEMPLATE


def test_with_tokenizer_json_replaces_the_tokenizer_of_a_gguf(tmp_path, other_tokenizer):
    """BOS and EOS are found again in the new one; the model's own EOS ids stay."""
    model = tiny(tmp_path, **{"tokenizer.ggml.add_bos_token": False})
    assert opened(model).tokenizer.adds_bos is False

    files = opened(model, tokenizer_json=other_tokenizer).tokenizer

    assert (files.bos_token, files.eos_token, files.adds_bos) == ("<s>", "</s>", True)
    assert files.eos_token_ids == {28, 513}
    assert files.chat_template == "{{ messages }}"


@pytest.mark.parametrize("key", ["pre", "model"])
def test_with_tokenizer_json_opens_a_gguf_whose_own_tokenizer_is_unknown(
    tmp_path, other_tokenizer, key
):
    """The file's own is refused with this way out, and not looked at where it is taken."""
    model = tiny(tmp_path, **{f"tokenizer.ggml.{key}": "new-one"})
    with pytest.raises(UnsupportedError, match=r"'new-one'.*with_tokenizer_json"):
        opened(model)

    files = opened(model, tokenizer_json=other_tokenizer).tokenizer

    assert (files.bos_token, files.eos_token, files.adds_bos) == ("<s>", "</s>", True)


def test_with_tokenizer_json_of_nothing_is_named(tmp_path):
    """The folder's own is not used in its place."""
    with pytest.raises(ModelLoadError, match=r"gone\.json does not exist"):
        opened(write_folder(tmp_path / "model"), tokenizer_json=tmp_path / "gone.json")
