"""Which rank a process is, out of its environment."""

from __future__ import annotations

import pytest

from mistralrs_sdk import ConfigError
from mistralrs_sdk.engine.rank_place import RankPlace, place_of, refuse_without_nccl

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
HEAD = {
    "MISTRALRS_MN_GLOBAL_WORLD_SIZE": "4",
    "MISTRALRS_MN_LOCAL_WORLD_SIZE": "2",
    "MISTRALRS_MN_HEAD_NUM_WORKERS": "1",
    "MISTRALRS_MN_HEAD_PORT": "7000",
}
WORKER = {
    "MISTRALRS_MN_GLOBAL_WORLD_SIZE": "4",
    "MISTRALRS_MN_LOCAL_WORLD_SIZE": "2",
    "MISTRALRS_MN_WORKER_ID": "0",
    "MISTRALRS_MN_WORKER_SERVER_ADDR": "10.0.0.1:7000",
}


def test_without_variables_this_process_starts_all_others():
    """Rank 0 is here, and the others are started on this machine."""
    place = place_of({}, 4)

    assert place == RankPlace(rank=0, size=4, local_rank=0, local_size=4, starts=range(1, 4))
    assert place.of(2) == RankPlace(rank=2, size=4, local_rank=2, local_size=4)


def test_a_world_of_one_is_no_world():
    """Job systems set WORLD_SIZE to 1 for a single process, which then starts the ranks itself."""
    assert place_of({"WORLD_SIZE": "1", "RANK": "0"}, 2).starts == range(1, 2)


def test_torchrun_says_which_rank_this_is():
    """Every rank is a process of its own, and they meet where torchrun says."""
    assert place_of(TORCHRUN, 4) == RankPlace(
        rank=3, size=4, local_rank=1, local_size=2, meeting=("10.0.0.1", 29500)
    )


def test_a_store_that_torchrun_keeps_is_not_opened_again():
    """torchrun's agent holds the port; each of its restarts is a meeting of its own."""
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = place_of({**TORCHRUN, **agent}, 4)

    assert place.agent_store
    assert place.attempt == 2


def test_the_head_of_several_machines_starts_its_own_ranks():
    """mistral.rs' variables: one process per machine, which starts the machine's other ranks."""
    place = place_of(HEAD, 4)

    assert (place.rank, place.local_size, place.starts) == (0, 2, range(1, 2))
    assert place.meeting == ("127.0.0.1", 7000)


def test_workers_come_after_the_head():
    """A worker's first rank is (id + 1) times the ranks per machine."""
    place = place_of(WORKER, 4)

    assert (place.rank, place.local_rank, place.starts) == (2, 0, range(3, 4))
    assert place.meeting == ("10.0.0.1", 7000)
    assert place.of(3).local_rank == 1


@pytest.mark.parametrize(
    ("environ", "size", "words"),
    [
        (TORCHRUN, 2, r"tensor_parallel is 2 and WORLD_SIZE is 4: .*with_tensor_parallel\(4\)"),
        ({**TORCHRUN, "RANK": "4"}, 4, r"RANK \('4'\) must be a whole number of at least 0, below"),
        ({**TORCHRUN, "RANK": "x"}, 4, r"RANK \('x'\) must be a whole number"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, 4, "MASTER_ADDR is not set"),
        ({k: v for k, v in TORCHRUN.items() if k != "RANK"}, 4, "RANK is not set"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, 4, "MASTER_PORT"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, 4, r"WORLD_SIZE \('many'\)"),
        (HEAD, 3, "tensor_parallel is 3 and MISTRALRS_MN_GLOBAL_WORLD_SIZE is 4"),
        ({**HEAD, "MISTRALRS_MN_HEAD_NUM_WORKERS": "2"}, 4, "are 6 ranks, and .* is 4"),
        ({**WORKER, "MISTRALRS_MN_WORKER_ID": "1"}, 4, "goes beyond"),
        ({**WORKER, "MISTRALRS_MN_WORKER_SERVER_ADDR": "10.0.0.1"}, 4, "must be host:port"),
        ({**WORKER, "MISTRALRS_MN_WORKER_SERVER_ADDR": ""}, 4, "SERVER_ADDR is not set"),
    ],
)
def test_what_contradicts_is_refused(environ, size, words):
    """The message names the variable and its value."""
    with pytest.raises(ConfigError, match=words):
        place_of(environ, size)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("yes", True), ("0", False)])
def test_nccl_can_be_switched_off(value, refused):
    """MISTRALRS_NO_NCCL and ranks on CUDA devices contradict each other."""
    if not refused:
        refuse_without_nccl({"MISTRALRS_NO_NCCL": value}, 2)
        return
    with pytest.raises(ConfigError, match=r"MISTRALRS_NO_NCCL .* tensor_parallel is 2"):
        refuse_without_nccl({"MISTRALRS_NO_NCCL": value}, 2)
