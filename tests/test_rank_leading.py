"""What rank 0 does when ranks differ, fail or end, with the others played by the test."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import attrs
import pytest
import torch

from mistralrs_sdk import ConfigError, ModelLoadError
from mistralrs_sdk._version import __version__
from mistralrs_sdk.attention.backend import BatchLists
from mistralrs_sdk.engine import tensor_parallel
from mistralrs_sdk.engine.leading_runner import LeadingRunner
from mistralrs_sdk.engine.rank_channel import Channel
from mistralrs_sdk.engine.rank_place import RankPlace
from mistralrs_sdk.engine.rank_terms import fingerprint, with_pool
from mistralrs_sdk.engine.tensor_parallel import Leader, RankLost
from mistralrs_sdk.plan import MemoryPlan

PLACE = RankPlace(rank=0, size=2, local_rank=0, local_size=2, starts=range(1, 2))
PLAN = MemoryPlan(
    name="m",
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="f32",
    free_bytes=1,
    num_parameters=7,
    weight_bytes=1,
    weights="",
    activation_bytes=1,
    reserve_bytes=1,
    cache="paged",
    kv_bytes_per_token=4,
    kv_growth=8,
    num_blocks=100,
    kv_bytes=101 * 8 * 4,
    kv_reason="user",
    max_model_len=800,
    max_model_len_reason="model",
    max_num_seqs=1,
    max_num_batched_tokens=1,
)


@pytest.fixture
def pair(monkeypatch):
    """Rank 0, and the other end of its connection to rank 1."""
    monkeypatch.setattr(tensor_parallel, "NOTICE_S", 0.2)
    leader = Leader(PLACE, torch.device("cpu"))
    ours, theirs = socket.socketpair()
    leader._channels[1] = Channel(ours)
    leader._channels[1].watch(leader._note(1))
    other = Channel(theirs)
    yield leader, other
    leader.close()
    other.close()


def settled(**changes):
    """What the ranks compare, as far as it is compared."""
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=800))
    config = SimpleNamespace(isq=None, max_num_seqs=1, cuda_graphs=False)
    return SimpleNamespace(
        **{
            "plan": PLAN,
            "model": model,
            "config": config,
            "dtype": torch.float32,
            "kv_dtype": "f32",
            "packing": "none",
            "forms": {},
            **changes,
        }
    )


def test_the_pool_is_the_smallest_of_all_ranks(pair):
    """The rank with the least memory decides for all, and they are told."""
    leader, other = pair
    other.send(fingerprint=fingerprint(settled()), num_blocks=40, max_model_len=320)
    plan = leader.agree(settled())

    assert other.receive() == {"num_blocks": 40, "max_model_len": 320}
    assert (plan.num_blocks, plan.max_model_len, plan.kv_bytes) == (40, 320, 41 * 8 * 4)
    assert "another rank" in plan.max_model_len_reason


def test_a_plan_that_fits_everywhere_is_kept():
    """Nothing is said of other ranks where they change nothing."""
    assert with_pool(PLAN, 100, 800, 800) is PLAN


def test_ranks_with_unlike_settings_are_refused(pair):
    """A rank that runs another model would answer nonsense."""
    leader, other = pair
    unlike = settled(plan=attrs.evolve(PLAN, num_parameters=8))
    other.send(fingerprint=fingerprint(unlike), num_blocks=100, max_model_len=800)

    with pytest.raises(ConfigError, match="rank 1 runs another model or other settings"):
        leader.agree(settled())


def test_a_rank_of_another_version_is_refused(pair):
    """What ranks say to each other may differ between versions."""
    leader, other = pair
    other.send(rank=1, version="0.0", device="cpu")
    with pytest.raises(ModelLoadError, match=rf"rank 1 has mistralrs_sdk 0.0 .*{__version__}"):
        leader._check_arrival(1, leader._hear(1, "rank"))


def test_a_rank_on_another_kind_of_device_is_refused(pair):
    """Each would wait in a group of its own, for minutes or for ever."""
    leader, other = pair
    other.send(rank=1, version=__version__, device="cuda")
    with pytest.raises(ConfigError, match="rank 1 would compute on cuda and rank 0 on cpu"):
        leader._check_arrival(1, leader._hear(1, "rank"))


def knock(leader):
    """A connection that nobody has said anything on yet; the end of who knocks, and ours."""
    theirs, ours = socket.socketpair()
    return Channel(theirs), lambda: leader._welcome(Channel(ours))


def test_a_rank_that_cannot_come_says_why():
    """Rank 0 would otherwise wait for it until the others have given up."""
    leader = Leader(PLACE, torch.device("cpu"))
    other, welcome = knock(leader)
    other.send(rank=1, failed="there are no CUDA devices")
    with pytest.raises(ModelLoadError, match=r"rank 1 of 2 .*there are no CUDA devices"):
        welcome()
    leader.close()
    other.close()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x10\x00\x00\x00{", b""])
def test_a_stranger_at_the_door_is_sent_away(words, monkeypatch):
    """Who speaks another language, or falls silent, does not hold the meeting up."""
    monkeypatch.setattr(tensor_parallel, "_KNOCK_S", 0.05)
    leader = Leader(PLACE, torch.device("cpu"))
    stranger, welcome = knock(leader)
    stranger._socket.sendall(words)
    welcome()

    assert not leader._channels
    assert stranger.has_message(1.0)
    with pytest.raises(EOFError):
        stranger.receive()
    stranger.close()


def test_what_a_rank_could_not_do_is_passed_on(pair):
    """Its own words are in the error of `build()`."""
    leader, other = pair
    other.send(failed="ModelLoadError: no such file")
    with pytest.raises(ModelLoadError, match=r"rank 1 of 2 could not load .*no such file"):
        leader._hear(1, "ready")


@pytest.mark.parametrize("says", [None, "no such file"])
def test_a_rank_that_ends_while_they_join_is_named(pair, monkeypatch, says):
    """It may be gone before this one has reached it: what is wrong there is the error, not that."""
    leader, other = pair

    def fail(*args, **more):
        if says is not None:
            other.send(failed=says)
            other.close()
        raise ModelLoadError("rank 0 of 2 cannot join the others: connection reset")

    monkeypatch.setattr(tensor_parallel, "join", fail)
    monkeypatch.setattr(leader, "_start_all", lambda source, config: None)

    words = "cannot join" if says is None else f"rank 1 of 2 could not load .{says}"
    with pytest.raises(ModelLoadError, match=words):
        leader.gather(None, None, cancelled=lambda: False)


def test_a_rank_that_ends_before_it_is_told_anything_is_named(pair):
    """What it said before it closed its connection is read first."""
    leader, other = pair
    other.send(failed="no such file")
    other.close()

    with pytest.raises(ModelLoadError, match=r"rank 1 of 2 could not load \(no such file\)"):
        leader._tell(address="127.0.0.1")


class Inner:
    """A runner whose model and sampler do what the test says."""

    block_size = 8
    tapes = graphs = None

    def __init__(self, forward=lambda: None, draw=lambda: None) -> None:
        self.model = lambda batch, backend: forward()
        self.draw = draw

    def run(self, scheduled):
        self.model(None, None)
        return [self.draw()]


@pytest.fixture(autouse=True)
def no_sequences(monkeypatch):
    """The steps of these tests have no sequences, but a layout."""
    empty = BatchLists(
        input_ids=[],
        positions=[],
        slot_mapping=[],
        logits_indices=[],
        query_start=[0],
        seq_lens=[],
        block_tables=[],
    )
    monkeypatch.setattr(tensor_parallel, "lay_out", lambda scheduled, block_size: empty)


def fail():
    raise ValueError("a bad logits processor")


def test_a_step_is_sent_before_it_is_computed(pair):
    """The others compute it at the same time."""
    leader, other = pair
    runner = LeadingRunner(Inner(), leader)  # type: ignore[arg-type]
    assert runner.run([]) == [None]
    assert isinstance(other.receive(), BatchLists)


def test_an_error_after_the_forward_is_that_steps_alone(pair):
    """All ranks are where they should be: the next step goes on."""
    leader, _ = pair
    inner = Inner(draw=fail)
    runner = LeadingRunner(inner, leader)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits processor"):
        runner.run([])
    inner.draw = lambda: None
    assert runner.run([]) == [None]


def test_an_error_in_the_forward_ends_the_engine(pair):
    """The others wait for rank 0 in the middle of it, and can never be in step again."""
    leader, _ = pair
    runner = LeadingRunner(Inner(forward=fail), leader)  # type: ignore[arg-type]
    with pytest.raises(RankLost, match=r"rank 0 of 2 failed in a step .*others wait"):
        runner.run([])


def test_tokens_of_a_step_in_which_a_rank_was_lost_are_not_used(pair):
    """Whoever waited for the rank has been let go with nonsense."""
    leader, other = pair

    def lose():
        other.close()
        while not leader.has_lost:
            time.sleep(0.001)

    runner = LeadingRunner(Inner(forward=lose), leader)  # type: ignore[arg-type]
    with pytest.raises(RankLost, match="rank 1 of 2 closed its connection"):
        runner.run([])


def test_a_rank_that_ended_while_nothing_ran_fails_the_next_step(pair):
    """Nothing is sent or computed any more."""
    leader, other = pair
    runner = LeadingRunner(Inner(forward=fail), leader)  # type: ignore[arg-type]
    other.close()
    while not leader.has_lost:
        time.sleep(0.001)
    with pytest.raises(RankLost, match="rank 1 of 2 closed its connection"):
        runner.run([])


def test_ranks_end_with_the_runner(pair):
    """Dropping the engine ends its ranks: nobody needs to say so."""
    leader, other = pair
    runner = LeadingRunner(Inner(), leader)  # type: ignore[arg-type]
    del runner

    assert other.receive() == {"close": True}
