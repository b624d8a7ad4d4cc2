"""Weights on a GPU as 4 bits with a scale and an offset for each group, multiplied by bfloat16.

The kernels are those of torch that torchao calls, too: `aten::_weight_int4pack_mm`, which keeps a
weight in the order in which tensor cores take it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.quant.device_kind import DTYPE, Parts, filled_up, joined, multiply_by_slabs
from mistralrs_sdk.quant.ggml import group_parameters
from mistralrs_sdk.quant.quantise import quantise, stored_type

_BLOCKS = frozenset({"Q4_0", "Q4_1", "HQQ4", "Q4_K"})
"""The GGML types whose numbers are such groups, of 32: only their scales and offsets, which are
float16's or products of those, are rounded to bfloat16."""

GROUPS = (32, 64, 128, 256)
"""The sizes of groups that the kernels know."""

FEW_ROWS = 128
"""Up to so many rows of inputs the kernel multiplies; above, the weight is made dense.

The kernel reads and expands the weight anew for every 16 rows; making it dense costs as much as a
few of these turns, once. Not measured yet."""

_TILE = 8
"""Rows of a weight that the kernels take together: others are filled up with zeros."""


@attrs.frozen
class Int4Groups:
    """weight = scale * (q - 8) + offset, q from 0 to 15, both in bfloat16 for each group of a row.

    `source` says whose numbers they are: a GGML type of this package's quantisers, or what has
    quantised the checkpoint.
    """

    source: str
    group: int = 32

    @property
    def name(self) -> str:
        return f"INT4/{self.group} ({self.source})"

    @property
    def block_size(self) -> int:
        return stored_type(self.source).block_size if is_int4(self.source) else self.group

    def num_bytes(self, rows: int, columns: int) -> int:
        filled = -(-rows // _TILE) * _TILE
        return filled * (columns // 2 + columns // self.group * 2 * DTYPE.itemsize)

    def encode(self, weight: Tensor, importance: Tensor | None = None) -> Parts:
        if not is_int4(self.source):
            return self._round(weight)
        blocks = quantise(weight, self.source, importance=importance)
        return self.encode_blocks(blocks, weight.shape[1])

    def encode_blocks(self, blocks: Tensor, columns: int) -> Parts:
        """The same from stored blocks of the GGML type, uint8 [rows, bytes]."""
        rows = len(blocks)
        q, scale, offset = group_parameters(blocks, self.source)
        return nibbles(q.view(rows, columns)), scale.view(rows, -1), offset.view(rows, -1)

    def _round(self, weight: Tensor) -> Parts:
        """From the extreme values of each group, as torchao does it for these kernels."""
        groups = weight.float().unflatten(1, (-1, self.group))
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min_(1e-6).to(DTYPE)
        offset = (low + 8 * scale.float()).to(DTYPE)
        q = (groups - offset.float()).div_(scale.float()).round_().add_(8).clamp_(0, 15)
        return nibbles(q.to(torch.uint8).flatten(1)), scale.squeeze(-1), offset.squeeze(-1)

    def pack(self, pieces: Sequence[Parts]) -> Parts:
        pairs, scale, offset = (
            filled_up(joined(list(column)), _TILE) for column in zip(*pieces, strict=True)
        )
        both = torch.stack([scale.to(DTYPE), offset.to(DTYPE)], dim=-1)
        words = torch.ops.aten._convert_weight_to_int4pack(pairs, _inner_tiles(2 * pairs.shape[1]))
        return words, both.transpose(0, 1).contiguous()

    def multiply(self, x: Tensor, packed: Parts, *, rows: int, bias: Tensor | None) -> Tensor:
        words, both = packed
        if len(x) <= FEW_ROWS:
            y = torch.ops.aten._weight_int4pack_mm(x, words, self.group, both)
        else:
            filled = both.shape[1]
            y = multiply_by_slabs(x, _expander(words, both), rows=filled, step=_TILE)
        if y.shape[1] != rows:
            y = y[:, :rows].contiguous()
        return y if bias is None else y.add_(bias)

    def inputs(self, x: Tensor) -> Tensor:
        return x.float()

    def pick(self, packed: Parts, ids: Tensor) -> Tensor:
        words, both = packed
        tiles = ids // _TILE
        rows = (tiles.unsqueeze(1) * _TILE + torch.arange(_TILE, device=ids.device)).view(-1)
        dense = _expand(words.index_select(0, tiles), both.index_select(1, rows))
        return dense.view(len(ids), _TILE, -1)[
            torch.arange(len(ids), device=ids.device), ids % _TILE
        ]

    def to_dense(self, packed: Parts, *, rows: int) -> Tensor:
        return _expand(*packed)[:rows].float()


def is_int4(ggml_type: str) -> bool:
    """Whether blocks of a GGML type can be kept as such groups."""
    return ggml_type in _BLOCKS


def nibbles(q: Tensor) -> Tensor:
    """uint8 [rows, columns] up to 15 as [rows, columns / 2], the first of two in the upper half."""
    return q[:, ::2] << 4 | q[:, 1::2]


def unpacked(words: Tensor) -> Tensor:
    """The numbers q in the kernels' words, uint8 [rows, columns].

    Words are [rows / 8, outer, 32, inner], four bytes each. With l the second of two columns, t one
    of four pairs of them, a one of two runs of eight and b one of two tiles of 16, which a word
    holds, column 16 b + 8 a + 2 t + l of each 32 is in lane t of its row, byte 2 l + b, half a.
    """
    tiles, outer, _, inner = words.shape
    by_place = words.view(torch.uint8).view(tiles, outer, _TILE, 4, inner, 2, 2)
    pairs = by_place.permute(0, 2, 1, 4, 6, 3, 5)  # tile, row, outer, inner, b, t, l
    q = torch.empty(
        (tiles, _TILE, outer, inner, 2, 2, 4, 2), dtype=torch.uint8, device=words.device
    )
    torch.bitwise_and(pairs, 15, out=q[:, :, :, :, :, 0])
    torch.bitwise_right_shift(pairs, 4, out=q[:, :, :, :, :, 1])
    return q.view(tiles * _TILE, -1)


def _expander(words: Tensor, both: Tensor) -> Callable[[int, int], Tensor]:
    return lambda start, end: _expand(words[start // _TILE : end // _TILE], both[:, start:end])


def _expand(words: Tensor, both: Tensor) -> Tensor:
    """The weight in bfloat16, rounded once as the kernels do."""
    q = unpacked(words)
    scale, offset = both.transpose(0, 1).unsqueeze(2).unbind(-1)  # [rows, groups, 1]
    signed = torch.sub(q.view(torch.int8), 8).to(DTYPE).view(*scale.shape[:2], -1)
    return torch.addcmul(offset, signed, scale, out=signed).view(q.shape)


def _inner_tiles(columns: int) -> int:
    """How many tiles of 16 columns lie together: the most that divide the columns."""
    return next(count for count in (8, 4, 2) if columns % (16 * count) == 0)
