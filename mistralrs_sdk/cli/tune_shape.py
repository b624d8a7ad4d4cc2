"""What `tune` knows of a model's matrices: their shapes, how each is stored, a slice of them."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import attrs

from mistralrs_sdk import ConfigError


@attrs.frozen
class Blocks:
    """A GGML type: `values` numbers in `size` bytes; `code` is its number in a GGUF file."""

    code: int
    values: int
    size: int
    scales: tuple[int, ...] = ()
    """Where a block has its float16 scales."""


BLOCKS: Mapping[str, Blocks] = MappingProxyType(
    {
        "F32": Blocks(0, 1, 4),
        "F16": Blocks(1, 1, 2),
        "BF16": Blocks(30, 1, 2),
        "Q4_0": Blocks(2, 32, 18, (0,)),
        "Q4_1": Blocks(3, 32, 20, (0, 2)),
        "Q5_0": Blocks(6, 32, 22, (0,)),
        "Q5_1": Blocks(7, 32, 24, (0, 2)),
        "Q8_0": Blocks(8, 32, 34, (0,)),
        "Q2_K": Blocks(10, 256, 84, (80, 82)),
        "Q3_K": Blocks(11, 256, 110, (108,)),
        "Q4_K": Blocks(12, 256, 144, (0, 2)),
        "Q5_K": Blocks(13, 256, 176, (0, 2)),
        "Q6_K": Blocks(14, 256, 210, (208,)),
    }
)

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Those of a layer, as GGUF calls them."""

_OF_BITS: Mapping[int, tuple[str, str, str]] = MappingProxyType(
    {
        8: ("Q8_0", "Q8_0", "Q8_0"),
        6: ("Q6_K", "Q8_0", "Q8_0"),
        5: ("Q5_K", "Q5_1", "Q8_0"),
        4: ("Q4_K", "Q5_0", "Q6_K"),
        3: ("Q3_K", "Q4_0", "Q6_K"),
        2: ("Q2_K", "Q4_0", "Q6_K"),
    }
)
"""What a number of bits gives on a CPU: in layers, in layers where blocks of 256 do not fit, and in
embedding and head. Whether a model is kept so is seen in its plan (`Types.are_those_of`)."""


@attrs.frozen(kw_only=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    wide: int
    """Of the MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Whether the embedding is the head, too."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a layer's matrices."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = ((q, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, q))
        mlp = ((self.wide, self.hidden), (self.wide, self.hidden), (self.hidden, self.wide))
        return dict(zip(MATRICES, shapes + mlp, strict=True))

    @property
    def layer_values(self) -> int:
        """Of all layers together."""
        return self.layers * sum(rows * columns for rows, columns in self.matrices.values())

    def halved(self) -> Shape | None:
        """The share of each layer that one of two devices would have; None if it is no whole one.

        Blocks of 256 values fill its rows, too.
        """
        if self.heads % 2 or self.kv_heads % 2:
            return None
        if self.wide % 512 or self.heads * self.head_dim % 512:
            return None
        return attrs.evolve(
            self, heads=self.heads // 2, kv_heads=self.kv_heads // 2, wide=self.wide // 2
        )


@attrs.frozen(kw_only=True)
class Types:
    """The type of each matrix."""

    layers: tuple[tuple[str, ...], ...]
    """For each layer those of `MATRICES`, in their order."""
    embedding: str
    head: str
    """That of the embedding, if it is the head."""

    @classmethod
    def alike(cls, shape: Shape, kind: str) -> Types:
        """All in one type."""
        layers = ((kind,) * len(MATRICES),) * shape.layers
        return cls(layers=layers, embedding=kind, head=kind)

    @classmethod
    def of_bits(cls, shape: Shape, bits: int) -> Types:
        """What quantising to so many bits gives on a CPU."""
        wanted, smaller, ends = _OF_BITS[bits]
        layer = tuple(_fitting(wanted, smaller, columns) for _, columns in shape.matrices.values())
        end = _fitting(ends, "Q8_0", shape.hidden)
        return cls(layers=(layer,) * shape.layers, embedding=end, head=end)

    def are_those_of(self, plan_weights: str, shape: Shape) -> bool:
        """Whether a plan with these `MemoryPlan.weights` keeps the matrices in these types."""
        found = Counter(kind for layer in self.layers for kind in layer)
        found.update([self.embedding] if shape.tied else [self.embedding, self.head])
        return dict(found) == planned(plan_weights)


def planned(plan_weights: str) -> dict[str, int]:
    """The counts in a text such as "Q4_1 x210, Q8_0 x1"."""
    return {kind: int(count) for kind, count in re.findall(r"(\S+) x(\d+)", plan_weights)}


def read_bytes(shape: Shape, types: Types) -> int:
    """What a decode step reads of the weights: all but an embedding that is not the head."""
    sizes = shape.matrices.values()
    return _size((shape.vocab, shape.hidden), types.head) + sum(
        _size(size, kind) for layer in types.layers for size, kind in zip(sizes, layer, strict=True)
    )


def num_bytes(shape: Shape, types: Types) -> int:
    """What all matrices take."""
    embedding = 0 if shape.tied else _size((shape.vocab, shape.hidden), types.embedding)
    return read_bytes(shape, types) + embedding


def slice_of(shape: Shape, types: Types, *, most_bytes: int) -> tuple[Shape, Types]:
    """A part of a model: so many of its layers, evenly spread, and as large a part of its head.

    A step reads about `most_bytes` of it, or a single layer if that is more; a layer of more than
    four times as much is halved, and again. A small enough model is its own slice.
    """
    part = most_bytes / read_bytes(shape, types)
    if part >= 1:
        return shape, types
    layers = min(shape.layers, max(1, round(part * shape.layers)))
    step = shape.layers / layers
    chosen = tuple(types.layers[int((i + 0.5) * step)] for i in range(layers))
    vocab = max(_LEAST_VOCAB, round(shape.vocab * layers / shape.layers / 64) * 64)
    cut = attrs.evolve(shape, layers=layers, vocab=min(shape.vocab, vocab))
    types = attrs.evolve(types, layers=chosen)
    while read_bytes(cut, types) > 4 * most_bytes and (half := cut.halved()) is not None:
        cut = half
    return cut, types


def read_shape(place: Path, *, plan_weights: str) -> tuple[Shape, Types]:
    """The sizes of the model in a folder or a GGUF file, and how it is kept as it is stored.

    Of safetensors, `plan_weights` (`MemoryPlan.weights`) says how they are kept.

    Raises:
        ConfigError: they cannot be told.
    """
    try:
        file = _gguf_in(place)
        if file is not None:
            return _of_gguf(file)
        return _of_config(json.loads((place / "config.json").read_bytes()), plan_weights)
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise ConfigError(
            f"the sizes of {place}'s layers cannot be told: {type(error).__name__}: {error}"
        ) from error


def _of_config(config: Mapping[str, Any], plan_weights: str) -> tuple[Shape, Types]:
    heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
    counts = planned(plan_weights)
    shape = Shape(
        layers=layers,
        hidden=int(config["hidden_size"]),
        wide=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab=int(config["vocab_size"]),
        tied=sum(counts.values()) <= len(MATRICES) * layers + 1,
    )
    main = max(counts, key=lambda kind: counts[kind])
    return shape, Types.alike(shape, _stored_as(main))


def _stored_as(kind: str) -> str:
    """The type a GGUF file has for what is kept in `kind`: a float type, if it knows no other."""
    return kind if kind in BLOCKS else "BF16" if kind == "bf16" else "F16"


def _fitting(wanted: str, smaller: str, columns: int) -> str:
    found = (kind for kind in (wanted, smaller) if columns % BLOCKS[kind].values == 0)
    return next(found, "F16")


def _size(size: tuple[int, int], kind: str) -> int:
    return size[0] * size[1] // BLOCKS[kind].values * BLOCKS[kind].size


_LEAST_VOCAB = 256
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def _gguf_in(place: Path) -> Path | None:
    """The GGUF file that is meant, of a split one a shard; None: the folder has safetensors."""
    if place.is_file():
        return place
    if (place / "config.json").is_file() and any(place.glob("*.safetensors")):
        return None
    return min(file for file in place.glob("*.gguf") if not file.name.startswith("mmproj"))


def _of_gguf(file: Path) -> tuple[Shape, Types]:
    files, split = [file], _SHARD.fullmatch(file.name)
    if split is not None:
        numbers = range(1, int(split[2]) + 1)
        files = [file.with_name(f"{split[1]}-{n:05d}-of-{split[2]}.gguf") for n in numbers]
    values, tensors = _read_header(files[0])
    for shard in files[1:]:
        tensors |= _read_header(shard)[1]
    family = values["general.architecture"]

    def whole(key: str, default: int | None = None) -> int:
        found = values.get(f"{family}.{key}", default)
        return int(found[0] if isinstance(found, list) else found)

    heads, hidden = whole("attention.head_count"), whole("embedding_length")
    shape = Shape(
        layers=whole("block_count"),
        hidden=hidden,
        wide=whole("feed_forward_length"),
        heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        head_dim=whole("attention.key_length", hidden // heads),
        vocab=tensors["token_embd.weight"][0][1],
        tied="output.weight" not in tensors,
    )
    kinds = {kind.code: name for name, kind in BLOCKS.items() if name != "F32"}

    def kind(name: str) -> str:
        return kinds.get(tensors[f"{name}.weight"][1], "F16")  # floats become float16

    layers = [tuple(kind(f"blk.{i}.{name}") for name in MATRICES) for i in range(shape.layers)]
    embedding = kind("token_embd")
    head = embedding if shape.tied else kind("output")
    return shape, Types(layers=tuple(layers), embedding=embedding, head=head)


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int]]]:
    """The single values of a GGUF file, and its tensors: dimensions as in the file, type's code.

    Lists are passed over, but for the first of a list of whole numbers. `plan()` has checked the
    file.
    """
    with file.open("rb") as data:
        data.seek(8)
        num_tensors, num_values = _whole(data, 8), _whole(data, 8)
        values = {}
        for _ in range(num_values):
            key = _text(data)
            values[key] = _value(data, _whole(data, 4))
        return values, dict(_tensors(data, num_tensors))


def _tensors(data: BinaryIO, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int]]]:
    for _ in range(count):
        name = _text(data)
        dims = tuple(_whole(data, 8) for _ in range(_whole(data, 4)))
        code = _whole(data, 4)
        data.seek(8, 1)
        yield name, (dims, code)


def _value(data: BinaryIO, code: int) -> Any:
    if code == _STRING:
        return _text(data)
    if code != _ARRAY:
        return int.from_bytes(data.read(_WIDTHS[code]), "little")
    item, count = _whole(data, 4), _whole(data, 8)
    if item == _STRING:
        for _ in range(count):
            data.seek(_whole(data, 8), 1)
        return None
    found = data.read(_WIDTHS[item] * count)
    return [int.from_bytes(found[: _WIDTHS[item]], "little")]


def _whole(data: BinaryIO, width: int) -> int:
    return int.from_bytes(data.read(width), "little")


def _text(data: BinaryIO) -> str:
    return data.read(_whole(data, 8)).decode("utf-8", "replace")
