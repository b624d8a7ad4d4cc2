"""From the name of a model to files on this machine, through the Hugging Face cache."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path

import attrs

from mistralrs_sdk.config import ModelSource, Progress
from mistralrs_sdk.errors import ConfigError, MistralRsError, ModelLoadError
from mistralrs_sdk.loading.progress import download_bar

logger = logging.getLogger("mistralrs_sdk.loading")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"-\d{5}-of-(\d{5}\.gguf)$")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_ELSEWHERE = ("*/*", "consolidated*")
"""Subfolders and Mistral's second copy of the weights."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_ANSWER_SECONDS = 10.0


def locate(source: ModelSource, progress: Progress | None) -> Path:
    """Return the folder or the GGUF file that `source` means, downloading it if it is a hub id.

    A path that exists is never looked up on the hub. A branch is looked up there each time, and
    taken from the cache, with a warning, if the hub does not answer; a commit that is in the cache
    needs no network, and nothing does with HF_HUB_OFFLINE.

    Raises:
        ConfigError: files that do not go together, or of something that is a file itself.
        ModelLoadError: nothing is there; the message says where it was looked for.
    """
    path = Path(source.model_id).expanduser()
    if not path.exists():
        if path.is_absolute():
            raise ModelLoadError(f"{source.model_id!r} does not exist")
        if not _HUB_ID.fullmatch(source.model_id) or path.suffix == ".gguf":
            raise ModelLoadError(
                f"{source.model_id!r} does not exist (looked in {Path.cwd()}): give a folder, "
                "a .gguf file or a Hugging Face id such as 'Qwen/Qwen3-4B'"
            )
        return _download(source, progress, _fetch)
    if source.revision is not None:
        logger.warning("revision %r is not used: %s is on this machine", source.revision, path)
    if path.is_dir():
        return _choose_weights(path, source)
    if source.files:
        raise ConfigError(
            f"{source.model_id!r} is a file, so it cannot hold {list(source.files)}: "
            "give the folder or the hub id they are in"
        )
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path} has no config and no tokenizer in it: give its folder")
    return path


def locate_adapter(source: ModelSource, progress: Progress | None) -> Path:
    """Return the folder with the adapter that `source` means, downloading it if it is a hub id.

    Paths, branches and commits are treated as `locate` does.

    Raises:
        ModelLoadError: nothing is there; the message says where it was looked for.
    """
    path = Path(source.model_id).expanduser()
    if path.is_dir():
        if source.revision is not None:
            logger.warning("revision %r is not used: %s is on this machine", source.revision, path)
        return path
    if path.exists() or path.is_absolute() or not _HUB_ID.fullmatch(source.model_id):
        raise ModelLoadError(
            f"adapter {source.model_id!r} is no folder (looked in {Path.cwd()}): give the folder "
            "that holds adapter_config.json, or a Hugging Face id"
        )
    return _download(source, progress, _fetch_adapter)


def _choose_weights(folder: Path, source: ModelSource) -> Path:
    """Return the GGUF file in `folder` that is meant, or the folder if it holds safetensors."""
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if source.files:
        for name in source.files:
            if not (folder / name).is_file():
                raise ModelLoadError(f"{name!r} is not in {folder}: it holds {ggufs or 'no GGUF'}")
        return folder / _only_gguf(source.files, source, ConfigError)
    has_config = (folder / "config.json").is_file()
    has_weights = any(folder.glob("*.safetensors"))
    if has_config and has_weights:
        return folder
    if ggufs:
        return folder / _only_gguf(ggufs, source, ModelLoadError)
    if has_config or has_weights:
        return folder  # opening it names what is missing
    raise ModelLoadError(f"{folder} holds neither config.json nor a .gguf file: it is no model")


def _only_gguf(names: Collection[str], source: ModelSource, kind: type[Exception]) -> str:
    """Return the one GGUF among `names`, of a split one its first shard; else raise `kind`."""
    models: dict[str, str] = {}
    for name in sorted(names):
        if not Path(name).name.startswith("mmproj"):  # the vision part that lies beside a model
            models.setdefault(_SHARD.sub("", name), name)
    if len(models) == 1:
        return next(iter(models.values()))
    found = list(models.values())
    raise kind(
        f"{source.model_id!r}: {found} are different models: choose one with "
        f"GgufModelBuilder({source.model_id!r}, [file])"
        if found
        else f"{source.model_id!r}: {sorted(names)} are vision parts, the language model is missing"
    )


def _download(
    source: ModelSource,
    progress: Progress | None,
    fetch: Callable[[ModelSource, Progress | None], Path],
) -> Path:
    """Fetch what `source` names into the cache, and say in our words what goes wrong."""
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = source.model_id, source.revision or "main"
    where = f"{repo!r} at revision {revision!r}"
    absent = f"{repo!r} is no folder in {Path.cwd()}"
    try:
        return fetch(source, progress)
    except MistralRsError:
        raise
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{where} is gated: accept its terms on its page, then run `hf auth login` "
            "or pass with_token_source(...)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(
            f"{repo!r} has no revision {revision!r}: see with_hf_revision"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelLoadError(
            f"{absent} and no model on the hub (or it is private and the token may not read it): "
            "check the name, or pass with_token_source(...)"
        ) from error
    except Exception as error:  # of huggingface_hub, its HTTP library, its transfer library, the OS
        absent += ", it is not (or not completely) in the cache, and"
        if huggingface_hub.is_offline_mode():
            raise ModelLoadError(
                f"{absent} HF_HUB_OFFLINE is set: run `hf download {repo}` where there is a "
                "network, or unset it"
            ) from error
        raise ModelLoadError(
            f"{absent} getting {where} from the hub failed ({type(error).__name__}: {error}): "
            f"check the network and the disk, then build again or run `hf download {repo}`; "
            "both resume"
        ) from error


def _fetch(source: ModelSource, progress: Progress | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = source.model_id, source.revision or "main"
    token = source.token_source.resolve()
    # what every error of the HTTP library derives from, whichever library it is
    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]

    def snapshot(source: ModelSource, *, cached: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=source.cache_path,
            token=token,
            allow_patterns=[*_SMALL_FILES, *_weight_patterns(source.files)],
            ignore_patterns=None if any("/" in name for name in source.files) else [*_ELSEWHERE],
            tqdm_class=download_bar(progress),
            local_files_only=cached,
        )
        return _choose_weights(Path(folder), source)

    offline = huggingface_hub.is_offline_mode()
    if offline or _COMMIT.fullmatch(revision):
        try:
            return snapshot(source, cached=True)
        except (errors.LocalEntryNotFoundError, ModelLoadError):
            if offline:
                raise
    try:
        info = huggingface_hub.model_info(
            repo, revision=revision, token=token, timeout=_ANSWER_SECONDS
        )
    except errors.RevisionNotFoundError:
        raise
    except (http_error, OSError) as error:
        try:
            folder = snapshot(source, cached=True)
        except errors.LocalEntryNotFoundError:
            raise error from None
        logger.warning("the hub did not give %r (%s): using the copy in the cache", repo, error)
        return folder
    names = [file.rfilename for file in info.siblings or ()]
    return snapshot(_with_chosen_file(source, names), cached=False)


def _fetch_adapter(source: ModelSource, progress: Progress | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    def snapshot(*, cached: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            source.model_id,
            revision=source.revision or "main",
            cache_dir=source.cache_path,
            token=source.token_source.resolve(),
            allow_patterns=[*_ADAPTER_FILES],
            tqdm_class=download_bar(progress),
            local_files_only=cached,
        )
        if cached and not all((Path(folder) / name).is_file() for name in _ADAPTER_FILES):
            raise errors.LocalEntryNotFoundError(f"{folder} does not hold {_ADAPTER_FILES}")
        return Path(folder)

    offline = huggingface_hub.is_offline_mode()
    if offline or _COMMIT.fullmatch(source.revision or ""):
        try:
            return snapshot(cached=True)
        except errors.LocalEntryNotFoundError:
            if offline:
                raise
    return snapshot(cached=False)  # which falls back on the cache if the hub does not answer


def _with_chosen_file(source: ModelSource, names: list[str]) -> ModelSource:
    """Check `source.files` against what the repository holds; choose if nothing was asked for.

    Raises:
        ModelLoadError: a file is not there, or there is not exactly one model to choose.
    """
    ggufs = [name for name in names if name.endswith(".gguf")]
    for name in source.files:
        if name not in names:
            raise ModelLoadError(
                f"{name!r} is not in {source.model_id!r}: it holds {ggufs or 'no GGUF'}"
            )
    weights = any("/" not in name and name.endswith(".safetensors") for name in names)
    if source.files or (weights and "config.json" in names):
        return source
    if not ggufs:
        raise ModelLoadError(
            f"{source.model_id!r} holds no model this package reads: neither config.json with "
            "safetensors nor GGUF"
        )
    return attrs.evolve(source, files=[_only_gguf(ggufs, source, ModelLoadError)])


def _weight_patterns(files: tuple[str, ...]) -> list[str]:
    """What to download for these files: the other shards of a split GGUF too."""
    if not files:
        return ["*.safetensors"]
    return [_SHARD.sub(r"-*-of-\1", glob.escape(name)) for name in files]
