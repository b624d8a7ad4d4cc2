"""What logits processors and constraints do to rows of logits before their tokens are drawn."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor

from mistralrs_sdk.kernels.sampling import Amounts, Draw

if TYPE_CHECKING:
    from mistralrs_sdk.engine.sampler import SamplerRow


@torch.inference_mode()
def change_rows(
    logits: Tensor, rows: Sequence[SamplerRow], *, lines: Iterable[int], draws: list[Draw]
) -> dict[int, str]:
    """Change these lines of logits [rows, vocab] in place; returns why some of them failed.

    A row with processors gets its penalties and bias here, before them, and its draw in `draws` is
    replaced by one without. What a constraint bans becomes -inf after that, so that no processor
    can bring it back. Failed rows may hold anything; the other lines are not touched.
    """
    errors: dict[int, str] = {}
    constrained = []
    for line in lines:
        row = rows[line]
        if row.processors:
            try:
                logits[line] = _processed(logits[line], row, draws[line])
            except ProcessorError as error:
                errors[line] = str(error)
                continue
            draws[line] = attrs.evolve(
                draws[line], losses=Amounts(), seen=array("q"), gains=Amounts()
            )
        if row.matcher is not None:
            constrained.append(line)
    if constrained:
        errors |= _mask(logits, rows, constrained)
    return errors


class ProcessorError(Exception):
    """A logits processor did what it must not."""


def _processed(logits: Tensor, row: SamplerRow, draw: Draw) -> Tensor:
    """The row after penalties, bias and the request's processors."""
    line = logits.clone()
    _edit(line, draw)
    ids = [*row.prompt_ids, *row.output_ids]
    for processor in row.processors:
        name = getattr(processor, "__qualname__", type(processor).__name__)
        line = _checked(_apply(processor, line, ids, name=name), like=logits, name=name)
    return line


def _apply(
    processor: Callable[[Any, Sequence[int]], Any], line: Tensor, ids: list[int], *, name: str
) -> Any:
    try:
        return processor(line, ids)
    except BaseException as error:  # sys.exit too: on this thread it would end all other requests
        raise ProcessorError(
            f"logits processor {name} raised {type(error).__name__}: {error}"
        ) from error


def _checked(result: Any, *, like: Tensor, name: str) -> Tensor:
    try:
        given = torch.as_tensor(result, dtype=like.dtype, device=like.device)
        # Copied, so that what is no plain row of numbers (sparse, a subclass) shows here.
        line = torch.empty_like(like).copy_(given) if given.shape == like.shape else given
    except Exception as error:  # whatever its own __array__ raises
        raise ProcessorError(
            f"logits processor {name} returned {type(result).__name__}, not a row of logits"
        ) from error
    if line.shape != like.shape:
        raise ProcessorError(
            f"logits processor {name} returned shape {list(line.shape)} for {list(like.shape)}"
        )
    if not bool((line < torch.inf).all()):  # neither NaN nor +inf is less
        raise ProcessorError(f"logits processor {name} returned NaN or +inf")
    return line


def _edit(line: Tensor, draw: Draw) -> None:
    """Apply the draw's penalties and bias, in its order."""
    at, amounts = _entries(line, draw.losses.ids, draw.losses.values)
    line[at] -= amounts
    at, factors = _entries(line, draw.seen, [draw.repetition] * len(draw.seen))
    old = line[at]
    line[at] = torch.where(old > 0, old / factors, old * factors)
    at, amounts = _entries(line, draw.gains.ids, draw.gains.values)
    line[at] += amounts


def _entries(line: Tensor, ids: Sequence[int], values: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The ids the row has, and their numbers."""
    known = [(i, value) for i, value in zip(ids, values, strict=True) if 0 <= i < len(line)]
    at = torch.tensor([i for i, _ in known], dtype=torch.int64, device=line.device)
    return at, torch.tensor([v for _, v in known], dtype=line.dtype, device=line.device)


def _mask(logits: Tensor, rows: Sequence[SamplerRow], lines: list[int]) -> dict[int, str]:
    """Make -inf of what the constraints of these lines ban."""
    errors = {}
    size = logits.shape[1]
    num_bytes = -(-size // 32) * 4
    bits = np.empty((len(lines), num_bytes), dtype=np.uint8)
    host = logits.numpy() if logits.is_cpu else None
    # One by one: the executor of llguidance is no faster at 32 rows, and waits for Python's lock.
    for i, line in enumerate(lines):
        row = rows[line]
        assert row.matcher is not None
        if not row.matcher.write_mask(bits.ctypes.data + i * num_bytes, num_bytes):
            errors[line] = f"its constraint cannot go on: {row.matcher.error}"
            continue
        banned = np.unpackbits(bits[i], count=size, bitorder="little") == 0
        if row.sampling.ignore_eos:  # where nothing but the end can come, it has ended already
            banned[list(row.matcher.eos_ids)] = True
        if host is not None:
            np.copyto(host[line], -np.inf, where=banned)
        else:
            logits[line].masked_fill_(torch.from_numpy(banned).to(logits.device), -torch.inf)
    return errors
