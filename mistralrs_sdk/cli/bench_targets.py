"""What `bench` measures: a model in this process, or a server with OpenAI's API."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mistralrs_sdk import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    MistralRsError,
    RequestBuilder,
    RequestError,
    SamplingParams,
)
from mistralrs_sdk.cli.bench_http import HttpClient
from mistralrs_sdk.cli.bench_numbers import Answer
from mistralrs_sdk.cli.bench_work import Job, TokenIds

if TYPE_CHECKING:
    from mistralrs_sdk import Model

_PROBED = 1000 + 2048
"""More of the vocabulary than this is not used."""


class Target(Protocol):
    """Answers jobs, greedily and to the wanted length."""

    name: str
    ids: TokenIds

    async def answer(self, job: Job) -> Answer:
        """Run one request; what goes wrong with it is in the answer.

        Raises:
            EngineDeadError, EngineClosedError: no later request can be answered either.
        """
        ...


class InProcess:
    """A model of this process."""

    def __init__(
        self, model: Model, *, name: str, ids: TokenIds, adapter: str | None = None
    ) -> None:
        self.name = name
        self.ids = ids
        self._model = model
        self._adapter = adapter

    @classmethod
    async def of(cls, model: Model, *, name: str, adapter: str | None = None) -> InProcess:
        """Find out which ids the model's vocabulary has.

        Raises:
            ConfigError: the model has no adapter of this name.
        """
        if adapter is not None:
            loaded = [info.alias for info in await model.list_lora_adapters()]
            if adapter not in loaded:
                names = ", ".join(loaded) or "none; load it with --lora"
                raise ConfigError(f"--adapter {adapter!r} is not loaded, but {names}")
        ids = TokenIds.below(await _vocab_size(model))
        return cls(model, name=name, ids=ids, adapter=adapter)

    async def answer(self, job: Job) -> Answer:
        """Stream a completion."""
        times: list[float] = []
        usage = None
        sent = time.perf_counter()
        try:
            sampling = SamplingParams(top_k=1, ignore_eos=True, max_len=job.new_tokens)
            asked = RequestBuilder().set_sampling(sampling).set_adapter(self._adapter)
            stream = await self._model.stream_completion_request(job.prompt, asked)
            async with stream:
                async for chunk in stream:
                    times.append(time.perf_counter())
                    usage = chunk.usage or usage
        except (EngineDeadError, EngineClosedError):
            raise
        except MistralRsError as error:
            return Answer(sent=sent, times=tuple(times), error=str(error))
        assert usage is not None, "the last chunk brings it"
        return Answer(
            sent=sent,
            times=tuple(times),
            prompt_tokens=usage.prompt_tokens,
            new_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        )


class OverHttp:
    """A server with OpenAI's completions or chat completions.

    Completions send the ids themselves. A chat sends one word for each id, so that its length in
    tokens is about right; what the server counts is what is reported.
    """

    def __init__(
        self,
        client: HttpClient,
        *,
        name: str,
        ids: TokenIds,
        api: Literal["completions", "chat"],
        ignore_eos: bool,
    ) -> None:
        self.name = name
        self.ids = ids
        self._client = client
        self._api = api
        self._ignore_eos = ignore_eos

    async def answer(self, job: Job) -> Answer:
        """Post the request and read its events."""
        times: list[float] = []
        usage: dict[str, Any] = {}
        path = "/v1/completions" if self._api == "completions" else "/v1/chat/completions"
        sent = time.perf_counter()
        try:
            async with contextlib.aclosing(self._client.events(path, self._body(job))) as events:
                async for event in events:
                    if _brings_something(event):
                        times.append(time.perf_counter())
                    usage = event.get("usage") or usage
        except MistralRsError as error:
            return Answer(sent=sent, times=tuple(times), error=str(error))
        except (OSError, EOFError, ValueError) as error:
            cut = f"the answer broke off: {str(error) or type(error).__name__}"
            return Answer(sent=sent, times=tuple(times), error=cut)
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            sent=sent,
            times=tuple(times),
            prompt_tokens=usage.get("prompt_tokens", len(job.prompt)),
            new_tokens=usage.get("completion_tokens", len(times)),
            cached_tokens=details.get("cached_tokens") or 0,
        )

    def _body(self, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "max_tokens": job.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._api == "completions":
            return body | {"prompt": list(job.prompt)}
        return body | {"messages": [{"role": "user", "content": _words(job.prompt)}]}


def _brings_something(event: dict[str, Any]) -> bool:
    """Whether it belongs to a token: not the usage, the role that opens a chat, or the end alone.

    Text that is empty counts: a token may be half a letter.
    """
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(value for name, value in delta.items() if name != "role"):
            return True
        if "role" not in delta and not choice.get("finish_reason"):
            return True
    return False


def _words(ids: Sequence[int]) -> str:
    """A short word for each id, which most tokenizers know as one token."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in ids)


_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book"
)
_WORDS = _TEXT.split()


async def _vocab_size(model: Model) -> int:
    """How many ids the tokenizer knows, at most `_PROBED`; found by asking for their text."""
    low, high = 1, _PROBED
    while low < high:
        middle = (low + high + 1) // 2
        try:
            await model.detokenize([middle - 1])
            low = middle
        except RequestError:
            high = middle - 1
    return low
