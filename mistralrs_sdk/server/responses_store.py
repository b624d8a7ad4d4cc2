"""`ResponsesStore`: answers of the Responses API that can be fetched, continued and cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from mistralrs_sdk import ConfigError
from mistralrs_sdk.server.responses_api_events import ResponseAnswer
from mistralrs_sdk.server.responses_api_items import Message, messages_of

MAX_RESPONSES = 1000
MAX_AGE_SECONDS = 24 * 3600.0
MAX_CHARACTERS = 100_000_000


@attrs.define(eq=False, kw_only=True)
class StoredResponse:
    """An answer, what it answered, and the task that works on it in the background."""

    answer: ResponseAnswer
    items: Sequence[dict[str, Any]]
    """The input of its request."""
    messages: Sequence[Message]
    """The turns before the answer, without instructions."""
    request_bytes: int = 0
    """The length of its request, for what is kept of that: items, instructions, tools."""
    task: asyncio.Task[None] | None = None
    created: float = 0.0

    @property
    def response(self) -> dict[str, Any]:
        """The response as far as it has come."""
        return self.answer.response

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def running(self) -> bool:
        """Whether it is still being answered."""
        return self.response["status"] in ("queued", "in_progress")

    @property
    def characters(self) -> int:
        """How much it holds, roughly; what several answers share counts for each."""
        turns = sum(map(_characters, self.messages))
        return turns + self.request_bytes + self.answer.characters

    def conversation(self) -> list[Message]:
        """Return all turns, the answer included, for a request that goes on from it."""
        return messages_of(self.response["output"], after=self.messages)

    async def cancel(self) -> None:
        """Stop the background task, and wait until the model has let go of it."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])


class ResponsesStore:
    """Answers by id, in memory. The oldest go when there are too many; all go when they are old.

    What still runs stays. `max_characters` bounds the text they hold. Everything is lost when the
    process ends.

    Raises:
        ConfigError: a limit is below 1.
    """

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_age_seconds: float = MAX_AGE_SECONDS,
        max_characters: int = MAX_CHARACTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("max_responses", max_responses),
            ("max_age_seconds", max_age_seconds),
            ("max_characters", max_characters),
        ):
            if value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1")
        self._max_responses = max_responses
        self._max_age = max_age_seconds
        self._max_characters = max_characters
        self._clock = clock
        self._stored: dict[str, StoredResponse] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Keep an answer, and let go of those it is too many with."""
        stored.created = self._clock()
        self._stored[stored.id] = stored
        self._forget_old()
        characters = sum(each.characters for each in self._stored.values())
        for each in list(self._stored.values()):
            if len(self._stored) <= self._max_responses and characters <= self._max_characters:
                break
            if not each.running and each is not stored:
                characters -= each.characters
                del self._stored[each.id]

    @property
    def is_full(self) -> bool:
        """Whether what runs takes all there is: none of that is let go of."""
        running = [each.characters for each in self._stored.values() if each.running]
        return len(running) >= self._max_responses or sum(running) >= self._max_characters

    def get(self, id: str) -> StoredResponse | None:
        """Return the answer with this id, None if there is none (any more)."""
        self._forget_old()
        return self._stored.get(id)

    async def delete(self, id: str) -> bool:
        """Forget an answer, and stop it if it runs; False if there is none."""
        stored = self.get(id)
        if stored is None:
            return False
        del self._stored[id]
        await stored.cancel()
        return True

    async def aclose(self) -> None:
        """Stop what runs in the background, and forget everything."""
        stored, self._stored = list(self._stored.values()), {}
        for each in stored:
            await each.cancel()

    def _forget_old(self) -> None:
        oldest = self._clock() - self._max_age
        for each in list(self._stored.values()):
            if each.created >= oldest:
                break
            if not each.running:
                del self._stored[each.id]


def _characters(message: Message) -> int:
    """What a turn holds, with something for the objects that hold it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = (message["content"], message.get("reasoning_content", ""))
    return sum(map(len, texts)) + sum(len(call["arguments"]) + 400 for call in calls) + 200
