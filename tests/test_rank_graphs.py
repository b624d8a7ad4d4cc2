"""Decode steps that all ranks of a model capture and replay together."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch

from mistralrs_sdk import ModelLoadError
from mistralrs_sdk.engine import rank_graphs, tensor_parallel
from mistralrs_sdk.engine.leading_runner import LeadingRunner
from mistralrs_sdk.engine.rank_channel import Channel
from mistralrs_sdk.engine.rank_graphs import capture_as_follower
from mistralrs_sdk.engine.rank_terms import in_step
from mistralrs_sdk.engine.tensor_parallel import Leader, RankLost
from tests.test_cuda_graphs import Rig, raise_out_of_memory
from tests.test_rank_leading import PLACE
from tests.test_step_tapes import decode


@pytest.fixture
def pair(monkeypatch):
    """Rank 0, and the other end of its connection to rank 1."""
    monkeypatch.setattr(tensor_parallel, "NOTICE_S", 0.2)
    leader = Leader(PLACE, torch.device("cpu"))
    ours, theirs = socket.socketpair()
    leader._channels[1] = Channel(ours)
    other = Channel(theirs)
    yield leader, other
    leader.close()
    other.close()


def runner_of(rig: Rig):
    """What an engine is built with, as far as ranks look at it."""
    return SimpleNamespace(model=rig.model, graphs=rig.runner, tapes=object(), block_size=4)


def heard(channel: Channel) -> list:
    """All words that were sent over a connection."""
    found = []
    while channel.has_message(0):
        found.append(channel.receive())
    return found


def test_all_ranks_are_told_which_steps_to_capture(pair):
    """One bucket after the other, each once the last is captured everywhere, and then the end."""
    leader, other = pair
    rig = Rig.of(max_num_seqs=3)
    other.send(ready=True)
    for _ in range(3):
        other.send(graph_bytes=100)

    leading = leader.ready(runner_of(rig))

    assert leading.pids == ()
    assert heard(other) == [
        {"capture": 1},
        {"capture": 2},
        {"capture": 3},
        {"capture": None, "reason": ""},
    ]
    assert rig.runner.together
    assert rig.runner.stats.captured == (1, 2, 3)


def test_the_rank_with_the_largest_graphs_decides_when_memory_is_full(pair):
    """And all are told why the rest runs eagerly."""
    leader, other = pair
    rig = Rig.of(max_num_seqs=4, max_bytes=2**20)
    other.send(ready=True)
    other.send(graph_bytes=100)
    other.send(graph_bytes=2**20)

    leading = leader.ready(runner_of(rig))

    reason = "the graphs take 1 MiB of the 1 that they may"
    assert heard(other)[-1] == {"capture": None, "reason": reason}
    assert leading.pids == ()
    assert rig.runner.stats.captured == (1, 2)
    assert rig.runner.stats.disabled == {3: reason, 4: reason}


def test_captures_end_when_their_time_is_over(pair, monkeypatch):
    """Rank 0's clock decides for all."""
    leader, other = pair
    rig = Rig.of(max_num_seqs=4)
    monkeypatch.setattr(rank_graphs, "CAPTURE_SECONDS", 0.0)
    other.send(ready=True)

    leading = leader.ready(runner_of(rig))

    reason = "0 s were over before it was captured"
    assert heard(other) == [{"capture": None, "reason": reason}]
    assert leading.pids == ()
    assert not rig.runner.stats.captured


def test_a_rank_that_cannot_capture_fails_the_build_with_its_words(pair):
    """The others may wait for it inside of the step: none can go on without graphs."""
    leader, other = pair
    other.send(ready=True)
    other.send(rank=1, failed="RuntimeError: CUDA error: operation not permitted")

    with pytest.raises(ModelLoadError, match=r"of 1 sequences .*rank 1.*not permitted.*leave with"):
        leader.ready(runner_of(Rig.of()))


@pytest.mark.parametrize("says", [None, "it ran out of memory"])
def test_the_rank_that_failed_first_is_named(pair, says):
    """What fails here may only be the wait for another rank, whose words are then there."""
    leader, other = pair
    rig = Rig.of()
    rig.graphs.fail_capture = raise_out_of_memory
    other.send(ready=True)
    if says is not None:
        other.send(rank=1, failed=says)

    words = r"rank 0 failed \(RuntimeError: CUDA out of memory\)" if says is None else f"1 .*{says}"
    with pytest.raises(ModelLoadError, match=words):
        leader.ready(runner_of(rig))


def test_graphs_are_dropped_before_the_ranks_part(pair):
    """NCCL does not end while there are graphs that captured its calls."""
    leader, other = pair
    rig = Rig.of(max_num_seqs=1)
    other.send(ready=True)
    other.send(graph_bytes=0)
    leading = leader.ready(runner_of(rig))
    assert rig.runner.stats.captured

    leader.close()

    assert not rig.runner.stats.captured
    assert leading.pids == ()


def test_another_rank_captures_what_it_is_told():
    """It answers each bucket with what its graphs take, and leaves out what is not named."""
    theirs, ours = (Channel(end) for end in socket.socketpair())
    rig = Rig.of(max_num_seqs=4)
    words = iter([{"capture": 1}, {"capture": 3}, {"capture": None, "reason": "no room"}])
    in_step(runner_of(rig))

    capture_as_follower(rig.runner, ours, hear=lambda: next(words))

    assert heard(theirs) == [{"graph_bytes": 100}, {"graph_bytes": 200}]
    assert rig.runner.stats.captured == (1, 3)
    assert rig.runner.stats.disabled == {2: "no room", 4: "no room"}
    ours.close()
    theirs.close()


class Replaying:
    """A runner whose steps are replayed; what follows them fails."""

    block_size = 4
    tapes = None

    def __init__(self, rig: Rig) -> None:
        self.model, self.graphs = rig.model, rig.runner
        self.lists = decode(rig.rows(3))

    def run(self, scheduled):
        self.graphs.run(self.lists)
        raise ValueError("a bad logits processor")


def test_a_replayed_step_counts_as_computed(pair, monkeypatch):
    """What fails after it fails that step alone; what fails in it ends the engine."""
    leader, _ = pair
    rig = Rig.of()
    runner = Replaying(rig)
    monkeypatch.setattr(tensor_parallel, "lay_out", lambda scheduled, block_size: runner.lists)
    rig.runner.capture(1)
    in_step(runner)  # type: ignore[arg-type]
    leading = LeadingRunner(runner, leader)  # type: ignore[arg-type]

    for _ in range(2):
        with pytest.raises(ValueError, match="logits processor"):
            leading.run([])

    rig.graphs.fail_replay = raise_out_of_memory
    with pytest.raises(RankLost, match=r"rank 0 of 2 failed in a step .*out of memory"):
        leading.run([])
