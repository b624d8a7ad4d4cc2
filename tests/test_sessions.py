"""Sessions: what is kept of a conversation, for how long, and how it is copied."""

from __future__ import annotations

import json

import pytest

from mistralrs_sdk import RequestError
from mistralrs_sdk.tools.sessions import SerializedSession, SessionStore


def turn(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": f"answer {number}"},
    ]


def with_calls(number: int) -> list[dict]:
    """A turn in which a tool was called."""
    user, answer = turn(number)
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [user, calling, {"role": "tool", "content": "1", "tool_call_id": "c"}, answer]


def filled(store: SessionStore, session_id: str, messages: list[dict]) -> None:
    store.import_(session_id, {"messages": messages})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_committed_answer_is_there_for_the_next_request():
    """What a request commits is what the next lease sees."""
    store = SessionStore()
    lease = store.lease("a")
    lease.commit(turn(1))
    lease.release()

    assert store.lease("a").messages == tuple(turn(1))


def test_a_released_lease_without_commit_changes_nothing():
    """A request that failed leaves the session as it was."""
    store = SessionStore()
    filled(store, "a", turn(1))
    store.lease("a").release()
    store.lease("new").release()

    assert store.export("a").messages == tuple(turn(1))
    assert store.ids() == ["a"]


def test_second_request_on_a_session_is_refused_until_the_first_has_ended():
    """Two answers at once would have no order."""
    store = SessionStore()
    lease = store.lease("a")

    with pytest.raises(RequestError, match="'a' is working on another request"):
        store.lease("a")
    with pytest.raises(RequestError, match="working"):
        store.import_("a", {"messages": []})
    lease.release()
    store.lease("a")


def test_exported_session_survives_json():
    """What to_dict gives goes through JSON and comes back equal."""
    store = SessionStore()
    filled(store, "a", with_calls(1))

    data = json.loads(json.dumps(store.export("a").to_dict()))
    store.import_("b", data)

    assert store.export("b") == store.export("a")


def test_an_export_is_a_copy():
    """Changing what was exported does not change the session."""
    store = SessionStore()
    filled(store, "a", turn(1))

    store.export("a").messages[0]["content"] = "changed"  # type: ignore[index]

    assert store.export("a").messages[0]["content"] == "question 1"


def test_fork_copies_the_first_complete_turns():
    """A turn with tool calls counts once; the source stays."""
    store = SessionStore()
    filled(store, "a", with_calls(1) + turn(2) + turn(3)[:1])

    new_id = store.fork("a", turns=1)
    whole = store.fork("a", new_session_id="whole")

    assert store.export(new_id).messages == tuple(with_calls(1))
    assert store.export(whole).messages == tuple(with_calls(1) + turn(2))
    assert len(store.export("a").messages) == 7


@pytest.mark.parametrize("turns", [0, 3, True])
def test_fork_of_more_turns_than_there_are_is_refused(turns):
    """The message says how many there are."""
    store = SessionStore()
    filled(store, "a", turn(1) + turn(2))

    with pytest.raises(RequestError, match="has 2 complete turns"):
        store.fork("a", turns=turns)


def test_fork_onto_a_session_is_refused():
    """A fork never overwrites."""
    store = SessionStore()
    filled(store, "a", turn(1))

    with pytest.raises(RequestError, match="'a' is there already"):
        store.fork("a", new_session_id="a")


def test_longest_unused_session_goes_first():
    """Using a session moves it away from the edge."""
    store = SessionStore(max_sessions=2)
    filled(store, "a", turn(1))
    filled(store, "b", turn(1))
    lease = store.lease("a")
    lease.commit(turn(1) + turn(2))
    lease.release()
    filled(store, "c", turn(1))

    assert store.ids() == ["a", "c"]


def test_idle_session_is_forgotten():
    """The message names the time that has passed."""
    clock = Clock()
    store = SessionStore(idle_seconds=60, clock=clock)
    filled(store, "a", turn(1))
    clock.now = 61

    assert store.ids() == []
    with pytest.raises(RequestError, match="not used for 60 s"):
        store.export("a")


def test_session_in_use_is_not_forgotten():
    """However long an answer takes, its session is there when it ends."""
    clock = Clock()
    store = SessionStore(idle_seconds=60, max_sessions=1, clock=clock)
    filled(store, "a", turn(1))
    lease = store.lease("a")
    clock.now = 1000
    filled(store, "b", turn(1))

    assert "a" in store.ids()
    lease.release()


def test_deleted_session_is_not_revived_by_its_running_request():
    """What was deleted while an answer ran stays deleted."""
    store = SessionStore()
    filled(store, "a", turn(1))
    lease = store.lease("a")

    assert store.delete("a")
    lease.commit(turn(1) + turn(2))
    lease.release()

    assert store.ids() == []
    assert not store.delete("a")


@pytest.mark.parametrize("data", [None, [], {}, {"messages": [{"content": "no role"}]}])
def test_what_is_no_session_is_refused(data):
    """Import takes to_dict's shape only."""
    with pytest.raises(RequestError, match="must be a dict"):
        SessionStore().import_("a", data)


def test_session_with_images_is_refused_by_name():
    """mistral.rs' empty lists are fine, content that would be lost is not."""
    SerializedSession.from_dict({"messages": [], "images": [], "files": []})

    with pytest.raises(RequestError, match="'images'"):
        SerializedSession.from_dict({"messages": [], "images": ["..."]})
