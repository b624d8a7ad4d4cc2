"""`ServedModel`: one engine with its tokenizer and chat template; requests in, streams out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread
import attrs

from mistralrs_sdk.adapters import (
    LoraAdapterInfo,
    LoraAdapterLoadPolicy,
    LoraAdapterSpec,
    LoraRuntimeStatus,
)
from mistralrs_sdk.answers.completions import (
    CompletionStream,
    Echo,
    completion_settings,
    sampled_best_of,
)
from mistralrs_sdk.answers.generation import Generation, failure_of
from mistralrs_sdk.answers.raw_logits import RawLogits, prompt_logprobs, require_room
from mistralrs_sdk.answers.stream import ChatStream
from mistralrs_sdk.chat.chat_text import ChatPrompt, ChatText
from mistralrs_sdk.chat.messages import flag
from mistralrs_sdk.chat.requests import RequestBuilder
from mistralrs_sdk.chat.responses import CompletionResponse
from mistralrs_sdk.chat.template import ChatTemplate, PromptEncoder
from mistralrs_sdk.chat.token_logprobs import first_logprob, response_logprobs
from mistralrs_sdk.config import Progress
from mistralrs_sdk.engine.adapters import AdapterRegistry, locator
from mistralrs_sdk.engine.build import EngineInfo, build_engine
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.engine_thread import EngineThread
from mistralrs_sdk.engine.metrics import QUEUE_FULL, EngineMetrics
from mistralrs_sdk.engine.requantise import Requantiser, WeightFiles
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.errors import ConfigError, RequestError
from mistralrs_sdk.isq import Isq, parse_isq
from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.loader import open_checkpoint
from mistralrs_sdk.sampling_params import SamplingParams
from mistralrs_sdk.serving.description import describe
from mistralrs_sdk.serving.event_loop import off_loop_if, on_loop
from mistralrs_sdk.serving.request_maker import RequestMaker
from mistralrs_sdk.tools.loop import ToolLoopStream, open_stream
from mistralrs_sdk.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from mistralrs_sdk.builders.model_builder import ModelBuilder

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
        toolbox: Toolbox,
        adapters: AdapterRegistry,
    ) -> None:
        self.thread = thread
        self.toolbox = toolbox
        self._adapters = adapters
        self._adapter_loads = anyio.CapacityLimiter(1)
        """They wait here for each other, not on the threads that encode and compile, too."""
        self._requantiser = requantiser
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._chat = ChatText(encoder, response_template=checkpoint.tokenizer.response_template)
        self._tokenizer = checkpoint.tokenizer.tokenizer
        self._requests = RequestMaker(checkpoint, encoder, info=self.info, adapters=adapters)

    @classmethod
    async def build(cls, builder: ModelBuilder) -> Self:
        """Do what `builder.build()` promises."""
        loop = asyncio.get_running_loop()
        progress = on_loop(builder.progress, loop)
        checkpoint = await anyio.to_thread.run_sync(
            functools.partial(open_checkpoint, builder.source, progress=progress),
            abandon_on_cancel=True,
        )
        files = WeightFiles.of(checkpoint, builder.source)
        encoder = _prompt_encoder(checkpoint)
        SamplingParams().resolve(checkpoint.generation_config)  # a bad file fails here, not later
        built: list[EngineInfo] = []
        adapters = AdapterRegistry(builder.config.lora, locator(builder.source, progress))

        ended = contextlib.ExitStack()

        def make_engine() -> Engine:
            engine, info = build_engine(
                checkpoint,
                builder.config,
                adapters=adapters,
                source=files.source,
                ended=ended,
                progress=progress,
                cancelled=lambda: thread.stopping,
            )
            built.append(info)
            return engine

        config = builder.config
        max_open = None if config.max_queue is None else config.max_num_seqs + config.max_queue
        thread = EngineThread(make_engine, max_open=max_open, at_end=ended.close)
        toolbox = Toolbox(builder.tools)
        try:
            await toolbox.start()
            await thread.start()
        except BaseException:
            await toolbox.aclose()
            raise
        # The weights are read: what maps their files may go.
        checkpoint = attrs.evolve(checkpoint, tensors={})
        return cls(thread, Requantiser(built[0], files), checkpoint, encoder, toolbox, adapters)

    @property
    def info(self) -> EngineInfo:
        """What was built: resolved settings, sizes, weights."""
        return self._requantiser.info

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self._checkpoint.name

    # Asking

    async def stream_chat(self, asked: RequestBuilder) -> ChatStream | ToolLoopStream:
        """Answer a chat in chunks, executing calls; see `Model.stream_chat_request`."""
        return await open_stream(self.stream_round, asked, self.toolbox)

    async def stream_round(self, asked: RequestBuilder) -> ChatStream:
        """Answer a chat once, in chunks: calls are left to the caller, sessions alone."""
        encode = functools.partial(self._chat.prompt, asked)
        prompt = await off_loop_if(self._is_slow_to_encode(asked), encode)
        asked = attrs.evolve(asked, constraint=prompt.constraint)
        sampling = asked.sampling_params
        number, generation = await self._generate(prompt.ids, asked, chat=prompt)
        return ChatStream(
            generation,
            id=f"chatcmpl-{number}",
            created=int(time.time()),
            model=self.name,
            logprobs=sampling.return_logprobs or sampling.top_n_logprobs > 0,
        )

    async def complete(
        self,
        prompt: str | Sequence[int],
        asked: RequestBuilder | SamplingParams | None = None,
        *,
        echo: bool = False,
        best_of: int | None = None,
    ) -> CompletionResponse:
        """Continue a raw prompt; see `Model.send_completion_request`."""
        settings = completion_settings(asked)
        stream = await self._open_completion(
            prompt, sampled_best_of(settings, best_of), echo=echo, shown=settings.sampling
        )
        async with stream:
            return await stream.collect()

    async def stream_completion(
        self,
        prompt: str | Sequence[int],
        asked: RequestBuilder | SamplingParams | None = None,
        *,
        echo: bool = False,
    ) -> CompletionStream:
        """Continue a raw prompt in chunks; see `Model.stream_completion_request`."""
        settings = completion_settings(asked)
        return await self._open_completion(prompt, settings, echo=echo, shown=settings.sampling)

    async def raw_logits(self, asked: RequestBuilder | str | Sequence[int]) -> RawLogits:
        """Return the logits at every position of a chat's prompt, or of a raw one.

        See `Model.send_raw_chat_request`.
        """
        if not isinstance(asked, RequestBuilder):
            return await self._raw_logits(await self._raw_prompt_ids(asked), RequestBuilder())
        if asked.session_id is not None:
            raise RequestError(
                f"session_id ({asked.session_id!r}) has no effect on raw logits: leave it out"
            )
        render = functools.partial(self._chat.render, asked)
        _, prompt_ids = await off_loop_if(self._is_slow_to_encode(asked), render)
        return await self._raw_logits(prompt_ids, asked)

    def abort(self, id: str) -> None:
        """End a request by its response id; see `Model.abort`."""
        prefix, _, number = id.rpartition("-")
        if prefix not in ("chatcmpl", "cmpl") or not number.isdecimal():
            raise RequestError(f"{id!r} is no response id: take `id` of a stream or chunk")
        self.thread.abort(int(self.toolbox.running_id(id).rpartition("-")[2]))

    # Looking

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a raw text."""
        encode = self._encoder.encode_text if add_special_tokens else self._encoder.encode_plain
        return await off_loop_if(len(text) > LONG_TEXT, functools.partial(encode, text))

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
        return (await off_loop_if(self._is_slow_to_encode(asked), render))[1]

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        decode = functools.partial(
            self._tokenizer.decode,
            self._requests.check_ids(ids),
            skip_special_tokens=skip_special_tokens,
        )
        return await off_loop_if(len(ids) > LONG_TEXT, decode)

    def render_chat(
        self, asked: RequestBuilder, *, add_generation_prompt: bool, enable_thinking: bool | None
    ) -> tuple[str, list[int]]:
        """Return the prompt a chat request becomes, as text and as ids."""
        return self._chat.render(
            asked, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def describe(self) -> str:
        """Return every resolved setting and where it came from, as text for people."""
        return describe(self.info, self._checkpoint, self._chat.answers)

    async def stats(self) -> SchedulerStats:
        """Return what runs, waits and is cached right now."""
        return await self.thread.call(lambda engine: engine.scheduler.stats())

    async def metrics(self) -> EngineMetrics:
        """Return what the engine holds now and has done so far."""
        metrics = await self.thread.call(Engine.metrics)
        return metrics.with_rejected(QUEUE_FULL, self.thread.num_refused)

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
            progress=on_loop(progress, asyncio.get_running_loop()),
            cancelled=lambda: self.thread.stopping,
        )
        await self.thread.call(run)

    async def load_adapter(
        self,
        alias: str,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        policy: LoraAdapterLoadPolicy | None = None,
    ) -> LoraAdapterInfo:
        """Load a LoRA adapter and give it a name; see `Model.load_lora_adapter`."""
        spec = LoraAdapterSpec(alias, source, revision)
        load = functools.partial(self._adapters.load, spec, policy)
        return await anyio.to_thread.run_sync(load, limiter=self._adapter_loads)

    async def unload_adapter(self, alias: str, *, generation: str | None = None) -> LoraAdapterInfo:
        """Take an adapter's name away; see `Model.unload_lora_adapter`."""
        return self._adapters.unload(alias, generation=generation)

    async def list_adapters(self) -> tuple[LoraAdapterInfo, ...]:
        """Return the loaded adapters, in the order of their aliases."""
        return self._adapters.infos()

    async def adapter_status(self) -> LoraRuntimeStatus:
        """Return all adapters, and the weights in memory."""
        return self._adapters.status()

    async def aclose(self) -> None:
        """Stop the engine after its current step and free the model; open requests fail."""
        try:
            await self.thread.aclose()
        finally:
            self._adapters.close()
            await self.toolbox.aclose()

    def __repr__(self) -> str:
        return f"<ServedModel {self.name!r} ({self.info.architecture})>"

    # Inside

    async def _generate(
        self, prompt_ids: Sequence[int], asked: RequestBuilder, *, chat: ChatPrompt | None = None
    ) -> tuple[int, Generation]:
        """Check the request against the model, then hand it to the engine."""
        prompt_ids = self._requests.fit(prompt_ids, asked)
        request = await self._requests.make(prompt_ids, asked)
        try:
            stream = await self.thread.submit(request)
        except BaseException:
            if request.adapter is not None:  # else whoever keeps the error keeps the weights
                request.adapter.release()
            raise
        return request.id, Generation(self.thread, stream, request, self._tokenizer, chat=chat)

    async def _open_completion(
        self,
        prompt: str | Sequence[int],
        asked: RequestBuilder,
        *,
        echo: bool,
        shown: SamplingParams,
    ) -> CompletionStream:
        """Start a completion; `shown` are the settings its caller made."""
        reports = shown.return_logprobs or shown.top_n_logprobs > 0
        given = await self._raw_prompt_ids(prompt)
        prompt_ids = self._requests.fit(given, asked)
        echoed = None
        if flag("echo", echo):
            text = prompt if isinstance(prompt, str) and prompt_ids is given else None
            echoed = await self._echo(prompt_ids, asked, text=text, reports=reports)
        number, generation = await self._generate(prompt_ids, asked)
        stream = ChatStream(
            generation,
            id=f"cmpl-{number}",
            created=int(time.time()),
            model=self.name,
            logprobs=asked.sampling.return_logprobs or reports,
        )
        return CompletionStream(stream, echo=echoed, logprobs=reports, keep=shown.n_choices)

    async def _echo(
        self, prompt_ids: Sequence[int], asked: RequestBuilder, *, text: str | None, reports: bool
    ) -> Echo:
        """The prompt as text, with the log probabilities of its tokens if they are reported."""
        if text is None:
            text = await self.detokenize(prompt_ids, skip_special_tokens=False)
        if not reports:
            return Echo(text=text)
        logits, tokens = await self._raw_logits(prompt_ids, asked)
        measure = functools.partial(
            prompt_logprobs, logits[0], tokens, top_n=asked.sampling.top_n_logprobs
        )
        found = await anyio.to_thread.run_sync(measure)
        entries = (
            first_logprob(self._tokenizer, tokens[0]),
            *response_logprobs(self._tokenizer, found),
        )
        added = tokens[0] in self._encoder.added_tokens.values()
        if added and not text.startswith(entries[0].token):
            entries = entries[1:]  # the tokenizer's own beginning is no part of the text
        return Echo(text=text, logprobs=entries)

    async def _raw_logits(self, prompt_ids: Sequence[int], asked: RequestBuilder) -> RawLogits:
        """Have the prompt computed, and nothing drawn."""
        prompt_ids = self._requests.fit(prompt_ids, asked)
        require_room(len(prompt_ids), vocab_size=self.info.vocab_size)
        plain = attrs.evolve(
            asked, sampling=SamplingParams(), samples=False, constraint=None, logits_processors=()
        )
        request = attrs.evolve(
            await self._requests.make(prompt_ids, plain),
            raw_logits=True,
            max_tokens=1,
            stop_ids=frozenset(),
        )
        stream = await self.thread.submit(request)
        try:
            (output,) = await stream.take()
        finally:
            stream.close()
        if output.error is not None:
            raise failure_of(output)
        return RawLogits([output.prompt_logits], list(prompt_ids))

    async def _raw_prompt_ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """The ids of a raw prompt, which may be ids already."""
        if not isinstance(prompt, str):
            return self._requests.check_ids(prompt)
        encode = functools.partial(self._encoder.encode_text, prompt)
        return await off_loop_if(len(prompt) > LONG_TEXT, encode)

    def _is_slow_to_encode(self, asked: RequestBuilder) -> bool:
        """Whether encoding would hold up the event loop."""
        size = sum(len(message["content"]) for message in asked.messages)
        return size > LONG_TEXT or self._chat.holds_control_text(asked)


def _prompt_encoder(checkpoint: Checkpoint) -> PromptEncoder:
    files = checkpoint.tokenizer
    template = None
    if files.chat_template is not None:
        template = ChatTemplate(
            files.chat_template,
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            unk_token=files.unk_token,
            origin=files.template_source or "unknown origin",
        )
    return PromptEncoder(
        files.tokenizer, bos_token=files.bos_token, adds_bos=files.adds_bos, template=template
    )
