"""From a hub id to files: what is downloaded, what the hub may answer, and the cache."""

from __future__ import annotations

import fnmatch
import logging
import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from mistralrs_sdk.config import ModelSource, TokenSource
from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.hub import locate
from tests.checkpoint_files import folder_with

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"
FOLDER_FILES = ("config.json", "tokenizer.json", "model.safetensors")
SPLIT = tuple(f"big-{number:05d}-of-00003.gguf" for number in (1, 2, 3))


def find(model_id: str | Path, **settings) -> Path:
    return locate(ModelSource(model_id=model_id, **settings), None)


def refusal(model_id: str | Path, **settings) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find(model_id, **settings)
    return str(caught.value)


def cached(cache: Path, *names: str, revision: str = "main") -> Path:
    """What huggingface_hub's cache looks like once `names` were downloaded; their folder."""
    repo = cache / "models--org--tiny"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(COMMIT)
    return folder_with(repo / "snapshots" / COMMIT, *names)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """The library's own error, as its own HTTP client would make it."""
    response = SimpleNamespace(headers={}, request=None, status_code=status)
    return kind(f"{status} Client Error", response=response)


class FakeHub:
    """Stands for huggingface_hub's two functions; an error in place of an answer is raised."""

    def __init__(self, folder: Path, names: tuple[str, ...] = FOLDER_FILES) -> None:
        self.folder, self.names = folder, names
        self.info_error: Exception | None = None
        self.download_error: Exception | None = None
        self.asked: list[dict] = []
        self.downloads: list[dict] = []

    def model_info(self, repo, **settings):
        self.asked.append(settings)
        if self.info_error is not None:
            raise self.info_error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n) for n in self.names])

    def snapshot_download(self, repo, *, local_files_only, **settings):
        assert repo == REPO
        if local_files_only:
            if not self.folder.exists():
                raise errors.LocalEntryNotFoundError("nothing is cached")
            return str(self.folder)
        self.downloads.append(settings)
        if self.download_error is not None:
            raise self.download_error
        kept = [
            name
            for name in self.names
            if any(fnmatch.fnmatch(name, p) for p in settings["allow_patterns"])
            and not any(fnmatch.fnmatch(name, p) for p in settings["ignore_patterns"] or ())
        ]
        return str(folder_with(self.folder, *kept))


@pytest.fixture
def hub(tmp_path, monkeypatch) -> FakeHub:
    """A hub that is reachable and has a folder of safetensors."""
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "model_info", fake.model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    return fake


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to reach another machine fails; what was tried is returned."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


# The hub, reachable


def test_a_path_is_never_looked_up_on_the_hub(tmp_path, monkeypatch, hub):
    """A folder with the shape of a hub id wins over the hub."""
    folder_with(tmp_path / REPO, *FOLDER_FILES)

    assert find(REPO) == Path(REPO)
    assert not hub.asked


def test_an_id_is_downloaded_and_its_settings_reach_the_hub(hub):
    """Revision, cache folder and token are passed on; a missing revision is main."""
    settings = {"cache_path": "/cache", "token_source": TokenSource.Literal("hf_secret")}

    assert find(REPO, revision="v1", **settings) == hub.folder

    (asked,), (download,) = hub.asked, hub.downloads
    assert (asked["revision"], asked["token"]) == ("v1", "hf_secret")
    assert (download["revision"], download["token"]) == ("v1", "hf_secret")
    assert download["cache_dir"] == "/cache"

    find(REPO, **settings)

    assert hub.downloads[1]["revision"] == "main"


def test_only_what_a_model_needs_is_downloaded(hub):
    """Not other formats, not subfolders, not Mistral's second copy of the weights."""
    hub.names = (
        *FOLDER_FILES,
        "chat_template.jinja",
        "merges.txt",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/config.json",
        "m.gguf",
    )

    find(REPO)

    found = {str(p.relative_to(hub.folder)) for p in hub.folder.rglob("*") if p.is_file()}
    assert found == {*FOLDER_FILES, "chat_template.jinja", "merges.txt"}


def test_the_only_gguf_of_a_repository_is_downloaded(hub):
    """One model, so nothing has to be chosen; all its shards come."""
    hub.names = ("config.json", *(f"Q4/{name}" for name in SPLIT))

    assert find(REPO) == hub.folder / "Q4" / SPLIT[0]
    assert all((hub.folder / "Q4" / name).is_file() for name in SPLIT)


def test_the_shards_of_the_file_that_was_named_come_along(hub):
    """Naming one shard is enough, and other models stay on the hub."""
    hub.names = ("other.gguf", "one[4].gguf", *SPLIT)

    assert find(REPO, files=["one[4].gguf"]) == hub.folder / "one[4].gguf"
    (hub.folder / "one[4].gguf").unlink()
    assert find(REPO, files=[SPLIT[0]]) == hub.folder / SPLIT[0]
    assert {p.name for p in hub.folder.iterdir()} == set(SPLIT)


def test_several_ggufs_of_a_repository_must_be_chosen_from_before_downloading(hub):
    """The message lists them; nothing was downloaded."""
    hub.names = ("a.gguf", "b.gguf")

    message = refusal(REPO)

    assert "['a.gguf', 'b.gguf']" in message
    assert "GgufModelBuilder(" in message
    assert not hub.downloads


def test_a_file_that_is_not_in_the_repository_is_named_with_what_is(hub):
    """Nothing is downloaded for a misspelt file."""
    hub.names = ("a.gguf",)

    assert "'b.gguf' is not in 'org/tiny': it holds ['a.gguf']" in refusal(REPO, files=["b.gguf"])
    assert not hub.downloads


def test_a_repository_without_a_model_is_named(hub):
    """A data set or a model in other formats is no model."""
    hub.names = ("README.md", "config.json", "pytorch_model.bin")

    assert "holds no model this package reads" in refusal(REPO)
    assert not hub.downloads


def test_no_such_repository(hub, tmp_path):
    """The message says that it is neither a folder here nor on the hub, and the way out."""
    hub.info_error = http_error(errors.RepositoryNotFoundError, 401)

    message = refusal(REPO)

    for part in (REPO, str(tmp_path), "no model on the hub", "with_token_source"):
        assert part in message


def test_an_id_the_hub_cannot_have(hub):
    """huggingface_hub refuses some names by itself."""
    hub.info_error = errors.HFValidationError("bad name")

    assert "no model on the hub" in refusal(REPO)


def test_gated_repository(hub):
    """The metadata is public, the files are not: accept the terms, log in."""
    hub.download_error = http_error(errors.GatedRepoError, 403)

    message = refusal(REPO)

    for part in (REPO, "gated", "hf auth login", "with_token_source"):
        assert part in message


def test_no_such_revision(hub):
    """Even with the repository in the cache: another revision is not what was asked for."""
    folder_with(hub.folder, *FOLDER_FILES)
    hub.info_error = http_error(errors.RevisionNotFoundError, 404)

    message = refusal(REPO, revision="v9")

    for part in ("'v9'", REPO, "with_hf_revision"):
        assert part in message


@pytest.mark.parametrize(
    "error",
    [
        http_error(errors.HfHubHTTPError, 500),
        errors.HfHubHTTPError.__bases__[0]("connection reset"),
        OSError(28, "No space left on device"),
        RuntimeError("the transfer library gave up"),
    ],
    ids=["server", "connection", "disk", "transfer"],
)
def test_a_download_that_breaks_off(hub, error):
    """The cause is in the message and chained, with how to resume."""
    hub.download_error = error

    with pytest.raises(ModelLoadError) as caught:
        find(REPO)

    assert str(error) in str(caught.value)
    assert f"hf download {REPO}" in str(caught.value)
    assert caught.value.__cause__ is error


def test_the_token_is_in_no_message_and_no_log(hub, caplog):
    """Tokens stay secret whatever fails."""
    caplog.set_level(logging.DEBUG)
    hub.info_error = http_error(errors.RepositoryNotFoundError, 401)

    message = refusal(REPO, token_source=TokenSource.Literal("hf_secret"))

    assert "hf_secret" not in message + caplog.text


# The cache


@pytest.mark.parametrize(
    "error",
    [
        http_error(errors.HfHubHTTPError, 503),
        http_error(errors.RepositoryNotFoundError, 401),
        errors.HfHubHTTPError.__bases__[0]("no route to host"),
    ],
    ids=["hub is down", "token expired", "no network"],
)
def test_the_cache_serves_when_the_hub_does_not(hub, caplog, error):
    """A branch in the cache is used, with one warning that says why."""
    folder_with(hub.folder, *FOLDER_FILES)
    hub.info_error = error

    assert find(REPO) == hub.folder

    (record,) = caplog.records
    assert REPO in record.getMessage()
    assert str(error) in record.getMessage()


def test_no_network_and_nothing_in_the_cache(hub):
    """The message names the cause and how to get the model."""
    hub.info_error = errors.HfHubHTTPError.__bases__[0]("no route to host")

    message = refusal(REPO)

    for part in (REPO, "not (or not completely) in the cache", "no route to host", "hf download"):
        assert part in message


def test_a_commit_in_the_cache_asks_nobody(hub):
    """A commit never changes."""
    folder_with(hub.folder, *FOLDER_FILES)

    assert find(REPO, revision=COMMIT) == hub.folder
    assert not hub.asked


def test_a_commit_of_which_the_file_is_not_in_the_cache_is_downloaded(hub):
    """The cache may hold another file of the same commit."""
    hub.names = ("a.gguf", "b.gguf")
    folder_with(hub.folder, "a.gguf")

    assert find(REPO, revision=COMMIT, files=["b.gguf"]) == hub.folder / "b.gguf"


def test_offline_opens_no_socket(tmp_path, no_network):
    """With HF_HUB_OFFLINE (set for all tests) the real library reads its cache and no more."""
    snapshot = cached(tmp_path, *FOLDER_FILES)

    assert find(REPO, cache_path=tmp_path) == snapshot
    assert not no_network


def test_offline_finds_a_revision_and_a_gguf_in_the_cache(tmp_path, no_network):
    """The cache knows branches and tags by name."""
    snapshot = cached(tmp_path, "m.gguf", revision="v1")

    assert find(REPO, cache_path=tmp_path, revision="v1") == snapshot / "m.gguf"
    assert "HF_HUB_OFFLINE" in refusal(REPO, cache_path=tmp_path, revision="v2")


def test_offline_and_not_in_the_cache(tmp_path, no_network):
    """The message says that offline mode is on, and how to fill the cache."""
    message = refusal(REPO, cache_path=tmp_path)

    for part in (REPO, "HF_HUB_OFFLINE is set", f"hf download {REPO}"):
        assert part in message
    assert not no_network


def test_the_real_library_without_a_network_falls_back_to_the_cache(
    tmp_path, no_network, monkeypatch, caplog
):
    """Its own connection error is one the fallback knows."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    snapshot = cached(tmp_path, *FOLDER_FILES)

    assert find(REPO, cache_path=tmp_path) == snapshot
    assert no_network
    assert len([r for r in caplog.records if r.name == "mistralrs_sdk.loading"]) == 1

    assert "not (or not completely) in the cache" in refusal("org/other", cache_path=tmp_path)
