"""The settings of an engine and of where its model comes from: values that check themselves."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import attrs

from mistralrs_sdk.adapters import LoraAdapterSpec, LoraRuntimeConfig
from mistralrs_sdk.device_map import DeviceMapSetting, as_device_mapping
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.isq import Isq, parse_isq
from mistralrs_sdk.token_source import TokenSource
from mistralrs_sdk.topology import Topology, refuse_unused_imatrix, require_one_device

Progress = bool | Callable[[str, int, int], None]
"""Whether to show progress bars, or a function called with (what, done, total)."""

BLOCK_SIZES = (8, 16, 32)
"""Tokens per KV block that can be asked for."""

MAX_SEED = 2**64 - 1
MAX_THREADS = 1024
MAX_RANKS = 256

_MEMORY_KINDS = {
    "mb": "MbAmount",
    "best_effort": "BestEffortMbAmount",
    "utilization": "Utilization",
    "context": "ContextSize",
}
_DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")


class ModelDType(enum.StrEnum):
    """Number type of weights and activations. AUTO lets the device decide."""

    AUTO = "auto"
    Auto = AUTO  # mistral.rs' name
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


class PagedCacheType(enum.StrEnum):
    """Number type of cached keys and values. AUTO is the type of the activations."""

    AUTO = "auto"
    Auto = AUTO  # mistral.rs' name
    F8E4M3 = "f8e4m3"


_Choice = TypeVar("_Choice", ModelDType, PagedCacheType)


def _choice(name: str, kind: type[_Choice]) -> Callable[[Any], _Choice]:
    """A converter that takes a member of `kind` or its text."""

    def convert(value: Any) -> _Choice:
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{name} ({value!r}) must be one of {', '.join(kind)}") from None

    return convert


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_int(name: str, value: Any, *, minimum: int, maximum: int | None = None) -> None:
    if not _is_int(value):
        raise ConfigError(f"{name} ({value!r}) must be a whole number of at least {minimum}")
    if value < minimum:
        raise ConfigError(f"{name} ({value}) must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{name} ({value}) must be at most {maximum}")


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be True or False")


@attrs.frozen(repr=False)
class MemoryGpuConfig:
    """How much memory the KV cache gets, on a GPU or in RAM; made by a class method.

    Raises:
        ConfigError: a size is no whole number above 0, or a fraction is not in (0, 1].
    """

    kind: Literal["mb", "best_effort", "utilization", "context"]
    amount: float
    minimum: int | None = None
    """For BestEffortMbAmount: the MiB below which loading fails."""

    @classmethod
    def MbAmount(cls, mb: int) -> MemoryGpuConfig:  # noqa: N802 (mistral.rs' name)
        """That many MiB; loading fails if they are not free."""
        return cls("mb", mb)

    @classmethod
    def BestEffortMbAmount(  # noqa: N802 (mistral.rs' name)
        cls, target_mb: int, min_mb: int | None = None
    ) -> MemoryGpuConfig:
        """That many MiB or what is safely free; below `min_mb`, if given, loading fails."""
        return cls("best_effort", target_mb, min_mb)

    @classmethod
    def Utilization(cls, fraction: float) -> MemoryGpuConfig:  # noqa: N802 (mistral.rs' name)
        """That part, in (0, 1], of a GPU's memory, weights included; on a CPU, of the free RAM."""
        return cls("utilization", fraction)

    @classmethod
    def ContextSize(cls, tokens: int) -> MemoryGpuConfig:  # noqa: N802 (mistral.rs' name)
        """Room for that many tokens, all running sequences together."""
        return cls("context", tokens)

    def __attrs_post_init__(self) -> None:
        if self.kind not in _MEMORY_KINDS:
            raise ConfigError(
                f"MemoryGpuConfig kind ({self.kind!r}) is unknown: use MbAmount(n), "
                "BestEffortMbAmount(n), Utilization(f) or ContextSize(tokens)"
            )
        name = _MEMORY_KINDS[self.kind]
        if self.kind == "utilization":
            fraction = self.amount
            if isinstance(fraction, bool) or not isinstance(fraction, int | float):
                raise ConfigError(f"{name} ({fraction!r}) must be a number above 0, at most 1")
            if not 0 < fraction <= 1:
                raise ConfigError(f"{name} ({fraction}) must be above 0 and at most 1")
        else:
            _require_int(name, self.amount, minimum=1)
        if self.minimum is None:
            return
        if self.kind != "best_effort":
            raise ConfigError(f"{name} takes no minimum ({self.minimum!r}): use BestEffortMbAmount")
        _require_int("BestEffortMbAmount min_mb", self.minimum, minimum=1)
        if self.minimum > self.amount:
            raise ConfigError(
                f"BestEffortMbAmount min_mb ({self.minimum}) must be at most target_mb "
                f"({self.amount})"
            )

    def __str__(self) -> str:
        least = "" if self.minimum is None else f", min_mb={self.minimum}"
        return f"{_MEMORY_KINDS[self.kind]}({self.amount}{least})"

    def __repr__(self) -> str:
        return f"MemoryGpuConfig.{self}"


@attrs.frozen(kw_only=True)
class PagedAttentionConfig:
    """The KV cache as a pool of blocks shared by all sequences.

    Raises:
        ConfigError: a value is out of range.
    """

    block_size: int = 32
    """Tokens per block: 8, 16 or 32."""
    gpu_memory: MemoryGpuConfig | None = None
    """Size of the pool; None sizes it from the free memory and what the sequences can use."""
    cache_type: PagedCacheType = attrs.field(
        default=PagedCacheType.AUTO, converter=_choice("cache_type", PagedCacheType)
    )

    def __attrs_post_init__(self) -> None:
        if not _is_int(self.block_size) or self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size ({self.block_size!r}) must be 8, 16 or 32")
        if self.gpu_memory is not None and not isinstance(self.gpu_memory, MemoryGpuConfig):
            raise ConfigError(
                f"gpu_memory ({self.gpu_memory!r}) must be a MemoryGpuConfig, for example "
                "MemoryGpuConfig.Utilization(0.5), or None for an automatic size"
            )


def _text(value: Any) -> Any:
    """A path as a string; anything else as it is, for the check that follows."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _file_names(files: str | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    if isinstance(files, str):
        raise ConfigError(f"files ({files!r}) must be a list of file names: [{files!r}]")
    return tuple(_text(name) for name in files)


def _path_field() -> Any:
    return attrs.field(default=None, converter=_text)


@attrs.frozen(kw_only=True)
class ModelSource:
    """Where the weights, the tokenizer and the chat template come from; nothing is opened here."""

    model_id: str = attrs.field(converter=_text)
    """A Hugging Face id, a folder, or a `.gguf` file."""
    files: tuple[str, ...] = attrs.field(default=(), converter=_file_names)
    """The GGUF files to take from `model_id`; empty: found out."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None for its main branch."""
    cache_path: str | None = _path_field()
    """Folder of the download cache; None for huggingface_hub's own."""
    token_source: TokenSource = attrs.field(factory=TokenSource.CacheToken)
    tokenizer_json: str | None = _path_field()
    """A tokenizer.json that replaces the model's."""
    chat_template: str | None = _path_field()
    """Jinja text, or the path of a .jinja or .json file; replaces the model's template."""
    jinja_explicit: str | None = _path_field()
    """Path of a Jinja file that overrides every other template."""

    def __attrs_post_init__(self) -> None:
        for name in attrs.fields_dict(ModelSource):
            value = getattr(self, name)
            if name in ("files", "token_source") or (value is None and name != "model_id"):
                continue
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"{name} ({value!r}) must be a non-empty string or path")
        for file in self.files:
            if not isinstance(file, str) or not file.strip():
                raise ConfigError(f"files: {file!r} must be a non-empty file name")
        if not isinstance(self.token_source, TokenSource):
            # the value stays out of the message: it may be a token
            raise ConfigError(
                'token_source must be a TokenSource or its text, such as "env:HF_TOKEN"'
            )


def _adapter_specs(adapters: Iterable[LoraAdapterSpec | str]) -> tuple[LoraAdapterSpec, ...]:
    return tuple(LoraAdapterSpec.parse(a) if isinstance(a, str) else a for a in adapters)


def _prefix_count(value: Any) -> Any:
    return None if _is_int(value) and value == 0 else value


@attrs.frozen(kw_only=True)
class EngineConfig:
    """How the engine runs: limits of a step, the KV cache, number type, device. Never changed.

    Raises:
        ConfigError: a value is out of range, or two settings contradict.
        UnsupportedError: a quantisation or a device for some layers that is not there.
        AdapterError: the alias of an adapter cannot be one.
    """

    max_num_seqs: int = 32
    """Most sequences running at once; others wait."""
    max_num_batched_tokens: int = 4096
    """Most tokens one step computes."""
    max_prefill_chunk_tokens: int = 512
    """Most prompt tokens one step computes."""
    max_decode_steps_before_prefill: int = 8
    """Decode steps that a waiting prompt lets pass at most."""
    prefix_cache_n: int | None = attrs.field(default=16, converter=_prefix_count)
    """Prefixes kept for reuse; None (or 0) keeps none."""
    no_kv_cache: bool = False
    """Compute every token's keys and values again each step; no prefix cache, no paging."""
    paged_attn: PagedAttentionConfig | Literal["auto"] | None = "auto"
    """The paged KV cache; "auto" pages with a pool sized by the machine, None does not page."""
    mixed_batches: bool = True
    """Whether running decodes ride along in prefill steps."""
    max_queue: int | None = None
    """Most requests waiting for a place among the running; None: no limit, senders wait."""
    max_model_len: int | None = None
    """Longest prompt plus completion, in tokens; None for what the model was made for."""
    dtype: ModelDType = attrs.field(default=ModelDType.AUTO, converter=_choice("dtype", ModelDType))
    device: str | None = None
    """"cpu", "cuda", "cuda:1" or "mps"; None picks the best there is."""
    device_mapping: DeviceMapSetting | None = attrs.field(default=None, converter=as_device_mapping)
    """Where the layers go if several devices hold them; None: all are on `device`."""
    isq: Isq | None = attrs.field(default=None, converter=attrs.converters.optional(parse_isq))
    """What weights are quantised to while loading: a type, or bits; None leaves them."""
    topology: Topology | None = None
    """The same for some layers or modules, where it wins over `isq`."""
    imatrix: str | None = _path_field()
    """Path of an importance matrix for the types that use one."""
    flashinfer: bool | None = None
    """Whether FlashInfer attends on a CUDA device; None where it can, and is not switched off."""
    cuda_graphs: bool | None = None
    """Whether decode steps are captured as CUDA graphs; None where it can be, likewise."""
    tensor_parallel: int = 1
    """Ranks, each a process with a device, that hold the model together."""
    num_threads: int | None = None
    """CPU threads for arithmetic; None for the physical cores this process may use."""
    seed: int | None = None
    """Makes the seeds of requests that bring none repeatable; None draws fresh ones."""
    throughput_logging: bool = False
    """Log tokens per second and the numbers of running and waiting sequences now and then."""
    lora_runtime_config: LoraRuntimeConfig | None = None
    """Limits of LoRA adapters; None: no adapters, or the usual limits if there are some."""
    lora_adapters: tuple[LoraAdapterSpec, ...] = attrs.field(default=(), converter=_adapter_specs)
    """LoRA adapters that are loaded with the model."""

    @property
    def lora(self) -> LoraRuntimeConfig | None:
        """The limits of adapters in effect; None if the model takes none."""
        if self.lora_runtime_config is None and self.lora_adapters:
            return LoraRuntimeConfig()
        return self.lora_runtime_config

    def __attrs_post_init__(self) -> None:
        _require_int("max_num_seqs", self.max_num_seqs, minimum=1)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, minimum=1)
        _require_int("max_prefill_chunk_tokens", self.max_prefill_chunk_tokens, minimum=1)
        _require_int(
            "max_decode_steps_before_prefill", self.max_decode_steps_before_prefill, minimum=1
        )
        if self.prefix_cache_n is not None:
            _require_int("prefix_cache_n", self.prefix_cache_n, minimum=0)
        if self.max_model_len is not None:
            _require_int("max_model_len", self.max_model_len, minimum=1)
        _require_int("tensor_parallel", self.tensor_parallel, minimum=1, maximum=MAX_RANKS)
        if self.num_threads is not None:
            _require_int("num_threads", self.num_threads, minimum=1, maximum=MAX_THREADS)
        if self.seed is not None:
            _require_int("seed", self.seed, minimum=0, maximum=MAX_SEED)
        _require_bool("no_kv_cache", self.no_kv_cache)
        _require_bool("throughput_logging", self.throughput_logging)
        if self.device is not None and not (
            isinstance(self.device, str) and _DEVICE.fullmatch(self.device)
        ):
            raise ConfigError(
                f'device ({self.device!r}) must be "cpu", "cuda", "cuda:N" or "mps"; '
                "leave it unset for the best one"
            )
        _require_bool("mixed_batches", self.mixed_batches)
        for name in ("flashinfer", "cuda_graphs"):
            if getattr(self, name) is not None:
                _require_bool(name, getattr(self, name))
        if self.max_queue is not None:
            _require_int("max_queue", self.max_queue, minimum=0)
        paged = self.paged_attn
        if paged not in (None, "auto") and not isinstance(paged, PagedAttentionConfig):
            raise ConfigError(
                f"paged_attn ({paged!r}) must be a PagedAttentionConfig or None: "
                "end the PagedAttentionMetaBuilder chain with .build()"
            )
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise ConfigError(
                f"topology ({self.topology!r:.80}) must be a Topology: read YAML with "
                "Topology.from_str or Topology.from_path"
            )
        if self.imatrix is not None and (
            not isinstance(self.imatrix, str) or not self.imatrix.strip()
        ):
            raise ConfigError(f"imatrix ({self.imatrix!r}) must be a non-empty path")
        self._check_adapters()
        self._refuse_contradictions()

    def _check_adapters(self) -> None:
        limits = self.lora_runtime_config
        if limits is not None and not isinstance(limits, LoraRuntimeConfig):
            raise ConfigError(f"lora_runtime_config ({limits!r}) must be a LoraRuntimeConfig")
        aliases = set()
        for spec in self.lora_adapters:
            if not isinstance(spec, LoraAdapterSpec):
                raise ConfigError(
                    f'lora_adapters: {spec!r} must be a LoraAdapterSpec: LoraAdapterSpec("alias", '
                    '"source")'
                )
            if spec.alias in aliases:
                raise ConfigError(f"lora_adapters: two adapters have the alias {spec.alias!r}")
            aliases.add(spec.alias)
        if self.lora is not None and len(aliases) > self.lora.max_adapters:
            raise ConfigError(
                f"lora_adapters has {len(aliases)} adapters and max_adapters is "
                f"{self.lora.max_adapters}: raise that with with_lora_runtime_config before"
            )

    def _refuse_contradictions(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs one token a "
                "step; set max_num_seqs lower, or max_num_batched_tokens higher, before this"
            )
        if self.topology is not None:
            require_one_device(self.topology, self.device)
        if self.imatrix is not None:
            refuse_unused_imatrix(self.imatrix, isq=self.isq, topology=self.topology)
        self._refuse_useless_switches()
        if self.device_mapping is not None:
            self._refuse_unmapped(self.device_mapping)
        if self.tensor_parallel > 1:
            self._refuse_undivided()
        if not isinstance(self.paged_attn, PagedAttentionConfig):
            return
        if self.no_kv_cache:
            raise ConfigError(
                "no_kv_cache and paged_attn contradict: without a KV cache there is nothing to "
                "page; leave one of them out"
            )
        if self.paged_attn.cache_type is PagedCacheType.F8E4M3 and self.device == "cpu":
            raise ConfigError(
                'paged_attn cache_type (f8e4m3) is not possible with device ("cpu"): '
                'use cache_type "auto" there'
            )

    def _refuse_unmapped(self, mapping: DeviceMapSetting) -> None:
        """What is not done where layers are on several devices."""
        first = mapping.first_device
        own = "cuda:0" if self.device == "cuda" else self.device
        if own is not None and first is not None and own != first:
            raise ConfigError(
                f"device ({self.device!r}) and device_mapping ({mapping}) contradict: the first "
                f"device of a map is the model's ({first}); leave device out"
            )
        self._refuse_beside(
            f"device_mapping ({mapping})",
            {
                f"tensor_parallel ({self.tensor_parallel})": self.tensor_parallel > 1,
                "topology": self.topology is not None
                and any(layer.device is not None for _, layer in self.topology.entries),
            },
        )

    def _refuse_undivided(self) -> None:
        """What ranks do not do together."""
        self._refuse_beside(
            f"tensor_parallel ({self.tensor_parallel})",
            {
                'device ("mps")': self.device == "mps",
            },
        )

    def _refuse_beside(self, setting: str, others: Mapping[str, bool]) -> None:
        """Refuse those of `others` that are there, and what neither kind of division does."""
        unpaged = self.paged_attn is None and not self.no_kv_cache
        always = {"paged_attn (None)": unpaged, "LoRA adapters": self.lora is not None}
        for name, there in {**always, **others}.items():
            if there:
                raise ConfigError(f"{setting} and {name} do not go together: leave one of them out")

    def _refuse_useless_switches(self) -> None:
        """FlashInfer reads a paged cache, and only what it computes is captured."""
        unpaged = "no_kv_cache (True)" if self.no_kv_cache else "paged_attn (None)"
        for name in ("flashinfer", "cuda_graphs"):
            if getattr(self, name) and (self.no_kv_cache or self.paged_attn is None):
                raise ConfigError(
                    f"{name} (True) and {unpaged} contradict: FlashInfer reads a paged KV cache; "
                    "leave one of them out"
                )
        if self.cuda_graphs and self.flashinfer is False:
            raise ConfigError(
                "cuda_graphs (True) and flashinfer (False) contradict: only FlashInfer's attention "
                "can be captured; leave one of them out"
            )
        cache_type = getattr(self.paged_attn, "cache_type", PagedCacheType.AUTO)
        if self.flashinfer is False and cache_type is not PagedCacheType.AUTO:
            raise ConfigError(
                f"paged_attn cache_type ({cache_type}) and flashinfer (False) contradict: only "
                "FlashInfer reads that type; leave one of them out"
            )
