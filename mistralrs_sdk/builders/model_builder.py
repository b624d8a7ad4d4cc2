"""`ModelBuilder`: describe a model step by step, then `await build()` it."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import attrs

from mistralrs_sdk.builders.adapter_methods import AdapterMethods
from mistralrs_sdk.builders.refused import RefusedSettings
from mistralrs_sdk.config import (
    EngineConfig,
    ModelDType,
    ModelSource,
    PagedAttentionConfig,
    Progress,
    TokenSource,
)
from mistralrs_sdk.device_map import DeviceMapSetting
from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.isq import IsqBits, IsqType
from mistralrs_sdk.logs import configure_logging
from mistralrs_sdk.tools.settings import ToolMethods, ToolSettings
from mistralrs_sdk.topology import Topology

if TYPE_CHECKING:
    from mistralrs_sdk.handle.model import Model
    from mistralrs_sdk.plan import MemoryPlan
    from mistralrs_sdk.serving.served_model import ServedModel

PathLike = str | os.PathLike[str]
_WITHOUT_ARGUMENT = (
    "with_force_cpu",
    "with_lora",
    "with_no_kv_cache",
    "with_throughput_logging",
)
_NONE_IS_A_VALUE = ("with_max_queue", "with_paged_attn", "with_prefix_cache_n")


@attrs.frozen(init=False, repr=False)
class ModelBuilder(AdapterMethods, ToolMethods, RefusedSettings):
    """Describes a model: `await ModelBuilder("path/to/model.gguf").with_max_num_seqs(8).build()`.

    `model_id` is a Hugging Face id, a local folder or a `.gguf` file; what it holds is found out
    when it is built. A builder never changes: each method returns a new one. It can be compared,
    hashed and pickled, and its repr shows what was set, but never a token.

    Raises:
        ConfigError, AdapterError: from each method, at once: out of range or contradicts another.
        UnsupportedError: likewise, for what this package does not do.
    """

    source: ModelSource
    """Where the files come from."""
    config: EngineConfig
    """How the engine runs."""
    progress: Progress | None
    """True or False for bars or none, a function called with (what, done, total), or None: bars
    if stderr is a terminal."""
    force_cpu: bool
    logs_to_stderr: bool
    tools: ToolSettings
    """What is executed here when the model calls it, and the sessions that are kept."""

    def __init__(self, model_id: PathLike) -> None:
        self._start(ModelSource(model_id=model_id_text(model_id)))

    async def build(self) -> Model:
        """Load the model and start its engine.

        Raises:
            ModelLoadError: it cannot be found, fetched, read or held in memory.
            UnsupportedError: it needs something this package does not do; the message says what.
        """
        from mistralrs_sdk.handle.model import Model

        self._start_logging()
        return await Model.build(self)

    async def serve(self) -> ServedModel:
        """Load the model and start its engine, without a handle: `Model` does this to load it.

        Raises:
            ModelLoadError, UnsupportedError: as `build()`.
        """
        from mistralrs_sdk.serving.served_model import ServedModel

        self._start_logging()
        return await ServedModel.build(self)

    async def plan(self) -> MemoryPlan:
        """Work out what `build()` would take in memory, without reading the weights.

        Opens headers and small files. A hub id is fetched into the cache as by `build()`, weights
        included: their headers are part of them.

        Raises:
            ConfigError, ModelLoadError, UnsupportedError: as `build()`, also for sizes that do
                not fit.
        """
        import anyio.to_thread

        from mistralrs_sdk.engine.build import plan_source
        from mistralrs_sdk.serving.event_loop import on_loop

        shown = on_loop(self.progress, asyncio.get_running_loop())
        work = functools.partial(plan_source, self.source, self.config, progress=shown)
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)

    # How requests share the engine

    def with_max_num_seqs(self, max_num_seqs: int) -> Self:
        """Run at most this many sequences at once; others wait. Default 32, at least 1."""
        return self._configure("with_max_num_seqs", max_num_seqs=max_num_seqs)

    def with_max_num_batched_tokens(self, tokens: int) -> Self:
        """Compute at most this many tokens a step. Default 4096, at least `max_num_seqs`."""
        return self._configure("with_max_num_batched_tokens", max_num_batched_tokens=tokens)

    def with_max_prefill_chunk_tokens(self, tokens: int) -> Self:
        """Compute at most this many prompt tokens a step on an accelerator. Default 512.

        Divided over the prompts that run. CPU scheduling does not use it: there
        `with_max_num_batched_tokens` splits prompts.
        """
        return self._configure("with_max_prefill_chunk_tokens", max_prefill_chunk_tokens=tokens)

    def with_max_decode_steps_before_prefill(self, steps: int) -> Self:
        """Let a waiting prompt wait for at most this many decode steps. Default 8, at least 1."""
        return self._configure(
            "with_max_decode_steps_before_prefill", max_decode_steps_before_prefill=steps
        )

    def with_mixed_batches(self, mixed: bool) -> Self:
        """Let running decodes ride along in prefill steps (True, the default), or wait."""
        return self._configure("with_mixed_batches", mixed_batches=mixed)

    def with_max_queue(self, max_queue: int | None) -> Self:
        """Refuse requests with `QueueFullError` while this many wait. Default None: no limit."""
        return self._configure("with_max_queue", max_queue=max_queue)

    # What is kept between steps and requests

    def with_prefix_cache_n(self, n: int | None) -> Self:
        """Reuse the keys and values of prompt prefixes. Default 16; None or 0 turns it off.

        Prefixes share the blocks of the KV pool and stay until their blocks are needed, least
        recently used first: with paging any other number means the same.
        """
        return self._configure("with_prefix_cache_n", prefix_cache_n=n)

    def with_no_kv_cache(self) -> Self:
        """Keep no keys and values at all: slow, and without prefix cache and paging."""
        return self._configure("with_no_kv_cache", no_kv_cache=True)

    def with_paged_attn(self, config: PagedAttentionConfig | None) -> Self:
        """Shape the pool of KV blocks (see `PagedAttentionMetaBuilder`), or None: do not page.

        Paging is on by default, with an automatically sized pool. Without it each sequence has a
        cache of its own, and sequences of equal length run together.
        """
        return self._configure("with_paged_attn", paged_attn=config)

    def with_max_model_len(self, tokens: int) -> Self:
        """Limit prompt plus completion to this many tokens. Default: what the model can do."""
        return self._configure("with_max_model_len", max_model_len=tokens)

    # Where and how it computes

    def with_dtype(self, dtype: ModelDType | str) -> Self:
        """Compute in this type: a `ModelDType` or "auto", "bf16", "f16", "f32". Default AUTO."""
        return self._configure("with_dtype", dtype=dtype)

    def with_device(self, device: str) -> Self:
        """Run on "cpu", "cuda", "cuda:N" or "mps". Default: the best there is."""
        if self.force_cpu and device != "cpu":
            raise ConfigError(
                f"with_device({device!r}): contradicts with_force_cpu(); leave one of them out"
            )
        return self._configure("with_device", device=device)

    def with_force_cpu(self) -> Self:
        """Run on the CPU even if there is a GPU."""
        if self.config.device not in (None, "cpu"):
            raise ConfigError(
                f"with_force_cpu(): contradicts with_device({self.config.device!r}); "
                "leave one of them out"
            )
        return self._configure("with_force_cpu", device="cpu")._replace(force_cpu=True)

    def with_device_mapping(self, mapping: DeviceMapSetting | str) -> Self:
        """Spread the layers over several devices: a `DeviceMapSetting`, or "auto", or "0:16;1:16".

        The text names CUDA devices (or "cpu") and their numbers of layers. Default: the model's
        device holds all.
        """
        return self._configure("with_device_mapping", device_mapping=mapping)

    def with_flashinfer(self, on: bool = True) -> Self:
        """Attend with FlashInfer on an NVIDIA GPU, or never. Default: where it can.

        `build()` fails with every reason if it is asked for and cannot be had. Unset,
        MISTRALRS_FLASHINFER_DECODE can switch it off.
        """
        return self._configure("with_flashinfer", flashinfer=on)

    def with_cuda_graphs(self, on: bool = True) -> Self:
        """Capture decode steps as CUDA graphs, or never.

        Default: where FlashInfer attends, unless ranks hold the model.

        `build()` fails with every reason if they are asked for and cannot be had. Unset,
        MISTRALRS_CUDA_GRAPHS can switch them off.
        """
        return self._configure("with_cuda_graphs", cuda_graphs=on)

    def with_tensor_parallel(self, ranks: int) -> Self:
        """Divide the model over this many CUDA devices or processes. Default 1: not at all.

        `build()` starts the other ranks on this machine. Under torchrun, or with the variables of
        docs/tensor_parallel.md, they are processes of their own that call `serve_rank(builder)`.
        """
        return self._configure("with_tensor_parallel", tensor_parallel=ranks)

    def with_num_threads(self, threads: int) -> Self:
        """Use this many CPU threads, 1 to 1024. Default: the physical cores it may use.

        Holds for the engine's thread, and for other torch work only in threads started after it.
        """
        return self._configure("with_num_threads", num_threads=threads)

    def with_seed(self, seed: int) -> Self:
        """Make requests without a seed of their own repeatable: 0 to 2**64 - 1. Default: none."""
        return self._configure("with_seed", seed=seed)

    # What its weights are quantised to while loading

    def with_isq(self, isq: IsqType | str) -> Self:
        """Quantise to this type: an `IsqType`, or text: "q4k" ("4" is four bits). Default: no.

        Embedding and head get a wider type; of this and `with_auto_isq`, the later one holds.
        """
        return self._configure("with_isq", isq=isq)

    def with_auto_isq(self, bits: IsqBits | int | str) -> Self:
        """Quantise to 2, 3, 4, 5, 6 or 8 bits a weight, as suits the device. Default: no."""
        try:
            isq = IsqBits(bits)
        except ValueError:
            raise ConfigError(
                f"with_auto_isq({bits!r}): must be 2, 3, 4, 5, 6 or 8; for a type use with_isq"
            ) from None
        return self._configure("with_auto_isq", isq=isq)

    def with_topology(self, topology: Topology) -> Self:
        """Quantise some layers to types of their own; these win over `with_isq`. Default: none."""
        return self._configure("with_topology", topology=topology)

    def with_topology_from_path(self, path: PathLike) -> Self:
        """The same from a YAML file, which is read now (see `Topology.from_str`)."""
        return self.with_topology(Topology.from_path(path))

    def with_imatrix(self, path: PathLike) -> Self:
        """Weigh the errors of quantising to q2k to q6k by this importance matrix. Default: none.

        Say first what is quantised. The file is read by `build()`.
        """
        return self._configure("with_imatrix", imatrix=path)

    # Where the files come from

    def with_chat_template(self, template: PathLike) -> Self:
        """Use this chat template: Jinja text, or the path of a .jinja or .json file.

        It replaces the model's own, the default; `with_jinja_explicit` wins, as in mistral.rs.
        """
        return self._locate("with_chat_template", chat_template=template)

    def with_jinja_explicit(self, path: PathLike) -> Self:
        """Use the chat template in this Jinja file, whatever else says. Default: none."""
        return self._locate("with_jinja_explicit", jinja_explicit=path)

    def with_tokenizer_json(self, path: PathLike) -> Self:
        """Use this tokenizer.json instead of the model's tokenizer, the default."""
        return self._locate("with_tokenizer_json", tokenizer_json=path)

    def with_token_source(self, source: TokenSource | str) -> Self:
        """Take the Hugging Face token from here: a `TokenSource` or its text, such as "env:X".

        Default: HF_TOKEN or the stored token, if there is one.
        """
        if isinstance(source, str):
            source = TokenSource.parse(source)
        return self._locate("with_token_source", token_source=source)

    def with_hf_revision(self, revision: str) -> Self:
        """Take this branch, tag or commit of the hub repository. Default: its main branch."""
        return self._locate("with_hf_revision", revision=revision)

    def from_hf_cache_path(self, path: PathLike) -> Self:
        """Keep downloads in this folder. Default: huggingface_hub's own."""
        return self._locate("from_hf_cache_path", cache_path=path)

    # What is shown

    def with_logging(self) -> Self:
        """Let `build()` send this package's log to standard error; RUST_LOG sets its level.

        RUST_LOG is trace, debug, info (default), warn or error.
        """
        return self._replace(logs_to_stderr=True)

    def with_throughput_logging(self) -> Self:
        """Log tokens per second and the numbers of running and waiting sequences now and then."""
        return self._configure("with_throughput_logging", throughput_logging=True)

    def with_progress(self, progress: Progress = True) -> Self:
        """Show progress bars while loading, or call `progress(what, done, total)`.

        Default: bars if stderr is a terminal. To pickle the builder, the function must be one that
        pickle can find: not a lambda.
        """
        if not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"with_progress({progress!r}): must be True, False or a function")
        return self._replace(progress=progress)

    def __repr__(self) -> str:
        return self._head() + "".join(f".{call}" for call in self._calls())

    def _head(self) -> str:
        return f"{type(self).__name__}({self.source.model_id!r})"

    def _calls(self) -> Iterable[str]:
        """The calls that lead from a fresh builder to this one."""
        plain = EngineConfig()
        for field in attrs.fields(EngineConfig):
            value = getattr(self.config, field.name)
            if value == getattr(plain, field.name) or (field.name == "device" and self.force_cpu):
                continue
            shown = "" if value is True else getattr(value, "value", value)
            name = "auto_isq" if isinstance(value, IsqBits) else field.name
            yield f"with_{name}({shown!r})" if shown != "" else f"with_{name}()"
        methods = {"revision": "with_hf_revision", "cache_path": "from_hf_cache_path"}
        bare = ModelSource(model_id=self.source.model_id, files=self.source.files)
        for field in attrs.fields(ModelSource):
            value = getattr(self.source, field.name)
            if value != getattr(bare, field.name):
                yield f"{methods.get(field.name, 'with_' + field.name)}({value!r})"
        if self.force_cpu:
            yield "with_force_cpu()"
        if self.logs_to_stderr:
            yield "with_logging()"
        if self.progress is not None:
            is_flag = isinstance(self.progress, bool)
            shown = self.progress if is_flag else getattr(self.progress, "__name__", "...")
            yield f"with_progress({shown})"
        yield from self._tool_calls()

    def _start_logging(self) -> None:
        if self.logs_to_stderr or self.config.throughput_logging:
            configure_logging()

    def _start(self, source: ModelSource) -> None:
        self.__attrs_init__(  # type: ignore[attr-defined]
            source=source,
            config=EngineConfig(),
            progress=None,
            force_cpu=False,
            logs_to_stderr=False,
            tools=ToolSettings(),
        )

    def _replace(self, **changes: Any) -> Self:
        values = {field.name: getattr(self, field.name) for field in attrs.fields(ModelBuilder)}
        copy = object.__new__(type(self))
        copy.__attrs_init__(**values | changes)  # type: ignore[attr-defined]
        return copy

    def _configure(self, method: str, **setting: Any) -> Self:
        return self._replace(config=evolve_for(self.config, method, setting))

    def _locate(self, method: str, **setting: Any) -> Self:
        return self._replace(source=evolve_for(self.source, method, setting))


def model_id_text(model_id: Any) -> str:
    if not isinstance(model_id, str | os.PathLike) or not str(model_id).strip():
        raise ConfigError(
            f"model_id ({model_id!r}) must be a Hugging Face id, a folder or a .gguf file"
        )
    return os.fspath(model_id)


def evolve_for(settings: Any, method: str, setting: dict[str, Any]) -> Any:
    """A copy of `settings` with one changed; an error names the method that asked for it."""
    (value,) = setting.values()
    if value is None and method not in _NONE_IS_A_VALUE:
        raise ConfigError(f"{method}(None): needs a value; leave the call out for the default")
    try:
        return attrs.evolve(settings, **setting)
    except (ConfigError, UnsupportedError) as error:
        shown = "" if method in _WITHOUT_ARGUMENT else repr(value)
        if method == "with_token_source":
            shown = "..."  # it may be a token
        raise type(error)(f"{method}({shown}): {error}") from None
