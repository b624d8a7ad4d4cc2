"""From the name of a model to files on this machine, through the Hugging Face cache."""

from __future__ import annotations

import re
from pathlib import Path

from mistralrs_sdk.config import ModelSource, Progress
from mistralrs_sdk.errors import ConfigError, ModelLoadError
from mistralrs_sdk.loading.progress import download_bar

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model"]
_ELSEWHERE = ["*/*", "consolidated*"]
"""Subfolders and Mistral's second copy of the weights."""


def locate(source: ModelSource, progress: Progress | None) -> Path:
    """Return the folder or the GGUF file that `source` means, downloading it if it is a hub id.

    Raises:
        ModelLoadError: nothing is there; the message says where it was looked for.
    """
    path = Path(source.model_id).expanduser()
    if path.is_file():
        if source.files:
            raise ConfigError(
                f"{source.model_id!r} is a file, so it cannot hold {list(source.files)}: "
                "give the folder or the hub id they are in"
            )
        return path
    if path.is_dir():
        return _choose_gguf(path, source)
    if not _HUB_ID.fullmatch(source.model_id) or source.model_id.endswith(".gguf"):
        raise ModelLoadError(
            f"{source.model_id!r} does not exist (looked in {Path.cwd()}): give a folder, "
            "a .gguf file or a Hugging Face id such as 'Qwen/Qwen3-4B'"
        )
    return _choose_gguf(_download(source, progress), source)


def _choose_gguf(folder: Path, source: ModelSource) -> Path:
    """Return the GGUF file in `folder` that is meant, or the folder if it holds safetensors."""
    if source.files:
        for name in source.files:
            if not (folder / name).is_file():
                found = sorted(p.name for p in folder.glob("*.gguf"))
                raise ModelLoadError(f"{name!r} is not in {folder}: it holds {found or 'no GGUF'}")
        return folder / sorted(source.files)[0]
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    first_shards = [p for p in ggufs if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", p.name)]
    if len(first_shards) == 1:
        return first_shards[0]
    if ggufs:
        raise ModelLoadError(
            f"{folder} holds several GGUF files: choose one with "
            f"GgufModelBuilder({source.model_id!r}, [file]); there are {[p.name for p in ggufs]}"
        )
    raise ModelLoadError(f"{folder} holds neither config.json nor a .gguf file: it is no model")


def _download(source: ModelSource, progress: Progress | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    repo, revision = source.model_id, source.revision or "main"
    where = f"{repo!r} at revision {revision!r}"
    token = source.token_source.resolve()

    def snapshot(weights: list[str], *, local_files_only: bool = False) -> Path:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=source.cache_path,
            token=token,
            allow_patterns=[*_SMALL_FILES, *weights],
            ignore_patterns=[p for p in _ELSEWHERE if not any("/" in name for name in weights)],
            tqdm_class=download_bar(progress),
            local_files_only=local_files_only,
        )
        return Path(folder)

    try:
        if source.files:
            return snapshot(list(source.files))
        folder = snapshot(["*.safetensors"])
        if (folder / "config.json").is_file() or list(folder.glob("*.gguf")):
            return folder
        names = huggingface_hub.list_repo_files(repo, revision=revision, token=token)
        ggufs = [n for n in names if n.endswith(".gguf")]
        hint = f"choose one of {ggufs}" if ggufs else "it holds no weights this package reads"
        raise ModelLoadError(f"{where} has no config.json: {hint} (GgufModelBuilder(repo, [file]))")
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{where} is gated: accept its terms on its page, then run `hf auth login` "
            "or pass with_token_source(...)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo!r} has no revision {revision!r}: see with_hf_revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{repo!r} is no folder here and no model on the hub (or it is private and the "
            "token may not read it): check the name, or pass with_token_source(...)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if huggingface_hub.is_offline_mode():
            raise ModelLoadError(
                f"{where} is not in the cache and HF_HUB_OFFLINE is set: run "
                f"`hf download {repo}` where there is a network, or unset it"
            ) from error
        raise ModelLoadError(
            f"{where} is not in the cache and the hub cannot be reached: check the network, "
            f"then run `hf download {repo}`"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelLoadError(f"downloading {where} failed: {error}") from error
    except OSError as error:
        raise ModelLoadError(
            f"downloading {where} failed: {error}; `hf download {repo}` resumes it"
        ) from error
