"""Reads how a folder in sentence-transformers' layout turns hidden states into one vector."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
from torch import Tensor

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.loading.json_file import read_json, read_json_if_there
from mistralrs_sdk.models.embedding import (
    POOLING_MODES,
    Activation,
    Dense,
    EmbeddingHead,
    Normalize,
    Pooling,
    PoolingMode,
)

MODULES = "modules.json"

Fetch = Callable[[str], Path]
"""Gets a file of the model by its path in the repository; raises ModelLoadError if it is not
there."""

_OLD_KEYS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""One flag per mode, in the order in which several are put side by side."""

_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Tanh": "tanh",
}


@attrs.frozen(kw_only=True)
class SentenceSettings:
    """What the folder says beside its weights."""

    prompts: Mapping[str, str]
    """Texts to put in front of an input, by name."""
    default_prompt_name: str | None
    max_seq_length: int | None
    """Most tokens of an input, special ones included; None: what the model can do."""


def read_head(folder: Path, fetch: Fetch) -> EmbeddingHead:
    """Read `modules.json` and the modules it names.

    Raises:
        ModelLoadError: a file is missing or damaged, or the modules do not go together.
        UnsupportedError: a module, or a setting of one, is not done here.
    """
    modules = _modules(folder / MODULES)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise UnsupportedError(
            f"{MODULES} lists {', '.join(kinds)}: only a Transformer followed by Pooling, then "
            "Dense and Normalize in any order, is supported"
        )
    if modules[0][1]:
        raise UnsupportedError(
            f"{MODULES} keeps the Transformer in {modules[0][1]!r}; only the folder itself is read"
        )
    pooling = _pooling(read_json(fetch(f"{modules[1][1]}/config.json")), modules[1][1])
    steps = [_step(kind, path, fetch) for kind, path in modules[2:]]
    return EmbeddingHead(pooling, steps)


def read_settings(folder: Path) -> SentenceSettings:
    """Read the prompts and the longest input; a folder without such files has none.

    Raises:
        ModelLoadError: a file is damaged.
        UnsupportedError: it asks for something that is not done here.
    """
    ours = read_json_if_there(folder / "config_sentence_transformers.json")
    prompts = ours.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise ModelLoadError(
            f"config_sentence_transformers.json has prompts {prompts!r}: they must be texts by name"
        )
    prompts = {name: text or "" for name, text in prompts.items()}
    default = ours.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelLoadError(
            f"config_sentence_transformers.json has default_prompt_name {default!r}, which is none "
            f"of its prompts: {', '.join(prompts) or 'there are none'}"
        )
    return SentenceSettings(
        prompts=prompts, default_prompt_name=default, max_seq_length=_max_seq_length(folder)
    )


def _max_seq_length(folder: Path) -> int | None:
    settings = read_json_if_there(folder / "sentence_bert_config.json")
    if settings.get("do_lower_case"):
        raise UnsupportedError(
            "sentence_bert_config.json asks for do_lower_case, which is not supported"
        )
    task = settings.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise UnsupportedError(
            f"sentence_bert_config.json has transformer_task {task!r}; only 'feature-extraction' "
            "is supported"
        )
    length = settings.get("max_seq_length")
    if length is None and (folder / MODULES).is_file():
        length = read_json_if_there(folder / "tokenizer_config.json").get("model_max_length")
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int | float) or length < 1:
        raise ModelLoadError(
            f"the longest input in {folder.name} is {length!r} tokens: it must be 1 or more"
        )
    return int(length)  # tokenizers write 1e30 where they know none


def _modules(path: Path) -> list[tuple[str, str]]:
    """The kind of each module and the folder it is in, in order."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        ordered = sorted(listed, key=lambda entry: entry["idx"])
        return [(entry["type"].rpartition(".")[2], entry["path"]) for entry in ordered]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{path} is no list of modules with idx, path and type ({error}): download it again"
        ) from error


def _pooling(config: Mapping[str, Any], path: str) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_KEYS.items() if config.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not set(modes) <= set(POOLING_MODES):
        raise UnsupportedError(
            f"{path}/config.json has pooling_mode {modes!r}; supported are "
            f"{', '.join(POOLING_MODES)}"
        )
    include = config.get("include_prompt", True)
    return Pooling(tuple(cast(list[PoolingMode], modes)), include_prompt=bool(include))


def _step(kind: str, path: str, fetch: Fetch) -> Dense | Normalize:
    if kind == "Normalize":
        return Normalize()
    if kind != "Dense":
        raise UnsupportedError(
            f"{MODULES} has a module {kind} in {path!r}; after Pooling, Dense and Normalize are "
            "supported"
        )
    where = f"{path}/config.json"
    config = read_json(fetch(where))
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{where} has activation_function {name!r}; supported are {', '.join(_ACTIVATIONS)}"
        )
    for key, only in (
        ("module_input_name", "sentence_embedding"),
        ("module_output_name", "sentence_embedding"),
        ("use_residual", False),
    ):
        if config.get(key, only) not in (only, None):
            raise UnsupportedError(f"{where} has {key} {config[key]!r}; only {only!r} is supported")
    weight, bias = _weights(fetch(f"{path}/model.safetensors"))
    return Dense(weight, bias, activation=_ACTIVATIONS[name])


def _weights(file: Path) -> tuple[Tensor, Tensor | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}): download it again") from error
    weight, bias = tensors.pop("linear.weight", None), tensors.pop("linear.bias", None)
    shape = (len(weight),) if weight is not None and weight.ndim == 2 else None
    if weight is None or shape is None or tensors or (bias is not None and bias.shape != shape):
        raise ModelLoadError(
            f"{file} is no dense layer: it must hold linear.weight [out, in], linear.bias [out] if "
            "there is one, and nothing else"
        )
    return weight, bias
