"""Approvals over HTTP: calls of tools that wait until somebody decides about them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from mistralrs_sdk import (
    AgentToolApproval,
    AgentToolApprovalDecision,
    AgentToolMetadata,
    ConfigError,
    Model,
)
from mistralrs_sdk.server.approvals import WaitingCalls, approval_data
from tests.model_helpers import assert_idle
from tests.test_model_tool_loop import builder, switch
from tests.translated_apis import serving

CHAT = "/v1/chat/completions"
APPROVALS = "/v1/agent/approvals"
ASKED: dict[str, Any] = {
    "messages": "light?",
    "temperature": 0,
    "max_tokens": 100,
    "tool_choice": {"type": "function", "function": {"name": "switch"}},
    "agent_permission": "ask",
    "stream": True,
}


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with await builder().with_tool(switch).build() as built:
        yield built


@pytest.fixture
async def http(model) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(model) as url, httpx2.AsyncClient(base_url=url, timeout=30) as client:
        yield client


async def named_events(answer: httpx2.Response) -> AsyncIterator[tuple[str | None, Any]]:
    """Every event of a stream with its name."""
    name = None
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: {"):
            yield name, json.loads(line.removeprefix("data: "))
            name = None


async def first_approval(answer: httpx2.Response) -> Any:
    async for name, data in named_events(answer):
        if name == "agentic_tool_approval_required":
            return data
    return None


async def decided(http: httpx2.AsyncClient, *bodies: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What is seen of a request whose calls are decided about in this order."""
    seen: dict[str, Any] = {"asked": [], "phases": [], "chunks": [], "resolved": []}
    left = list(bodies)
    async with http.stream("POST", CHAT, json={**ASKED, **more}) as answer:
        async for name, data in named_events(answer):
            if name == "agentic_tool_approval_required":
                seen["asked"].append(data)
                told = await http.post(f"{APPROVALS}/{data['approval_id']}", json=left.pop(0))
                seen["resolved"].append((told.status_code, told.json()))
            elif name == "agentic_tool_call_progress":
                seen["phases"].append((data["phase"], data.get("error")))
            else:
                seen["chunks"].append(data)
    return seen


async def test_an_approved_call_runs(http, model):
    """The event says which call it is; the answer goes on once it is approved."""
    seen = await decided(http, {"decision": "approve"})

    (asked,) = seen["asked"]
    assert asked["type"] == "agentic_tool_approval_required"
    assert asked["tool"] == {"source": "user", "kind": "custom", "label": "switch"}
    assert set(asked["arguments"]) == {"on"}
    assert asked["round"] == 0
    assert seen["resolved"] == [(200, {"status": "resolved"})]
    assert seen["phases"] == [("calling", None), ("complete", None)]
    assert seen["chunks"][-1]["choices"][0]["finish_reason"] is not None
    await assert_idle(model)


async def test_a_denied_call_does_not_run(http):
    """The model reads the message instead of a result."""
    seen = await decided(http, {"decision": "deny", "message": "not at night"})

    assert seen["phases"] == [("calling", None), ("complete", "not at night")]


async def test_an_approval_may_hold_for_the_session(http):
    """The next request of the session is not asked again."""
    remembered = {"decision": "approve", "remember_for_session": True}
    first = await decided(http, remembered, session_id="s")
    second = await decided(http, session_id="s")

    assert len(first["asked"]) == 1
    assert second["asked"] == []
    assert second["phases"] == [("calling", None), ("complete", None)]


async def test_leaving_ends_the_waiting(http, model):
    """Who goes while a call waits cannot decide about it any more, and nothing stays behind."""
    async with http.stream("POST", CHAT, json=ASKED) as answer:
        asked = await first_approval(answer)
    await assert_idle(model)
    told = await http.post(f"{APPROVALS}/{asked['approval_id']}", json={"decision": "approve"})

    assert told.status_code == 404
    assert told.json()["error"]["code"] == "approval_not_found"


async def test_asking_needs_a_stream(http):
    """Where else should it be asked; OpenAI's other API and Anthropic's do not know it."""
    whole = await http.post(CHAT, json={**ASKED, "stream": False})
    response = await http.post("/v1/responses", json={"input": "x", "agent_permission": "ask"})

    assert (whole.status_code, response.status_code) == (400, 400)
    assert whole.json()["error"]["param"] == "agent_permission"
    assert '"stream": true' in whole.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"decision": "maybe"},
        {"decision": True},
        {"decision": "approve", "remember_for_session": "yes"},
        {"decision": "approve", "message": "well"},
        {"decision": "deny", "message": 3},
        {"decision": "deny", "remember_for_session": True},
        {"decision": "approve", "forever": True},
    ],
)
async def test_a_wrong_decision_leaves_the_call_waiting(http, body):
    """It is a 400, and the right one may follow."""
    async with http.stream("POST", CHAT, json=ASKED) as answer:
        async for name, data in named_events(answer):
            if name == "agentic_tool_approval_required":
                place = f"{APPROVALS}/{data['approval_id']}"
                wrong = await http.post(place, json=body)
                right = await http.post(place, json={"decision": "deny"})

    assert (wrong.status_code, right.status_code) == (400, 200)
    assert wrong.json()["error"]["param"] in {"decision", *body}


def approval(arguments: str = "{}") -> AgentToolApproval:
    tool = AgentToolMetadata(source="mcp", kind="custom", label="dig")
    return AgentToolApproval(approval_id="a", round=0, tool=tool, arguments=arguments)


async def test_what_nobody_decides_about_is_denied():
    """After the time for it; nothing waits any more."""
    waiting = WaitingCalls(seconds=0.01)

    decision = await waiting.decision(approval())

    assert not decision.approved
    assert "nobody decided about it within 0.01 s" in str(decision.message)
    assert len(waiting) == 0
    with pytest.raises(ConfigError, match="seconds"):
        WaitingCalls(seconds=0)


async def test_only_the_first_decision_counts():
    """A second one finds no call that waits."""
    waiting = WaitingCalls()
    asking = asyncio.create_task(waiting.decision(approval()))
    await asyncio.sleep(0)
    settled = [
        waiting.settle("a", AgentToolApprovalDecision.approve()),
        waiting.settle("a", AgentToolApprovalDecision.deny()),
        waiting.settle("b", AgentToolApprovalDecision.deny()),
    ]

    assert settled == [True, False, False]
    assert (await asking).approved


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
def test_arguments_that_could_not_be_sent_as_json_are_shown_as_text(text):
    """A model may write anything; whoever decides must see it."""
    assert approval_data(approval(text))["arguments"] == text
    assert approval_data(approval('{"a": [1]}'))["arguments"] == {"a": [1]}
