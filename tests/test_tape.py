"""Tapes: what is recorded and what refuses it, replays on new values, and the memory they take."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mistralrs_sdk.kernels import elementwise, matmul, native
from mistralrs_sdk.kernels.attention import LayerCache, keys_by_dim, store_kv
from mistralrs_sdk.kernels.tape import Arena, ReplayError, Tape, lay_out, record

SIZE = 64
NORM = torch.ones(SIZE)
X = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels here")


@functools.cache
def weights() -> tuple[matmul.PackedWeight, ...]:
    torch.manual_seed(0)
    return tuple(
        matmul.pack((torch.randn(rows, SIZE) / 8).half(), "F16", (rows, SIZE))
        for rows in (2 * SIZE, SIZE)
    )


def feed_forward(x: Tensor, layers: int = 2) -> Tensor:
    """Norms, products, gates and residuals, as a model has them; x stays as it is."""
    up, down = weights()
    x = new = elementwise.rms_norm(x, NORM, eps=1e-6, num_threads=1)
    for _ in range(layers):
        gates = matmul.linear(new, up, num_threads=1)
        new = matmul.linear(elementwise.gated(gates, "silu", num_threads=1), down, num_threads=1)
        new = elementwise.rms_norm(new, NORM, eps=1e-6, residual=x, num_threads=1)
    return new


def tape_of(x: Tensor, *, layers: int = 2, arena: Arena | None = None) -> Tape:
    weights()  # a model has them before a step
    recorded = record(lambda: feed_forward(x, layers), arena or Arena())
    assert recorded.tape is not None, recorded.reason
    return recorded.tape


def softcap(x: Tensor) -> Tensor:
    return elementwise.softcap(x, 1.0, num_threads=1)


@needs_native
@pytest.mark.parametrize("inference", [False, True])
def test_a_replay_computes_on_what_stands_in_the_inputs(inference):
    """Bit for bit what the step itself gives, time after time."""
    x = torch.randn(3, SIZE)
    with torch.inference_mode(inference):
        tape = tape_of(x)
        for _ in range(3):
            x.normal_()
            assert torch.equal(tape.run(), feed_forward(x))


@needs_native
def test_recording_runs_the_step():
    """The recorded run is a run: its result is right, and apart from the arena."""
    weights()
    x, arena = torch.randn(2, SIZE), Arena()
    recorded = record(lambda: feed_forward(x), arena)
    assert recorded.tape is not None
    kept = recorded.result.clone()
    assert torch.equal(kept, feed_forward(x))

    x.zero_()
    recorded.tape.run()

    assert torch.equal(recorded.result, kept)


@needs_native
def test_a_result_may_be_a_view():
    """Of any part and order of what the step allocated."""
    weights()
    x = torch.randn(3, SIZE)
    recorded = record(lambda: feed_forward(x)[1:, ::2].T, Arena())
    assert recorded.tape is not None

    x.normal_()
    result = recorded.tape.run()

    assert result.shape == (SIZE // 2, 2)
    assert torch.equal(result, feed_forward(x)[1:, ::2].T)


@needs_native
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda x: softcap(x.clone()), "aten.clone"),
        (lambda x: softcap(x + 1), "aten.add"),
        (lambda x: softcap(torch.zeros_like(x)), "aten.zero"),
        (lambda x: softcap(x.t().reshape(-1)), "aten.clone"),
        (lambda x: softcap(x.t().contiguous()), "aten.clone"),
        (lambda x: softcap(torch.empty(1) if x.sum() > 0 else x), "aten.sum"),
        (lambda x: softcap(torch.tensor([1.0, 2.0])), "aten.lift_fresh"),
        (lambda x: softcap(torch.empty(2).copy_(x[0, :2])), "aten.copy_"),
        (lambda x: softcap(x.double().float()), "aten._to_copy"),
    ],
)
def test_what_torch_computes_is_not_taped(inference, step, name):
    """The first op of torch that is no view and no allocation is the reason."""
    with torch.inference_mode(inference):
        recorded = record(lambda: step(X), Arena())

    assert recorded.tape is None
    assert name in recorded.reason


@needs_native
@pytest.mark.parametrize("inference", [False, True])
def test_views_and_allocations_are_free(inference):
    """Nothing on the tape but the kernel, whatever torch does to shapes and types that fit."""
    x = torch.randn(4, SIZE)

    def step() -> Tensor:
        parts = x.view(2, 2, SIZE).flatten(0, 1).reshape(4, 2, -1).split(1, 1)
        same = parts[0].squeeze(1).float()
        torch.empty_like(same.new_empty(4, 3).to(torch.float32).contiguous())
        return elementwise.rms_norm(same, NORM[: SIZE // 2], eps=1e-6, num_threads=1).detach()

    with torch.inference_mode(inference):
        recorded = record(step, Arena())

    assert recorded.tape is not None, recorded.reason
    assert recorded.tape.names == ["mistralrs_rms_norm"]


@needs_native
def test_a_result_the_step_did_not_make_is_no_result():
    """Its memory belongs to somebody else."""
    x = torch.randn(2, SIZE)

    recorded = record(lambda: softcap(x), Arena())

    assert recorded.tape is None
    assert recorded.reason == "the result is not a tensor that the step allocated"


@needs_native
def test_an_error_while_recording_is_the_steps():
    """It comes out as it is, and nobody listens any more."""
    with pytest.raises(ValueError, match="must be float32"):
        record(lambda: softcap(X.double()), Arena())

    assert torch.equal(softcap(torch.zeros(1)), torch.zeros(1))
    assert not native._listeners


@needs_native
def test_a_call_that_fails_ends_the_replay():
    """The error names the call; those behind it are not made."""
    shape = (2, 4, 1, 8)
    caches = [LayerCache(k=keys_by_dim(torch.zeros(shape)), v=torch.zeros(shape)) for _ in range(2)]
    slots = [torch.tensor([3]), torch.tensor([3])]
    x = torch.ones(1, 1, 8)

    def step() -> Tensor:
        out = softcap(torch.empty(8))
        for cache, slot in zip(caches, slots, strict=True):
            store_kv(x, x, slots=slot, cache=cache)
        return out

    recorded = record(step, Arena())
    assert recorded.tape is not None
    slots[0][0], slots[1][0] = 8, 5

    with pytest.raises(ReplayError, match="call 1 of a tape, mistralrs_store_kv"):
        recorded.tape.run()

    assert caches[1].k.flatten(0, 1)[5].sum() == 0
    slots[0][0] = 7
    recorded.tape.run()
    assert caches[0].k.flatten(0, 1)[7].sum() == caches[1].k.flatten(0, 1)[5].sum() == 8


@needs_native
def test_memory_does_not_grow_with_depth():
    """Buffers that are not needed at once share their place."""
    sizes = []
    for layers in (2, 20):
        arena = Arena()
        tape_of(X, layers=layers, arena=arena)
        sizes.append(len(arena.memory))

    row = 2 * SIZE * 4
    assert sizes[0] == sizes[1] <= 6 * row


@needs_native
def test_tapes_share_an_arena_that_grows():
    """A tape goes on working after the arena moved for a larger one, and keeps no old memory."""
    arena = Arena()
    inputs = [torch.randn(rows, SIZE) for rows in (1, 9)]
    tapes = [tape_of(inputs[0], arena=arena)]
    assert torch.equal(tapes[0].run(), feed_forward(inputs[0]))
    small = len(arena.memory)

    tapes.append(tape_of(inputs[1], arena=arena))

    assert len(arena.memory) > small
    for _ in range(2):
        for tape, x in zip(tapes, inputs, strict=True):
            x.normal_()
            result = tape.run()
            assert torch.equal(result, feed_forward(x))
            assert result.untyped_storage().data_ptr() == arena.memory.data_ptr()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(1, 1000)), max_size=40)
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_buffers_in_use_at_once_do_not_overlap(spans):
    """And all lie within the memory, at multiples of a cache line."""
    buffers = {n: (first, first + more, size) for n, (first, more, size) in enumerate(spans)}

    starts, total = lay_out(buffers)

    assert starts.keys() == buffers.keys()
    for n, (first, last, size) in buffers.items():
        assert starts[n] % 64 == 0
        assert 0 <= starts[n] <= total - size
        for m, (other_first, other_last, other_size) in buffers.items():
            if n != m and first <= other_last and other_first <= last:
                assert starts[n] + size <= starts[m] or starts[m] + other_size <= starts[n]
