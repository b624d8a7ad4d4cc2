"""The steps between a layer's matrix products, each in one pass, and their references in torch."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn import functional

from mistralrs_sdk.kernels import native
from mistralrs_sdk.kernels.attention import (
    CACHE_ARGUMENTS,
    LayerCache,
    check_rows,
    check_slots,
    slot_error,
    store_kv_reference,
)

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""What `gated` knows, in the order of the kernel's numbers."""


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

    x is [..., size] float32, weight [size]. With a `residual` of x's shape, that is increased by x
    in place, and the sum is what is normalised. `num_threads` defaults to torch's.

    Raises:
        ValueError: the tensors do not fit together, or are not float32 with dense rows.
    """
    size = weight.shape[-1]
    rows = _rows("x", x)
    others = residual if residual is None else _rows("residual", residual)
    _check_dense("weight", weight)
    if (
        weight.ndim != 1
        or x.shape[-1] != size
        or (residual is not None and residual.shape != x.shape)
    ):
        shapes = [list(t.shape) for t in (x, weight, residual) if t is not None]
        raise ValueError(f"x, weight and residual do not fit together: their shapes are {shapes}")
    out = torch.empty(x.shape)
    _loaded().mistralrs_rms_norm(
        rows.data_ptr(),
        rows.stride(0),
        None if others is None else others.data_ptr(),
        0 if others is None else others.stride(0),
        weight.data_ptr(),
        offset,
        eps,
        out.data_ptr(),
        len(rows),
        size,
        num_threads or torch.get_num_threads(),
    )
    return out


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
    wrong = _loaded().mistralrs_rotate_and_store(
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
    """`activation(gate) * up` of x [..., 2 * size] float32, gates first; the result is [..., size].

    Raises:
        ValueError: the activation is none of ACTIVATIONS, or x is not float32 with dense rows.
    """
    number = _activation(activation)
    rows = _rows("x", x)
    if x.shape[-1] % 2:
        raise ValueError(f"x {list(x.shape)} must have as many gates as other values")
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size))
    _loaded().mistralrs_gated(
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
        len(rows),
        size,
        number,
        num_threads or torch.get_num_threads(),
    )
    return out


def argmax(x: Tensor, *, num_threads: int | None = None) -> Tensor:
    """The index of the greatest element of each row of x [rows, size] float32, int64 [rows].

    The first of equals wins, and NaN is greater than all else.

    Raises:
        ValueError: x has no columns, or is not float32 with dense rows.
    """
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"x {list(x.shape)} must be [rows, size] with at least one column")
    rows = _rows("x", x)
    out = torch.empty(len(rows), dtype=torch.int64)
    _loaded().mistralrs_argmax(
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
        len(rows),
        x.shape[1],
        num_threads or torch.get_num_threads(),
    )
    return out


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
    """What `gated` computes, in torch."""
    gate, up = x.chunk(2, -1)
    if _activation(activation) == 0:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up


def argmax_reference(x: Tensor, *, num_threads: int | None = None) -> Tensor:
    """What `argmax` computes, in torch."""
    return x.argmax(-1)


def _activation(name: str) -> int:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(name)


def _rows(name: str, x: Tensor) -> Tensor:
    """x as [rows, size], without a copy."""
    dense = x.stride(-1) == 1 or x.shape[-1] <= 1 or not x.numel()
    if x.dtype != torch.float32 or not dense:
        raise ValueError(
            f"{name} {list(x.shape)} ({x.dtype}, strides {x.stride()}) must be float32 with its "
            "last dimension contiguous"
        )
    return x if x.ndim == 2 else x.flatten(0, -2)


def _check_dense(name: str, x: Tensor) -> None:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"{name} {list(x.shape)} ({x.dtype}) must be float32 and contiguous")


@functools.cache
def _loaded() -> ctypes.CDLL:
    library = native.required()
    integer, long, real = ctypes.c_int, ctypes.c_int64, ctypes.c_float
    pointer = ctypes.c_void_p
    rows = (pointer, long)
    library.mistralrs_rms_norm.restype = None
    library.mistralrs_rms_norm.argtypes = [
        *(*rows, *rows, pointer, real, real),
        *(pointer, long, integer, integer),
    ]
    library.mistralrs_rotate_and_store.restype = long
    library.mistralrs_rotate_and_store.argtypes = [
        *(*rows, *rows, *rows, pointer, pointer, pointer),
        *(long, integer, integer, *CACHE_ARGUMENTS),
    ]
    library.mistralrs_gated.restype = None
    library.mistralrs_gated.argtypes = [*rows, pointer, long, integer, integer, integer]
    library.mistralrs_argmax.restype = None
    library.mistralrs_argmax.argtypes = [*rows, pointer, long, long, integer]
    return library
