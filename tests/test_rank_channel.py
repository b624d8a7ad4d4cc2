"""Messages between rank 0 and the others."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.attention.backend import BatchLists
from mistralrs_sdk.engine.rank_channel import Channel, decode_step, encode_step

numbers = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@st.composite
def steps(draw) -> BatchLists:
    return BatchLists(
        input_ids=draw(numbers),
        positions=draw(numbers),
        slot_mapping=draw(numbers),
        logits_indices=draw(numbers),
        query_start=draw(numbers),
        seq_lens=draw(numbers),
        block_tables=draw(st.lists(numbers, max_size=4)),
    )


@pytest.fixture
def ends():
    """Two channels that are connected with each other."""
    one, two = (Channel(end) for end in socket.socketpair())
    yield one, two
    one.close()
    two.close()


@given(steps())
@settings(max_examples=50, deadline=None)
def test_a_step_arrives_as_it_was_sent(step):
    """Every list is the same, empty ones too."""
    assert attrs.asdict(decode_step(encode_step(step))) == attrs.asdict(step)


def test_messages_arrive_in_order(ends):
    """Words and steps come out as they went in, one by one."""
    one, two = ends
    step = decode_step(encode_step(BatchLists(
        input_ids=[5, 6], positions=[0, 1], slot_mapping=[8, 9], logits_indices=[1],
        query_start=[0, 2], seq_lens=[2], block_tables=[[1]],
    )))  # fmt: skip
    one.send(address="10.0.0.1", nccl_id=None)
    one.send_step(step)

    assert two.receive() == {"address": "10.0.0.1", "nccl_id": None}
    received = two.receive()
    assert isinstance(received, BatchLists)
    assert attrs.asdict(received) == attrs.asdict(step)


def test_who_waits_sees_that_the_other_has_closed(ends):
    """There is something to receive, and receiving it raises."""
    one, two = ends
    assert not two.has_message(0.0)
    one.close()

    assert two.has_message(1.0)
    with pytest.raises(EOFError):
        two.receive()


def test_what_no_rank_sends_is_not_waited_for(ends):
    """A message of another kind, or words without end, are refused by their first bytes."""
    one, two = ends
    for head in (b"GET / HTTP/1.1", b"\x00\xff\xff\xff\x7f"):
        one._socket.sendall(head)
        with pytest.raises(ValueError, match="is none of a rank"):
            two.receive()
        while two.has_message(0.0):
            two._socket.recv(64)


def test_a_channel_may_have_any_number(ends):
    """A server with more than a thousand open sockets can wait for its ranks, too."""
    one, two = ends
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1200:
        pytest.skip(f"a process may have {soft} open files here")
    high = Channel(socket.socket(fileno=fcntl.fcntl(two._socket.fileno(), fcntl.F_DUPFD, 1100)))
    one.send(ready=True)

    assert high.has_message(1.0)
    high.close()


def test_a_watcher_hears_of_the_end_behind_unread_messages(ends):
    """A rank that dies is noticed even while nobody reads what it sent."""
    one, two = ends
    gone = threading.Event()
    two.watch(gone.set)
    one.send(ready=True)

    assert not gone.wait(0.05)
    one.close()
    assert gone.wait(5)


def test_a_channel_on_one_machine_has_no_address(ends):
    """What is not connected over a network says so."""
    assert ends[0].local_address is None


def test_loopback_is_no_address_for_others():
    """Ranks on one machine tell no address that others could not use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Channel(socket.create_connection(listener.getsockname()))
        server = Channel(listener.accept()[0])
        assert client.local_address is None
        server.send(close=True)
        assert client.receive() == {"close": True}
        client.close()
        server.close()
