"""What running tools here asks and leaves behind: contexts of calls, approvals, records."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import attrs

from mistralrs_sdk.errors import RequestError

ToolSource = Literal["built_in", "user", "mcp", "external"]
"""Who executes a tool: this package, a function of the user, an MCP server, or the dispatch URL."""
ToolKind = Literal["code_execution", "shell", "custom", "external"]
"""What a tool does: run code or commands, what its function or server does, or who knows what."""


class AgentPermission(enum.StrEnum):
    """Whether calls are executed here at once, after asking, or not at all."""

    AUTO = "auto"
    Auto = AUTO  # mistral.rs' name
    ASK = "ask"
    Ask = ASK
    DENY = "deny"
    Deny = DENY


@attrs.frozen(kw_only=True)
class ToolCallContext:
    """Where a call comes from; the second argument of a tool callback."""

    session_id: str | None = None
    request_id: str | None = None
    """The id of the response; None in the runs of an agent."""
    round: int
    """Counts from 0: the rounds of calls before this one in the same request."""
    tool_name: str


@attrs.frozen(kw_only=True)
class AgentToolMetadata:
    """The tool of an approval."""

    source: ToolSource
    kind: ToolKind
    """custom is for functions and MCP tools, external for the dispatch URL, as in mistral.rs."""
    label: str
    """The tool's name."""


@attrs.frozen(kw_only=True)
class AgentToolApproval:
    """A call that waits for a decision."""

    approval_id: str
    session_id: str | None = None
    round: int
    tool: AgentToolMetadata
    arguments: str
    """JSON text, as the model wrote it."""


@attrs.frozen
class AgentToolApprovalDecision:
    """Whether a call may run: `approve()`, `approve_for_session()` or `deny("why")`."""

    approved: bool
    remember_for_session: bool = False
    """Do not ask again for this tool, in this session or (without one) this request."""
    message: str | None = None
    """What the model is told about a denial."""

    @classmethod
    def approve(cls) -> AgentToolApprovalDecision:
        """Run this call."""
        return cls(True)

    @classmethod
    def approve_for_session(cls) -> AgentToolApprovalDecision:
        """Run this call and, without asking, later ones of the same tool in this session."""
        return cls(True, True)

    @classmethod
    def deny(cls, message: str | None = None) -> AgentToolApprovalDecision:
        """Do not run it; the model reads `message` instead of a result."""
        return cls(False, message=message)

    @classmethod
    def deny_with_message(cls, message: str) -> AgentToolApprovalDecision:
        """As `deny(message)`."""
        return cls.deny(message)


ApprovalCallback = Callable[
    [AgentToolApproval],
    AgentToolApprovalDecision | bool | Awaitable[AgentToolApprovalDecision | bool],
]
"""Decides about a call; a plain function runs on a worker thread, a coroutine function here."""


@attrs.frozen(kw_only=True)
class AgenticToolCallRecord:
    """A call that was executed here, with its result."""

    round: int
    tool_call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    result_content: str
    """What the model was given; starts with `Error: ` if there was no result."""

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON data."""
        return attrs.asdict(self)


def require_permission(value: object) -> AgentPermission:
    """Read a permission or its text.

    Raises:
        RequestError: it is none.
    """
    try:
        return AgentPermission(value)
    except ValueError:
        known = ", ".join(AgentPermission)
        raise RequestError(f"agent_permission ({value!r}) must be one of {known}") from None
