"""What ranks compute together: over gloo, and the calls that are made to NCCL."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

from mistralrs_sdk import distributed
from mistralrs_sdk.distributed import (
    ALONE,
    GlooGroup,
    NcclGroup,
    TensorParallel,
    nccl_unique_id,
)


def on_ranks(size, compute):
    """What `compute(parallel)` returns on each rank; the ranks are threads."""
    store = torch.distributed.HashStore()
    found = [None] * size

    def run(rank):
        group = GlooGroup(store, rank=rank, size=size, address="127.0.0.1")
        found[rank] = compute(TensorParallel(rank, size, group))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_one_rank_computes_nothing():
    """Without others, sums and gathered rows are what was given."""
    x = torch.arange(6.0).view(2, 3)

    assert ALONE.all_reduce(x) is x
    assert torch.equal(ALONE.gather(x), x[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_gets_the_sum(dtype):
    """In place, in the type of the values."""
    found = on_ranks(3, lambda p: p.all_reduce(torch.full((2, 2), p.rank + 1.0, dtype=dtype)))

    assert all(torch.equal(x, torch.full((2, 2), 6.0, dtype=dtype)) for x in found)


def test_rank_0_gets_the_rows_of_all():
    """In the order of the ranks; the others get nothing."""
    found = on_ranks(2, lambda p: p.gather(torch.full((1, 3), float(p.rank))))

    assert found[1] is None
    assert torch.equal(found[0], torch.tensor([[[0.0] * 3], [[1.0] * 3]]))


def test_nothing_is_sent_for_no_rows():
    """A step whose logits nobody wants has no rows to sum or to gather."""
    found = on_ranks(2, lambda p: (p.all_reduce(torch.empty(0, 4)), p.gather(torch.empty(0, 4))))

    assert found[0][1].shape == (2, 0, 4)
    assert found[1][0].shape == (0, 4)


class FakeNccl:
    """Records the calls made to it; all succeed unless `status` says otherwise."""

    def __init__(self) -> None:
        self.calls = []
        self.status = 0

    def ncclGetErrorString(self, status):  # noqa: N802
        return b"unhandled system error"

    def ncclGetUniqueId(self, identity):  # noqa: N802
        ctypes.memmove(identity, bytes(range(128)), 128)
        return self.status

    def ncclCommInitRank(self, comm, size, identity, rank):  # noqa: N802
        ctypes.cast(comm, ctypes.POINTER(ctypes.c_void_p))[0] = 77
        self.calls.append(("init", size, bytes(identity), rank))
        return self.status

    def ncclAllReduce(self, *arguments):  # noqa: N802
        self.calls.append(("sum", *arguments[:5], arguments[5].value, arguments[6]))
        return self.status

    def ncclAllGather(self, *arguments):  # noqa: N802
        self.calls.append(("gather", *arguments[:4], arguments[4].value, arguments[5]))
        return self.status

    def ncclCommAbort(self, comm):  # noqa: N802
        self.calls.append(("abort", comm.value))
        return self.status


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    return FakeNccl()


def test_nccl_ranks_meet_by_the_id_that_rank_0_drew(nccl):
    """All 128 bytes of it, zeros included, reach the library on every rank."""
    identity = nccl_unique_id(nccl)
    group = NcclGroup(identity, rank=1, size=2, library=nccl)

    assert identity == bytes(range(128))
    assert nccl.calls == [("init", 2, identity, 1)]
    group.abort()


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.float16, 6), (torch.float32, 7), (torch.bfloat16, 9)]
)
def test_nccl_sums_in_place_on_the_current_stream(nccl, dtype, code):
    """Address, count, type and stream are those of the tensor and of torch."""
    group = NcclGroup(bytes(128), rank=0, size=2, library=nccl)
    x = torch.zeros(3, 5, dtype=dtype)
    group.all_reduce(x)

    assert nccl.calls[-1] == ("sum", x.data_ptr(), x.data_ptr(), 15, code, 0, 77, 5)


def test_nccl_gathers_one_row_of_each_rank(nccl):
    """The result has room for all ranks, and the count is that of one."""
    group = NcclGroup(bytes(128), rank=0, size=4, library=nccl)
    x = torch.zeros(2, 3)
    found = group.gather(x)

    assert found is not None
    assert found.shape == (4, 2, 3)
    assert nccl.calls[-1] == ("gather", x.data_ptr(), found.data_ptr(), 6, 7, 77, 5)


def test_nccl_is_aborted_once(nccl):
    """A second thread that aborts does not free what is freed."""
    group = NcclGroup(bytes(128), rank=0, size=2, library=nccl)
    group.abort()
    group.abort()

    assert nccl.calls[1:] == [("abort", 77)]


def test_nccl_is_freed_with_its_group(nccl):
    """A model that is closed leaves no buffers on the GPU; an aborted one is not freed again."""
    group = NcclGroup(bytes(128), rank=0, size=2, library=nccl)
    del group
    aborted = NcclGroup(bytes(128), rank=0, size=2, library=nccl)
    aborted.abort()
    del aborted

    assert [call for call in nccl.calls if call[0] == "abort"] == [("abort", 77)] * 2


@pytest.mark.parametrize("how", ["dropped", "aborted"])
def test_nccl_may_wait_for_graphs_that_this_thread_drops_next(nccl, monkeypatch, how):
    """Its abort does not return while graphs hold its calls: whoever frees it goes on."""
    dropped = threading.Event()
    monkeypatch.setattr(distributed, "_ABORT_S", 0.01)
    ended = threading.Event()

    def abort(comm):
        dropped.wait(20)
        ended.set()

    nccl.ncclCommAbort = abort
    group = NcclGroup(bytes(128), rank=0, size=2, library=nccl)
    if how == "aborted":
        group.abort()
    del group

    assert not ended.is_set()
    dropped.set()
    assert ended.wait(20)


def test_what_nccl_refuses_says_why(nccl):
    """The call, the library's own words, and how to see more."""
    group = NcclGroup(bytes(128), rank=0, size=2, library=nccl)
    nccl.status = 2
    with pytest.raises(RuntimeError, match=r"ncclAllReduce failed: unhandled.*NCCL_DEBUG=INFO"):
        group.all_reduce(torch.zeros(1))
    with pytest.raises(RuntimeError, match="ncclGetUniqueId failed"):
        nccl_unique_id(nccl)


def test_a_torch_without_nccl_is_refused_by_name(monkeypatch):
    """Where the library is not found, the message says what brings it."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(distributed.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"needs NCCL, and libnccl\.so\.2 is not found"):
        distributed.nccl_library()
