"""The fused elementwise kernels against their references, and rows alone against a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import LayerCache, keys_by_dim
from mistralrs_sdk.kernels.elementwise import (
    ACTIVATIONS,
    gated,
    gated_reference,
    rms_norm,
    rms_norm_reference,
    rope_table,
    rope_table_reference,
    rotate_and_store,
    rotate_and_store_reference,
    scale,
    scale_reference,
    softcap,
    softcap_reference,
)
from mistralrs_sdk.layers.rotary import RotaryEmbedding

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels here")
NAN, INF = float("nan"), float("inf")

rows = st.integers(0, 9)
seeds = st.integers(0, 99)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a view with a gap between the rows and an odd address."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), NAN)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    count=rows,
    size=st.integers(1, 70) | st.sampled_from([576, 2048]),
    offset=st.sampled_from([0.0, 1.0]),
    power=st.sampled_from([-12, 0, 12]),
    with_residual=st.booleans(),
    seed=seeds,
)
def test_rms_norm_matches_the_reference(
    count: int, size: int, offset: float, power: int, with_residual: bool, seed: int
):
    """The norm, and the residual it leaves behind, for any size and magnitude."""
    x = unaligned(draw(count, size, seed=seed) * 10.0**power)
    weight = draw(size, seed=1)
    mine = draw(count, size, seed=2) * 10.0**power if with_residual else None
    theirs = None if mine is None else mine.clone()

    out = rms_norm(x, weight, eps=1e-6, offset=offset, residual=mine)

    expected = rms_norm_reference(x, weight, eps=1e-6, offset=offset, residual=theirs)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    assert mine is None or torch.equal(mine, theirs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    count=rows,
    size=st.integers(1, 70) | st.just(1536),
    activation=st.sampled_from(ACTIVATIONS),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    seed=seeds,
)
def test_gated_matches_the_reference(
    count: int, size: int, activation: str, scale: float, seed: int
):
    """Activation of the first half times the second half, far into saturation too."""
    x = unaligned(draw(count, 2 * size, seed=seed) * scale)

    out = gated(x, activation)

    expected = gated_reference(x.double(), activation)
    torch.testing.assert_close(out.double(), expected, atol=1e-7 * scale**2, rtol=2e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=rows,
    pairs=st.integers(1, 40) | st.just(128),
    magnitude=st.sampled_from([1.0, 1.3]),
    highest=st.sampled_from([10, 4096, 1_000_000]),
    seed=seeds,
)
def test_rope_table_is_exact_to_the_last_bit_but_one(
    tokens: int, pairs: int, magnitude: float, highest: int, seed: int
):
    """Angles are rounded to float32 as in torch; their cosines and sines are as good as libm's."""
    positions = torch.randint(0, highest, (tokens,), generator=torch.Generator().manual_seed(seed))
    frequencies = 1e4 ** -(torch.arange(pairs) / pairs)
    angles = (positions[:, None].float() * frequencies).double()

    cos, sin = rope_table(positions, frequencies, magnitude=magnitude)

    for mine, exact in ((cos, angles.cos()), (sin, angles.sin())):
        first, second = mine[:, 0].double().split(pairs, -1)
        torch.testing.assert_close(second, exact * magnitude, atol=1e-9, rtol=2e-7)
        assert torch.equal(first, second if mine is cos else -second)
    theirs = rope_table_reference(positions, frequencies, magnitude=magnitude)
    torch.testing.assert_close((cos, sin), theirs, atol=3e-7, rtol=0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(count=rows, size=st.integers(1, 70) | st.just(20_000), scale=st.sampled_from([1e-4, 1, 1e6]))
def test_softcap_matches_the_reference(count: int, size: int, scale: float):
    """Small scores stay, large ones end at the cap, in place."""
    x = draw(count, size) * scale
    expected = softcap_reference(x.double(), 30.0)

    out = softcap(x, 30.0)

    assert out is x
    torch.testing.assert_close(out.double(), expected, atol=0, rtol=5e-7)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    count=rows,
    size=st.integers(1, 70) | st.just(20_000),
    factor=st.sampled_from([0.0, -1.0, 32**0.5, 1e30]),
)
def test_scale_is_the_reference(count: int, size: int, factor: float):
    """Bit for bit, in place: both multiply by the factor in float32."""
    x = draw(count, size)
    expected = scale_reference(x.clone(), factor)

    out = scale(x, factor)

    assert out is x
    assert torch.equal(out, expected)


def test_a_scale_is_rounded_to_the_type_it_meets():
    """As Gemma was trained in bfloat16: sqrt(3072) is 55.5 there."""
    out = scale_reference(torch.ones(3, dtype=torch.bfloat16), 3072**0.5)

    assert out.dtype == torch.bfloat16
    assert out.tolist() == [55.5] * 3


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=rows,
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6, 16, 24, 64, 80, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=seeds,
)
def test_rotate_and_store_matches_the_reference(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int
):
    """q and k turn in place inside the fused projection, k and v land in their slots."""
    fused = draw(tokens, heads + 2 * kv_heads, head_dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 500, (tokens,), generator=generator)
    rotation = RotaryEmbedding(head_dim, 1e4)(positions, torch.float32)
    slots = torch.randperm(3 * 8, generator=generator)[:tokens]
    results = []
    for kernel in (rotate_and_store, rotate_and_store_reference):
        whole = fused.clone()
        q, k, v = whole.split((heads, kv_heads, kv_heads), 1)
        caches = [torch.full((3, 8, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
        cache = LayerCache(k=keys_by_dim(caches[0]), v=caches[1])
        kernel(q, k, v=v, cos=rotation.cos, sin=rotation.sin, slots=slots, cache=cache)
        results.append((whole, cache.k, cache.v))

    mine, theirs = results
    torch.testing.assert_close(mine[0], theirs[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(mine[1], theirs[1], atol=2e-6, rtol=1e-3)
    assert torch.equal(mine[2], theirs[2])
    assert torch.equal(mine[1].flatten(0, 1)[slots], mine[0][:, heads:-kv_heads].to(dtype))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_is_bit_equal_alone_and_in_a_batch(threads: int):
    """Neither the other rows nor the number of threads changes a bit."""
    x, weight, residual = draw(70, 1540), draw(1540), draw(70, 1540, seed=3)
    sums = residual.clone()
    norms = rms_norm(x, weight, eps=1e-5, residual=sums, num_threads=threads)
    halves = [gated(x, name, num_threads=threads) for name in ACTIVATIONS]
    capped = softcap(x.clone(), 0.7, num_threads=threads)

    for i in (0, 1, 33, 69):
        one = residual[i : i + 1].clone()
        alone = rms_norm(unaligned(x[i : i + 1]), weight, eps=1e-5, residual=one, num_threads=1)
        assert torch.equal(alone[0], norms[i])
        assert torch.equal(one[0], sums[i])
        assert torch.equal(softcap(x[i].clone(), 0.7), capped[i])
        for name, half in zip(ACTIVATIONS, halves, strict=True):
            assert torch.equal(gated(unaligned(x[i : i + 1]), name)[0], half[i])


def test_norm_takes_some_heads_of_each_token():
    """Head norms are over the last dimension of [tokens, heads, head_dim], a part of a wider
    projection, which stays as it is; a residual may be one too."""
    fused, weight = draw(5, 7, 16), draw(16)
    before, others = fused.clone(), draw(5, 7, 16, seed=4)
    expected = rms_norm_reference(fused[:, 2:5], weight, eps=1e-6)
    sums = others[:, 2:5] + fused[:, 2:5]

    out = rms_norm(fused[:, 2:5], weight, eps=1e-6)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    assert torch.equal(fused, before)

    out = rms_norm(fused[:, 2:5], weight, eps=1e-6, residual=others[:, 2:5])
    torch.testing.assert_close(out, rms_norm_reference(sums, weight, eps=1e-6))
    assert torch.equal(others[:, 2:5], sums)


def test_tensors_that_do_not_fit_are_refused():
    """Wrong types, shapes and names are told before anything is read."""
    x, weight = draw(4, 6), draw(6)
    with pytest.raises(ValueError, match=r"x .*float64.* must be float32"):
        rms_norm(x.double(), weight, eps=1e-6)
    with pytest.raises(ValueError, match="do not fit together"):
        rms_norm(x, weight[:5], eps=1e-6)
    with pytest.raises(ValueError, match="do not fit together"):
        rms_norm(x, weight, eps=1e-6, residual=draw(3, 6))
    with pytest.raises(ValueError, match=r"x \[4, 6\] .*strides .* must be float32"):
        rms_norm(draw(6, 4).T, weight, eps=1e-6)
    with pytest.raises(ValueError, match=r"'relu' is not one of silu, gelu_pytorch_tanh, gelu"):
        gated(x, "relu")
    with pytest.raises(ValueError, match=r"positions \[4\] .*int32"):
        rope_table(torch.arange(4, dtype=torch.int32), weight)
    with pytest.raises(ValueError, match="must be float32 and contiguous"):
        softcap(x[:, :3], 1.0)
    with pytest.raises(ValueError, match="must be float32 and contiguous"):
        scale(x.double(), 1.0)
    with pytest.raises(ValueError, match="as many gates"):
        gated(draw(4, 5), "silu")


@pytest.mark.parametrize(("slot", "dim"), [(-1, 4), (16, 4), (3, 6)])
def test_rotation_that_does_not_fit_is_refused(slot: int, dim: int):
    """Nothing turns and nothing is written if a slot or a shape is wrong."""
    q, k, v = draw(2, 3, 4), draw(2, 1, 4), draw(2, 1, 4)
    before = q.clone()
    cache = LayerCache(k=keys_by_dim(torch.zeros(2, 8, 1, dim)), v=torch.zeros(2, 8, 1, dim))
    slots = torch.tensor([3, slot])

    with pytest.raises(ValueError, match=r"is not in the cache|do not fit the cache"):
        rotate_and_store(q, k, v=v, cos=draw(2, 4), sin=draw(2, 4), slots=slots, cache=cache)

    assert torch.equal(q, before)
    assert not cache.k.any()
