"""`SessionStore`: conversations kept between requests, and the form in which they leave it."""

from __future__ import annotations

import copy
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import attrs

from mistralrs_sdk.chat.messages import Message, from_openai
from mistralrs_sdk.errors import RequestError

MAX_SESSIONS = 128
"""Sessions kept if the builder does not say otherwise."""
SESSION_IDLE_SECONDS = 30 * 60.0
"""Seconds after its last use for which a session is kept, likewise."""


@attrs.frozen
class SerializedSession:
    """A conversation as JSON-able data: `to_dict()` to store it, `from_dict()` to bring it back."""

    messages: tuple[Message, ...] = attrs.field(converter=tuple, hash=False)
    """OpenAI-shaped turns, with the calls and results of tools."""

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read what `to_dict` gave, or mistral.rs' form of a session that holds text only.

        Raises:
            RequestError: it is neither, or a message in it is no text turn.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("messages"), Iterable):
            raise RequestError(f'session {data!r:.80} must be a dict with a list under "messages"')
        for key in sorted(data.keys() - {"messages"}):
            if data[key]:
                raise RequestError(f"session has {key!r}, which is not supported: leave it out")
        return cls(copy.deepcopy([from_openai(message) for message in data["messages"]]))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, a copy of its own."""
        return {"messages": copy.deepcopy([dict(message) for message in self.messages])}


@attrs.define(eq=False)
class _Session:
    messages: tuple[Message, ...] = ()
    approved: set[str] = attrs.field(factory=set)
    busy: bool = False
    deleted: bool = False
    last_use: float = 0.0


class SessionLease:
    """A session while one request works on it; `release()` must follow, whatever happens."""

    def __init__(self, store: SessionStore, session_id: str, session: _Session) -> None:
        self.id = session_id
        self._store = store
        self._session = session
        self._released = False
        session.busy = True

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns so far."""
        return self._session.messages

    @property
    def approved(self) -> set[str]:
        """Tools that need no approval any more; add to it."""
        return self._session.approved

    def commit(self, messages: Iterable[Message]) -> None:
        """Make these the session's turns, unless it was deleted meanwhile."""
        self._session.messages = tuple(messages)
        if not self._session.deleted:
            self._store._keep(self.id, self._session)

    def release(self) -> None:
        """Let other requests have the session. Harmless when repeated."""
        if not self._released:
            self._released = True
            self._session.busy = False
            del self._store._busy[self.id]
            if self.id not in self._store._sessions:
                self._store._forgotten(self.id)


class SessionStore:
    """The sessions of one model, for one event loop.

    A request takes a session for itself until its answer has ended; what fails or is cancelled
    leaves the session as it was. The longest unused session goes when there are too many, and any
    session that was not used for a while; one that a request works on stays.
    """

    def __init__(
        self,
        *,
        max_sessions: int = MAX_SESSIONS,
        idle_seconds: float = SESSION_IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sessions = max_sessions
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._busy: dict[str, _Session] = {}
        self.on_forgotten: Callable[[str], None] | None = None
        """Told of each session that is gone, or has other turns than before."""

    def lease(self, session_id: str) -> SessionLease:
        """Take a session for one request; an unknown id starts an empty one.

        Raises:
            RequestError: another request works on it.
        """
        self._refuse_busy(session_id)
        self._drop_old()
        session = self._sessions.get(session_id) or _Session()
        self._busy[session_id] = session
        return SessionLease(self, session_id, session)

    def export(self, session_id: str) -> SerializedSession:
        """The session's complete turns; what a running request adds is not in it yet.

        Raises:
            RequestError: there is no such session.
        """
        return SerializedSession(copy.deepcopy(self._find(session_id).messages))

    def import_(self, session_id: str, session: SerializedSession | Mapping[str, Any]) -> None:
        """Keep these turns under this id, in place of a session of that id.

        Raises:
            RequestError: a request works on that session, or `session` is none.
        """
        if not isinstance(session_id, str) or not session_id:
            raise RequestError(f"session_id ({session_id!r}) must be a non-empty str")
        self._refuse_busy(session_id)
        if not isinstance(session, SerializedSession):
            session = SerializedSession.from_dict(session)
        self._keep(session_id, _Session(copy.deepcopy(session.messages)))
        self._forgotten(session_id)

    def delete(self, session_id: str) -> bool:
        """Forget a session; returns whether there was one. What runs in it goes on."""
        running = self._busy.get(session_id)
        found = self._sessions.pop(session_id, None) is not None
        if running is not None:
            running.deleted = True
        else:
            self._forgotten(session_id)
        return found

    def fork(
        self, session_id: str, *, turns: int | None = None, new_session_id: str | None = None
    ) -> str:
        """Copy a session's first complete turns into a new one; returns the new id.

        `turns` None copies all of them. A turn ends with the answer that calls no tools; messages
        before the first user belong to the first turn.

        Raises:
            RequestError: there is no such session, it has fewer turns, or the new id is taken.
        """
        source = self._find(session_id)
        ends = turn_ends(source.messages)
        turns = len(ends) if turns is None else turns
        if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= len(ends):
            raise RequestError(
                f"session {session_id!r} has {len(ends)} complete turns: turns ({turns!r}) must be "
                "between 1 and that"
            )
        if new_session_id is None:
            new_session_id = str(uuid.uuid4())
        elif new_session_id in self._sessions or new_session_id in self._busy:
            raise RequestError(f"session {new_session_id!r} is there already: take another id")
        self._keep(new_session_id, _Session(copy.deepcopy(source.messages[: ends[turns - 1]])))
        return new_session_id

    def ids(self) -> list[str]:
        """The ids of all sessions, the longest unused first."""
        self._drop_old()
        return list(self._sessions)

    def _find(self, session_id: str) -> _Session:
        self._drop_old()
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestError(
                f"session {session_id!r} is unknown: it never had an answer, was deleted, or was "
                f"not used for {self._idle_seconds:g} s"
            )
        return session

    def _refuse_busy(self, session_id: str) -> None:
        if session_id in self._busy:
            raise RequestError(
                f"session {session_id!r} is working on another request: wait for its answer, or "
                "fork the session"
            )

    def _keep(self, session_id: str, session: _Session) -> None:
        session.last_use = self._clock()
        self._sessions[session_id] = session
        self._sessions.move_to_end(session_id)
        self._drop_old()

    def _drop_old(self) -> None:
        oldest_kept = self._clock() - self._idle_seconds
        excess = len(self._sessions) - self._max_sessions
        for session_id, session in list(self._sessions.items()):
            if session.busy:
                continue
            if excess > 0 or session.last_use < oldest_kept:
                del self._sessions[session_id]
                self._forgotten(session_id)
                excess -= 1

    def _forgotten(self, session_id: str) -> None:
        if self.on_forgotten is not None:
            self.on_forgotten(session_id)


def turn_ends(messages: Iterable[Message]) -> list[int]:
    """Where complete turns end: the index after each answer that calls no tools."""
    return [
        index
        for index, message in enumerate(messages, start=1)
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
