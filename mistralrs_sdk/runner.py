"""`Runner`: the API of the `mistralrs` Python package, a thin face over `BlockingModel`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from mistralrs_sdk.adapters import LoraAdapterInfo, LoraAdapterLoadPolicy, LoraRuntimeStatus
from mistralrs_sdk.builders.embedding_builder import EmbeddingModelBuilder
from mistralrs_sdk.builders.model_builder import ModelBuilder
from mistralrs_sdk.chat.embeddings import EmbeddingRequestLike
from mistralrs_sdk.chat.responses import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    CompletionResponse,
)
from mistralrs_sdk.chat.tool_events import ToolCallContext
from mistralrs_sdk.chat.tools import CalledFunction
from mistralrs_sdk.config import PagedCacheType
from mistralrs_sdk.errors import ConfigError, RequestError
from mistralrs_sdk.handle.blocking import BlockingModel
from mistralrs_sdk.runner_requests import ChatCompletionRequest, CompletionRequest
from mistralrs_sdk.tools.callbacks import arguments_of
from mistralrs_sdk.tools.execution_config import CodeExecutionConfig, ShellConfig
from mistralrs_sdk.tools.loop import StreamItem
from mistralrs_sdk.tools.mcp_config import McpClientConfig
from mistralrs_sdk.unsupported import refuse, unsupported_method
from mistralrs_sdk.which import WhichModel, builder_of, check_architecture, configured, pool_of

_NO_MEDIA = "models here read and write text only"
_NO_CALIBRATION = "collect an importance matrix with llama.cpp's llama-imatrix instead"


class Runner:
    """A loaded model with the methods of mistral.rs' Python package; they block.

    `Runner(which=Which.Plain(model_id="Qwen/Qwen3-4B"), max_seqs=64)`. May be used from several
    threads: requests share batches. Close it, or use it in `with`. docs/runner.md lists what is
    accepted; an argument this package does nothing with is refused unless it has its default.

    Methods take the id of the model they are for as `model_id`; None and "default" are the one that
    was loaded.

    Raises:
        ConfigError: a setting is out of range, two contradict, or it has no part in a model that
            embeds.
        ModelLoadError: the model cannot be found, fetched, read or held in memory.
        UnsupportedError: an argument asks for something this package does not do.
        RequestError: from each method: there is no model of that id.
    """

    def __init__(
        self,
        which: WhichModel,
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
        flashinfer: bool | None = None,
        cuda_graphs: bool | None = None,
        tensor_parallel: int = 1,
        cpu: bool = False,
        num_threads: int | None = None,
        throughput_logging: bool = False,
        in_situ_quant: str | None = None,
        tool_callbacks: Mapping[str, Callable[[str, dict[str, Any]], Any]] | None = None,
        mcp_client_config: McpClientConfig | None = None,
        code_execution_config: CodeExecutionConfig | None = None,
        shell_config: ShellConfig | None = None,
        mtp_model: Any = None,
        mtp_n_predict: Any = None,
        num_device_layers: Sequence[str] | None = None,
        anymoe_config: Any = None,
        enable_search: bool = False,
        search_embedding_model: Any = None,
        search_callback: Any = None,
    ) -> None:
        for name, value in {
            "mtp_model": mtp_model,
            "mtp_n_predict": mtp_n_predict,
            "anymoe_config": anymoe_config,
            "enable_search": enable_search,
            "search_embedding_model": search_embedding_model,
            "search_callback": search_callback,
        }.items():
            refuse("Runner", name, value)
        if isinstance(num_device_layers, str):
            num_device_layers = [num_device_layers]
        builder = (
            builder_of(which, isq=in_situ_quant)
            .with_max_num_seqs(1)  # so that the token budget is checked against max_seqs alone
            .with_max_num_batched_tokens(max_num_batched_tokens)
            .with_max_num_seqs(max_seqs)
            .with_token_source(token_source)
        )
        size = {
            "pa_gpu_mem": pa_gpu_mem,
            "pa_gpu_mem_usage": pa_gpu_mem_usage,
            "pa_ctxt_len": pa_ctxt_len,
            "memory_goal": memory_goal,
        }
        shape = {"pa_blk_size": pa_blk_size, "pa_cache_type": pa_cache_type}
        settings = {
            "max_prefill_chunk_tokens": max_prefill_chunk_tokens,
            "max_decode_steps_before_prefill": max_decode_steps_before_prefill,
            "mixed_batches": mixed_batches,
            "flashinfer": flashinfer,
            "cuda_graphs": cuda_graphs,
            "tensor_parallel": tensor_parallel,
            "num_device_layers": ";".join(num_device_layers or ()) or None,
            "max_queue": max_queue,
            "prefix_cache_n": prefix_cache_n,
            "chat_template": chat_template,
            "jinja_explicit": jinja_explicit,
            "seed": seed,
            "max_model_len": max_model_len,
            "num_threads": num_threads,
            "mcp_client_config": mcp_client_config,
            "code_execution_config": code_execution_config,
            "shell_config": shell_config,
            "cpu": cpu,
            "throughput_logging": throughput_logging,
            "no_kv_cache": no_kv_cache,
            "paged_attn": pool_of(on=paged_attn, off=no_paged_attn, size=size, shape=shape),
        }
        builder = _with_callbacks(configured(builder, settings), tool_callbacks or {})
        self._closed = False
        self._model = BlockingModel.from_builder(builder)
        if getattr(which, "arch", None) is not None:
            try:
                check_architecture(which, self._model.inner().inner().info.architecture)
            except ConfigError:
                self.close()
                raise

    # Asking

    def send_chat_completion_request(
        self, request: ChatCompletionRequest, model_id: str | None = None
    ) -> ChatCompletionResponse | Iterator[ChatCompletionChunkResponse]:
        """Answer a chat: the response, or with `request.stream` an iterator of its chunks.

        Closing or dropping the iterator aborts the request. Calls of tools that have a callback
        are executed; the response has them as `agentic_tool_calls`.

        Raises:
            RequestError: the request is at fault.
            QueueFullError, InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        name = request.model if model_id is None else model_id
        if request.stream:
            return _chunks(self._model.stream_chat_request(request.builder(), model_id=name))
        return self._model.send_chat_request(request.builder(), model_id=name)

    def send_chat_completion_request_to_model(
        self, request: ChatCompletionRequest, model_id: str
    ) -> ChatCompletionResponse | Iterator[ChatCompletionChunkResponse]:
        """As `send_chat_completion_request`."""
        return self.send_chat_completion_request(request, model_id)

    def send_completion_request(
        self, request: CompletionRequest, model_id: str | None = None
    ) -> CompletionResponse:
        """Continue a raw prompt; with `request.echo_prompt` each text begins with the prompt.

        Raises:
            RequestError: the request is at fault.
            QueueFullError, InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        return self._model.send_completion_request(
            request.prompt,
            request.builder(),
            echo=request.echo_prompt,
            best_of=None if request.best_of == 1 else request.best_of,
            model_id=request.model if model_id is None else model_id,
        )

    def send_completion_request_to_model(
        self, request: CompletionRequest, model_id: str
    ) -> CompletionResponse:
        """As `send_completion_request`."""
        return self.send_completion_request(request, model_id)

    def send_embedding_request(
        self, request: EmbeddingRequestLike, model_id: str | None = None
    ) -> list[list[float]]:
        """Return one vector per input of an `EmbeddingRequest`, or of what it may be made from.

        The result is [inputs][dimensions].

        Raises:
            RequestError: an input is empty or too long, or the model was not loaded by
                `Which.Embedding`.
            InferenceError, EngineDeadError, EngineClosedError: as `Model`.
        """
        return self._model.generate_embeddings(request, model_id=model_id)

    def tokenize_text(
        self,
        text: str,
        add_special_tokens: bool,
        enable_thinking: bool | None = None,
        model_id: str | None = None,
    ) -> list[int]:
        """Return the ids of a raw text.

        Raises:
            RequestError: `enable_thinking` is given; it is for chat templates, and none is used.
        """
        if enable_thinking is not None:
            raise RequestError(
                f"enable_thinking ({enable_thinking!r}) has no effect on a raw text: leave it out"
            )
        return self._model.tokenize(text, add_special_tokens=add_special_tokens, model_id=model_id)

    def detokenize_text(
        self, tokens: Sequence[int], skip_special_tokens: bool, model_id: str | None = None
    ) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        return self._model.detokenize(
            tokens, skip_special_tokens=skip_special_tokens, model_id=model_id
        )

    # The model

    def max_sequence_length(self, model_id: str | None = None) -> int:
        """Return the longest prompt plus completion, in tokens."""
        return self._model.max_sequence_length(model_id=model_id)

    def send_re_isq(self, dtype: str, model_id: str | None = None) -> None:
        """Quantise the weights of the running model to another type, such as "q4k", or bits.

        Where `mistralrs` returns at once and logs a failure, this waits, and raises it.

        Raises:
            ConfigError, ModelLoadError, EngineDeadError, EngineClosedError: as `Model`.
        """
        self._model.re_isq_model(dtype, model_id=model_id)

    def list_models(self) -> list[str]:
        """Return the ids a request may name, besides "default": the loaded model's."""
        return self._model.list_models()

    def list_models_with_status(self) -> list[tuple[str, str]]:
        """Return the id of every model with "loaded", "unloaded" or "reloading"."""
        return [(id, status.value) for id, status in self._model.list_models_with_status()]

    def list_unloaded_models(self) -> list[str]:
        """Return the ids of the models that the next request would load again."""
        return [id for id, status in self.list_models_with_status() if status == "unloaded"]

    def get_model_status(self, model_id: str) -> str | None:
        """Return "loaded", "unloaded" or "reloading"; None if there is no such model."""
        return dict(self.list_models_with_status()).get(model_id)

    def get_default_model_id(self) -> str:
        """Return the id of the model that requests for "default" go to."""
        return self._model.get_default_model_id()

    def set_default_model_id(self, model_id: str) -> None:
        """Let requests for "default" go to this model."""
        self._model.set_default_model_id(model_id)

    def is_model_loaded(self, model_id: str | None = None) -> bool:
        """Return whether this model is here and not closed; None is the one there is."""
        return self._model.is_model_loaded(model_id) and not self._closed

    def unload_model(self, model_id: str | None = None) -> None:
        """Free a model's memory; the next request for it loads it again."""
        self._model.unload_model(model_id)

    def reload_model(self, model_id: str | None = None) -> None:
        """Load a model that was unloaded now.

        Raises:
            ModelLoadError: it does not load any more.
        """
        self._model.reload_model(model_id)

    def remove_model(self, model_id: str) -> None:
        """Free a model and forget it.

        Raises:
            RequestError: it is the last one.
        """
        self._model.remove_model(model_id)

    # Adapters

    def load_lora_adapter(
        self,
        alias: str,
        adapter_dir: str | os.PathLike[str],
        model_id: str | None = None,
        load_inplace: bool = False,
        expected_generation: str | None = None,
    ) -> LoraAdapterInfo:
        """Load an adapter while the model runs.

        The name must be free, unless `load_inplace` replaces what has it, or `expected_generation`
        exactly that one.

        Raises:
            ConfigError: `expected_generation` is no 64 hexadecimal digits.
            AdapterError, ModelLoadError, UnsupportedError: as `Model`.
        """
        policy = LoraAdapterLoadPolicy.Upsert() if load_inplace else None
        if expected_generation is not None:
            policy = LoraAdapterLoadPolicy.CompareAndSwap(expected_generation)
        return self._model.load_lora_adapter(alias, adapter_dir, policy=policy, model_id=model_id)

    def unload_lora_adapter(
        self, alias: str, model_id: str | None = None, expected_generation: str | None = None
    ) -> LoraAdapterInfo:
        """Take an adapter's name away; requests that run with it go on.

        Raises:
            AdapterError: there is no such adapter, or it is another generation.
        """
        return self._model.unload_lora_adapter(
            alias, generation=expected_generation, model_id=model_id
        )

    def list_lora_adapters(self, model_id: str | None = None) -> list[LoraAdapterInfo]:
        """Return the loaded adapters in the order of their names."""
        return list(self._model.list_lora_adapters(model_id=model_id))

    def lora_adapter_status(self, model_id: str | None = None) -> LoraRuntimeStatus:
        """Return the loaded adapters, the memory they take, and the limits.

        Raises:
            AdapterError: the model takes no adapters.
        """
        return self._model.lora_adapter_status(model_id=model_id)

    # Sessions

    def export_session(self, session_id: str, model_id: str | None = None) -> str | None:
        """Return the complete turns of a session as JSON; None if there is no such session."""
        if session_id not in self.list_session_ids(model_id):
            return None
        session = self._model.export_session(session_id, model_id=model_id)
        return json.dumps(session.to_dict(), ensure_ascii=False)

    def import_session(
        self, session_id: str, session_json: str, model_id: str | None = None
    ) -> None:
        """Keep these turns under this id, in place of a session of that id.

        Raises:
            RequestError: the JSON holds no session, or a request works on that session.
        """
        try:
            session = json.loads(session_json)
        except json.JSONDecodeError as error:
            raise RequestError(f"session_json {session_json!r:.80} is no JSON: {error}") from None
        self._model.import_session(session_id, session, model_id=model_id)

    def delete_session(self, session_id: str, model_id: str | None = None) -> bool:
        """Forget a session; returns whether there was one."""
        return self._model.delete_session(session_id, model_id=model_id)

    def list_session_ids(self, model_id: str | None = None) -> list[str]:
        """Return the ids of all sessions, the longest unused first."""
        return self._model.list_session_ids(model_id=model_id)

    # What the package does and this one does not: each says so

    generate_image = unsupported_method("generate_image", _NO_MEDIA)
    generate_audio = unsupported_method("generate_audio", _NO_MEDIA)
    begin_calibration = unsupported_method("begin_calibration", _NO_CALIBRATION)
    calibration_status = unsupported_method("calibration_status", _NO_CALIBRATION)
    apply_calibration = unsupported_method("apply_calibration", _NO_CALIBRATION)
    find_file = unsupported_method("find_file", "tools here produce no files")

    # Ending

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


@attrs.frozen
class _ByName:
    """A callback of the `mistralrs` package: gets the tool's name and its arguments."""

    function: Callable[[str, dict[str, Any]], Any]

    def __call__(self, call: CalledFunction, context: ToolCallContext) -> Any:
        return self.function(call.name, arguments_of(call))


def _with_callbacks(
    builder: ModelBuilder | EmbeddingModelBuilder, callbacks: Mapping[str, Any]
) -> ModelBuilder | EmbeddingModelBuilder:
    for name, function in callbacks.items():
        if not callable(function):
            raise ConfigError(f"tool_callbacks[{name!r}] ({function!r}) must be callable")
        if isinstance(builder, EmbeddingModelBuilder):
            raise ConfigError("tool_callbacks has no part in a model that embeds: leave it out")
        builder = builder.with_tool_callback(name, _ByName(function))
    return builder


def _chunks(items: Iterator[StreamItem]) -> Iterator[ChatCompletionChunkResponse]:
    """The chunks alone; dropping this drops `items`."""
    for item in items:
        if isinstance(item, ChatCompletionChunkResponse):
            yield item
