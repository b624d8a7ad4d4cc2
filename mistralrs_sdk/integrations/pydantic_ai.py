"""`MistralRsModel`: a loaded model as the model of Pydantic AI's agents; needs `pydantic-ai`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any, NoReturn

try:
    from pydantic_ai import exceptions, messages
    from pydantic_ai.models import (
        Model,
        ModelRequestParameters,
        StreamedResponse,
        check_allow_model_requests,
    )
    from pydantic_ai.profiles import ModelProfile, merge_profile
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.usage import RequestUsage
except ModuleNotFoundError as missing:
    raise ImportError(
        f"Pydantic AI's models need {missing.name}: pip install 'mistralrs_sdk[pydantic-ai]'"
    ) from missing

from mistralrs_sdk import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    EngineDeadError,
    InferenceError,
    MistralRsError,
    ModelLoadError,
    QueueFullError,
    RequestError,
    UnsupportedError,
    Usage,
)
from mistralrs_sdk.integrations.chunks import AnyModel, Chunk, Chunks, WholeCalls, open_chunks
from mistralrs_sdk.integrations.pydantic_ai_request import chat_request, must_call

_PROFILE = ModelProfile(
    supports_json_schema_output=True,
    supports_json_object_output=True,
    native_output_requires_schema_in_instructions=True,  # the grammar holds, and tells nothing
    supports_thinking=True,
    supports_image_input=False,
    supports_document_input=False,
    supports_audio_file_input=False,
    supports_video_input=False,
)

_FINISH_REASONS: dict[str, messages.FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_call",
}


class MistralRsModel(Model[None]):
    """A loaded model for Pydantic AI: `Agent(MistralRsModel(model))`.

    `model` is a `Model`, used in the event loop it was built in, or a `BlockingModel`, which
    `run_sync` can use too. It is not closed here. `model_id` names one of several that it holds.
    `settings` are the defaults of every request; `extra_body` in them, or in a request's, may hold
    anything else of an OpenAI-shaped request, such as `{"adapter": "a", "min_p": 0.1}`. `profile`
    overrides what is said here of the model.

    Raises, from requests:
        ModelHTTPError: with the status our server would give, the error chained: 400 the request is
            at fault, 429 too many wait, 500 it failed, 503 there is no engine, 504 its time is up.
        UserError: something is asked for that no request can express.
    """

    unsupported_settings = frozenset({"extra_headers", "max_retries"})
    """There is no HTTP here, and nothing that fails here gets better by itself."""

    def __init__(
        self,
        model: AnyModel,
        *,
        model_id: str | None = None,
        settings: ModelSettings | None = None,
        profile: ModelProfile | None = None,
    ) -> None:
        self.model = model
        self._served_id = model_id
        context = None
        if model.is_model_loaded(model_id):
            context = model.max_sequence_length(model_id=model_id)
        own = merge_profile(_PROFILE, ModelProfile(context_window=context), profile)
        super().__init__(settings=settings, profile=own)

    @property
    def model_name(self) -> str:
        """The id of the model that answers."""
        return self._served_id or self.model.get_default_model_id()

    @property
    def system(self) -> str:
        """Who provides it, for traces."""
        return "mistralrs"

    def customize_request_parameters(
        self, model_request_parameters: ModelRequestParameters
    ) -> ModelRequestParameters:
        """Choose how structured output is asked for, where the agent does not say.

        By a schema that the answer is held to; beside tools, which such an answer could not call,
        by a tool for the output, one of which must then be called.
        """
        params = super().customize_request_parameters(model_request_parameters)
        return params.with_default_output_mode("tool" if params.function_tools else "native")

    async def request(
        self,
        messages: list[messages.ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> messages.ModelResponse:
        """Answer, whole. Cancelling frees the request."""
        asked = self.request_stream(messages, model_settings, model_request_parameters)
        async with asked as response:
            async for _ in response:
                pass
            return response.get()

    @contextlib.asynccontextmanager
    async def request_stream(
        self,
        messages: list[messages.ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: Any = None,
    ) -> AsyncGenerator[StreamedResponse]:
        """Answer piece by piece. Leaving, or cancelling, frees the request."""
        check_allow_model_requests()
        settings, params = self.prepare_request(model_settings, model_request_parameters)
        asked = chat_request(messages, settings, params)
        name = self.model_name
        try:
            chunks = await open_chunks(self.model, asked, self._served_id)
        except MistralRsError as error:
            _raise(error, name, in_stream=False)
        async with chunks:
            yield _Response(params, name, chunks, _held=must_call(asked))

    async def count_tokens(
        self,
        messages: list[messages.ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> RequestUsage:
        """The tokens of the prompt that a request becomes."""
        settings, params = self.prepare_request(model_settings, model_request_parameters)
        asked = chat_request(messages, settings, params)
        try:
            _, ids = self.model.render_chat(asked, model_id=self._served_id)
        except MistralRsError as error:
            _raise(error, self.model_name, in_stream=False)
        return RequestUsage(input_tokens=len(ids))


@dataclasses.dataclass
class _Response(StreamedResponse):
    """An answer as it comes."""

    _name: str
    _chunks: Chunks
    _: dataclasses.KW_ONLY
    _held: bool
    """Whether it must call: what begins like a call is one, unless its length ends it."""
    _timestamp: datetime = dataclasses.field(default_factory=lambda: datetime.now(UTC))

    async def close_stream(self) -> None:
        await self._chunks.aclose()

    async def _get_event_iterator(self) -> AsyncIterator[messages.ModelResponseStreamEvent]:
        calls = None if self._held else WholeCalls()
        try:
            async for chunk in self._chunks:
                self._note(chunk)
                shown = chunk if calls is None else calls.shown(chunk)
                for event in () if shown is None else self._events(shown):
                    yield event
        except MistralRsError as error:
            _raise(error, self._name, in_stream=True)

    def _note(self, chunk: Chunk) -> None:
        """What a chunk says besides the answer."""
        choice = chunk.choices[0]
        self.provider_response_id = chunk.id
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        details = self.provider_details or {}
        if choice.unparsed_tool_call:
            details["unparsed_tool_call"] = True
        if choice.finish_reason is not None:
            self.finish_reason = _FINISH_REASONS[choice.finish_reason]
            details["finish_reason"] = choice.finish_reason
        self.provider_details = details or None

    def _events(self, chunk: Chunk) -> Iterator[messages.ModelResponseStreamEvent]:
        choice = chunk.choices[0]
        delta, parts = choice.delta, self._parts_manager
        if delta.reasoning_content:
            yield from parts.handle_thinking_delta(
                vendor_part_id="thinking",
                content=delta.reasoning_content,
                provider_name=self.provider_name,
            )
        if delta.content and not choice.withdrawn_tool_calls:  # else the call is shown, cut short
            yield from parts.handle_text_delta(vendor_part_id="content", content=delta.content)
        for call in delta.tool_calls or ():
            yield from parts.handle_tool_call_delta_events(
                vendor_part_id=call.index,
                tool_name=None if call.continues else call.function.name,
                args=call.function.arguments,
                tool_call_id=call.id,
            )

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def provider_name(self) -> str:
        return "mistralrs"

    @property
    def provider_url(self) -> None:
        return None

    @property
    def timestamp(self) -> datetime:
        return self._timestamp


def _usage(usage: Usage) -> RequestUsage:
    return RequestUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cached_tokens,
    )


def _raise(error: MistralRsError, name: str, *, in_stream: bool) -> NoReturn:
    """Raise Pydantic AI's error for ours, so that its fallbacks and retries know what to do."""
    status, category = _status(error)
    raise exceptions.ModelHTTPError.for_category(
        category,
        status_code=status,
        model_name=name,
        body=str(error),
        retry_after=1.0 if status == 429 else None,
        in_stream=in_stream,
    ) from error


def _status(error: MistralRsError) -> tuple[int, Any]:
    match error:
        case RequestError() | ConfigError() | UnsupportedError():
            return 400, exceptions.ModelRequestRejectedError
        case QueueFullError():
            return 429, exceptions.ModelRateLimitError
        case EngineDeadError() | EngineClosedError() | ModelLoadError():
            return 503, exceptions.ModelUnavailableError
        case DeadlineError():
            return 504, exceptions.ModelServerError
        case InferenceError():
            return 500, exceptions.ModelServerError
    return 500, None
