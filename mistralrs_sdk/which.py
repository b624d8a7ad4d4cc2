"""`Which`: the model a `Runner` loads, as the `mistralrs` package writes it."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any

import attrs

from mistralrs_sdk.adapters import LoraAdapterSpec
from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.builders.text_builders import GgufModelBuilder
from mistralrs_sdk.config import ModelDType
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.topology import Topology
from mistralrs_sdk.unsupported import unsupported

_Path = str | os.PathLike[str]
_Adapters = Sequence[LoraAdapterSpec | str] | None
"""LoRA adapters to load, each a spec or written alias=source; with any, even none of them, others
can be loaded later."""


class Architecture(enum.StrEnum):
    """What `Which.Plain(arch=...)` may state; the model says it itself, so it is only checked."""

    Gemma2 = "gemma2"
    Gemma3 = "gemma3"
    Llama = "llama"
    Mistral = "mistral"
    Qwen2 = "qwen2"
    Qwen3 = "qwen3"


def _architecture(value: Any) -> Architecture | None:
    if value is None:
        return None
    try:
        return Architecture(value)
    except ValueError:
        raise UnsupportedError(
            f"arch ({value!r}) is not supported; supported are {', '.join(Architecture)}"
        ) from None


def _no_variant(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"Which.{name} is not supported: use Which.Plain (safetensors) or Which.GGUF"
        )

    return staticmethod(refuse)


class Which:
    """Which model a `Runner` loads: `Which.Plain(...)` or `Which.GGUF(...)`.

    The other variants of `mistralrs` raise UnsupportedError when called.
    """

    @attrs.frozen
    class Plain:
        """A text model: a Hugging Face id or a folder (or, unlike in `mistralrs`, a .gguf file)."""

        model_id: _Path
        arch: Architecture | None = attrs.field(default=None, converter=_architecture)
        tokenizer_json: _Path | None = None
        dtype: ModelDType | str = attrs.field(default=ModelDType.AUTO, kw_only=True)
        hf_cache_path: _Path | None = attrs.field(default=None, kw_only=True)
        hf_revision: str | None = attrs.field(default=None, kw_only=True)
        topology: Topology | _Path | None = attrs.field(default=None, kw_only=True)
        imatrix: _Path | None = attrs.field(default=None, kw_only=True)
        adapters: _Adapters = attrs.field(default=None, kw_only=True)
        max_adapters: int | None = attrs.field(default=None, kw_only=True)
        max_rank: int | None = attrs.field(default=None, kw_only=True)
        max_bytes: int | None = attrs.field(default=None, kw_only=True)
        organization: Any = unsupported()
        write_uqff: Any = unsupported()
        from_uqff: Any = unsupported()
        calibration_file: Any = unsupported()
        auto_map_params: Any = unsupported()
        matformer_config_path: Any = unsupported()
        matformer_slice_name: Any = unsupported()

    @attrs.frozen
    class GGUF:
        """GGUF files of a Hugging Face repository or a folder; of a split model the first will do.

        The tokenizer and the config are in the files.
        """

        quantized_model_id: _Path
        quantized_filename: str | Sequence[str]
        dtype: ModelDType | str = attrs.field(default=ModelDType.AUTO, kw_only=True)
        tokenizer_json: _Path | None = attrs.field(default=None, kw_only=True)
        hf_cache_path: _Path | None = attrs.field(default=None, kw_only=True)
        hf_revision: str | None = attrs.field(default=None, kw_only=True)
        topology: Topology | _Path | None = attrs.field(default=None, kw_only=True)
        imatrix: _Path | None = attrs.field(default=None, kw_only=True)
        adapters: _Adapters = attrs.field(default=None, kw_only=True)
        max_adapters: int | None = attrs.field(default=None, kw_only=True)
        max_rank: int | None = attrs.field(default=None, kw_only=True)
        max_bytes: int | None = attrs.field(default=None, kw_only=True)
        tok_model_id: Any = unsupported()
        mmproj_filename: Any = unsupported()
        organization: Any = unsupported()
        write_uqff: Any = unsupported()
        calibration_file: Any = unsupported()
        auto_map_params: Any = unsupported()
        max_edge: Any = unsupported()
        encoder_cache_memory_bytes: Any = unsupported()
        matformer_config_path: Any = unsupported()
        matformer_slice_name: Any = unsupported()

    Embedding = _no_variant("Embedding")
    XLora = _no_variant("XLora")
    Lora = _no_variant("Lora")
    XLoraGGUF = _no_variant("XLoraGGUF")
    LoraGGUF = _no_variant("LoraGGUF")
    GGML = _no_variant("GGML")
    XLoraGGML = _no_variant("XLoraGGML")
    LoraGGML = _no_variant("LoraGGML")
    MultimodalPlain = _no_variant("MultimodalPlain")
    VisionPlain = _no_variant("VisionPlain")
    DiffusionPlain = _no_variant("DiffusionPlain")
    Speech = _no_variant("Speech")


def builder_of(which: Which.Plain | Which.GGUF, *, isq: str | None = None) -> ModelBuilder:
    """The builder for that model, with nothing set but `isq` and what `which` says.

    Raises:
        ConfigError: it is neither variant, or a value in it is wrong.
    """
    if isinstance(which, Which.Plain):
        builder = ModelBuilder(which.model_id)
    elif isinstance(which, Which.GGUF):
        files = which.quantized_filename
        builder = GgufModelBuilder(
            which.quantized_model_id, [files] if isinstance(files, str) else files
        )
    else:
        raise ConfigError(f"which ({which!r:.80}) must be Which.Plain(...) or Which.GGUF(...)")
    builder = builder.with_dtype(which.dtype)
    if which.tokenizer_json is not None:
        builder = builder.with_tokenizer_json(which.tokenizer_json)
    if which.hf_cache_path is not None:
        builder = builder.from_hf_cache_path(which.hf_cache_path)
    if which.hf_revision is not None:
        builder = builder.with_hf_revision(which.hf_revision)
    if isq is not None:
        builder = builder.with_isq(isq)
    if isinstance(which.topology, Topology):
        builder = builder.with_topology(which.topology)
    elif which.topology is not None:
        builder = builder.with_topology_from_path(which.topology)
    if which.imatrix is not None:
        builder = builder.with_imatrix(which.imatrix)
    return _with_adapters(builder, which)


def _with_adapters(builder: ModelBuilder, which: Which.Plain | Which.GGUF) -> ModelBuilder:
    limits = {name: getattr(which, name) for name in ("max_adapters", "max_rank", "max_bytes")}
    wanted = which.adapters
    if any(limit is not None for limit in limits.values()) or (wanted is not None and not wanted):
        builder = builder.with_lora(**limits)
    return builder.with_lora_adapters(wanted) if wanted else builder
