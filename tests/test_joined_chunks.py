"""The chunks of several rounds as those of one answer."""

from __future__ import annotations

from mistralrs_sdk import CalledFunction, ToolCallResponse
from mistralrs_sdk.chat.responses import ChatCompletionChunkResponse, ChunkChoice, Delta
from mistralrs_sdk.tools.joined_chunks import JoinedChunks


def piece(index: int, name: str, arguments: str, *, continues: bool = False) -> ToolCallResponse:
    function = CalledFunction(name, arguments)
    return ToolCallResponse(index=index, id=f"id-{index}", function=function, continues=continues)


def show(chunks: JoinedChunks, *calls: ToolCallResponse, withdrawn: tuple[int, ...] = ()) -> None:
    choice = ChunkChoice(
        index=0, delta=Delta(tool_calls=calls or None), withdrawn_tool_calls=withdrawn
    )
    chunks.show(ChatCompletionChunkResponse(id="round", choices=(choice,), created=0, model="m"))


def shown(chunks: JoinedChunks) -> list[tuple[int, str, bool]]:
    calls = [call for item in chunks.ready for call in item.choices[0].delta.tool_calls or ()]
    return [(call.index, call.function.arguments, call.continues) for call in calls]


def test_pieces_of_calls_for_the_caller_are_numbered_without_the_hidden_ones():
    """What is executed here leaves no gap, and all pieces of a call have one index."""
    chunks = JoinedChunks("id", is_hidden=lambda name: name == "ours")
    show(chunks, piece(0, "ours", "{"))
    show(chunks, piece(0, "ours", "}", continues=True), piece(1, "theirs", '{"a"'))
    show(chunks, piece(1, "theirs", ": 1}", continues=True), piece(2, "theirs", "{}"))

    assert shown(chunks) == [(0, '{"a"', False), (0, ": 1}", True), (1, "{}", False)]


def test_only_calls_that_were_shown_are_withdrawn():
    """The caller never heard of the others."""
    chunks = JoinedChunks("id", is_hidden=lambda name: name == "ours")
    show(chunks, piece(0, "ours", "{"), piece(1, "theirs", "{"))
    chunks.ready.clear()
    show(chunks, withdrawn=(0, 1))

    assert [item.choices[0].withdrawn_tool_calls for item in chunks.ready] == [(0,)]
