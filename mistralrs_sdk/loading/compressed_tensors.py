"""Checkpoints in the formats of compressed-tensors: packed integers, int8 and FP8."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.packed_words import signed_source
from mistralrs_sdk.loading.stored_tensor import (
    FLOAT8_TYPES,
    WAY_OUT,
    Scheme,
    block_size,
    one_byte_source,
    whole,
)

_PACKED, _INT, _FLOAT, _NAIVE = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
)
_PACKED_BITS = (2, 4, 8)  # those that never straddle a word, where older writers packed otherwise
_HELPERS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


def compressed_scheme(settings: Mapping[str, Any]) -> Scheme:
    """How the weights are stored that compressed-tensors wrote.

    Raises:
        ModelLoadError: the config does not say how.
        UnsupportedError: a format that is not read, or several in one checkpoint.
    """
    for key in ("sparsity_config", "transform_config"):
        given = settings.get(key) or {}
        if given and given.get("format") != "dense":  # "dense" changes nothing
            raise UnsupportedError(f"compressed-tensors with a {key} is not read: {WAY_OUT}")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelLoadError("quantization_config of compressed-tensors has no config_groups")
    found = [_arguments(name, group, settings) for name, group in groups.items()]
    kinds = [kind for kind in found if kind is not None]
    if not kinds:
        raise ModelLoadError("no group in quantization_config's config_groups quantises weights")
    if any(kind != kinds[0] for kind in kinds):
        raise UnsupportedError(
            f"compressed-tensors with groups of different kinds ({', '.join(groups)}) is not "
            f"read: {WAY_OUT}"
        )
    return _scheme(
        kinds[0], quantises_activations=any(g.get("input_activations") for g in groups.values())
    )


def _arguments(name: str, group: Any, settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What of a group decides how weights are stored; None if it has none."""
    if not isinstance(group, Mapping):
        raise UnsupportedError(f"config_groups names the preset {name!r}, not its values")
    weights = group.get("weights")
    if not weights:
        return None
    format_ = group.get("format") or settings.get("format")
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    return {"format": format_} | {key: weights.get(key) for key in keys}


def _scheme(kind: Mapping[str, Any], *, quantises_activations: bool) -> Scheme:
    format_, number = kind["format"], str(kind["type"] or "int").lower()
    bits = whole(kind, "num_bits", default=8)
    block, shared = _block(kind)
    is_packed = format_ == _PACKED and number == "int" and bits in _PACKED_BITS
    is_int = format_ in (_INT, _NAIVE) and number == "int" and bits == 8
    is_float = format_ in (_FLOAT, _NAIVE) and number == "float" and bits == 8
    if is_packed:
        symmetric = kind["symmetric"] is not False
        source = partial(signed_source, bits=bits, symmetric=symmetric, block=block)
    elif is_int or is_float:
        types = FLOAT8_TYPES if is_float else ("I8",)
        source = partial(one_byte_source, scale="weight_scale", types=types, block=block)
    else:
        raise UnsupportedError(
            f"compressed-tensors weights of {number}{bits} in the format {format_!r} are not "
            f"read: {WAY_OUT}"
        )
    name = "FP8" if is_float else f"{bits} bits"
    return Scheme(
        words=f"compressed-tensors {format_}, {name}{shared}",
        main="weight_packed" if is_packed else "weight",
        helpers=_HELPERS,
        source=source,
        quantises_activations=quantises_activations,
    )


def _block(kind: Mapping[str, Any]) -> tuple[tuple[int, int] | None, str]:
    """Rows and columns that share a scale, None for a row or all; and the same in words."""
    strategy, size = kind["strategy"], whole(kind, "group_size", default=-1)
    if strategy is None:
        strategy = "group" if size > 0 else "channel"
    if strategy in ("tensor", "channel"):
        return None, ""
    if strategy == "group" and size > 0:
        return (1, size), f" in groups of {size}"
    if strategy == "block":
        rows, columns = block_size(kind["block_structure"], "block_structure")
        return (rows, columns), f" in blocks of {rows} x {columns}"
    raise UnsupportedError(
        f"compressed-tensors with the strategy {strategy!r} (group_size {size}) is not read: "
        f"{WAY_OUT}"
    )
