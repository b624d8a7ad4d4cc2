"""A small HTTP client for `bench`: little work per piece, so that it measures the server."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from mistralrs_sdk import ConfigError, InferenceError

_LONGEST_LINE = 2**20
_CONNECT_SECONDS = 10.0


@attrs.frozen(kw_only=True)
class Address:
    """Where a server is: `http://host:port/prefix`, the prefix without a trailing slash."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a URL; a final `/v1` may be there or not.

        Raises:
            ConfigError: it is no http or https URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--http {url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"--http {url!r} must be like http://127.0.0.1:1234")
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname,
            port=port or (443 if tls else 80),
            tls=tls,
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )


class HttpClient:
    """Posts JSON and reads events; connections are kept and used again."""

    def __init__(self, address: Address, *, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._headers = dict(headers or {})
        self._idle: list[_Connection] = []

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Post `body` and yield the JSON of each server-sent event until `[DONE]` or the end.

        Leaving early closes the connection.

        Raises:
            InferenceError: the server cannot be reached, refuses, or sends what is no event.
        """
        connection = await self._post(path, body)
        finished = False
        try:
            async for line in connection.lines():
                if not line.startswith(b"data:"):
                    continue  # comments keep the connection alive; names of events do not matter
                data = line[5:].strip()
                if data != b"[DONE]":
                    yield _event(data)
            finished = connection.reusable
        finally:
            self._give_back(connection, finished)

    async def aclose(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def _post(self, path: str, body: Mapping[str, Any]) -> _Connection:
        """A connection whose answer has begun with status 200."""
        text = json.dumps(body).encode()
        kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                await kept.ask(self._head(path, len(text)) + text)
                return await self._checked(kept)
            except (OSError, EOFError):
                kept.close()  # the server had closed it meanwhile: once more on a fresh one
            except BaseException:
                kept.close()
                raise
        connection = await self._connect()
        try:
            await connection.ask(self._head(path, len(text)) + text)
            return await self._checked(connection)
        except (OSError, EOFError) as error:
            connection.close()
            raise InferenceError(
                f"{self._address.host}:{self._address.port} closed the connection before it "
                "answered: see the server's log"
            ) from error
        except BaseException:  # cancelling, too, must not leave it open
            connection.close()
            raise

    async def _checked(self, connection: _Connection) -> _Connection:
        if connection.status != 200:
            said = b"\n".join([line async for line in connection.lines()])
            raise InferenceError(f"HTTP {connection.status}: {_message(said)}")
        return connection

    async def _connect(self) -> _Connection:
        where = self._address
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    where.host,
                    where.port,
                    ssl=ssl.create_default_context() if where.tls else None,
                    limit=_LONGEST_LINE,
                )
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer within {_CONNECT_SECONDS:g} s"
            raise InferenceError(
                f"{where.host}:{where.port} cannot be reached ({why}): is the server running?"
            ) from error
        return _Connection(reader, writer)

    def _head(self, path: str, length: int) -> bytes:
        headers = {
            "Host": f"{self._address.host}:{self._address.port}",
            "Content-Type": "application/json",
            "Content-Length": str(length),
            "Accept": "text/event-stream",
            **self._headers,
        }
        lines = [f"POST {self._address.prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    def _give_back(self, connection: _Connection, finished: bool) -> None:
        if finished:
            self._idle.append(connection)
        else:
            connection.close()


class _Connection:
    """One connection and the head of its last answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.reusable = False

    async def ask(self, message: bytes) -> None:
        """Send a request and read the head of the answer."""
        self._writer.write(message)
        await self._writer.drain()
        words = (await self._line()).split(maxsplit=2)
        if len(words) < 2 or not words[1].isdigit():
            raise InferenceError(f"the answer begins with {b' '.join(words)!r:.60}: no HTTP server")
        self.status = int(words[1])
        self.headers = {}
        while head := (await self._line()).decode("latin-1"):
            name, _, value = head.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body as they come, without their ends."""
        rest = b""
        async for piece in self._body():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def _body(self) -> AsyncIterator[bytes]:
        self.reusable = False
        keeps = self.headers.get("connection", "").lower() != "close"
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._line()).partition(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            while await self._line():
                pass  # trailers
            self.reusable = keeps
        elif "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
            self.reusable = keeps
        else:
            while piece := await self._reader.read(2**16):
                yield piece

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line.rstrip(b"\r\n")

    def close(self) -> None:
        """Close it, whatever is still coming."""
        self._writer.close()


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise InferenceError(f"the server sent {data!r:.80}, which is no JSON") from error
    if not isinstance(event, dict) or event.get("error"):
        raise InferenceError(f"the server sent an error: {_message(data)}")
    return event


def _message(said: bytes) -> str:
    """What a server's error says, whatever shape it has."""
    try:
        found = json.loads(said)
    except ValueError:
        found = said.decode(errors="replace")
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if key in found), None)
    return " ".join(str(found or "it does not say why").split())[:300]
