"""Safetensors that others quantised (GPTQ, AWQ, FP8, compressed-tensors), read as float weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.checkpoint import TensorSource
from mistralrs_sdk.loading.compressed_tensors import compressed_scheme
from mistralrs_sdk.loading.json_file import read_json_if_there
from mistralrs_sdk.loading.packed_words import awq_scheme, gptq_scheme
from mistralrs_sdk.loading.stored_tensor import (
    FLOAT8_TYPES,
    FLOAT_TYPES,
    WAY_OUT,
    Parts,
    Scheme,
    StoredTensor,
    block_size,
    float_source,
    one_byte_source,
)
from mistralrs_sdk.quant.device_kinds import FLOAT8

logger = logging.getLogger("mistralrs_sdk.loading")

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json under which a checkpoint says how it was quantised."""

_CONFIG_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where older checkpoints say it, and by which method they are."""

_FOR_ACTIVATIONS = {
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "k_scale",
    "k_zero_point",
    "output_scale",
    "output_zero_point",
    "prob_output_scale",
    "q_scale",
    "v_scale",
    "v_zero_point",
}
"""Tensors that only serve to quantise activations or the KV cache."""


def quantization_settings(
    config: Mapping[str, Any], folder: Path, *, names: Iterable[str]
) -> Mapping[str, Any] | None:
    """How the checkpoint was quantised, with its method under "quant_method"; None if it was not.

    `config` is config.json, `names` are those of the tensors.

    Raises:
        ModelLoadError: what should say it is no JSON object.
    """
    for key in CONFIG_KEYS:
        settings = config.get(key)
        if settings:
            if not isinstance(settings, Mapping):
                raise ModelLoadError(f"{key} in config.json is no object: {settings!r}")
            return settings
    if any(name.endswith(".qweight") for name in names):
        for file, method in _CONFIG_FILES.items():
            settings = read_json_if_there(folder / file)
            if settings:
                return {"quant_method": method, **settings}
    return None


def dequantised(
    stored: Mapping[str, StoredTensor], settings: Mapping[str, Any], *, config: Mapping[str, Any]
) -> tuple[dict[str, TensorSource], str]:
    """The tensors by the names they have in an unquantised checkpoint, and what they were.

    Quantised weights load in float32, computed in it from what is stored; others as they are.
    Activations are not quantised as the checkpoint may ask for; a warning says so.

    Raises:
        UnsupportedError: the method, or the way it was used, is not read here.
        ModelLoadError: tensors are missing or do not fit each other; the message names them.
    """
    method = str(settings.get("quant_method") or "").lower()
    if method not in _SCHEMES:
        named = f"quant_method {method!r}" if method else "no quant_method"
        raise UnsupportedError(
            f"the quantization_config has {named}, which is not read; readable are "
            f"{', '.join(sorted(_SCHEMES))}: {WAY_OUT}"
        )
    try:
        scheme = _SCHEMES[method](settings)
        modules, plain, unused = _sort(stored, scheme)
        tensors = {f"{module}.weight": _source(scheme, parts) for module, parts in modules.items()}
    except (TypeError, AttributeError, ValueError, re.error) as error:  # a file may hold anything
        raise ModelLoadError(
            f"the quantization_config ({method}) holds a value of the wrong type: {error}"
        ) from error
    for name, tensor in plain.items():
        if name in tensors:
            raise ModelLoadError(
                f"{name} is in {tensor.file} both in floats and quantised: the files do not "
                "belong together, download them again"
            )
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" and "qweight" in modules.get(module, ()) and _is_padding(tensor, config):
            continue
        tensors[name] = float_source(tensor)
    if not modules:
        logger.warning("the config says %s, but no weight is quantised", scheme.words)
    words = f"{scheme.words}, dequantised"
    if any(tensor.codes is not None for tensor in tensors.values()):
        words += " unless CUDA keeps it"
    if unused or scheme.quantises_activations:
        words += ", activations not quantised"
        logger.warning(
            "the checkpoint (%s) asks for quantised activations or a quantised KV cache: only its "
            "weights are used",
            scheme.words,
        )
    return tensors, words


def _source(scheme: Scheme, parts: Parts) -> TensorSource:
    source = attrs.evolve(scheme.source(parts), quantised=scheme.words)
    codes = source.codes
    if codes is not None and codes.kind == FLOAT8.name and not scheme.quantises_activations:
        return attrs.evolve(source, codes=None)  # multiplying float8 rounds the inputs, too
    return source


def _sort(
    stored: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[dict[str, Parts], dict[str, StoredTensor], list[str]]:
    """The parts of each quantised module, what is not quantised, and what is of no use here."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    plain: dict[str, StoredTensor] = {}
    unused: list[str] = []
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf in _FOR_ACTIVATIONS:
            unused.append(name)
        elif leaf in scheme.helpers or (leaf == scheme.main and tensor.dtype not in FLOAT_TYPES):
            modules.setdefault(module, {})[leaf] = tensor
        else:
            plain[name] = tensor
    for module, parts in modules.items():
        main = f"{module}.{scheme.main}"
        if main in plain:  # in floats although it has scales: the scheme names the contradiction
            parts[scheme.main] = plain.pop(main)
    return dict(modules), plain, unused


def _is_padding(bias: StoredTensor, config: Mapping[str, Any]) -> bool:
    """Whether a bias was only added by the quantiser, as AutoGPTQ does where there is none.

    Such a bias is zero throughout, and the model's config does not ask for one.
    """
    if ".self_attn." in bias.name:
        always = config.get("model_type") == "qwen2" and ".o_proj." not in bias.name
        wanted = always or config.get("attention_bias")
    else:
        wanted = config.get("mlp_bias")
    return not wanted and not bias.load().any()


def _fp8_scheme(settings: Mapping[str, Any]) -> Scheme:
    """FP8 with a scale per block, per row or for the whole weight."""
    given = settings.get("weight_block_size")
    block = None if given is None else block_size(given, "weight_block_size")
    return Scheme(
        words="FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}",
        main="weight",
        helpers=("weight_scale", "weight_scale_inv"),
        source=partial(_fp8_source, block=block),
        quantises_activations=True,
    )


def _fp8_source(parts: Parts, *, block: tuple[int, int] | None) -> TensorSource:
    # Both names hold what the stored values are multiplied by.
    scale = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    return one_byte_source(parts, scale=scale, types=FLOAT8_TYPES, block=block)


_SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": awq_scheme,
    "compressed-tensors": compressed_scheme,
    "fbgemm_fp8": _fp8_scheme,
    "fp8": _fp8_scheme,
    "gptq": gptq_scheme,
}
