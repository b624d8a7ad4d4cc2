"""Where the chat template comes from: the model's files, or what the user gives instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mistralrs_sdk.config import ModelSource
from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.checkpoint import TokenizerFiles
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.loading.tokenizer import read_tokenizer
from tests.checkpoint_files import change_json, write_folder, write_json
from tests.gguf_files import tiny
from tests.tiny_models import CHAT_TEMPLATE, write_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tokenizer with a template in its settings."""
    path = tmp_path / "folder"
    path.mkdir()
    write_tokenizer(path)
    return path


def read(folder: Path) -> TokenizerFiles:
    return read_tokenizer(folder, config={}, generation_config={})


def opened(path: Path, **source) -> TokenizerFiles:
    return open_checkpoint(ModelSource(model_id=path, **source)).tokenizer


def test_the_jinja_file_wins_over_the_json_files(folder):
    """chat_template.jinja, then chat_template.json, then tokenizer_config.json."""
    write_json(folder / "chat_template.json", {"chat_template": "from json"})

    assert read(folder).chat_template == "from json"
    assert read(folder).template_source == "chat_template.json"

    (folder / "chat_template.jinja").write_text("from jinja: 世")

    assert read(folder).chat_template == "from jinja: 世"
    assert read(folder).template_source == "chat_template.jinja"


def test_of_several_named_templates_the_default_is_taken(folder):
    """Without a default there is none: no other is put in its place."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    assert read(folder).chat_template == "D"

    change_json(folder / "tokenizer_config.json", chat_template=named[:1])
    assert read(folder).chat_template is None


@pytest.mark.parametrize("entries", [["x"], [{"name": "default"}]])
def test_a_damaged_list_of_templates_is_named(folder, entries):
    """The file and the way out."""
    change_json(folder / "tokenizer_config.json", chat_template=entries)

    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json .*with_chat_template"):
        read(folder)


def test_a_jinja_file_that_is_no_text_is_named(folder):
    """Not UTF-8."""
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")

    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read"):
        read(folder)


def test_with_chat_template_replaces_the_models(tmp_path):
    """Literal Jinja, a text file or a .json file; describe() learns which."""
    model = write_folder(tmp_path / "model")
    for name in ("mine.jinja", "mine.txt"):
        (tmp_path / name).write_text("from a file")
    write_json(tmp_path / "mine.json", {"chat_template": "from json"})

    def chosen(**source) -> tuple[str | None, str | None]:
        files = opened(model, **source)
        return files.chat_template, files.template_source

    assert chosen() == (CHAT_TEMPLATE, "tokenizer_config.json")
    assert chosen(chat_template="{{ x }}") == ("{{ x }}", "with_chat_template")
    for name in ("mine.jinja", "mine.txt"):
        assert chosen(chat_template=tmp_path / name) == (
            "from a file",
            f"with_chat_template ({name})",
        )
    assert chosen(chat_template=tmp_path / "mine.json") == (
        "from json",
        "with_chat_template (mine.json)",
    )


def test_jinja_explicit_wins_over_every_other_template(tmp_path):
    """Also over with_chat_template, and whatever the file is called."""
    (tmp_path / "mine.txt").write_text("explicit")

    files = opened(
        write_folder(tmp_path / "model"),
        chat_template="{{ x }}",
        jinja_explicit=tmp_path / "mine.txt",
    )

    assert files.chat_template == "explicit"
    assert files.template_source == "with_jinja_explicit (mine.txt)"


@pytest.mark.parametrize(
    ("setting", "name", "words"),
    [
        ("jinja_explicit", "gone.jinja", "cannot be read"),
        ("chat_template", "gone.jinja", "cannot be read"),
        ("chat_template", "gone.json", "is missing"),
        ("chat_template", "empty.json", "no string under 'chat_template'"),
    ],
)
def test_a_template_that_cannot_be_had_is_named(tmp_path, setting, name, words):
    """The model's own is not used in its place."""
    write_json(tmp_path / "empty.json", {"chat_template": []})

    with pytest.raises(ModelLoadError, match=words) as caught:
        opened(write_folder(tmp_path / "model"), **{setting: tmp_path / name})

    assert name in str(caught.value)


def test_a_gguf_takes_another_template_too(tmp_path):
    """The rules do not depend on the format."""
    assert opened(tiny(tmp_path), chat_template="{{ x }}").chat_template == "{{ x }}"
