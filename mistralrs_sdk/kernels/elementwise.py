"""The steps between a layer's matrix products, each in one pass, and their references in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import (
    LayerCache,
    check_rows,
    check_slots,
    slot_error,
    store_kv_reference,
)

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""What `gated` knows, in the order of the kernel's numbers."""


def usable(x: Tensor) -> bool:
    """Whether these kernels can take x: float32 on a CPU that has them."""
    return x.is_cpu and x.dtype is torch.float32 and native.available()


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    residual: Tensor | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension.

    x is [tokens, size] or [tokens, heads, size] float32, dense but for the stride from token to
    token, weight [size]. With a `residual` of x's shape, that is increased by x in place, and the
    sum is what is normalised. `num_threads` defaults to torch's.

    Raises:
        ValueError: the tensors do not fit together, or are not float32 with dense rows.
    """
    size = weight.shape[-1]
    x_stride = _row_stride("x", x)
    residual_stride = 0 if residual is None else _row_stride("residual", residual)
    _check_dense("weight", weight)
    if (
        weight.ndim != 1
        or x.shape[-1] != size
        or (residual is not None and residual.shape != x.shape)
    ):
        shapes = [list(t.shape) for t in (x, weight, residual) if t is not None]
        raise ValueError(f"x, weight and residual do not fit together: their shapes are {shapes}")
    out = x.new_empty(x.shape)
    native.call(
        "mistralrs_rms_norm",
        x.data_ptr(),
        x_stride,
        0 if residual is None else residual.data_ptr(),
        residual_stride,
        weight.data_ptr(),
        offset,
        eps,
        out.data_ptr(),
        x.shape[0],
        1 if x.ndim == 2 else x.shape[1],
        size,
        num_threads or torch.get_num_threads(),
    )
    return out


def rope_table(
    positions: Tensor,
    frequencies: Tensor,
    *,
    magnitude: float = 1.0,
    num_threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position times every frequency, times `magnitude`.

    positions is [tokens] int64, frequencies [pairs] float32; both results are
    [tokens, 1, 2 * pairs] float32, all pairs twice, the first half of the sines negated: what
    `rotate_and_store` takes.

    Raises:
        ValueError: the tensors are something else.
    """
    _check_dense("frequencies", frequencies)
    right = positions.dtype == torch.int64 and positions.is_contiguous()
    if not right or positions.ndim != 1 or frequencies.ndim != 1:
        raise ValueError(
            f"positions {list(positions.shape)} ({positions.dtype}) must be int64, contiguous and "
            f"of one dimension, as frequencies {list(frequencies.shape)} must be"
        )
    tokens, pairs = len(positions), len(frequencies)
    cos = frequencies.new_empty((tokens, 1, 2 * pairs))
    sin = frequencies.new_empty((tokens, 1, 2 * pairs))
    native.call(
        "mistralrs_rope_table",
        positions.data_ptr(),
        frequencies.data_ptr(),
        magnitude,
        cos.data_ptr(),
        sin.data_ptr(),
        tokens,
        pairs,
        num_threads or torch.get_num_threads(),
    )
    return cos, sin


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: LayerCache,
    num_threads: int | None = None,
) -> None:
    """Rotate q and k in place as `layers.rotary.Rotation` does, and write k and v to their slots.

    q is [tokens, heads, head_dim] float32, k and v are [tokens, kv_heads, head_dim], all dense but
    for the stride from token to token. cos and sin are [tokens, 1, head_dim] or [tokens, head_dim],
    the first half of the sines negated. Slots are as in `attention.store_kv`.

    Raises:
        ValueError: the tensors do not fit together, or a slot is not in the cache.
    """
    tokens, heads, dim = q.shape
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(name, tensor)
    shape = (tokens, *cache.arguments[5:])
    if k.shape != shape or v.shape != shape or dim != shape[2] or dim % 2 or len(slots) != tokens:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} and slots "
            f"{list(slots.shape)} do not fit the cache {list(cache.k.shape)}: k and v need its "
            "shape of a token, q its head_dim, which must be even, and each token a slot"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        _check_dense(name, table)
        if table.numel() != tokens * dim:
            raise ValueError(f"{name} {list(table.shape)} must be [{tokens}, {dim}]")
    check_slots(slots)
    wrong = native.call(
        "mistralrs_rotate_and_store",
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        tokens,
        heads,
        num_threads or torch.get_num_threads(),
        *cache.arguments,
    )
    if wrong >= 0:
        raise slot_error(int(slots[wrong]), cache)


def gated(x: Tensor, activation: str, *, num_threads: int | None = None) -> Tensor:
    """`activation(gate) * up` of x [tokens, 2 * size] float32, gates first: [tokens, size].

    Raises:
        ValueError: the activation is none of ACTIVATIONS, or x is not float32 with dense rows.
    """
    number = _activation(activation)
    if x.ndim != 2 or x.shape[1] % 2:
        raise ValueError(f"x {list(x.shape)} must be rows of as many gates as other values")
    x_stride = _row_stride("x", x)
    tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, size))
    native.call(
        "mistralrs_gated",
        x.data_ptr(),
        x_stride,
        out.data_ptr(),
        tokens,
        size,
        number,
        num_threads or torch.get_num_threads(),
    )
    return out


def softcap(x: Tensor, cap: float, *, num_threads: int | None = None) -> Tensor:
    """Make x (float32, contiguous) `cap * tanh(x / cap)` in place, and return it.

    Raises:
        ValueError: x is something else.
    """
    _check_dense("x", x)
    native.call(
        "mistralrs_softcap", x.data_ptr(), x.numel(), cap, num_threads or torch.get_num_threads()
    )
    return x


def scale(x: Tensor, factor: float, *, num_threads: int | None = None) -> Tensor:
    """Make x (float32, contiguous) `x * factor` in place, and return it; float32 factor.

    Raises:
        ValueError: x is something else.
    """
    _check_dense("x", x)
    native.call(
        "mistralrs_scale", x.data_ptr(), x.numel(), factor, num_threads or torch.get_num_threads()
    )
    return x


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    residual: Tensor | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """What `rms_norm` computes, in torch."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, weight.shape, weight + offset, eps)


def rope_table_reference(
    positions: Tensor,
    frequencies: Tensor,
    *,
    magnitude: float = 1.0,
    num_threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What `rope_table` computes, in torch, on any device."""
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_and_store_reference(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: LayerCache,
    num_threads: int | None = None,
) -> None:
    """What `rotate_and_store` does, in torch."""
    cos, sin = (x.view(len(q), 1, q.shape[2]) for x in (cos, sin))
    for x in (q, k):
        x.copy_(x * cos + x.roll(x.shape[-1] // 2, -1) * sin)
    store_kv_reference(k, v, slots=slots, cache=cache)


def gated_reference(x: Tensor, activation: str, *, num_threads: int | None = None) -> Tensor:
    """What `gated` computes, in torch, for any float type and device."""
    gate, up = x.chunk(2, -1)
    if _activation(activation) == 0:
        return functional.silu(gate) * up
    tanh = activation == "gelu_pytorch_tanh"
    return functional.gelu(gate, approximate="tanh" if tanh else "none") * up


def softcap_reference(x: Tensor, cap: float, *, num_threads: int | None = None) -> Tensor:
    """What `softcap` does, in torch, for any float type and device."""
    return x.div_(cap).tanh_().mul_(cap)


def scale_reference(x: Tensor, factor: float, *, num_threads: int | None = None) -> Tensor:
    """What `scale` does, in torch, for any float type and device: the factor is rounded first."""
    return x.mul_(torch.tensor(factor, dtype=x.dtype, device="cpu"))


def _activation(name: str) -> int:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(name)


def _row_stride(name: str, x: Tensor) -> int:
    """How far the tokens of [tokens, size] or [tokens, heads, size] lie apart; ValueError if not
    all else is dense."""
    shape, strides = x.shape, x.stride()
    dense = shape[-1] <= 1 or strides[-1] == 1
    if len(shape) == 3:
        dense = dense and (shape[1] <= 1 or strides[1] == shape[2])
    if x.dtype != torch.float32 or len(shape) not in (2, 3) or not (dense or not x.numel()):
        raise ValueError(
            f"{name} {list(shape)} ({x.dtype}, strides {strides}) must be float32, of two or three "
            "dimensions, and contiguous but for the first"
        )
    return strides[0]


def _check_dense(name: str, x: Tensor) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{name} {list(x.shape)} ({x.dtype}) must be float32 and contiguous")
