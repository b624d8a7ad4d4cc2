"""`Runner`: the API of the `mistralrs` Python package, a thin face over `BlockingModel`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.builders.paged_attention import PagedAttentionMetaBuilder
from mistralrs_sdk.chat.requests import RequestBuilder, as_request
from mistralrs_sdk.chat.responses import ChatCompletionResponse, CompletionResponse
from mistralrs_sdk.config import MemoryGpuConfig, PagedCacheType
from mistralrs_sdk.errors import ConfigError, RequestError
from mistralrs_sdk.handle.blocking import BlockingModel
from mistralrs_sdk.runner_requests import ChatCompletionRequest, CompletionRequest
from mistralrs_sdk.tools.loop import StreamItem
from mistralrs_sdk.unsupported import refuse
from mistralrs_sdk.which import Architecture, Which, builder_of

_GOAL = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_BYTES = {"mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}


class Runner:
    """A loaded model with the methods of mistral.rs' Python package; they block.

    `Runner(which=Which.Plain(model_id="Qwen/Qwen3-4B"), max_seqs=64)`. May be used from several
    threads: requests share batches. Close it, or use it in `with`. docs/runner.md lists what is
    accepted; an argument this package does nothing with is refused unless it has its default.

    Raises:
        ConfigError: a setting is out of range, or two contradict.
        ModelLoadError: the model cannot be found, fetched, read or held in memory.
        UnsupportedError: an argument asks for something this package does not do.
    """

    def __init__(
        self,
        which: Which.Plain | Which.GGUF,
        max_seqs: int = 32,
        *,
        no_kv_cache: bool = False,
        prefix_cache_n: int | None = 16,
        token_source: str = "cache",
        chat_template: str | None = None,
        jinja_explicit: str | None = None,
        seed: int | None = None,
        no_paged_attn: bool = False,
        paged_attn: bool = False,
        pa_gpu_mem: int | None = None,
        pa_gpu_mem_usage: float | None = None,
        pa_ctxt_len: int | None = None,
        memory_goal: float | str | None = None,
        pa_blk_size: int | None = None,
        pa_cache_type: PagedCacheType | str | None = None,
        max_num_batched_tokens: int = 4096,
        max_prefill_chunk_tokens: int = 512,
        max_decode_steps_before_prefill: int = 8,
        mixed_batches: bool = True,
        max_queue: int | None = None,
        max_model_len: int | None = None,
        cpu: bool = False,
        num_threads: int | None = None,
        throughput_logging: bool = False,
        in_situ_quant: str | None = None,
        mtp_model: Any = None,
        mtp_n_predict: Any = None,
        num_device_layers: Any = None,
        anymoe_config: Any = None,
        enable_search: bool = False,
        search_embedding_model: Any = None,
        search_callback: Any = None,
        tool_callbacks: Any = None,
        mcp_client_config: Any = None,
        code_execution_config: Any = None,
        shell_config: Any = None,
    ) -> None:
        for name, value in {
            "mtp_model": mtp_model,
            "mtp_n_predict": mtp_n_predict,
            "num_device_layers": num_device_layers,
            "anymoe_config": anymoe_config,
            "enable_search": enable_search,
            "search_embedding_model": search_embedding_model,
            "search_callback": search_callback,
            "tool_callbacks": tool_callbacks,
            "mcp_client_config": mcp_client_config,
            "code_execution_config": code_execution_config,
            "shell_config": shell_config,
        }.items():
            refuse("Runner", name, value)
        builder = (
            builder_of(which, isq=in_situ_quant)
            .with_max_num_seqs(1)  # so that the token budget is checked against max_seqs alone
            .with_max_num_batched_tokens(max_num_batched_tokens)
            .with_max_num_seqs(max_seqs)
            .with_max_prefill_chunk_tokens(max_prefill_chunk_tokens)
            .with_max_decode_steps_before_prefill(max_decode_steps_before_prefill)
            .with_mixed_batches(mixed_batches)
            .with_max_queue(max_queue)
            .with_prefix_cache_n(prefix_cache_n)
            .with_token_source(token_source)
        )
        for method, value in {
            "with_chat_template": chat_template,
            "with_jinja_explicit": jinja_explicit,
            "with_seed": seed,
            "with_max_model_len": max_model_len,
            "with_num_threads": num_threads,
        }.items():
            if value is not None:
                builder = getattr(builder, method)(value)
        if cpu:
            builder = builder.with_force_cpu()
        if throughput_logging:
            builder = builder.with_throughput_logging()
        if no_kv_cache:
            builder = builder.with_no_kv_cache()
        size = {
            "pa_gpu_mem": pa_gpu_mem,
            "pa_gpu_mem_usage": pa_gpu_mem_usage,
            "pa_ctxt_len": pa_ctxt_len,
            "memory_goal": memory_goal,
        }
        shape = {"pa_blk_size": pa_blk_size, "pa_cache_type": pa_cache_type}
        builder = _with_paged_attn(
            builder, on=paged_attn, off=no_paged_attn, size=size, shape=shape
        )
        self._name = builder.source.model_id
        self._closed = False
        self._model = BlockingModel.from_builder(builder)
        if isinstance(which, Which.Plain) and which.arch is not None:
            self._check_architecture(which.arch)

    def send_chat_completion_request(
        self, request: ChatCompletionRequest, model_id: str | None = None
    ) -> ChatCompletionResponse | Iterator[StreamItem]:
        """Answer a chat: the response, or with `request.stream` an iterator of its chunks.

        Closing or dropping the iterator aborts the request.

        Raises:
            RequestError: the request is at fault, or names a model that is not this one.
            InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        self._check_model(request.model if model_id is None else model_id)
        asked = (
            as_request(request.messages)
            .set_sampling(request.sampling_params())
            .with_truncate_sequence(request.truncate_sequence)
            .set_adapter(request.adapter)
            .set_constraint(request.constraint())
        )
        if request.enable_thinking is not None:
            asked = asked.enable_thinking(request.enable_thinking)
        if request.stream:
            return self._model.stream_chat_request(asked)
        return self._model.send_chat_request(asked)

    def send_completion_request(
        self, request: CompletionRequest, model_id: str | None = None
    ) -> CompletionResponse:
        """Continue a raw prompt; with `request.echo_prompt` each text begins with the prompt.

        Raises:
            RequestError: the request is at fault, or names a model that is not this one.
            InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        self._check_model(request.model if model_id is None else model_id)
        asked = (
            RequestBuilder()
            .set_sampling(request.sampling_params())
            .with_truncate_sequence(request.truncate_sequence)
            .set_adapter(request.adapter)
            .set_constraint(request.constraint())
        )
        return self._model.send_completion_request(
            request.prompt,
            asked,
            echo=request.echo_prompt,
            best_of=None if request.best_of == 1 else request.best_of,
        )

    def tokenize_text(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        enable_thinking: bool | None = None,
        model_id: str | None = None,
    ) -> list[int]:
        """Return the ids of a raw text.

        Raises:
            RequestError: `enable_thinking` is given; it is for chat templates, and none is used.
        """
        self._check_model(model_id)
        if enable_thinking is not None:
            raise RequestError(
                f"enable_thinking ({enable_thinking!r}) has no effect on a raw text: leave it out"
            )
        return self._model.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize_text(
        self, ids: Sequence[int], skip_special_tokens: bool, *, model_id: str | None = None
    ) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        self._check_model(model_id)
        return self._model.detokenize(ids, skip_special_tokens=skip_special_tokens)

    def max_sequence_length(self, model_id: str | None = None) -> int:
        """Return the longest prompt plus completion, in tokens."""
        self._check_model(model_id)
        return self._model.max_sequence_length()

    def send_re_isq(self, dtype: str, model_id: str | None = None) -> None:
        """Quantise the weights of the running model to another type, such as "q4k", or bits.

        Where `mistralrs` returns at once and logs a failure, this waits, and raises it.

        Raises:
            RequestError: `model_id` names a model that is not this one.
            ConfigError, ModelLoadError, EngineDeadError, EngineClosedError: as `Model`.
        """
        self._check_model(model_id)
        self._model.re_isq_model(dtype)

    def list_models(self) -> list[str]:
        """Return the ids a request may name, besides "default": the loaded model's."""
        return [self._name]

    def is_model_loaded(self, model_id: str | None = None) -> bool:
        """Return whether this model is here and not closed; None is the one there is."""
        return model_id in (None, "default", self._name) and not self._closed

    def inner(self) -> BlockingModel:
        """Return the model behind it: `describe()` and what else the `mistralrs` API lacks."""
        return self._model

    def close(self) -> None:
        """Stop the engine and free the model; open requests fail. A second call does nothing."""
        self._closed = True
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Runner of {self._model!r}>"

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "default", self._name):
            raise RequestError(
                f"model {name!r} is not loaded: this Runner has {self._name!r}; "
                'leave the name out, or write "default"'
            )

    def _check_architecture(self, arch: Architecture) -> None:
        found = self._model.inner().inner().info.architecture
        if found.lower() != f"{arch}forcausallm":
            self.close()
            raise ConfigError(
                f"arch ({arch.value!r}) is not what {self._name} holds ({found}): "
                "leave it out, the model says what it is"
            )


def _with_paged_attn(
    builder: ModelBuilder, *, on: bool, off: bool, size: Mapping[str, Any], shape: Mapping[str, Any]
) -> ModelBuilder:
    """Set paging; arguments that were not given are None."""
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
        return builder.with_paged_attn(None)
    if not asked:
        return builder
    paged = PagedAttentionMetaBuilder()
    if sizes:
        paged = paged.with_gpu_memory(_MEMORY[sizes[0]](size[sizes[0]]))
    if shape["pa_blk_size"] is not None:
        paged = paged.with_block_size(shape["pa_blk_size"])
    if shape["pa_cache_type"] is not None:
        paged = paged.with_paged_cache_type(shape["pa_cache_type"])
    return builder.with_paged_attn(paged.build())


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
