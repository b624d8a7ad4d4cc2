"""Writes what `tune` measures: a GGUF file with random weights in given shapes and types."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mistralrs_sdk.cli.tune_shape import BLOCKS, MATRICES, Shape, Types

if TYPE_CHECKING:
    import numpy as np

MOST_TOKENS = 512
"""The context of such a model."""

_ALIGNMENT = 32
_TILE_BYTES = 2**20
_SCALE = 1e-4
_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9


def write_stand_in(folder: Path, shape: Shape, types: Types) -> tuple[Path, Path]:
    """Write a Llama of this shape, and a tokenizer with a word for each id; returns both files.

    The other families have the same matrices, and besides them only what takes little time. Tensors
    of a type share their bytes in the file, and get memory of their own when it is loaded. What it
    holds is the same each time.
    """
    import numpy as np

    file, tokenizer = folder / "stand-in.gguf", folder / "tokenizer.json"
    tensors = list(_tensors(shape, types))
    longest: dict[str, int] = {}
    for _, dims, kind in tensors:
        longest[kind] = max(longest.get(kind, 0), _num_bytes(dims, kind))
    starts, end = {}, 0
    for kind, size in longest.items():
        starts[kind], end = end, end + size + -size % _ALIGNMENT
    with file.open("wb") as out:
        values = list(_values(shape))
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
        for key, code, value in values:
            out.write(_text(key) + struct.pack("<I", code) + value)
        for name, dims, kind in tensors:
            out.write(_text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
            out.write(struct.pack("<IQ", BLOCKS[kind].code, starts[kind]))
        out.write(bytes(-out.tell() % _ALIGNMENT))
        random = np.random.default_rng(0)
        for kind, size in longest.items():
            tile = _tile(kind, random)
            for _ in range(size // len(tile)):
                out.write(tile)
            out.write(tile[: size % len(tile)] + bytes(-size % _ALIGNMENT))
    words = {f"w{i}": i for i in range(shape.vocab)}  # a token without text would not be sent
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return file, tokenizer


def _values(shape: Shape) -> Iterator[tuple[str, int, bytes]]:
    yield "general.architecture", _STRING, _text("llama")
    numbers = {
        "context_length": MOST_TOKENS,
        "block_count": shape.layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.wide,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
    }
    for key, number in numbers.items():
        yield f"llama.{key}", _UINT32, struct.pack("<I", number)
    yield "llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)
    yield "llama.rope.freq_base", _FLOAT32, struct.pack("<f", 10_000.0)
    yield "tokenizer.ggml.tokens", _ARRAY, struct.pack("<IQ", _STRING, 1) + _text("w0")


def _tensors(shape: Shape, types: Types) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, dimensions in the file's order (columns first) and types."""
    vocabulary = (shape.hidden, shape.vocab)
    yield "token_embd.weight", vocabulary, types.embedding
    if not shape.tied:
        yield "output.weight", vocabulary, types.head
    yield "output_norm.weight", (shape.hidden,), "F32"
    for layer, kinds in enumerate(types.layers):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", (shape.hidden,), "F32"
        for name, kind in zip(MATRICES, kinds, strict=True):
            rows, columns = shape.matrices[name]
            yield f"blk.{layer}.{name}.weight", (columns, rows), kind


def _tile(kind: str, random: np.random.Generator) -> bytes:
    """About a MiB of whole blocks: random numbers, where they have scales under small ones."""
    import numpy as np

    blocks = BLOCKS[kind]
    count = _TILE_BYTES // blocks.size
    if not blocks.scales:
        values = (random.standard_normal(count) * 0.02).astype(np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype({"F16": np.float16, "F32": np.float32}[kind]).tobytes()
    found = random.integers(0, 256, (count, blocks.size), dtype=np.uint8)
    for place in blocks.scales:
        found[:, place : place + 2] = np.array([_SCALE], np.float16).view(np.uint8)
    return found.tobytes()


def _num_bytes(dims: tuple[int, ...], kind: str) -> int:
    values = 1
    for dim in dims:
        values *= dim
    return values // BLOCKS[kind].values * BLOCKS[kind].size


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
