"""`POST /v1/completions`: raw prompts continued, whole and streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mistralrs_sdk import (
    CompletionChunkResponse,
    CompletionStream,
    Constraint,
    DrySamplingParams,
    RequestBuilder,
    RequestError,
    SamplingParams,
    StopTokens,
    UnsupportedError,
    Usage,
)
from mistralrs_sdk.server.chat import wants_usage
from mistralrs_sdk.server.errors import read_json
from mistralrs_sdk.server.sse import event_stream, unless_disconnected
from mistralrs_sdk.server.targets import Target, find_target

T = TypeVar("T")

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "ignore_eos": "ignore_eos",
    "n": "n_choices",
    "max_tokens": "max_len",
}
"""Keys that are settings of the sampler, and what they are called there."""

_SETTERS: Mapping[str, Callable[[RequestBuilder, Any], RequestBuilder]] = {
    "truncate_sequence": RequestBuilder.with_truncate_sequence,
    "adapter": RequestBuilder.set_adapter,
    "priority": RequestBuilder.with_priority,
    "deadline": RequestBuilder.with_deadline,
    "cache_salt": RequestBuilder.with_cache_salt,
    "grammar": lambda asked, value: asked.set_constraint(_grammar(value)),
}

_DRY = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers")
_READ_HERE = ("best_of", "echo", "logit_bias", "logprobs", "model", "prompt", "stop", "stream")
_KNOWN = {*_SAMPLING, *_SETTERS, *_DRY, *_READ_HERE, "stream_options", "suffix", "user"}

_GRAMMARS: Mapping[Any, Callable[[Any], Constraint]] = {
    "regex": Constraint.Regex,
    "json_schema": Constraint.JsonSchema,
    "lark": Constraint.Lark,
    "llguidance": Constraint.Llguidance,
}


def routes() -> list[Route]:
    """The routes of this module."""
    return [Route("/v1/completions", create_completion, methods=["POST"])]


async def create_completion(request: Request) -> Response:
    """Continue one prompt or several, as text or token ids, in OpenAI's shape."""
    target = await find_target(request, await read_json(request))
    body = {key: value for key, value in target.body.items() if value is not None}
    prompts, asked = _prompts(body), _settings(body)
    echo = _flag(body, "echo")
    include_usage = wants_usage(body)
    model, name = request.app.state.model, target.model_id
    if _flag(body, "stream"):
        if body.get("best_of", asked.sampling.n_choices) != asked.sampling.n_choices:
            raise RequestError(
                f'"best_of" ({body["best_of"]!r:.80}) needs all answers before it can choose: '
                "leave it out, or do not stream"
            )
        opening = _all_or_none(
            [
                model.stream_completion_request(prompt, asked, echo=echo, model_id=name)
                for prompt in prompts
            ]
        )
        streams = await unless_disconnected(request, opening)
        events = _events(
            streams, target, choices=asked.sampling.n_choices, include_usage=include_usage
        )
        keep_alive = request.app.state.settings.keep_alive_seconds
        return await event_stream(request, events, done="[DONE]", keep_alive=keep_alive)
    best_of = body.get("best_of")
    answering = _all_or_none(
        [
            model.send_completion_request(prompt, asked, echo=echo, best_of=best_of, model_id=name)
            for prompt in prompts
        ]
    )
    responses = await unless_disconnected(request, answering)
    data = [response.to_dict() for response in responses]
    choices = [choice for each in data for choice in each["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    usage = _joined([response.usage for response in responses])
    return JSONResponse({**data[0], "model": target.shown, "choices": choices, "usage": usage})


async def _events(
    streams: Sequence[CompletionStream], target: Target, *, choices: int, include_usage: bool
) -> AsyncIterator[str | dict[str, Any]]:
    used: list[Usage] = []
    data: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        items = _merged(streams) if len(streams) > 1 else _numbered(streams[0])
        async with contextlib.aclosing(items):
            async for number, item in items:
                data = {**item.to_dict(), "id": streams[0].id, "model": target.shown}
                data.pop("usage", None)
                if item.usage is not None:
                    used.append(item.usage)
                if include_usage:
                    data["usage"] = None
                for choice in data["choices"]:
                    choice["index"] += number * choices
                yield data
        if include_usage:
            yield {**data, "choices": [], "usage": _joined(used)}


async def _numbered(
    stream: CompletionStream,
) -> AsyncGenerator[tuple[int, CompletionChunkResponse], None]:
    async for item in stream:
        yield 0, item


async def _merged(
    streams: Sequence[CompletionStream],
) -> AsyncGenerator[tuple[int, CompletionChunkResponse], None]:
    """The chunks of several streams as they come, each with its stream's number."""
    # bounded: what a slow client does not take is merged in the stream, not heaped up here
    queue: asyncio.Queue[tuple[int, CompletionChunkResponse | BaseException | None]]
    queue = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: CompletionStream) -> None:
        try:
            async for item in stream:
                await queue.put((number, item))
        except Exception as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    pumps = [asyncio.create_task(pump(*each)) for each in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            number, item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; the first that fails ends the others, and its error is raised."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    """What to continue: a text, token ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(item) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and all(map(_is_id, item)) for item in prompt):
            return prompt
    raise RequestError(
        f'"prompt" ({prompt!r:.80}) must be a text, a list of texts, token ids, or a list of those'
    )


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _settings(body: Mapping[str, Any]) -> RequestBuilder:
    unknown = sorted(str(key) for key in body.keys() - _KNOWN)
    if unknown:
        raise RequestError(
            f"unknown in a completion request: {', '.join(map(repr, unknown))}; known are "
            f"{', '.join(sorted(_KNOWN))}"
        )
    if body.get("suffix"):
        raise UnsupportedError(
            '"suffix" is not supported: put the text before and after into the prompt as the '
            "model was trained to see it"
        )
    settings = {name: body[key] for key, name in _SAMPLING.items() if key in body}
    if "logprobs" in body:
        settings["return_logprobs"] = True
        settings["top_n_logprobs"] = body["logprobs"]
    sampling = SamplingParams(
        **settings,
        stop_toks=_stops(body.get("stop")),
        logits_bias=_bias(body.get("logit_bias")),
        dry_params=_dry(body),
    )
    asked = RequestBuilder().set_sampling(sampling)
    for key, setter in _SETTERS.items():
        if key in body:
            asked = setter(asked, body[key])
    return asked


def _stops(stop: Any) -> StopTokens | None:
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None and not isinstance(stop, list):
        raise RequestError(f'"stop" ({stop!r:.80}) must be a text or a list of texts')
    return StopTokens.Seqs(stop) if stop else None


def _bias(bias: Any) -> dict[Any, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise RequestError(f'"logit_bias" ({bias!r:.80}) must be an object of token ids')
    return {_token(text): value for text, value in bias.items()}


def _token(text: str) -> int | str:
    """The id a key of JSON stands for; what is none is refused as it came."""
    return int(text) if text.isdecimal() and len(text) < 20 else text


def _dry(body: Mapping[str, Any]) -> DrySamplingParams | None:
    given = {key.removeprefix("dry_"): body[key] for key in _DRY if key in body}
    if given and "multiplier" not in given:
        raise RequestError(
            f'"dry_{next(iter(given))}" has no effect without "dry_multiplier": set that as well'
        )
    return DrySamplingParams(**given) if given else None


def _grammar(asked: Any) -> Constraint:
    kind = asked.get("type") if isinstance(asked, dict) else None
    if not isinstance(kind, str) or kind not in _GRAMMARS or "value" not in asked:
        raise RequestError(
            f'"grammar" ({asked!r:.120}) must be {{"type": ..., "value": ...}} with the type '
            f"{', '.join(_GRAMMARS)}"
        )
    return _GRAMMARS[kind](asked["value"])


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f'"{key}" ({value!r:.80}) must be true or false')
    return value


def _joined(used: Sequence[Usage]) -> dict[str, Any]:
    """The usage of a request; of several prompts only the tokens add up, not the seconds."""
    if len(used) == 1:
        return used[0].to_dict()
    return {
        "prompt_tokens": sum(each.prompt_tokens for each in used),
        "completion_tokens": sum(each.completion_tokens for each in used),
        "total_tokens": sum(each.total_tokens for each in used),
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in used)},
    }
