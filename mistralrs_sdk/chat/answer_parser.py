"""`AnswerParser`: parts an answer's text into reasoning, content and tool calls, as it comes."""

from __future__ import annotations

import re
import secrets
import string

import attrs

from mistralrs_sdk.chat.call_drafts import CallDraft, CallDrafts
from mistralrs_sdk.chat.incoming_text import IncomingText, Waiting
from mistralrs_sdk.chat.tool_formats import Schemas, ToolFormat, parameter_schemas
from mistralrs_sdk.chat.tools import CalledFunction, Tool, ToolCallResponse, joined_calls

_ALPHANUMERIC = string.ascii_letters + string.digits


@attrs.frozen(kw_only=True)
class ReasoningTags:
    """What stands around the part of an answer in which the model thinks."""

    opens: str
    closes: str


@attrs.frozen(kw_only=True)
class AnswerDelta:
    """What a piece of text added to an answer.

    None of it is taken back later, except calls that had begun and turn out to be none.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallResponse, ...] = ()
    """Calls, or pieces of them; `joined_calls` joins those of all deltas."""
    withdrawn: tuple[int, ...] = ()
    """Indices of calls that had begun in earlier deltas and are none: their text is content."""
    unparsed: bool = False
    """Whether the content holds what began like a call and is none."""

    def __bool__(self) -> bool:
        said = self.content or self.reasoning or self.tool_calls
        return bool(said or self.withdrawn or self.unparsed)

    def __add__(self, later: AnswerDelta) -> AnswerDelta:
        return AnswerDelta(
            content=self.content + later.content,
            reasoning=self.reasoning + later.reasoning,
            tool_calls=joined_calls((*self.tool_calls, *later.tool_calls), later.withdrawn),
            withdrawn=self.withdrawn + self._not_begun_here(later.withdrawn),
            unparsed=self.unparsed or later.unparsed,
        )

    def _not_begun_here(self, withdrawn: tuple[int, ...]) -> tuple[int, ...]:
        begun = {call.index for call in self.tool_calls if not call.continues}
        return tuple(index for index in withdrawn if index not in begun)


class AnswerParser:
    """The only parser of answers: fed all at once or in any pieces, it finds the same.

    Whitespace beside calls and around reasoning belongs to the markup. Calls that are cut off or
    malformed are content, word for word; where their arguments are JSON, which is given as it
    comes, they are withdrawn then. A reasoning block that is never closed stays reasoning.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning: ReasoningTags | None,
        *,
        tools: tuple[Tool, ...] = (),
        opened: bool = False,
    ) -> None:
        """`opened` says that the prompt ends inside a reasoning block."""
        self._format = tool_format
        self._reasoning = reasoning
        self._schemas: Schemas = parameter_schemas(tools)
        self._text = IncomingText()
        markers = [*(tool_format.markers if tool_format else ())]
        if reasoning is not None:
            markers.append(reasoning.opens)
        self._markers = tuple(markers)
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCallResponse] = []
        self._places: dict[CallDraft, ToolCallResponse] = {}
        """The calls that have begun and may turn out to be none."""
        self._withdrawn: list[int] = []
        self._num_begun = 0
        self.has_calls = False
        """Whether it found any."""
        self._unparsed = False
        self._reading = self._read(opened)
        next(self._reading)

    def feed(self, text: str) -> AnswerDelta:
        """Add text; return what is now certain."""
        self._text.text += text
        if text:
            next(self._reading)
        return self._taken()

    def finish(self) -> AnswerDelta:
        """Return what was held back because it could have become something else."""
        self._text.closed = True
        for _ in self._reading:
            pass
        return self._taken()

    def _taken(self) -> AnswerDelta:
        delta = AnswerDelta(
            content="".join(self._content),
            reasoning="".join(self._thoughts),
            tool_calls=joined_calls(self._calls),
            withdrawn=tuple(self._withdrawn),
            unparsed=self._unparsed,
        )
        for part in (self._content, self._thoughts, self._calls, self._withdrawn):
            part.clear()
        self._unparsed = False
        return delta

    def _read(self, opened: bool) -> Waiting[None]:
        text = self._text
        yield
        if opened and self._reasoning is not None:
            yield from text.space()
            yield from text.literal(self._reasoning.opens)  # some open it again
            yield from self._think(self._reasoning)
        yield from self._bare_calls()
        while (marker := (yield from self._copy(self._content, self._markers))) is not None:
            before = text.pos
            yield from text.space()
            text.pos += len(marker)
            if self._reasoning is not None and marker == self._reasoning.opens:
                yield from self._think(self._reasoning)
                yield from self._bare_calls()
                continue
            assert self._format is not None
            behind = text.pos
            drafts = CallDrafts(self._grow)
            calls = yield from self._format.read(text, marker, self._schemas, drafts)
            self._settle(drafts, calls or [])
            if calls is not None:
                yield from text.space()
                continue
            self._unparsed = self._unparsed or marker not in self._format.soft
            text.pos = behind  # what follows the marker may hold a call
            self._content.append(text.text[before:behind])

    def _think(self, tags: ReasoningTags) -> Waiting[None]:
        """Take the rest of a reasoning block, and the whitespace around its end."""
        yield from self._text.space()
        if (yield from self._copy(self._thoughts, (tags.closes,))) is not None:
            yield from self._text.space()
            self._text.pos += len(tags.closes)
            yield from self._text.space()

    def _bare_calls(self) -> Waiting[None]:
        """Take calls that begin an answer without a marker, where the format has such."""
        text = self._text
        if self._format is None or not self._format.bare:
            return
        start = text.pos
        yield from text.space()
        brace = text.pos
        calls = None
        if text.text.startswith("{", brace):
            drafts = CallDrafts(self._grow)
            calls = yield from self._format.read(text, "", self._schemas, drafts)
            self._settle(drafts, calls or [])
        if calls is not None:
            yield from text.space()
            return
        self._unparsed = self._unparsed or _CALL_LIKE.match(text.text, brace) is not None
        text.pos = start

    def _copy(self, target: list[str], markers: tuple[str, ...]) -> Waiting[str | None]:
        """Copy text up to the first of the markers and return it; None: the text ended.

        Whitespace before the marker is left. Held back is an end that may turn out to be such
        whitespace, or the beginning of a marker.
        """
        text = self._text
        pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        while True:
            found = pattern.search(text.text, text.pos)
            end = len(text.text) if found is None else found.start()
            if found is None and not text.closed:
                end -= _begun(text.text, markers)
            sure = text.text[text.pos : end]
            if markers and not (found is None and text.closed):
                sure = sure.rstrip()
            target.append(sure)
            text.pos += len(sure)
            if found is not None:
                return found[0]
            if text.closed:
                return None
            text.forget()
            yield

    def _grow(self, draft: CallDraft, piece: str) -> None:
        """Give a piece of a call, with its name if it is the first."""
        place = self._places.get(draft)
        first = place is None
        if place is None:
            place = self._places[draft] = self._begin(CalledFunction(draft.name, ""))
        function = CalledFunction(draft.name, piece)
        self._calls.append(attrs.evolve(place, function=function, continues=not first))

    def _begin(self, function: CalledFunction) -> ToolCallResponse:
        call = ToolCallResponse(index=self._num_begun, id=self._new_id(), function=function)
        self._num_begun += 1
        return call

    def _settle(self, drafts: CallDrafts, calls: list[CalledFunction]) -> None:
        """Give what was not given of a block's calls, and withdraw what is none of them."""
        self.has_calls = self.has_calls or bool(calls)
        # more calls began than there are: the text of the others is content
        self._unparsed = self._unparsed or len(drafts.begun) > len(calls)
        left = list(drafts.begun)
        for call in calls:
            draft = next((draft for draft in left if draft.says(call)), None)
            if draft is None:
                self._calls.append(self._begin(call))
            else:
                left.remove(draft)
        for draft in left:
            index = self._places[draft].index
            here = [call for call in self._calls if call.index == index]
            self._calls = [call for call in self._calls if call.index != index]
            if not here or here[0].continues:  # it had begun in an earlier delta
                self._withdrawn.append(index)
        self._places.clear()

    def _new_id(self) -> str:
        if self._format is not None and self._format.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


_CALL_LIKE = re.compile(r'\{\s*"(?:name|function|type"\s*:\s*"function)"')


def _begun(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that a marker may continue."""
    for size in range(min(len(text), max(map(len, markers), default=1) - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
