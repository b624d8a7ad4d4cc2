"""The calls of one round: approved one after the other, executed side by side."""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import attrs

from mistralrs_sdk.chat.tool_events import (
    AgenticToolCallRecord,
    AgentPermission,
    AgentToolApproval,
    AgentToolApprovalDecision,
    AgentToolMetadata,
    ApprovalCallback,
    ToolCallContext,
)
from mistralrs_sdk.chat.tools import ToolCallResponse
from mistralrs_sdk.tools.callbacks import ToolError, ToolExecutor, call_here_or_in_thread
from mistralrs_sdk.tools.execution_config import strictest

MAX_PARALLEL_CALLS = 16
"""Calls of one round that are executed at once; the others wait."""
CANCEL_GRACE = 1.0
"""Seconds that cancelled callbacks have to clean up before nobody waits for them any more."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


def _as_unicode(text: str) -> str:
    """Without halves of surrogate pairs, which no prompt can hold."""
    return text.encode(errors="replace").decode()


@attrs.frozen
class ToolOutcome:
    """A call with its result, or the reason why there is none."""

    call: ToolCallResponse
    result: str = attrs.field(converter=_as_unicode)
    error: str | None = attrs.field(default=None, converter=attrs.converters.optional(_as_unicode))

    @property
    def content(self) -> str:
        """What the model reads."""
        return self.result if self.error is None else f"Error: {self.error}"

    def record(self, round: int) -> AgenticToolCallRecord:
        """The entry of `agentic_tool_calls`."""
        return AgenticToolCallRecord(
            round=round,
            tool_call_id=self.call.id,
            name=self.call.function.name,
            arguments=self.call.function.arguments,
            result_content=self.content,
        )


@attrs.define
class Approvals:
    """Who decides about calls, and what was decided for good."""

    permission: AgentPermission = AgentPermission.AUTO
    callback: ApprovalCallback | None = None
    code_permission: AgentPermission | None = None
    """For tools that run code, beside the other one."""
    remembered: set[str] = attrs.field(factory=set)
    """Names of tools that are not asked about any more."""

    def of(self, executor: ToolExecutor) -> tuple[AgentPermission, ApprovalCallback | None]:
        """The strictest permission that holds for a tool, and who is asked."""
        code = self.code_permission if executor.kind == "code_execution" else None
        permission = strictest((self.permission, executor.guard.permission, code))
        return permission, self.callback or executor.guard.callback

    async def refusal(
        self, call: ToolCallResponse, executor: ToolExecutor, context: ToolCallContext
    ) -> str | None:
        """Why the call may not run, or None. An approval that fails is a denial."""
        name = call.function.name
        permission, callback = self.of(executor)
        if permission is AgentPermission.DENY:
            ours = self.permission is AgentPermission.DENY
            reason = "this request may execute no tools" if ours else "it may not be executed here"
            return f"the call of {name} was denied: {reason}"
        if permission is AgentPermission.AUTO or name in self.remembered:
            return None
        if callback is None:
            return f"the call of {name} was denied: there is nobody to ask"
        approval = AgentToolApproval(
            approval_id=str(uuid.uuid4()),
            session_id=context.session_id,
            round=context.round,
            tool=AgentToolMetadata(source=executor.source, kind=executor.kind, label=name),
            arguments=call.function.arguments,
        )
        decision = await _in_own_task(_decide(callback, approval))
        if decision is None:
            return f"the call of {name} was denied: asking for approval failed"
        if not decision.approved:
            return decision.message or f"the call of {name} was denied by the user"
        if decision.remember_for_session:
            self.remembered.add(name)
        return None


class RunningCalls:
    """The calls of one round while they run: what happens as it comes, outcomes at the end."""

    def __init__(
        self,
        calls: Iterable[tuple[ToolCallResponse, ToolExecutor | str]],
        *,
        round: int,
        session_id: str | None = None,
        request_id: str | None = None,
        approvals: Approvals,
        timeout: float | None,
        deadline: float | None = None,
        max_parallel: int = MAX_PARALLEL_CALLS,
    ) -> None:
        """Start them; see `run_calls`."""
        self._events: asyncio.Queue[ToolCallResponse | ToolOutcome | None] = asyncio.Queue()
        self._ended: list[ToolOutcome] = []
        run = run_calls(
            calls,
            round=round,
            session_id=session_id,
            request_id=request_id,
            approvals=approvals,
            timeout=timeout,
            deadline=deadline,
            emit=functools.partial(_note, self._events, self._ended),
            max_parallel=max_parallel,
        )
        self._task = asyncio.create_task(run)
        wake = functools.partial(self._events.put_nowait, None)
        self._task.add_done_callback(lambda _: wake())

    async def next_event(self) -> ToolCallResponse | ToolOutcome | None:
        """A call that begins or the outcome of one; None once all ended or it was interrupted."""
        return await self._events.get()

    def outcomes(self) -> list[ToolOutcome]:
        """All outcomes, in the order of the calls, once all have ended.

        Raises:
            TimeoutError: the deadline has passed.
        """
        return self._task.result()

    def ended(self) -> list[ToolOutcome]:
        """The outcomes there are so far, in the order of the calls."""
        return sorted(self._ended, key=lambda outcome: outcome.call.index)

    def interrupt(self) -> None:
        """Cancel them, without waiting for what does not heed it."""
        self._task.cancel()
        self._events.put_nowait(None)

    async def aclose(self) -> None:
        """Cancel them and wait until they have cleaned up, for `CANCEL_GRACE` at most."""
        self.interrupt()
        await asyncio.wait([self._task], timeout=CANCEL_GRACE)


def _note(
    events: asyncio.Queue[ToolCallResponse | ToolOutcome | None],
    ended: list[ToolOutcome],
    event: ToolCallResponse | ToolOutcome,
) -> None:
    if isinstance(event, ToolOutcome):
        ended.append(event)
    events.put_nowait(event)


async def run_calls(
    calls: Iterable[tuple[ToolCallResponse, ToolExecutor | str]],
    *,
    round: int,
    session_id: str | None = None,
    request_id: str | None = None,
    approvals: Approvals,
    timeout: float | None,
    deadline: float | None = None,
    emit: Callable[[ToolCallResponse | ToolOutcome], None],
    max_parallel: int = MAX_PARALLEL_CALLS,
) -> list[ToolOutcome]:
    """Execute calls, each with its executor or the reason why there is none; keeps their order.

    Nothing a tool does raises here: what fails becomes an outcome with an error. `timeout` is in
    seconds and for each call; MCP servers and built-in tools have their own. `emit` gets a call
    when it begins and its outcome when it ends. Cancelling cancels the calls; worker threads, and
    coroutines that do not end within `CANCEL_GRACE`, are left to themselves.

    Raises:
        TimeoutError: `deadline`, a time of the event loop, has passed.
    """
    places = asyncio.Semaphore(max_parallel)

    async def run(
        call: ToolCallResponse, executor: ToolExecutor | str, context: ToolCallContext
    ) -> ToolOutcome:
        async with places:
            emit(call)
            if isinstance(executor, str):
                outcome = ToolOutcome(call, "", executor)
            else:
                outcome = await _run_one(call, executor, context, timeout=timeout)
            emit(outcome)
        return outcome

    tasks: list[asyncio.Task[ToolOutcome]] = []
    async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as group:
        for call, executor in calls:
            context = ToolCallContext(
                session_id=session_id,
                request_id=request_id,
                round=round,
                tool_name=call.function.name,
            )
            if not isinstance(executor, str):
                executor = await approvals.refusal(call, executor, context) or executor
            tasks.append(group.create_task(run(call, executor, context)))
    return [task.result() for task in tasks]


async def _run_one(
    call: ToolCallResponse,
    executor: ToolExecutor,
    context: ToolCallContext,
    *,
    timeout: float | None,
) -> ToolOutcome:
    limit = None if executor.source in ("mcp", "built_in") else timeout
    try:
        return await _in_own_task(_attempt(call, executor, context), timeout=limit)
    except TimeoutError:
        reason = f"{call.function.name} gave no result within {timeout:g} s"
        return ToolOutcome(call, "", reason)


async def _attempt(
    call: ToolCallResponse, executor: ToolExecutor, context: ToolCallContext
) -> ToolOutcome:
    try:
        return ToolOutcome(call, await executor.run(call.function, context))
    except ToolError as error:
        return ToolOutcome(call, "", str(error))
    except BaseException as error:
        if _is_not_its_own(error):
            raise
        logger.warning("the tool %s failed", call.function.name, exc_info=error)
        return ToolOutcome(call, "", f"{type(error).__name__}: {error}")


async def _decide(
    callback: ApprovalCallback, approval: AgentToolApproval
) -> AgentToolApprovalDecision | None:
    """What was decided; None if asking failed."""
    try:
        decision = await call_here_or_in_thread(callback, approval)
    except BaseException as error:
        if _is_not_its_own(error):
            raise
        logger.warning("the approval of a call of %s failed", approval.tool.label, exc_info=error)
        return None
    if isinstance(decision, AgentToolApprovalDecision):
        return decision
    return AgentToolApprovalDecision(decision is True)


def _is_not_its_own(error: BaseException) -> bool:
    """Whether what comes out of a callback was meant for us: it must go on."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


async def _in_own_task(work: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
    """Await what people wrote, in a task of its own: if it heeds no cancelling, it is left behind.

    Raises:
        TimeoutError: it took longer than `timeout` seconds.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=timeout)
        if not task.done():
            raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_GRACE)
            if not task.done():
                logger.warning("a callback goes on although it was cancelled: %r", task)
    return task.result()
