"""`MistralRsModel`: a loaded model for OpenAI's Agents SDK; needs the extra `openai-agents`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import attrs

try:
    from agents import (
        AgentOutputSchemaBase,
        Handoff,
        Model,
        ModelBehaviorError,
        ModelProvider,
        ModelResponse,
        ModelRetryAdvice,
        ModelRetryAdviceRequest,
        ModelSettings,
        ModelTracing,
        Tool,
        TResponseInputItem,
        Usage,
        UserError,
        generation_span,
    )
    from agents.items import TResponseStreamEvent
    from agents.models.chatcmpl_stream_handler import ChatCmplStreamHandler
    from agents.tracing import SpanError
    from openai.types.chat import ChatCompletionChunk
    from openai.types.responses import Response, ResponseCompletedEvent
except ModuleNotFoundError as missing:
    raise ImportError(
        f"Models for the Agents SDK need {missing.name}: pip install 'mistralrs_sdk[openai-agents]'"
    ) from missing

from mistralrs_sdk import Delta, QueueFullError
from mistralrs_sdk.integrations.chunks import (
    AnyModel,
    Chunk,
    Chunks,
    WholeCalls,
    joined,
    open_chunks,
)
from mistralrs_sdk.integrations.openai_agents_request import OUTPUT_TOOL, chat_request

RETRY_SECONDS = 1.0
"""When a full queue is worth another try: places come free with every answer."""


class MistralRsModel(Model):
    """A loaded model for agents: `Agent("Helper", model=MistralRsModel(model))`.

    `model` is a `Model`, used in the event loop it was built in, or a `BlockingModel`, which
    `Runner.run_sync` can use too. It is not closed here. `model_id` names one of several that it
    holds. `ModelSettings.extra_body` and `extra_args` may hold anything else of an OpenAI-shaped
    request, such as `{"seed": 1, "stop": ["END"], "adapter": "a"}`.

    Raises, from requests:
        UserError: a setting, a tool or an item is of a kind that models here do not take.
        ModelBehaviorError: the most tokens were reached before anything was said.
        MistralRsError: what `Model.stream_chat_request` raises, as it is.
    """

    def __init__(self, model: AnyModel, *, model_id: str | None = None) -> None:
        self.model = model
        self.model_id = model_id

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: Any = None,
    ) -> ModelResponse:
        """Answer, whole. Cancelling frees the request."""
        _require_here(previous_response_id, conversation_id, prompt)
        name = self._name()
        asked = chat_request(
            name, system_instructions, input, model_settings, tools, output_schema, handoffs
        )
        final: Response | None = None
        async for event in self._events(name, asked, model_settings, tracing, whole=True):
            if isinstance(event, ResponseCompletedEvent):
                final = event.response
        assert final is not None, "an answer ends, or its reader gets an error"
        return ModelResponse(output=final.output, usage=_usage(final), response_id=None)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: Any = None,
    ) -> AsyncIterator[TResponseStreamEvent]:
        """Answer in the events of the Responses API. Leaving, or cancelling, frees the request."""
        _require_here(previous_response_id, conversation_id, prompt)
        name = self._name()
        asked = chat_request(
            name, system_instructions, input, model_settings, tools, output_schema, handoffs
        )
        events = self._events(name, asked, model_settings, tracing, whole=False)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        """Suggest another try where the queue was full: nothing had begun."""
        if not isinstance(request.error, QueueFullError):
            return None
        return ModelRetryAdvice(
            suggested=True,
            retry_after=RETRY_SECONDS,
            replay_safety="safe",
            reason=str(request.error),
        )

    def _name(self) -> str:
        return self.model_id or self.model.get_default_model_id()

    async def _events(
        self,
        name: str,
        asked: dict[str, Any],
        settings: ModelSettings,
        tracing: ModelTracing,
        *,
        whole: bool,
    ) -> AsyncGenerator[TResponseStreamEvent, None]:
        """What one answer tells; if it is wanted whole, all of it at once."""
        with _span(name, asked, settings, tracing) as span:
            async with await open_chunks(self.model, asked, self.model_id) as chunks:
                answer = _answer(chunks, must_call=asked.get("tool_choice") == "required")
                if whole:
                    answer = _all_at_once(answer)
                read: Any = _as_openai(answer)  # an AsyncStream only reads from a socket
                handled = ChatCmplStreamHandler.handle_stream(
                    _empty_response(name), read, model=name
                )
                async for event in handled:
                    if isinstance(event, ResponseCompletedEvent):
                        _tell(span, event.response, tracing)
                    yield event


class MistralRsProvider(ModelProvider):
    """Finds models by name for a whole run: `RunConfig(model_provider=MistralRsProvider(model))`.

    Names are the ids of the models that the handle holds; None is its default model.
    """

    def __init__(self, model: AnyModel) -> None:
        self.model = model

    def get_model(self, model_name: str | None) -> MistralRsModel:
        """Return the model of this id; an unknown one is a `RequestError` when it is asked."""
        return MistralRsModel(self.model, model_id=model_name)


async def _answer(chunks: Chunks, *, must_call: bool) -> AsyncIterator[Chunk]:
    """The chunks with whole calls only, that of the output tool as the text it stands for."""
    calls = WholeCalls()
    said = False
    async for chunk in chunks:
        shown = calls.shown(chunk)
        if shown is None:
            continue
        choice = shown.choices[0]
        delta = choice.delta
        if must_call and delta.content:  # what is left of a call that was cut short
            shown = _with_delta(shown, attrs.evolve(delta, content=None))
            delta = shown.choices[0].delta
        said = said or bool(delta.content or delta.tool_calls)
        if choice.finish_reason == "length" and not said:
            raise ModelBehaviorError(
                "the answer reached its most tokens before it said anything: raise max_tokens"
            )
        yield _with_output(shown)


def _with_output(chunk: Chunk) -> Chunk:
    delta = chunk.choices[0].delta
    calls = delta.tool_calls or ()
    others = tuple(call for call in calls if call.function.name != OUTPUT_TOOL)
    if len(others) == len(calls):
        return chunk
    if others:  # an output before the results of tools is a guess: they run, and it is asked again
        return _with_delta(chunk, attrs.evolve(delta, tool_calls=others))
    call = next(iter(calls))
    output = attrs.evolve(delta, content=call.function.arguments, tool_calls=None)
    return _with_delta(chunk, output, finish_reason="stop")


def _with_delta(chunk: Chunk, delta: Delta, **changes: Any) -> Chunk:
    choice = attrs.evolve(chunk.choices[0], delta=delta, **changes)
    return attrs.evolve(chunk, choices=(choice,))


async def _all_at_once(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    yield joined([chunk async for chunk in chunks])


async def _as_openai(chunks: AsyncIterator[Chunk]) -> AsyncGenerator[Any]:
    async for chunk in chunks:
        yield ChatCompletionChunk.model_validate(chunk.to_dict())


def _empty_response(name: str) -> Response:
    return Response(
        id="",
        created_at=time.time(),
        model=name,
        object="response",
        output=[],
        parallel_tool_calls=True,
        tool_choice="auto",
        tools=[],
    )


def _require_here(previous: str | None, conversation: str | None, prompt: Any) -> None:
    kept = {
        "previous_response_id": previous,
        "conversation_id": conversation,
        "prompt": prompt,
    }
    for key, value in kept.items():
        if value is not None:
            raise UserError(
                f"{key} ({value!r:.80}) is kept by OpenAI's servers, and there is none here: give "
                "the runner the items themselves, or a Session"
            )


@contextlib.contextmanager
def _span(
    name: str, asked: dict[str, Any], settings: ModelSettings, tracing: ModelTracing
) -> Iterator[Any]:
    """The part of a trace that tells of this request, and of its failure."""
    config = settings.to_traceable_dict()
    with generation_span(model=name, model_config=config, disabled=tracing.is_disabled()) as span:
        if tracing.include_data():
            span.span_data.input = asked["messages"]
        try:
            yield span
        except Exception as error:
            data = {"error": str(error)} if tracing.include_data() else None
            span.set_error(SpanError(message=type(error).__name__, data=data))
            raise


def _tell(span: Any, response: Response, tracing: ModelTracing) -> None:
    if tracing.include_data():
        span.span_data.output = [item.model_dump() for item in response.output]
    if response.usage is not None:
        span.span_data.usage = response.usage.model_dump()


def _usage(response: Response) -> Usage:
    usage = response.usage
    if usage is None:
        return Usage(requests=1)
    return Usage(
        requests=1,
        input_tokens=usage.input_tokens,
        input_tokens_details=usage.input_tokens_details,
        output_tokens=usage.output_tokens,
        output_tokens_details=usage.output_tokens_details,
        total_tokens=usage.total_tokens,
    )
