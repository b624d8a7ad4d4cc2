"""The event in a stream that says what a tool does."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from mistralrs_sdk.chat.responses import ChunkChoice, Delta


@attrs.frozen(kw_only=True)
class AgenticToolCallProgress:
    """A call that is executed here begins or has ended; comes between the chunks of a stream.

    It can be read like a chunk that adds nothing, so that code which only shows text need not tell
    the two apart.
    """

    round: int
    tool_call_id: str
    tool_name: str
    phase: Literal["calling", "complete"]
    error: str | None = None
    """Why there is no result, in the phase complete; the model reads it after `Error: `."""

    @property
    def choices(self) -> tuple[ChunkChoice, ...]:
        """One choice without any text."""
        return (ChunkChoice(index=0, delta=Delta(content="")),)

    @property
    def usage(self) -> None:
        """Only the last chunk has one."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """The event as plain JSON data."""
        data = {"type": "agentic_tool_call_progress", **attrs.asdict(self)}
        return {key: value for key, value in data.items() if value is not None}
