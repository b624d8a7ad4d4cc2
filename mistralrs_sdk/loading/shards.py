"""A checkpoint as one rank of a tensor-parallel model reads it: its parts of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
from torch import Tensor

from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.loading.checkpoint import (
    Checkpoint,
    ReadPart,
    StoredBlocks,
    StoredCodes,
    TensorSource,
)
from mistralrs_sdk.loading.forms import Packing, Target, kept_type
from mistralrs_sdk.models.parallel import Part
from mistralrs_sdk.quant.device_kind import Parts
from mistralrs_sdk.quant.device_kinds import kind_of
from mistralrs_sdk.quant.quantise import stored_type


def shard_checkpoint(checkpoint: Checkpoint, parts: Mapping[str, Part]) -> Checkpoint:
    """The checkpoint with its tensors cut to these parts; the others stay whole.

    A part of a checkpoint that was quantised for other programs (GPTQ, AWQ, FP8) is cut out of the
    whole tensor; of all others no more is read than the part.
    """
    tensors = {
        name: _cut(source, parts[name]) if name in parts else source
        for name, source in checkpoint.tensors.items()
    }
    return attrs.evolve(checkpoint, tensors=tensors)


def shard_importance(
    importance: Mapping[str, Tensor], parts: Mapping[str, Part]
) -> dict[str, Tensor]:
    """How much the inputs of each part matter."""
    cut = {}
    for name, values in importance.items():
        columns = parts[name].columns if name in parts else None
        cut[name] = values if columns is None else values[columns.start : columns.stop]
    return cut


def whole_target(target: Target, checkpoint: Checkpoint) -> Target:
    """What is chosen for whole tensors, those of `checkpoint`: all ranks then choose alike."""

    def choose(name: str, columns: int) -> str | None:
        return target(name, checkpoint.tensors[f"{name}.weight"].shape[1])

    return choose


def refuse_split_blocks(
    checkpoint: Checkpoint,
    parts: Mapping[str, Part],
    parallel: TensorParallel,
    *,
    packing: Packing,
    target: Target,
) -> None:
    """Refuse parts that begin or end inside of a block of the type a weight will be kept in.

    `checkpoint` is the whole one; `packing` and `target` are what `choose_forms` gets. Where a GPU
    would only have kept what is stored, and nobody asked for it, such parts are made dense.

    Raises:
        ConfigError: naming the column and the size of the blocks.
    """
    for name, part in parts.items():
        source = checkpoint.tensors.get(name)
        if part.columns is None or source is None:
            continue
        wanted = target(name.removesuffix(".weight"), source.shape[1])
        if wanted is None and packing == "native":
            wanted = kept_type(source, packing)
        if wanted is None:  # dense: each value stands for itself
            continue
        border = _border_within(wanted, part.columns)
        if border is not None:
            raise ConfigError(
                f"tensor_parallel ({parallel.size}) would cut {name} at column {border}, inside of "
                f"a {wanted} block of {_block_size(wanted)} values: use fewer ranks, or weights in "
                "a type with smaller blocks"
            )


def _border_within(name: str, columns: range) -> int | None:
    """Where a part begins or ends inside of a block of that type or form; None if it does not."""
    size = _block_size(name)
    return next((border for border in (columns.start, columns.stop) if border % size), None)


def _block_size(name: str) -> int:
    return (kind_of(name) or stored_type(name)).block_size


def _cut(source: TensorSource, part: Part) -> TensorSource:
    rows = part.rows or range(source.shape[0])
    shape: tuple[int, ...] = (len(rows), *source.shape[1:])
    columns = range(1)
    if len(source.shape) == 2:
        columns = part.columns or range(source.shape[1])
        shape = (len(rows), len(columns))
    where = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    load = source.load_part or partial(_cut_from_whole, source)
    blocks, codes = source.blocks, source.codes
    if blocks is not None:
        whole = _border_within(blocks.ggml_type, columns) is None
        blocks = _cut_blocks(blocks, *where) if whole else None
    if codes is not None and _border_within(codes.kind, columns) is not None:
        codes = None
    if codes is not None:
        codes = StoredCodes(
            kind=codes.kind, load=partial(_cut_codes, codes, source.shape[1], *where)
        )
    return TensorSource(
        shape=shape,
        load=partial(load, *where),
        blocks=blocks,
        codes=codes,
        quantised=source.quantised,
    )


def _cut_blocks(blocks: StoredBlocks, rows: slice, columns: slice) -> StoredBlocks:
    load: ReadPart | None = blocks.load_part
    assert load is not None, "every reader of blocks reads parts of them"
    return StoredBlocks(ggml_type=blocks.ggml_type, load=partial(load, rows, columns))


def _cut_codes(codes: StoredCodes, width: int, rows: slice, columns: slice) -> Parts:
    """Of each tensor the rows, and of those that have columns, in groups or not, their part."""
    found = []
    for tensor in codes.load():
        part = tensor[rows]
        if part.dim() == 2:
            each = width // part.shape[1]
            part = part[:, columns.start // each : columns.stop // each]
        found.append(part.contiguous())
    return tuple(found)


def _cut_from_whole(source: TensorSource, rows: slice, columns: slice) -> Tensor:
    whole = source.load()
    part = whole[rows] if whole.dim() == 1 else whole[rows, columns]
    return part.clone()  # a view would keep the whole tensor
