"""`Which`: the model a `Runner` loads, as the `mistralrs` package writes it."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from mistralrs_sdk.adapters import LoraAdapterSpec
from mistralrs_sdk.builders.embedding_builder import EmbeddingModelBuilder
from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.builders.paged_attention import PagedAttentionMetaBuilder
from mistralrs_sdk.builders.text_builders import GgufModelBuilder
from mistralrs_sdk.config import MemoryGpuConfig, ModelDType, PagedAttentionConfig
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.topology import Topology
from mistralrs_sdk.unsupported import unsupported

_Path = str | os.PathLike[str]
_GOAL = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
PAGED_BY_DEFAULT = "auto"
_BYTES = {"mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}
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


class EmbeddingArchitecture(enum.StrEnum):
    """What `Which.Embedding(arch=...)` may state; it is only checked, likewise."""

    EmbeddingGemma = "embeddinggemma"
    Qwen3Embedding = "qwen3embedding"


_CLASSES = {
    EmbeddingArchitecture.EmbeddingGemma: "gemma3",
    EmbeddingArchitecture.Qwen3Embedding: "qwen3",
}
"""What the decoders of these embedding models are."""


def _one_of(kind: type[enum.StrEnum]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value is None:
            return None
        try:
            return kind(value)
        except ValueError:
            raise UnsupportedError(
                f"arch ({value!r}) is not supported; supported are {', '.join(kind)}"
            ) from None

    return read


def _no_variant(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        """Not done: `UnsupportedError`."""
        raise UnsupportedError(
            f"Which.{name} is not supported: use Which.Plain (safetensors), Which.GGUF or "
            "Which.Embedding"
        )

    return staticmethod(refuse)


class Which:
    """Which model a `Runner` loads: `Which.Plain`, `Which.GGUF` or `Which.Embedding`.

    The other variants of `mistralrs` raise UnsupportedError when called.
    """

    @attrs.frozen
    class Plain:
        """A text model: a Hugging Face id or a folder (or, unlike in `mistralrs`, a .gguf file)."""

        model_id: _Path
        arch: Architecture | None = attrs.field(default=None, converter=_one_of(Architecture))
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

    @attrs.frozen
    class Embedding:
        """A model that embeds: a Hugging Face id or a folder that says how it pools."""

        model_id: _Path
        arch: EmbeddingArchitecture | None = attrs.field(
            default=None, converter=_one_of(EmbeddingArchitecture)
        )
        tokenizer_json: _Path | None = None
        dtype: ModelDType | str = attrs.field(default=ModelDType.AUTO, kw_only=True)
        hf_cache_path: _Path | None = attrs.field(default=None, kw_only=True)
        hf_revision: str | None = attrs.field(default=None, kw_only=True)
        topology: Topology | _Path | None = attrs.field(default=None, kw_only=True)
        imatrix: _Path | None = attrs.field(default=None, kw_only=True)
        write_uqff: Any = unsupported()
        from_uqff: Any = unsupported()
        calibration_file: Any = unsupported()

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


_SETTINGS: Mapping[str, tuple[str, Any]] = {
    "max_prefill_chunk_tokens": ("with_max_prefill_chunk_tokens", 512),
    "max_decode_steps_before_prefill": ("with_max_decode_steps_before_prefill", 8),
    "mixed_batches": ("with_mixed_batches", True),
    "flashinfer": ("with_flashinfer", None),
    "cuda_graphs": ("with_cuda_graphs", None),
    "tensor_parallel": ("with_tensor_parallel", 1),
    "num_device_layers": ("with_device_mapping", None),
    "max_queue": ("with_max_queue", None),
    "prefix_cache_n": ("with_prefix_cache_n", 16),
    "chat_template": ("with_chat_template", None),
    "jinja_explicit": ("with_jinja_explicit", None),
    "seed": ("with_seed", None),
    "max_model_len": ("with_max_model_len", None),
    "num_threads": ("with_num_threads", None),
    "mcp_client_config": ("with_mcp_client", None),
    "code_execution_config": ("with_code_execution", None),
    "shell_config": ("with_shell_execution", None),
    "cpu": ("with_force_cpu", False),
    "throughput_logging": ("with_throughput_logging", False),
    "no_kv_cache": ("with_no_kv_cache", False),
    "paged_attn": ("with_paged_attn", PAGED_BY_DEFAULT),
}
"""Arguments of `Runner`: the method each comes to, and the default, which needs no call."""

WhichModel = Which.Plain | Which.GGUF | Which.Embedding
"""The variants there are."""


def builder_of(
    which: WhichModel, *, isq: str | None = None
) -> ModelBuilder | EmbeddingModelBuilder:
    """The builder for that model, with nothing set but `isq` and what `which` says.

    Raises:
        ConfigError: it is no variant, or a value in it is wrong.
    """
    if isinstance(which, Which.Plain):
        builder = ModelBuilder(which.model_id)
    elif isinstance(which, Which.GGUF):
        files = which.quantized_filename
        builder = GgufModelBuilder(
            which.quantized_model_id, [files] if isinstance(files, str) else files
        )
    elif isinstance(which, Which.Embedding):
        builder = EmbeddingModelBuilder(which.model_id)
    else:
        raise ConfigError(
            f"which ({which!r:.80}) must be Which.Plain(...), Which.GGUF(...) or "
            "Which.Embedding(...)"
        )
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
    if isinstance(builder, EmbeddingModelBuilder) or isinstance(which, Which.Embedding):
        return builder
    return _with_adapters(builder, which)


def configured(
    builder: ModelBuilder | EmbeddingModelBuilder, settings: Mapping[str, Any]
) -> ModelBuilder | EmbeddingModelBuilder:
    """The builder after what these arguments of `Runner` come to; a default changes nothing.

    Raises:
        ConfigError: a value is wrong, or has no part in a model that embeds.
    """
    for name, value in settings.items():
        method, default = _SETTINGS[name]
        if value == default:
            continue
        call = getattr(builder, method, None)
        if call is None:
            raise ConfigError(f"{name} has no part in a model that embeds: leave it out")
        builder = call() if default is False else call(value)
    return builder


def check_architecture(which: WhichModel, found: str) -> None:
    """Compare what `which` states with the architecture that was loaded.

    Raises:
        ConfigError: they are not the same.
    """
    arch = None if isinstance(which, Which.GGUF) else which.arch
    if arch is None:
        return
    if isinstance(arch, EmbeddingArchitecture):
        same = found.lower().startswith(_CLASSES[arch])
    else:
        same = found.lower() == f"{arch}forcausallm"
    if not same:
        raise ConfigError(
            f"arch ({arch.value!r}) is not what {builder_of(which).source.model_id} holds "
            f"({found}): leave it out, the model says what it is"
        )


def pool_of(
    *, on: bool, off: bool, size: Mapping[str, Any], shape: Mapping[str, Any]
) -> PagedAttentionConfig | str | None:
    """What "paged_attn" of `configured` is; PAGED_BY_DEFAULT if nothing of it was given.

    `size` and `shape` have a None for each argument that was not given.

    Raises:
        ConfigError: two arguments contradict, or a value is wrong.
    """
    sizes = [name for name, value in size.items() if value is not None]
    shapes = [name for name, value in shape.items() if value is not None]
    if len(sizes) > 1:
        raise ConfigError(f"{' and '.join(sizes)} contradict: the pool has one size; keep one")
    asked = [*(["paged_attn"] if on else ()), *sizes, *shapes]
    if off and asked:
        raise ConfigError(
            f"no_paged_attn and {asked[0]} contradict: without paging there is no pool of blocks; "
            "leave one of them out"
        )
    if off:
        return None
    if not asked:
        return PAGED_BY_DEFAULT
    paged = PagedAttentionMetaBuilder()
    if sizes:
        paged = paged.with_gpu_memory(_MEMORY[sizes[0]](size[sizes[0]]))
    if shape["pa_blk_size"] is not None:
        paged = paged.with_block_size(shape["pa_blk_size"])
    if shape["pa_cache_type"] is not None:
        paged = paged.with_paged_cache_type(shape["pa_cache_type"])
    return paged.build()


def _memory_goal(goal: Any) -> MemoryGpuConfig:
    """Read a fraction (0.9), a size ("4GiB") or a number of tokens ("65536tokens")."""
    if isinstance(goal, int | float) and not isinstance(goal, bool):
        return MemoryGpuConfig.Utilization(goal)
    match = _GOAL.fullmatch(goal) if isinstance(goal, str) else None
    number, unit = match.groups() if match else ("", "?")
    if unit == "":
        return MemoryGpuConfig.Utilization(float(number))
    if unit.lower() == "tokens" and number.isdecimal():
        return MemoryGpuConfig.ContextSize(int(number))
    if unit.lower() in _BYTES:
        return MemoryGpuConfig.MbAmount(int(float(number) * _BYTES[unit.lower()]) // 2**20)
    raise ConfigError(
        f'memory_goal ({goal!r}) must be a fraction such as 0.9, a size such as "4GiB" or "500MB", '
        'or a number of tokens such as "65536tokens"'
    )


_MEMORY = {
    "pa_gpu_mem": MemoryGpuConfig.MbAmount,
    "pa_gpu_mem_usage": MemoryGpuConfig.Utilization,
    "pa_ctxt_len": MemoryGpuConfig.ContextSize,
    "memory_goal": _memory_goal,
}
"""What the arguments that size the pool come to."""


def _with_adapters(builder: ModelBuilder, which: Which.Plain | Which.GGUF) -> ModelBuilder:
    limits = {name: getattr(which, name) for name in ("max_adapters", "max_rank", "max_bytes")}
    wanted = which.adapters
    if any(limit is not None for limit in limits.values()) or (wanted is not None and not wanted):
        builder = builder.with_lora(**limits)
    return builder.with_lora_adapters(wanted) if wanted else builder
