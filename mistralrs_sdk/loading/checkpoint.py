"""What every checkpoint format is turned into before the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer


ReadPart = Callable[[slice, slice], "torch.Tensor"]
"""Reads some rows and, of a matrix, some columns: slices with a start and a stop."""


@attrs.frozen(kw_only=True)
class StoredBlocks:
    """A matrix that is stored in quantised GGML blocks, not yet read."""

    ggml_type: str
    load: Callable[[], torch.Tensor]
    """Reads them as they are: uint8 [rows, bytes of a row], rows in Hugging Face's order."""
    load_part: ReadPart | None = None
    """Reads no more than a part, of whole heads and of columns that fill blocks."""


@attrs.frozen(kw_only=True)
class StoredCodes:
    """A matrix that is stored in a form that GPUs multiply by, not yet read."""

    kind: str
    """The form's name, as `device_kinds.kind_of` knows it."""
    load: Callable[[], tuple[torch.Tensor, ...]]
    """Reads what that form's `encode` gives."""


@attrs.frozen(kw_only=True)
class TensorSource:
    """One tensor of a checkpoint, not yet read."""

    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    """Reads it: Hugging Face layout, in the file's float type (block-quantised ones in float32)."""
    blocks: StoredBlocks | None = None
    """The same without dequantising, where the file has blocks."""
    codes: StoredCodes | None = None
    """The same as GPUs multiply by it, where the file has that."""
    quantised: str | None = None
    """What others had quantised it to, in words; blocks say it themselves."""
    load_part: ReadPart | None = None
    """Reads no more than a part, of whole heads; None where all must be read for it."""


@attrs.frozen(kw_only=True)
class TokenizerFiles:
    """The tokenizer and what surrounds it."""

    tokenizer: Tokenizer
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: frozenset[int]
    """Every id that ends a turn, from the tokenizer, the config and the generation config."""
    adds_bos: bool
    """Whether raw text gets a BOS in front (encoding with special tokens does it)."""
    chat_template: str | None
    template_source: str | None
    """Where the template came from, in words, for `describe()`."""
    unk_token: str | None = None
    """The token of unknown text; some templates ask for it."""
    response_template: Mapping[str, Any] | None = None
    """How answers are written, of a tokenizer_config.json that says so."""


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A checkpoint that was opened: headers read and checked, weights still on disk."""

    name: str
    """What the user called it: hub id, folder or file."""
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    """Hugging Face style `config.json`, also for GGUF."""
    tensors: Mapping[str, TensorSource]
    """By Hugging Face parameter name, for example "model.layers.0.self_attn.q_proj.weight"."""
    tokenizer: TokenizerFiles
    generation_config: Mapping[str, Any]
    """Contents of `generation_config.json`, {} if there is none."""
    format: str
    """safetensors or gguf, with the weight types, for `describe()`."""
