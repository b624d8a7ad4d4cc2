"""Open the checkpoint of an embedding model: the language model in it, and its pooling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk.config import ModelSource, Progress
from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.loading.sentence_transformers import (
    MODULES,
    Fetch,
    SentenceSettings,
    read_head,
    read_settings,
)
from mistralrs_sdk.models import SUPPORTED, headless, read_config
from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.embedding import Dense, EmbeddingHead, Normalize, Pooling
from mistralrs_sdk.models.hf_config import BOTH_WAYS

_HEAD = "lm_head.weight"
_PREFIX = "model."


@attrs.frozen(kw_only=True)
class EmbeddingCheckpoint:
    """An embedding model that was opened; the weights of the language model are on disk."""

    checkpoint: Checkpoint
    """The language model, by the names it has with a head, and without one."""
    config: ModelConfig
    head: EmbeddingHead
    settings: SentenceSettings

    @property
    def dimensions(self) -> int:
        """Size of a vector."""
        return self.head.dimensions(self.config.hidden_size)


def open_embedding(source: ModelSource, *, progress: Progress | None = None) -> EmbeddingCheckpoint:
    """Find and open what `source` names; downloads if it must.

    Raises:
        ModelLoadError: something is missing or damaged, or nothing says how it pools.
        UnsupportedError: the architecture or a module is not done here.
    """
    checkpoint = open_checkpoint(source, progress=progress)
    folder = checkpoint.files[0].parent
    if checkpoint.files[0].suffix != ".safetensors":
        raise UnsupportedError(
            f"{checkpoint.name} is a GGUF file: an embedding model is loaded from the folder or "
            "hub id with its safetensors (with_isq quantises it while it loads)"
        )
    checkpoint = attrs.evolve(
        checkpoint,
        config=_without_head(checkpoint.config),
        tensors=_with_prefix(checkpoint.tensors),
    )
    config = read_config(checkpoint.config)
    opened = EmbeddingCheckpoint(
        checkpoint=checkpoint,
        config=config,
        head=_head(checkpoint, folder, source),
        settings=read_settings(folder),
    )
    _check_sizes(opened)
    return opened


def _head(checkpoint: Checkpoint, folder: Path, source: ModelSource) -> EmbeddingHead:
    if (folder / MODULES).is_file():
        return read_head(folder, _fetch_from(folder, source))
    known = "qwen3-embedding" in checkpoint.name.lower().replace("_", "-")
    if known and checkpoint.config.get("model_type") == "qwen3":
        return EmbeddingHead(Pooling(("lasttoken",)), [Normalize()])
    raise ModelLoadError(
        f"{checkpoint.name} does not say how it pools: there is no {MODULES} beside its "
        "config.json, as sentence-transformers writes it; take the complete folder, or "
        "ModelBuilder if this is a model to chat with"
    )


def _fetch_from(folder: Path, source: ModelSource) -> Fetch:
    """Files in subfolders, which a download of a model leaves on the hub."""

    def fetch(name: str) -> Path:
        path = folder / name
        if path.is_file():
            return path
        if Path(source.model_id).expanduser().exists():
            raise ModelLoadError(f"{name} is missing in {folder}, and {MODULES} needs it")
        import huggingface_hub

        try:  # the name of a snapshot's folder is its commit
            return Path(
                huggingface_hub.hf_hub_download(
                    source.model_id,
                    name,
                    revision=folder.name,
                    cache_dir=source.cache_path,
                    token=source.token_source.resolve(),
                )
            )
        except Exception as error:  # of huggingface_hub, its HTTP library, the OS
            raise ModelLoadError(
                f"{name} of {source.model_id!r} is not in the cache, and getting it from the hub "
                f"failed ({type(error).__name__}: {error}): build again, or run "
                f"`hf download {source.model_id}`"
            ) from error

    return fetch


def _without_head(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config under the name the architecture has with a head, tied so that none is loaded."""
    names = hf.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    config = {**hf, "tie_word_embeddings": True}
    bare = headless(name)
    if bare is not None:
        if f"{bare}ForCausalLM" not in SUPPORTED:
            raise UnsupportedError(
                f"architecture {name} is not supported; supported are, with or without their "
                f"heads, {', '.join(SUPPORTED)}"
            )
        config["architectures"] = [f"{bare}ForCausalLM"]
    if config.get("use_bidirectional_attention") is True and name.startswith("Gemma3"):
        config |= {"use_bidirectional_attention": False, BOTH_WAYS: True}
    return config


def _with_prefix(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Name the tensors as in a model with a head, whose own is left out."""
    bare = "embed_tokens.weight" in tensors
    return {
        (_PREFIX + name if bare else name): tensor
        for name, tensor in tensors.items()
        if name != _HEAD
    }


def _check_sizes(opened: EmbeddingCheckpoint) -> None:
    size = opened.config.hidden_size * len(opened.head.pooling.modes)
    for step in opened.head.steps:
        if isinstance(step, Dense):
            if step.weight.shape[1] != size:
                raise ModelLoadError(
                    f"a dense layer of {opened.checkpoint.name} takes {step.weight.shape[1]} "
                    f"values and gets {size}: its files do not belong together"
                )
            size = step.weight.shape[0]
