"""The forms that weights can have on a GPU, by name, and whether a GPU computes with them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mistralrs_sdk.quant.device_kind import DTYPE, DenseRows, DeviceKind
from mistralrs_sdk.quant.float8_rows import Float8Rows
from mistralrs_sdk.quant.int4_groups import GROUPS, Int4Groups
from mistralrs_sdk.quant.int8_rows import Int8Rows

DENSE_ROWS, INT8, FLOAT8 = DenseRows(), Int8Rows(), Float8Rows()
_INT4 = re.compile(r"INT4/(\d+) \((\w+)\)")
_TOLERANCE = 0.01
"""What rounding sums to bfloat16, twice, leaves room for."""
_COARSEST = 0.25
"""What four bits leave of a weight is nearer to it than this, as a part of its size."""

_tried: set[tuple[str, torch.device]] = set()
"""What was found to work."""


def kind_of(name: str) -> DeviceKind | None:
    """The form of that name; None if it is none of a GPU's."""
    match = _INT4.fullmatch(name)
    if match is not None and int(match[1]) in GROUPS:
        return Int4Groups(source=match[2], group=int(match[1]))
    return next((kind for kind in (DENSE_ROWS, INT8, FLOAT8) if kind.name == name), None)


def fallback(name: str, columns: int) -> str:
    """The form for rows of so many values: that one if they fill its blocks, else a similar one."""
    for similar in (name, "INT4/32 (HQQ4)") if _INT4.fullmatch(name) else (name,):
        kind = kind_of(similar)
        assert kind is not None, f"{similar} is a form of a GPU"
        if columns % kind.block_size == 0:
            return similar
    return INT8.name


def obstacle(kind: DeviceKind, device: torch.device) -> str | None:
    """Why the device cannot compute with that form; None if it can.

    Few and many rows are multiplied by a small weight, and by the same made dense, which must be
    near the weight. What has worked once is not tried again.
    """
    if (kind.name, device) in _tried:
        return None
    try:
        error = max(_error(kind, count, device) for count in (1, 256))
    except Exception as failure:  # kernels that are missing or do not launch say so in their ways
        first = (str(failure).splitlines() or [""])[0][:200]
        return f"its kernels do not run: {type(failure).__name__}: {first}"
    if not error < _TOLERANCE:  # also true for NaN
        return f"its kernels are wrong, by {error:.2g} of the result"
    _tried.add((kind.name, device))
    return None


@torch.inference_mode()
def _error(kind: DeviceKind, count: int, device: torch.device) -> float:
    rows, columns = 40, 512
    # Without a random generator, whose state is the user's.
    numbers = torch.arange(rows * columns, device=device, dtype=torch.float64)
    weight = torch.sin(numbers.square() * 0.37).float().view(rows, columns)
    numbers = torch.arange(count * columns, device=device, dtype=torch.float64)
    x = torch.cos(numbers.square() * 0.61).to(DTYPE).view(count, columns)
    packed = kind.pack([kind.encode(weight)])
    found = kind.multiply(x, packed, rows=rows, bias=None).float()
    exact = kind.inputs(x) @ kind.to_dense(packed, rows=rows).t()
    picked = kind.pick(packed, torch.arange(rows, device=device)).float()
    dense = kind.to_dense(packed, rows=rows)
    loss = _distance(dense, weight)
    return max(_distance(found, exact), _distance(picked, dense), loss if loss > _COARSEST else 0.0)


def _distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
