"""Threads that stay together during a tape: what they compute, and how they part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mistralrs_sdk.kernels import elementwise, matmul, native
from mistralrs_sdk.kernels.attention import paged_attention
from mistralrs_sdk.kernels.tape import Arena, ReplayError, Tape, record
from tests.matmul_helpers import make
from tests.test_kernels_attention import Shape, make_case

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")
HEADS, DIM = 6, 64
SIZE = HEADS * DIM
NORM = torch.ones(SIZE)


@pytest.fixture(params=[1, 2, 5])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Threads of each tape that the test records: also more than there are cores."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


def tape_of(step: Callable[[], Tensor]) -> Tape:
    recorded = record(step, Arena())
    assert recorded.tape is not None, recorded.reason
    return recorded.tape


@pytest.mark.parametrize("num_threads", [None, 1, 2, 7])
def test_a_team_computes_what_one_thread_does(team: int, num_threads: int | None):
    """Bit for bit, whether its calls were to use as many threads, fewer or more."""
    shape = Shape(kv_heads=2, group=HEADS // 2, head_dim=DIM)
    case = make_case(shape, [(400, 1), (900, 40), (30, 30)])
    many, few = make("Q4_1", 2 * SIZE, SIZE)[0], make("Q6_K", SIZE // 2, 512)[0]
    x = torch.randn(71, HEADS, DIM)

    def step(num_threads: int | None) -> Tensor:
        attended = paged_attention(
            x, case.cache, batch=case.batch, num_threads=num_threads, **shape.options
        ).view(71, SIZE)
        normed = elementwise.rms_norm(attended, NORM, eps=1e-6, num_threads=num_threads)
        gates = matmul.linear(normed, many, num_threads=num_threads)
        y = torch.empty(71, 512)
        matmul.linear(gates[:, :SIZE], few_in, out=y, num_threads=num_threads)
        return matmul.linear(y, few, num_threads=num_threads)

    few_in = make("F16", 512, SIZE)[0]
    tape = tape_of(lambda: step(num_threads))
    for _ in range(20):
        x.normal_()
        assert torch.equal(tape.run(), step(1))


def test_a_team_parts_when_a_call_fails(team: int):
    """The replay ends, the threads are free for others, and the next replay has its own."""
    weight = make("Q8_0", 64, 64)[0]
    table = make("Q8_0", 40, 64)[0]
    ids = torch.tensor([3])

    def step() -> Tensor:
        return matmul.linear(matmul.embedding_rows(table, ids), weight)

    expected, tape = step(), tape_of(step)
    ids[0] = 40

    with pytest.raises(ReplayError, match="call 0 of a tape, mistralrs_embedding_rows"):
        tape.run()

    ids[0] = 3
    assert torch.equal(step(), expected)
    assert torch.equal(tape.run(), expected)
