"""`ServedEmbedder`: an embedding model on an engine of its own; texts in, vectors out."""

from __future__ import annotations

import asyncio
import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

import anyio.to_thread
import attrs

from mistralrs_sdk.chat.embedding_encoder import EmbeddingEncoder
from mistralrs_sdk.chat.embeddings import EmbeddingRequest, EmbeddingResponse
from mistralrs_sdk.config import EngineConfig
from mistralrs_sdk.engine.embedding import (
    EmbeddingEngine,
    EmbedInput,
    EmbedOutput,
    EmbedRequest,
    Vector,
)
from mistralrs_sdk.engine.embedding_build import EmbeddingInfo, build_embedding_engine
from mistralrs_sdk.engine.engine import Engine
from mistralrs_sdk.engine.engine_thread import EngineThread
from mistralrs_sdk.engine.metrics import EngineMetrics
from mistralrs_sdk.engine.request import Request
from mistralrs_sdk.engine.scheduler import SchedulerStats
from mistralrs_sdk.errors import InferenceError, RequestError
from mistralrs_sdk.loading.embedding import EmbeddingCheckpoint, open_embedding
from mistralrs_sdk.serving.event_loop import off_loop_if, on_loop

if TYPE_CHECKING:
    from mistralrs_sdk.builders.embedding_builder import EmbeddingModelBuilder

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters from which on a request is encoded off the event loop."""

_SETTINGS = (
    "device",
    "dtype",
    "isq",
    "topology",
    "imatrix",
    "num_threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "throughput_logging",
)
"""Those that have a part in embedding."""


class ServedEmbedder:
    """A loaded embedding model. `Model` is the handle people hold."""

    def __init__(
        self, thread: EngineThread, info: EmbeddingInfo, opened: EmbeddingCheckpoint
    ) -> None:
        self.thread = thread
        self.info = info
        """What was built: resolved settings, sizes, weights."""
        self._opened = opened
        self._tokenizer = opened.checkpoint.tokenizer.tokenizer
        self._request_ids = itertools.count(1)
        settings = opened.settings
        self._encoder = EmbeddingEncoder(
            self._tokenizer,
            limit=info.max_model_len,
            vocab_size=info.vocab_size,
            prompts=settings.prompts,
            default_prompt_name=settings.default_prompt_name,
            include_prompt=info.pooling.include_prompt,
        )

    @classmethod
    async def build(cls, builder: EmbeddingModelBuilder) -> Self:
        """Do what `builder.build()` promises."""
        progress = on_loop(builder.base.progress, asyncio.get_running_loop())
        opened = await anyio.to_thread.run_sync(
            functools.partial(open_embedding, builder.base.source, progress=progress),
            abandon_on_cancel=True,
        )
        built: list[EmbeddingInfo] = []

        def make_engine() -> Engine:
            engine, info = build_embedding_engine(
                opened, builder.base.config, progress=progress, cancelled=lambda: thread.stopping
            )
            built.append(info)
            return cast(Engine, engine)  # all that the thread asks of one

        thread = EngineThread(make_engine)
        await thread.start()
        # The weights are read: what maps their files may go.
        checkpoint = attrs.evolve(opened.checkpoint, tensors={})
        return cls(thread, built[0], attrs.evolve(opened, checkpoint=checkpoint))

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self._opened.checkpoint.name

    # Asking

    async def embed(self, asked: EmbeddingRequest) -> EmbeddingResponse:
        """Embed every input; requests sent at the same time share batches.

        Cancelling the task drops what was not computed yet.

        Raises:
            RequestError: an input is at fault: empty, too long, not in the vocabulary ...
            InferenceError: an input failed while it was computed; the message names it.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        size = sum(len(text) for text in asked.inputs)
        encode = functools.partial(self._encoder.encode, asked)
        encoded = await off_loop_if(size > LONG_TEXT, encode)
        request = EmbedRequest(
            id=next(self._request_ids),
            inputs=tuple(EmbedInput(one.ids, one.skip) for one in encoded),
        )
        vectors = await self._collect(request)
        return EmbeddingResponse(
            model=self.name,
            vectors=tuple(array("f", vector) for vector in vectors),
            prompt_tokens=sum(len(one.ids) for one in encoded),
        )

    def abort(self, id: str) -> NoReturn:
        """Refuse: embedding requests have no ids."""
        raise RequestError(
            f"{id!r} is no id of an embedding request: cancel the task that waits for it"
        )

    # Looking

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a raw text."""
        encode = functools.partial(
            self._encoder.encode_text, text, add_special_tokens=add_special_tokens
        )
        return await off_loop_if(len(text) > LONG_TEXT, encode)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        self._encoder.check_ids(ids)
        decode = functools.partial(
            self._tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens
        )
        return await off_loop_if(len(ids) > LONG_TEXT, decode)

    def describe(self) -> str:
        """Return every setting that has a part and where it came from, as text for people."""
        rows = [*self._model_rows(), *self._setting_rows()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {why}" for name, value, why in rows]
        return "\n".join(line.rstrip() for line in lines)

    async def stats(self) -> SchedulerStats:
        """Return what waits right now."""
        return await self._call(EmbeddingEngine.stats)

    async def metrics(self) -> EngineMetrics:
        """Return what the engine has done so far."""
        return await self._call(EmbeddingEngine.metrics)

    # Ending

    async def aclose(self) -> None:
        """Stop the engine after its current step and free the model; open requests fail."""
        await self.thread.aclose()

    def __repr__(self) -> str:
        return f"<ServedEmbedder {self.name!r} ({self.info.architecture})>"

    # Inside

    async def _collect(self, request: EmbedRequest) -> list[Vector]:
        """Wait for the vector of every input."""
        vectors: list[Vector] = [[]] * len(request.inputs)
        stream = await self.thread.submit(cast(Request, request))
        try:
            while outputs := cast("list[EmbedOutput]", await stream.take()):
                for output in outputs:
                    if output.vector is None:
                        raise InferenceError(f"input {output.choice} failed: {output.error}")
                    vectors[output.choice] = output.vector
        finally:
            stream.close()
        return vectors

    async def _call(self, function: Callable[[EmbeddingEngine], T]) -> T:
        return await self.thread.call(cast(Any, function))

    def _model_rows(self) -> Iterator[tuple[str, str, str]]:
        info, checkpoint, settings = self.info, self._opened.checkpoint, self._opened.settings
        yield "model", checkpoint.name, "user"
        yield "architecture", info.architecture, "model"
        yield "parameters", f"{info.num_parameters / 1e6:.1f} M", "model"
        yield "format", checkpoint.format, "model"
        loaded = f"{info.weights}; loaded in {info.load_seconds:.1f} s"
        yield "weights", f"{info.weight_bytes / 2**20:.1f} MiB", loaded
        yield "dimensions", str(info.dimensions), "model"
        steps = [type(step).__name__.lower() for step in self._opened.head.steps]
        yield "pooling", ", then ".join([" + ".join(info.pooling.modes), *steps]), "model"
        yield "prompts", ", ".join(settings.prompts) or "none", "model"
        if settings.default_prompt_name is not None:
            yield "default prompt", settings.default_prompt_name, "model"

    def _setting_rows(self) -> Iterator[tuple[str, str, str]]:
        plain = EngineConfig()
        for name in _SETTINGS:
            value = getattr(self.info.config, name)
            default = "default" if value == getattr(plain, name) else "user"
            origin = self.info.origins.get(name) or default
            yield name, str(getattr(value, "value", value)), origin
        yield "attention", self.info.attention, "automatic"
