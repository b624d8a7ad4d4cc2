"""Quantises float weights to GGML blocks: which types there are, and which of them fit a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.quant.ggml import GGML_TYPES, HQQ8, GgmlType
from mistralrs_sdk.quant.quantise_hqq import quantise_hqq4, quantise_hqq8
from mistralrs_sdk.quant.quantise_k import (
    quantise_q2_k,
    quantise_q3_k,
    quantise_q4_k,
    quantise_q5_k,
    quantise_q6_k,
)
from mistralrs_sdk.quant.quantise_round import (
    quantise_f16,
    quantise_q4_0,
    quantise_q4_1,
    quantise_q5_0,
    quantise_q5_1,
    quantise_q8_0,
)

_QUANTISERS: Mapping[str, Callable[[Tensor, Tensor | None], Tensor]] = MappingProxyType(
    {
        "F16": quantise_f16,
        "Q4_0": quantise_q4_0,
        "Q4_1": quantise_q4_1,
        "Q5_0": quantise_q5_0,
        "Q5_1": quantise_q5_1,
        "Q8_0": quantise_q8_0,
        "Q2_K": quantise_q2_k,
        "Q3_K": quantise_q3_k,
        "Q4_K": quantise_q4_k,
        "Q5_K": quantise_q5_k,
        "Q6_K": quantise_q6_k,
        "HQQ4": quantise_hqq4,
        "HQQ8": quantise_hqq8,
    }
)

QUANTISABLE = tuple(_QUANTISERS)
"""The types that weights can be quantised to."""

WEIGHTED = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
"""Those that use an importance matrix."""

_STORED: Mapping[str, GgmlType] = MappingProxyType(
    {kind.name: kind for kind in (*GGML_TYPES.values(), HQQ8)}
)

# As llama.cpp: about as many bits, in blocks of 32.
_FALLBACKS = MappingProxyType(
    {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
)

_MAX_HALF = 65504.0

# Temporary tensors have 1 MB each at most: they stay in the cache, and a big weight never needs
# memory for all of its rows. At most twenty of them live at once. On a GPU launching a kernel costs
# as much as computing 16 MB.
_CHUNK_VALUES = 1 << 18
_GPU_CHUNK_VALUES = 1 << 22
_CHUNKS = 20


@torch.no_grad()
def quantise(weight: Tensor, ggml_type: str, *, importance: Tensor | None = None) -> Tensor:
    """Quantise a weight [out, in] (float32, float16, bfloat16) to stored bytes, uint8 [out, bytes].

    The bytes are a GGUF tensor's; those of HQQ4 are Q4_1's, and for HQQ8 see `ggml.HQQ8`. A row's
    bytes depend on that row only. `importance` (floats [in], from zero up) says how much the error
    of each input matters, up to a common factor; the K types use it, the others do not.

    Raises:
        UnsupportedError: for a type outside QUANTISABLE.
        ValueError: the rows do not consist of whole blocks, a value is not finite or beyond
            float16's range (the scales have it), or the importance does not fit.
    """
    kind = stored_type(ggml_type)
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"a weight to quantise is a matrix of floats, not {weight.dtype} {tuple(weight.shape)}"
        )
    rows, size = weight.shape
    if not fits(ggml_type, size):
        raise ValueError(
            f"{ggml_type} stores blocks of {kind.block_size} values, which rows of {size} do not "
            f"fill: use {fallback(ggml_type, size)}"
        )
    values = weight.contiguous().view(-1, kind.block_size)
    weights = None if importance is None else _relative_weights(importance, size)
    if weights is not None:
        weights = weights.to(weight.device).view(-1, 256) if ggml_type in WEIGHTED else None
    out = torch.empty((len(values), kind.block_bytes), dtype=torch.uint8, device=weight.device)
    most = _CHUNK_VALUES if weight.device.type == "cpu" else _GPU_CHUNK_VALUES
    step = most // kind.block_size
    for start in range(0, len(values), step):
        chunk = values[start : start + step].to(torch.float32)
        _check_values(chunk)
        share = None
        if weights is not None:
            positions = torch.arange(start, start + len(chunk), device=weight.device)
            share = weights[positions % len(weights)]
        out[start : start + step] = _QUANTISERS[ggml_type](chunk, share)
    return out.view(rows, kind.num_bytes(size))


def work_bytes(num_values: int) -> int:
    """Memory that `quantise` needs on a GPU besides weight and result."""
    return _CHUNKS * min(num_values, _GPU_CHUNK_VALUES) * torch.float32.itemsize


def stored_type(ggml_type: str) -> GgmlType:
    """The blocks that `quantise` gives for a type: its own, but for HQQ4.

    Raises: UnsupportedError for a type outside QUANTISABLE.
    """
    if ggml_type not in _QUANTISERS:
        raise UnsupportedError(
            f"weights cannot be quantised to {ggml_type}: use one of {', '.join(QUANTISABLE)}"
        )
    return _STORED["Q4_1" if ggml_type == "HQQ4" else ggml_type]


def fits(ggml_type: str, in_features: int) -> bool:
    """Whether rows of so many values consist of whole blocks.

    Raises: UnsupportedError for a type outside QUANTISABLE.
    """
    return in_features % stored_type(ggml_type).block_size == 0


def fallback(ggml_type: str, in_features: int) -> str:
    """The type to use for rows of so many values: the given one if it fits, else one that does.

    That is for a K type one with blocks of 32 and about as many bits, as in llama.cpp; for rows
    that those do not fit either, F16.

    Raises: UnsupportedError for a type outside QUANTISABLE.
    """
    if fits(ggml_type, in_features):
        return ggml_type
    smaller = _FALLBACKS.get(ggml_type, "F16")
    return smaller if fits(smaller, in_features) else "F16"


def _check_values(chunk: Tensor) -> None:
    low, high = (float(end) for end in torch.aminmax(chunk))
    if not (low >= -_MAX_HALF and high <= _MAX_HALF):  # also true for NaN
        worst = low if not low >= -_MAX_HALF else high
        raise ValueError(
            f"the weight has a value of {worst:g}; quantised blocks keep their scales in float16 "
            f"and need finite values up to {_MAX_HALF:g}: keep this weight in float32, or repair "
            "the checkpoint"
        )


def _relative_weights(importance: Tensor, size: int) -> Tensor:
    """The importance as float32 weights [size] with a mean of one, none of them zero."""
    if tuple(importance.shape) != (size,):
        raise ValueError(
            f"the importance has shape {tuple(importance.shape)}, the weight has {size} inputs"
        )
    weights = importance.to(torch.float64)
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError("the importance of an input must be a finite number from zero up")
    mean = weights.mean()
    weights = weights / mean if float(mean) > 0 else torch.ones_like(weights)
    # An input that was never active still counts a little: a group of nothing has no best scale.
    return weights.clamp_(min=1e-6).to(torch.float32)
