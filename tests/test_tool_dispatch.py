"""Tools answered at a dispatch URL: what is sent, what is understood, what an error says."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mistralrs_sdk import Function, RequestBuilder, RequestError, Tool
from mistralrs_sdk.tools.callbacks import ToolCallback
from mistralrs_sdk.tools.loop import open_stream
from mistralrs_sdk.tools.settings import ToolSettings
from mistralrs_sdk.tools.toolbox import Toolbox
from tests.scripted_rounds import Rounds, Say


class ToolServer(HTTPServer):
    """Answers every POST with `answer`, and keeps what it was sent."""

    answer: tuple[int, bytes] = (200, b"")

    def __init__(self) -> None:
        self.received: list = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/tools"


class _Handler(BaseHTTPRequestHandler):
    server: ToolServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, json.loads(body)))
        status, content = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def server():
    with ToolServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def result(url: str, *, arguments: str = '{"q": 1}', box: Toolbox | None = None) -> str:
    """What the model reads for a call of the tool "far"."""
    asked = RequestBuilder().add_message("user", "?").set_tools([Tool(Function("far"))])
    rounds = Rounds(Say(calls=[("far", arguments)]), Say("done"))
    stream = await open_stream(rounds, asked.with_tool_dispatch_url(url), box or Toolbox())
    async with stream:
        response = await stream.collect()
    return response.agentic_tool_calls[0].result_content


async def test_call_is_posted_with_its_arguments(server):
    """Name and arguments as JSON; the content of the answer is the result."""
    server.answer = (200, b'{"content": "found"}')

    assert await result(server.url) == "found"
    assert server.received == [("/tools", {"name": "far", "arguments": {"q": 1}})]


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (b"plain text", "plain text"),
        (b'"a JSON string"', "a JSON string"),
        (b'{"content": {"a": 1}}', '{"a": 1}'),
        (b"[1, 2]", "[1, 2]"),
        (b"", ""),
    ],
)
async def test_answers_of_any_shape_become_text(server, answer, read):
    """A string is taken as it is, other JSON as JSON."""
    server.answer = (200, answer)

    assert await result(server.url) == read


async def test_error_status_is_told_the_model(server):
    """With the status and what the server said."""
    server.answer = (500, b"out of order")

    assert await result(server.url) == "Error: the tool's server answered 500: out of order"


async def test_server_that_is_not_there_is_told_the_model():
    """The request goes on."""
    assert "cannot be reached" in await result("http://127.0.0.1:9/tools")


async def test_arguments_that_are_no_object_are_not_sent(server):
    """The model reads what is wrong."""
    assert "must be a JSON object" in await result(server.url, arguments="[1]")
    assert server.received == []


async def test_registered_callback_comes_before_the_url(server):
    """Only what nothing here executes is sent away."""
    box = Toolbox(ToolSettings(callbacks=(ToolCallback("far", lambda call: "near"),)))

    assert await result(server.url, box=box) == "near"
    assert server.received == []


def test_url_must_be_http():
    """Files and other schemes are refused where they are written."""
    with pytest.raises(RequestError, match="http:// or https://"):
        RequestBuilder().with_tool_dispatch_url("file:///etc/passwd")
