"""`AgentConfig`: how an agent works, as a value that checks itself."""

from __future__ import annotations

import attrs

from mistralrs_sdk.chat.messages import ReasoningEffort, require_one_wish
from mistralrs_sdk.chat.tools import ToolChoice
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.tools.callbacks import ToolCallback
from mistralrs_sdk.tools.settings import TOOL_TIMEOUT

MAX_ITERATIONS = 10


@attrs.frozen(kw_only=True)
class AgentConfig:
    """The settings of an agent.

    Raises:
        ConfigError: `max_iterations` is below 1.
        RequestError: thinking and reasoning effort contradict each other.
    """

    max_iterations: int = MAX_ITERATIONS
    """Answers of the model after which a run ends, whatever they are."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    """For the first answer; a call that is required is required once."""
    system_prompt: str | None = None
    parallel_tool_execution: bool = True
    """Whether the calls of one answer run at once, or one after the other."""
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    tool_timeout: float | None = TOOL_TIMEOUT
    """Seconds for each call; None: no limit."""
    tools: tuple[ToolCallback, ...] = ()

    def __attrs_post_init__(self) -> None:
        n = self.max_iterations
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ConfigError(f"max_iterations ({n!r}) must be a whole number of at least 1")
        require_one_wish(self.enable_thinking, self.reasoning_effort)
