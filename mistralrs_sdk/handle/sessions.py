"""`ModelSessions`: the methods of `Model` for conversations it keeps, and for tools of servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mistralrs_sdk.handle.base import ModelHandle
from mistralrs_sdk.tools.mcp_client import McpToolInfo
from mistralrs_sdk.tools.sessions import SerializedSession


class ModelSessions(ModelHandle):
    """Sessions belong to one model; `with_session_id` makes a request part of one.

    They outlive `unload_model`, not `aclose`: export what is to stay.
    """

    def export_session(self, session_id: str, *, model_id: str | None = None) -> SerializedSession:
        """Return the complete turns of a session; what a running request adds is not in it yet.

        Raises:
            RequestError: there is no such session.
        """
        return self._models.sessions(model_id).export(session_id)

    def import_session(
        self,
        session_id: str,
        session: SerializedSession | Mapping[str, Any],
        *,
        model_id: str | None = None,
    ) -> None:
        """Keep these turns under this id, in place of a session of that id.

        Raises:
            RequestError: a request works on that session, or `session` is none.
        """
        self._models.sessions(model_id).import_(session_id, session)

    def delete_session(self, session_id: str, *, model_id: str | None = None) -> bool:
        """Forget a session; returns whether there was one. A request that runs in it goes on."""
        return self._models.sessions(model_id).delete(session_id)

    def fork_session(
        self,
        session_id: str,
        *,
        turns: int | None = None,
        new_session_id: str | None = None,
        model_id: str | None = None,
    ) -> str:
        """Copy the first complete turns of a session, None for all, and return the copy's id.

        Both share the cached keys and values of what they have in common. The new id is made up
        unless one is given.

        Raises:
            RequestError: there is no such session, it has fewer turns, or the new id is taken.
        """
        sessions = self._models.sessions(model_id)
        return sessions.fork(session_id, turns=turns, new_session_id=new_session_id)

    def list_session_ids(self, *, model_id: str | None = None) -> list[str]:
        """Return the ids of all sessions, the longest unused first."""
        return self._models.sessions(model_id).ids()

    def list_mcp_tools(self, *, model_id: str | None = None) -> list[McpToolInfo]:
        """Return the tools of the MCP servers, under the names the model knows them by.

        Raises:
            EngineClosedError: the model is unloaded.
        """
        return self._loaded_chat_model(model_id).toolbox.list_mcp_tools()
