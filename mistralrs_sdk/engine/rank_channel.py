"""What rank 0 and another rank of a tensor-parallel model tell each other, over one socket."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mistralrs_sdk.attention.backend import BatchLists

_HEAD = struct.Struct("<BI")
"""Kind and number of bytes, before each message."""
_WORDS, _STEP = 0, 1
_MOST_WORDS = 2**20
"""Bytes of the longest message of words: who sends more, or another kind, is no rank."""
_NUMBER = "i"
"""Of a step's message: token ids, positions and slots are far below 2**31."""
_LOST_AFTER_S = 4
"""Seconds after which a machine that no longer answers counts as gone."""


class Channel:
    """Messages over a connected socket; one thread sends, one receives.

    They are JSON and plain numbers, so that nothing a network brings is ever executed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(True)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            _notice_lost_machines(connection)

    @property
    def local_address(self) -> str | None:
        """This machine's address on the way to the other; None if it is the same machine's."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        address = self._socket.getsockname()[0].removeprefix("::ffff:")
        return None if address.startswith("127.") or address == "::1" else address

    def send(self, **words: Any) -> None:
        """Send a message that `receive` returns as a mapping.

        Raises:
            OSError: the other side is gone.
        """
        self._send(_WORDS, json.dumps(words).encode())

    def send_step(self, lists: BatchLists) -> None:
        """Send what is computed next.

        Raises:
            OSError: the other side is gone.
        """
        self._send(_STEP, encode_step(lists))

    def receive(self, *, timeout: float | None = None) -> Mapping[str, Any] | BatchLists:
        """Wait for a message, whose parts may be so many seconds apart.

        Raises:
            EOFError: the other side has closed, or the connection broke.
            ValueError: the other side speaks another language.
        """
        self._socket.settimeout(timeout)
        kind, size = _HEAD.unpack(self._read(_HEAD.size))
        if kind not in (_WORDS, _STEP) or (kind == _WORDS and size > _MOST_WORDS):
            raise ValueError(f"a message of kind {kind} with {size} bytes is none of a rank")
        content = self._read(size)
        self._socket.settimeout(None)
        return decode_step(content) if kind == _STEP else json.loads(content)

    def has_message(self, timeout: float) -> bool:
        """Whether `receive` has something to return or to raise, within so many seconds."""
        events = select.poll()  # select.select refuses the numbers of a server with many sockets
        events.register(self._socket, select.POLLIN)
        return bool(events.poll(1000 * timeout))

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone`, once and on a thread of its own, when the other side has closed."""
        watching = threading.Thread(target=self._watch, args=(gone,), daemon=True)
        watching.name = "mistralrs-rank-watch"
        watching.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, kind: int, content: bytes | memoryview) -> None:
        self._socket.sendall(_HEAD.pack(kind, len(content)) + content)

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise EOFError(f"the connection broke: {error}") from error
            if not count:
                raise EOFError("the connection was closed")
            view = view[count:]
        return content

    def _watch(self, gone: Callable[[], None]) -> None:
        events = select.poll()
        # Linux tells of a closed connection even while messages are there to be read.
        events.register(self._socket, getattr(select, "POLLRDHUP", 0))
        events.poll()
        gone()


def encode_step(lists: BatchLists) -> bytes:
    """The numbers of a step, one list behind the other."""
    parts: list[Sequence[int]] = [
        lists.input_ids,
        lists.positions,
        lists.slot_mapping,
        lists.logits_indices,
        lists.query_start,
        lists.seq_lens,
        [len(table) for table in lists.block_tables],
        *lists.block_tables,
    ]
    numbers = array(_NUMBER, [len(part) for part in parts[:7]])
    for part in parts:
        numbers.extend(part)
    return numbers.tobytes()


def decode_step(content: bytes | bytearray) -> BatchLists:
    """What `encode_step` was given."""
    numbers = array(_NUMBER)
    numbers.frombytes(content)
    place = 7

    def take(count: int) -> list[int]:
        nonlocal place
        start, place = place, place + count
        return numbers[start:place].tolist()

    ids, positions, slots, logits, starts, lengths, tables = (take(count) for count in numbers[:7])
    return BatchLists(
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        logits_indices=logits,
        query_start=starts,
        seq_lens=lengths,
        block_tables=[take(count) for count in tables],
    )


def _notice_lost_machines(connection: socket.socket) -> None:
    """Do not wait, as TCP would, for minutes on a machine that lost its power or its network."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": _LOST_AFTER_S - 1,
        "TCP_USER_TIMEOUT": 1000 * _LOST_AFTER_S,
    }
    for name, value in settings.items():
        option = getattr(socket, name, None)  # macOS has not all of them
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
