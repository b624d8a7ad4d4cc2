"""`Model`: what `ModelBuilder.build()` returns; chats on an engine that runs on its own thread."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio.to_thread
import attrs

from mistralrs_sdk.chat.messages import RequestBuilder, TextMessages, as_request
from mistralrs_sdk.chat.responses import (
    ChatCompletionResponse,
    CompletionChoice,
    CompletionResponse,
)
from mistralrs_sdk.chat.template import ChatTemplate, PromptEncoder
from mistralrs_sdk.config import EngineConfig, Progress
from mistralrs_sdk.description import describe
from mistralrs_sdk.engine.build import EngineInfo, build_engine
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.engine_thread import EngineThread
from mistralrs_sdk.engine.metrics import EngineMetrics
from mistralrs_sdk.engine.requantise import Requantiser, WeightFiles
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.errors import ConfigError, RequestError
from mistralrs_sdk.generation import Generation
from mistralrs_sdk.isq import Isq, parse_isq
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.sampling_params import SamplingParams
from mistralrs_sdk.stream import ChatStream

if TYPE_CHECKING:
    from mistralrs_sdk.builder import ModelBuilder

RequestLike = RequestBuilder | TextMessages | str | Sequence[dict[str, Any]]
"""What a chat request may be: a builder, messages, one user turn, or OpenAI message dicts."""

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters from which on a prompt is encoded off the event loop."""


class Model:
    """A loaded model. Its methods may be called concurrently; requests share batches inside.

    Made by `await ModelBuilder(...).build()`. Close it with `await model.aclose()`, or use it as
    `async with await builder.build() as model`. It belongs to the event loop it was built in.
    """

    def __init__(
        self,
        thread: EngineThread,
        requantiser: Requantiser,
        checkpoint: Checkpoint,
        encoder: PromptEncoder,
    ) -> None:
        self._thread = thread
        self._requantiser = requantiser
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._tokenizer = checkpoint.tokenizer.tokenizer
        self._request_ids = itertools.count(1)
        self._seeds = random.Random(self._info.config.seed)
        self._closed = False

    @classmethod
    async def build(cls, builder: ModelBuilder) -> Self:
        """Do what `builder.build()` promises."""
        loop = asyncio.get_running_loop()
        progress = _on_loop(builder.progress, loop)
        checkpoint = await anyio.to_thread.run_sync(
            functools.partial(open_checkpoint, builder.source, progress=progress),
            abandon_on_cancel=True,
        )
        files = WeightFiles.of(checkpoint, builder.source)
        encoder = _prompt_encoder(checkpoint)
        SamplingParams().resolve(checkpoint.generation_config)  # a bad file fails here, not later
        built: list[EngineInfo] = []

        def make_engine() -> Engine:
            engine, info = build_engine(
                checkpoint, builder.config, progress=progress, cancelled=lambda: thread.stopping
            )
            built.append(info)
            return engine

        config = builder.config
        max_open = None if config.max_queue is None else config.max_num_seqs + config.max_queue
        thread = EngineThread(make_engine, max_open=max_open)
        await thread.start()
        # The weights are read: what maps their files may go.
        checkpoint = attrs.evolve(checkpoint, tensors={})
        return cls(thread, Requantiser(built[0], files), checkpoint, encoder)

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
        asked = as_request(request)
        if asked.adapter is not None:
            raise RequestError(
                f"adapter {asked.adapter!r} is unknown: {self._checkpoint.name} was loaded without "
                "adapters; leave set_adapter out for the base model"
            )
        encode = functools.partial(
            self._encoder.encode_chat,
            asked.messages,
            enable_thinking=asked.thinking,
            extra=asked.chat_template_kwargs,
        )
        prompt_ids = await _off_loop_if(self._is_slow_to_encode(asked), encode)
        sampling = asked.sampling_params
        number, generation = await self._generate(prompt_ids, asked)
        return ChatStream(
            generation,
            id=f"chatcmpl-{number}",
            created=int(time.time()),
            model=self._checkpoint.name,
            logprobs=sampling.return_logprobs or sampling.top_n_logprobs > 0,
        )

    async def send_completion_request(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> CompletionResponse:
        """Continue a raw prompt (text or token ids), greedily unless `sampling` says otherwise.

        Raises:
            RequestError, InferenceError, EngineDeadError, EngineClosedError: as for a chat.
        """
        sampling = SamplingParams.deterministic() if sampling is None else sampling
        if isinstance(prompt, str):
            encode = functools.partial(self._encoder.encode_text, prompt)
            prompt_ids = await _off_loop_if(len(prompt) > LONG_TEXT, encode)
        else:
            prompt_ids = self._check_ids(prompt)
        asked = RequestBuilder().set_sampling(sampling)
        number, generation = await self._generate(prompt_ids, asked)
        async with ChatStream(
            generation,
            id=f"cmpl-{number}",
            created=int(time.time()),
            model=self._checkpoint.name,
            logprobs=sampling.return_logprobs or sampling.top_n_logprobs > 0,
        ) as stream:
            answer = await stream.collect()
        return CompletionResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=tuple(
                CompletionChoice(
                    index=choice.index,
                    text=choice.message.content or "",
                    logprobs=choice.logprobs,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for choice in answer.choices
            ),
            usage=answer.usage,
        )

    def abort(self, id: str) -> None:
        """End the request with this response id; its stream ends with finish_reason "canceled".

        An id that is not running any more is ignored.

        Raises:
            RequestError: this is no response id.
        """
        prefix, _, number = id.rpartition("-")
        if prefix not in ("chatcmpl", "cmpl") or not number.isdecimal():
            raise RequestError(f"{id!r} is no response id: take `id` of a stream or chunk")
        self._thread.abort(int(number))

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
            encode = self._encoder.encode_text if add_special_tokens else self._encoder.encode_plain
            return await _off_loop_if(len(text) > LONG_TEXT, functools.partial(encode, text))
        asked = as_request(text)
        render = functools.partial(
            self.render_chat,
            asked,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )
        return (await _off_loop_if(self._is_slow_to_encode(asked), render))[1]

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        decode = functools.partial(
            self._tokenizer.decode, self._check_ids(ids), skip_special_tokens=skip_special_tokens
        )
        return await _off_loop_if(len(ids) > LONG_TEXT, decode)

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
        asked = as_request(request)
        return self._encoder.render_chat(
            asked.messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=asked.thinking if enable_thinking is None else enable_thinking,
            extra=asked.chat_template_kwargs,
        )

    def config(self) -> EngineConfig:
        """Return the settings the engine runs with, nothing left open."""
        return self._info.config

    def max_sequence_length(self) -> int:
        """Return the longest prompt plus completion, in tokens."""
        return self._info.max_model_len

    def describe(self) -> str:
        """Return every resolved setting and where it came from, as text for people."""
        return describe(self._info, self._checkpoint)

    async def stats(self) -> SchedulerStats:
        """Return what runs, waits and is cached right now.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        return await self._thread.call(lambda engine: engine.scheduler.stats())

    async def metrics(self) -> EngineMetrics:
        """Return what the engine holds now and has done so far, with latency histograms.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        return await self._thread.call(Engine.metrics)

    async def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        await self._thread.call(lambda engine: engine.scheduler.clear_prefix_cache())

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
        if not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"progress ({progress!r}) must be True, False or a function")
        run = functools.partial(
            self._requantiser.run,
            isq=parse_isq(isq),
            progress=_on_loop(progress, asyncio.get_running_loop()),
            cancelled=lambda: self._thread.stopping,
        )
        await self._thread.call(run)

    # Ending

    async def aclose(self) -> None:
        """Stop the engine after its current step and free the model; open requests fail.

        Raises nothing when called again.
        """
        self._closed = True
        await self._thread.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)
            self._thread.stop()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self._info.config.device}"
        return f"<Model {self._checkpoint.name!r} ({self._info.architecture}) {state}>"

    # Inside

    @property
    def _info(self) -> EngineInfo:
        return self._requantiser.info

    async def _generate(
        self, prompt_ids: Sequence[int], asked: RequestBuilder
    ) -> tuple[int, Generation]:
        """Check the request against the model, then hand it to the engine."""
        sampling = asked.sampling_params
        sampling.check_vocabulary(self._info.vocab_size)
        if prompt_ids and max(prompt_ids) >= self._info.vocab_size:  # a tokenizer may know more
            self._check_ids(prompt_ids)
        limit = self._info.max_model_len
        if asked.truncate_sequence and len(prompt_ids) >= limit:
            room = limit - min(sampling.max_len or 1, limit - 1)
            prompt_ids = self._encoder.keep_end(prompt_ids, room)
        if not prompt_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context {limit}, which leaves "
                "no room for an answer: shorten it, or cut its start off with "
                "with_truncate_sequence(True)"
            )
        resolved = sampling.resolve(self._checkpoint.generation_config)
        stop = sampling.stop_toks
        eos = frozenset() if sampling.ignore_eos else self._checkpoint.tokenizer.eos_token_ids
        room = limit - len(prompt_ids)
        request = Request(
            id=next(self._request_ids),
            prompt_ids=tuple(prompt_ids),
            sampling=resolved,
            max_tokens=min(sampling.max_len or room, room),
            stop_ids=eos | frozenset(stop.ids if stop else ()),
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed,
            priority=asked.priority,
            deadline=None if asked.deadline is None else time.perf_counter() + asked.deadline,
            cache_salt=asked.cache_salt,
            use_prefix_cache=asked.prefix_cache,
            dry_breakers=self._breaker_ids(resolved),
        )
        stream = await self._thread.submit(request)
        return request.id, Generation(self._thread, stream, request, self._tokenizer)

    def _is_slow_to_encode(self, asked: RequestBuilder) -> bool:
        """Whether encoding would hold up the event loop."""
        size = sum(len(message["content"]) for message in asked.messages)
        return size > LONG_TEXT or self._encoder.holds_control_text(asked.messages)

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        size = self._info.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
                raise RequestError(
                    f"token id {token!r} is outside the vocabulary (0 to {size - 1})"
                )
        return list(ids)

    def _breaker_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """The ids that end a repetition: the last token of "a" followed by each breaker."""
        if sampling.dry_params is None:
            return frozenset()
        texts = [f"a{breaker}" for breaker in sampling.dry_params.sequence_breakers]
        return frozenset(self._encoder.encode_plain(text)[-1] for text in texts)


def _prompt_encoder(checkpoint: Checkpoint) -> PromptEncoder:
    files = checkpoint.tokenizer
    template = None
    if files.chat_template is not None:
        template = ChatTemplate(
            files.chat_template,
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            origin=files.template_source or "unknown origin",
        )
    return PromptEncoder(
        files.tokenizer, bos_token=files.bos_token, adds_bos=files.adds_bos, template=template
    )


async def _off_loop_if(long: bool, function: Callable[[], T]) -> T:
    """Run it here, or on a worker thread if it would hold up the event loop."""
    return await anyio.to_thread.run_sync(function) if long else function()


def _on_loop(progress: Progress | None, loop: asyncio.AbstractEventLoop) -> Progress | None:
    """Make a progress callback run on the event loop, whatever thread reports."""
    if progress is None or isinstance(progress, bool):
        return progress

    def report(what: str, done: int, total: int) -> None:
        loop.call_soon_threadsafe(progress, what, done, total)

    return report
