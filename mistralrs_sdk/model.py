"""`Model`: what `ModelBuilder.build()` returns; chats on an engine that runs on its own thread."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from mistralrs_sdk.chat.messages import TextMessages
from mistralrs_sdk.chat.requests import RequestLike, as_request
from mistralrs_sdk.chat.responses import ChatCompletionResponse, CompletionResponse
from mistralrs_sdk.config import EngineConfig, Progress
from mistralrs_sdk.engine.metrics import EngineMetrics
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.isq import Isq
from mistralrs_sdk.sampling_params import SamplingParams
from mistralrs_sdk.served_model import ServedModel
from mistralrs_sdk.stream import ChatStream

if TYPE_CHECKING:
    from mistralrs_sdk.builder import ModelBuilder


class Model:
    """A loaded model. Its methods may be called concurrently; requests share batches inside.

    Made by `await ModelBuilder(...).build()`. Close it with `await model.aclose()`, or use it as
    `async with await builder.build() as model`. It belongs to the event loop it was built in.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._closed = False

    @classmethod
    async def build(cls, builder: ModelBuilder) -> Self:
        """Do what `builder.build()` promises."""
        return cls(await ServedModel.build(builder))

    # Asking

    async def chat(self, text: str) -> str:
        """Answer one user turn greedily; returns the text."""
        response = await self.send_chat_request(TextMessages().add_message("user", text))
        return response.choices[0].message.content or ""

    async def send_chat_request(self, request: RequestLike) -> ChatCompletionResponse:
        """Answer a chat; requests sent at the same time run in one batch.

        Cancelling the task aborts the request within one step.

        Raises:
            RequestError: the request is at fault: empty, too long, refused by the template ...
            InferenceError: it failed while running; `partial_response` holds what had come.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        async with await self.stream_chat_request(request) as stream:
            return await stream.collect()

    async def stream_chat_request(self, request: RequestLike) -> ChatStream:
        """Answer a chat in chunks, one per step and choice; see `ChatStream`.

        Raises:
            RequestError: as `send_chat_request`, before anything runs.
        """
        return await self._served.stream_chat(as_request(request))

    async def send_completion_request(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> CompletionResponse:
        """Continue a raw prompt (text or token ids), greedily unless `sampling` says otherwise.

        Raises:
            RequestError, InferenceError, EngineDeadError, EngineClosedError: as for a chat.
        """
        sampling = SamplingParams.deterministic() if sampling is None else sampling
        return await self._served.complete(prompt, sampling)

    def abort(self, id: str) -> None:
        """End the request with this response id; its stream ends with finish_reason "canceled".

        An id that is not running any more is ignored.

        Raises:
            RequestError: this is no response id.
        """
        self._served.abort(id)

    # Looking

    async def tokenize(
        self,
        text: RequestLike,
        *,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Return the ids of a raw text, or of messages as the chat template renders them.

        Raises:
            RequestError: the template refuses the messages.
        """
        if isinstance(text, str):
            return await self._served.tokenize(text, add_special_tokens=add_special_tokens)
        return await self._served.tokenize_chat(
            as_request(text),
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        return await self._served.detokenize(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        request: RequestLike,
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> tuple[str, list[int]]:
        """Return the prompt a chat request becomes, as text and as ids.

        Raises:
            RequestError: the template refuses the messages, or there is none.
        """
        return self._served.render_chat(
            as_request(request),
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )

    def config(self) -> EngineConfig:
        """Return the settings the engine runs with, nothing left open."""
        return self._served.info.config

    def max_sequence_length(self) -> int:
        """Return the longest prompt plus completion, in tokens."""
        return self._served.info.max_model_len

    def describe(self) -> str:
        """Return every resolved setting and where it came from, as text for people."""
        return self._served.describe()

    async def stats(self) -> SchedulerStats:
        """Return what runs, waits and is cached right now.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        return await self._served.stats()

    async def metrics(self) -> EngineMetrics:
        """Return what the engine holds now and has done so far, with latency histograms.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        return await self._served.metrics()

    async def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        await self._served.clear_prefix_cache()

    def inner(self) -> ServedModel:
        """Return the engine's side of the model, for what no method here does."""
        return self._served

    # Changing

    async def re_isq_model(self, isq: Isq | str | int, *, progress: Progress = False) -> None:
        """Quantise the weights of the running model to another type, as `with_isq` would have.

        `isq` is a type or a number of bits. The weights are read again from the model's files, so
        more bits bring back quality. No step runs meanwhile; streams then go on with the new
        weights, which compute their keys and values again. `progress` is as for `with_progress`.
        Cancelling who waits does not stop it.

        Raises:
            ConfigError: `isq` is no type and no number of bits.
            UnsupportedError: nothing here computes with the type, or the device does not.
            ModelLoadError: the files have changed or it does not fit, and nothing was changed; or
                reading failed later: each weight is then the old or the new one.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        await self._served.re_isq(isq, progress=progress)

    # Ending

    async def aclose(self) -> None:
        """Stop the engine after its current step and free the model; open requests fail.

        Raises nothing when called again.
        """
        self._closed = True
        await self._served.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)
            self._served.thread.stop()

    def __repr__(self) -> str:
        served = self._served
        state = "closed" if self._closed else f"on {served.info.config.device}"
        return f"<Model {served.name!r} ({served.info.architecture}) {state}>"
