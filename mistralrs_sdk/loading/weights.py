"""Read one weight of a checkpoint into a model, in the form chosen for it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.checkpoint import TensorSource
from mistralrs_sdk.loading.forms import Form
from mistralrs_sdk.quant.device_kind import DeviceKind, Parts
from mistralrs_sdk.quant.device_kinds import kind_of
from mistralrs_sdk.quant.device_method import DeviceMethod
from mistralrs_sdk.quant.int4_groups import Int4Groups
from mistralrs_sdk.quant.linear_method import DENSE
from mistralrs_sdk.quant.packed import PackedMethod
from mistralrs_sdk.quant.quantise import quantise, work_bytes
from mistralrs_sdk.switches import switched_on

logger = logging.getLogger("mistralrs_sdk.loading")

SINGLE_THREAD = "MISTRALRS_ISQ_SINGLETHREAD"

_GREATEST_HALF = torch.finfo(torch.float16).max

_ENCODED_VALUES = 1 << 24
"""Of a weight that a GPU quantises, so many are there in floats at a time."""


def fill(
    model: nn.Module,
    name: str,
    form: Form,
    *,
    tensors: Mapping[str, TensorSource],
    dtype: torch.dtype,
    device: torch.device,
    importance: Mapping[str, Tensor] | None = None,
) -> None:
    """Set parameter `name` of the model, which may be on "meta"; only one part is read at a time.

    What does not fit into float16 is kept dense, with a warning, unless another type was asked for.
    `importance` has, by the name of a tensor, how much each of its inputs matters to a quantiser.

    Raises:
        ModelLoadError: a weight cannot be quantised.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    method = form.method
    if isinstance(method, DeviceMethod):
        method.from_encoded(module, _encoded(form, tensors, device=device, importance=importance))
        return
    if isinstance(method, PackedMethod):
        blocks = _read_blocks(form, method, tensors, importance or {})
        if blocks is not None:
            method.from_blocks(module, blocks)
            return
    value = _read_dense(form, tensors, dtype=dtype, device=device)
    if method is None or isinstance(method, PackedMethod):
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    elif _fits_half(value):
        method.from_dense(module, value)
    else:
        _warn_of_range(form)
        DENSE.from_dense(module, value)


def bytes_to_read(form: Form, tensors: Mapping[str, TensorSource]) -> int:
    """Memory that is needed while the parameter is read, besides what it takes in the end."""
    values = max(math.prod(tensors[part].shape) for part in form.parts)
    read = values * torch.float32.itemsize  # a part as it is read, at most
    if form.method is None:
        return read
    if isinstance(form.method, DeviceMethod):
        # Of the GPU: what is quantised at a time, as it is read and as the quantiser turns it; and
        # everything that was encoded before, which is copied once in order to be packed.
        some = min(values, _ENCODED_VALUES)
        return some * 2 * torch.float32.itemsize + work_bytes(some) + 2 * form.num_bytes
    # A packed weight is put in order from its blocks, which are copied once for it.
    return read + 2 * form.num_bytes


def _encoded(
    form: Form,
    tensors: Mapping[str, TensorSource],
    *,
    device: torch.device,
    importance: Mapping[str, Tensor] | None,
) -> Iterator[tuple[Parts, int]]:
    """The parts as their forms encode them, on the device, some rows at a time; and how many."""
    for part, name in zip(form.parts, form.types, strict=True):
        source, kind = tensors[part], kind_of(name)
        assert kind is not None, "chosen so"
        rows, columns = source.shape
        if source.codes is not None and source.codes.kind == name:
            yield tuple(tensor.to(device) for tensor in source.codes.load()), rows
            continue
        step = max(_ENCODED_VALUES // columns, 1)
        blocks = source.blocks
        if isinstance(kind, Int4Groups) and blocks is not None and blocks.ggml_type == kind.source:
            for some in blocks.load().split(step):
                yield kind.encode_blocks(some.to(device), columns), len(some)
            continue
        weights = None if importance is None else importance.get(part)
        for some in source.load().split(step):
            yield _encode(kind, some.to(device), name=part, importance=weights), len(some)


def _encode(kind: DeviceKind, weight: Tensor, *, name: str, importance: Tensor | None) -> Parts:
    try:
        return kind.encode(weight, importance)
    except ValueError as error:
        raise ModelLoadError(f"{name} cannot be quantised to {kind.name}: {error}") from error


def _read_blocks(
    form: Form,
    method: PackedMethod,
    tensors: Mapping[str, TensorSource],
    importance: Mapping[str, Tensor],
) -> list[Tensor] | None:
    """The blocks of each run of parts of one type; None if float16 does not hold the values."""
    runs: list[list[Tensor]] = [[] for _ in method.parts]
    run, left = 0, method.parts[0].count
    for part, wanted in zip(form.parts, form.types, strict=True):
        source = tensors[part]
        if source.blocks is not None and source.blocks.ggml_type == wanted:
            rows = source.blocks.load()
        else:
            rows = source.load()
            if wanted == "F16":
                if not _fits_half(rows):
                    _warn_of_range(form)
                    return None
                rows = rows.to(torch.float16)
            else:
                rows = _quantise(rows, wanted, name=part, importance=importance.get(part))
        runs[run].append(rows)
        left -= source.shape[0]
        if not left and run + 1 < len(runs):
            run, left = run + 1, method.parts[run + 1].count
    return [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in runs]


def _quantise(weight: Tensor, ggml_type: str, *, name: str, importance: Tensor | None) -> Tensor:
    """Quantise with torch's threads, or on one thread with MISTRALRS_ISQ_SINGLETHREAD."""
    threads = torch.get_num_threads()
    single = threads > 1 and switched_on(os.environ, SINGLE_THREAD)
    try:
        if single:
            torch.set_num_threads(1)
        return quantise(weight, ggml_type, importance=importance)
    except ValueError as error:
        raise ModelLoadError(f"{name} cannot be quantised to {ggml_type}: {error}") from error
    finally:
        if single:
            torch.set_num_threads(threads)


def _read_dense(
    form: Form, tensors: Mapping[str, TensorSource], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Read the parts one under the other; only one part is held besides the result."""
    sources = [tensors[part] for part in form.parts]
    rows = sum(source.shape[0] for source in sources)
    value = torch.empty((rows, *sources[0].shape[1:]), dtype=dtype, device=device)
    start = 0
    for source in sources:
        value[start : start + source.shape[0]].copy_(source.load())
        start += source.shape[0]
    return value


def _fits_half(weight: Tensor) -> bool:
    """Whether every value has a float16: not too great, and none that is no number."""
    if weight.dtype == torch.float16 or not weight.numel():
        return True
    low, high = torch.aminmax(weight)
    return bool((high <= _GREATEST_HALF) & (low >= -_GREATEST_HALF))


def _warn_of_range(form: Form) -> None:
    logger.warning(
        "%s has values beyond float16 (%d): it is kept in the model's dtype",
        " + ".join(form.parts),
        _GREATEST_HALF,
    )
