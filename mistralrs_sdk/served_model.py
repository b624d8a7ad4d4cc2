"""`ServedModel`: one engine with its tokenizer and chat template; requests in, streams out."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

import anyio.to_thread
import attrs

from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import CompletionChoice, CompletionResponse
from mistralrs_sdk.chat.template import ChatTemplate, PromptEncoder
from mistralrs_sdk.config import Progress
from mistralrs_sdk.description import describe
from mistralrs_sdk.engine.build import EngineInfo, build_engine
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.engine_thread import EngineThread
from mistralrs_sdk.engine.metrics import EngineMetrics
from mistralrs_sdk.engine.requantise import Requantiser, WeightFiles
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.errors import ConfigError, RequestError, UnsupportedError
from mistralrs_sdk.generation import Generation
from mistralrs_sdk.isq import Isq, parse_isq
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.sampling_params import SamplingParams
from mistralrs_sdk.stream import ChatStream

if TYPE_CHECKING:
    from mistralrs_sdk.builder import ModelBuilder

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters from which on a prompt is encoded off the event loop."""


class ServedModel:
    """A loaded model on an engine of its own. `Model` is the handle people hold."""

    def __init__(
        self,
        thread: EngineThread,
        requantiser: Requantiser,
        checkpoint: Checkpoint,
        encoder: PromptEncoder,
    ) -> None:
        self.thread = thread
        self._requantiser = requantiser
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._tokenizer = checkpoint.tokenizer.tokenizer
        self._request_ids = itertools.count(1)
        self._seeds = random.Random(self.info.config.seed)

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

    @property
    def info(self) -> EngineInfo:
        """What was built: resolved settings, sizes, weights."""
        return self._requantiser.info

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self._checkpoint.name

    # Asking

    async def stream_chat(self, asked: RequestBuilder) -> ChatStream:
        """Answer a chat in chunks; see `Model.stream_chat_request`."""
        _refuse_unserved(asked)
        if asked.adapter is not None:
            raise RequestError(
                f"adapter {asked.adapter!r} is unknown: {self.name} was loaded without "
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
            model=self.name,
            logprobs=sampling.return_logprobs or sampling.top_n_logprobs > 0,
        )

    async def complete(
        self, prompt: str | Sequence[int], sampling: SamplingParams
    ) -> CompletionResponse:
        """Continue a raw prompt; see `Model.send_completion_request`."""
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
            model=self.name,
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
        """End a request by its response id; see `Model.abort`."""
        prefix, _, number = id.rpartition("-")
        if prefix not in ("chatcmpl", "cmpl") or not number.isdecimal():
            raise RequestError(f"{id!r} is no response id: take `id` of a stream or chunk")
        self.thread.abort(int(number))

    # Looking

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a raw text."""
        encode = self._encoder.encode_text if add_special_tokens else self._encoder.encode_plain
        return await _off_loop_if(len(text) > LONG_TEXT, functools.partial(encode, text))

    async def tokenize_chat(
        self, asked: RequestBuilder, *, add_generation_prompt: bool, enable_thinking: bool | None
    ) -> list[int]:
        """Return the ids of messages as the chat template renders them."""
        render = functools.partial(
            self.render_chat,
            asked,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=enable_thinking,
        )
        return (await _off_loop_if(self._is_slow_to_encode(asked), render))[1]

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        decode = functools.partial(
            self._tokenizer.decode, self._check_ids(ids), skip_special_tokens=skip_special_tokens
        )
        return await _off_loop_if(len(ids) > LONG_TEXT, decode)

    def render_chat(
        self, asked: RequestBuilder, *, add_generation_prompt: bool, enable_thinking: bool | None
    ) -> tuple[str, list[int]]:
        """Return the prompt a chat request becomes, as text and as ids."""
        return self._encoder.render_chat(
            asked.messages,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=asked.thinking if enable_thinking is None else enable_thinking,
            extra=asked.chat_template_kwargs,
        )

    def describe(self) -> str:
        """Return every resolved setting and where it came from, as text for people."""
        return describe(self.info, self._checkpoint)

    async def stats(self) -> SchedulerStats:
        """Return what runs, waits and is cached right now."""
        return await self.thread.call(lambda engine: engine.scheduler.stats())

    async def metrics(self) -> EngineMetrics:
        """Return what the engine holds now and has done so far."""
        return await self.thread.call(Engine.metrics)

    async def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self.thread.call(lambda engine: engine.scheduler.clear_prefix_cache())

    # Changing and ending

    async def re_isq(self, isq: Isq | str | int, *, progress: Progress) -> None:
        """Quantise the running weights to another type; see `Model.re_isq_model`."""
        if not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"progress ({progress!r}) must be True, False or a function")
        run = functools.partial(
            self._requantiser.run,
            isq=parse_isq(isq),
            progress=_on_loop(progress, asyncio.get_running_loop()),
            cancelled=lambda: self.thread.stopping,
        )
        await self.thread.call(run)

    async def aclose(self) -> None:
        """Stop the engine after its current step and free the model; open requests fail."""
        await self.thread.aclose()

    def __repr__(self) -> str:
        return f"<ServedModel {self.name!r} ({self.info.architecture})>"

    # Inside

    async def _generate(
        self, prompt_ids: Sequence[int], asked: RequestBuilder
    ) -> tuple[int, Generation]:
        """Check the request against the model, then hand it to the engine."""
        sampling = asked.sampling_params
        sampling.check_vocabulary(self.info.vocab_size)
        prompt_ids = self._fit(prompt_ids, asked)
        resolved = sampling.resolve(self._checkpoint.generation_config)
        stop = sampling.stop_toks
        eos = frozenset() if sampling.ignore_eos else self._checkpoint.tokenizer.eos_token_ids
        room = self.info.max_model_len - len(prompt_ids)
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
        stream = await self.thread.submit(request)
        return request.id, Generation(self.thread, stream, request, self._tokenizer)

    def _fit(self, prompt_ids: Sequence[int], asked: RequestBuilder) -> Sequence[int]:
        """The prompt as it fits the context and the vocabulary, or a refusal."""
        if prompt_ids and max(prompt_ids) >= self.info.vocab_size:  # a tokenizer may know more
            self._check_ids(prompt_ids)
        limit = self.info.max_model_len
        if asked.truncate_sequence and len(prompt_ids) >= limit:
            room = limit - min(asked.sampling_params.max_len or 1, limit - 1)
            prompt_ids = self._encoder.keep_end(prompt_ids, room)
        if not prompt_ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context {limit}, which leaves "
                "no room for an answer: shorten it, or cut its start off with "
                "with_truncate_sequence(True)"
            )
        return prompt_ids

    def _is_slow_to_encode(self, asked: RequestBuilder) -> bool:
        """Whether encoding would hold up the event loop."""
        size = sum(len(message["content"]) for message in asked.messages)
        return size > LONG_TEXT or self._encoder.holds_control_text(asked.messages)

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        size = self.info.vocab_size
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


_UNSERVED = (
    "reasoning_effort",
    "tools",
    "constraint",
    "logits_processors",
    "max_tool_rounds",
    "session_id",
)


def _refuse_unserved(asked: RequestBuilder) -> None:
    """Refuse what a request can say and nothing here does yet."""
    for name in _UNSERVED:
        if getattr(asked, name):
            raise UnsupportedError(f"{name} of a request is not supported yet: leave it out")


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
