"""A checkpoint as one rank of a tensor-parallel model reads it: its parts of the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
from torch import Tensor

from mistralrs_sdk.distributed import TensorParallel
from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.kernels.matmul import PACKABLE
from mistralrs_sdk.loading.checkpoint import Checkpoint, ReadPart, StoredBlocks, TensorSource
from mistralrs_sdk.loading.forms import Packing, Target
from mistralrs_sdk.models.parallel import Part
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

    `checkpoint` is the whole one; `packing` and `target` are what `choose_forms` gets.

    Raises:
        ConfigError: naming the column and the size of the blocks.
    """
    for name, part in parts.items():
        source = checkpoint.tensors.get(name)
        if part.columns is None or source is None:
            continue
        kept = source.blocks.ggml_type if source.blocks is not None else "F16"
        if packing != "native" or kept not in PACKABLE:
            kept = "F16"  # or dense: in both every value stands for itself
        ggml_type = target(name.removesuffix(".weight"), source.shape[1]) or kept
        size = stored_type(ggml_type).block_size
        for border in (part.columns.start, part.columns.stop):
            if border % size:
                raise ConfigError(
                    f"tensor_parallel ({parallel.size}) would cut {name} at column {border}, "
                    f"inside of a {ggml_type} block of {size} values: use fewer ranks, or weights "
                    "in a type with smaller blocks"
                )


def _cut(source: TensorSource, part: Part) -> TensorSource:
    rows = part.rows or range(source.shape[0])
    shape: tuple[int, ...] = (len(rows), *source.shape[1:])
    columns = range(1)
    if len(source.shape) == 2:
        columns = part.columns or range(source.shape[1])
        shape = (len(rows), len(columns))
    where = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    load = source.load_part or partial(_cut_from_whole, source)
    blocks = source.blocks
    if blocks is not None:
        blocks = _cut_blocks(blocks, *where)
    return TensorSource(shape=shape, load=partial(load, *where), blocks=blocks)


def _cut_blocks(blocks: StoredBlocks, rows: slice, columns: slice) -> StoredBlocks:
    load: ReadPart | None = blocks.load_part
    assert load is not None, "every reader of blocks reads parts of them"
    return StoredBlocks(ggml_type=blocks.ggml_type, load=partial(load, rows, columns))


def _cut_from_whole(source: TensorSource, rows: slice, columns: slice) -> Tensor:
    whole = source.load()
    part = whole[rows] if whole.dim() == 1 else whole[rows, columns]
    return part.clone()  # a view would keep the whole tensor
