"""What answers of the Responses API are kept, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mistralrs_sdk import ConfigError
from mistralrs_sdk.server.responses_api_events import ResponseAnswer
from mistralrs_sdk.server.responses_store import ResponsesStore, StoredResponse


def stored(id: str, *, status: str = "completed", said: str = "") -> StoredResponse:
    response = {"id": id, "status": status, "output": []}
    messages = [{"role": "user", "content": said}]
    return StoredResponse(answer=ResponseAnswer(response), items=[], messages=messages)


def filled(store: ResponsesStore, *ids: str, **settings: Any) -> ResponsesStore:
    for id in ids:
        store.put(stored(id, **settings))
    return store


def kept(store: ResponsesStore, ids: str) -> str:
    return "".join(id for id in ids if store.get(id))


def test_the_oldest_goes_when_there_are_too_many():
    """The limit is a number of answers."""
    assert kept(filled(ResponsesStore(max_responses=2), *"abc"), "abc") == "bc"


def test_the_oldest_go_when_there_is_too_much_text():
    """The limit is on all of it; one answer alone is kept."""
    store = filled(ResponsesStore(max_characters=2500), *"abc", said="x" * 800)
    assert kept(store, "abc") == "bc"

    store.put(stored("d", said="x" * 9000))

    assert kept(store, "abcd") == "d"


def test_what_is_old_goes():
    """The limit is in seconds since it was stored."""
    now = 0.0
    store = ResponsesStore(max_age_seconds=10, clock=lambda: now)
    filled(store, "a")
    now = 6.0
    filled(store, "b")
    now = 11.0

    assert kept(store, "ab") == "b"
    assert len(store) == 1


def test_what_runs_stays():
    """An answer that is being written is not lost to newer ones."""
    store = ResponsesStore(max_responses=1)
    store.put(stored("a", status="in_progress"))

    assert kept(filled(store, *"bc"), "abc") == "ac"


async def test_closing_stops_what_runs():
    """Nothing works on for a store that is gone."""
    store = ResponsesStore()
    running = stored("a", status="in_progress")
    running.task = asyncio.create_task(asyncio.sleep(60))
    store.put(running)

    await store.aclose()

    assert running.task.cancelled()
    assert len(store) == 0


@pytest.mark.parametrize("limit", ["max_responses", "max_age_seconds", "max_characters"])
def test_limits_are_checked(limit):
    """The error names the limit."""
    with pytest.raises(ConfigError, match=limit):
        ResponsesStore(**{limit: 0})
