"""Reads `adapter_config.json` of a PEFT adapter: which matrices it changes, with what ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from mistralrs_sdk.errors import ModelLoadError

_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of its matrices",
    "modules_to_save": "modules that were trained as a whole",
    "trainable_token_indices": "trained embeddings of single tokens",
    "layer_replication": "replicated layers",
    "target_parameters": "bare parameters as targets",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron layers",
}
"""Keys that ask for something not done here if they are set to anything, and what that is."""

_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin the training that change the base model too."""


@attrs.frozen(kw_only=True)
class PeftConfig:
    """The part of an adapter's config that decides what it computes."""

    targets: tuple[str, ...] | str | None
    """Names or ends of names, or one regular expression for whole names; None: not said."""
    excluded: tuple[str, ...] | str | None
    layers: tuple[int, ...] | None
    """The only layers that are changed."""
    layers_pattern: tuple[str, ...]
    """What the list of layers is called."""
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Of some matrices, by a regular expression for the end of their names."""
    alphas: Mapping[str, float]
    rank_stabilised: bool

    def changes(self, name: str) -> bool:
        """Whether the matrix of this name is to be changed."""
        if self.targets is None or _matches(self.excluded, name):
            return False
        if self.targets == "all-linear":
            return True
        return _matches(self.targets, name) and (
            isinstance(self.targets, str) or self._is_wanted_layer(name)
        )

    def rank_of(self, name: str) -> int:
        """Rank of the two matrices for that one."""
        return _by_pattern(self.ranks, name, self.rank)

    def scale_of(self, name: str) -> float:
        """What the product is multiplied by: alpha / rank, or alpha / sqrt(rank)."""
        rank = self.rank_of(name)
        return _by_pattern(self.alphas, name, self.alpha) / (
            math.sqrt(rank) if self.rank_stabilised else rank
        )

    def _is_wanted_layer(self, name: str) -> bool:
        if self.layers is None:
            return True
        for pattern in self.layers_pattern or (r"[^.]*",):
            found = re.match(rf"(?:^|.*?\.)(?:{pattern})\.(?P<layer>\d+)\.", name)
            if found:
                return int(found["layer"]) in self.layers
        return False


def parse_peft_config(values: Mapping[str, Any], *, where: str) -> tuple[PeftConfig, list[str]]:
    """Read the config, and name everything in it that is not done here.

    Raises:
        ModelLoadError: it is not that of a LoRA, or a value is not what it must be.
    """
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(f"{where} is of a PEFT adapter of type {kind!r}: LORA is supported")
    config = PeftConfig(
        targets=_names(values, "target_modules", where),
        excluded=_names(values, "exclude_modules", where) or None,
        layers=_layers(values, where),
        layers_pattern=_pattern(_names(values, "layers_pattern", where)),
        rank=int(_number(values.get("r"), "r", where, whole=True)),
        alpha=_number(values.get("lora_alpha"), "lora_alpha", where),
        ranks={k: int(v) for k, v in _numbers(values, "rank_pattern", where, whole=True).items()},
        alphas=_numbers(values, "alpha_pattern", where),
        rank_stabilised=bool(values.get("use_rslora")),
    )
    for pattern in _regular_expressions(config):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelLoadError(
                f"{where}: {pattern!r} is no regular expression ({error})"
            ) from error
    return config, _reasons(values)


def _reasons(values: Mapping[str, Any]) -> list[str]:
    """What the config asks for and nothing here does."""
    reasons = [f"{what} ({key})" for key, what in _REFUSED.items() if values.get(key)]
    if values.get("bias") not in (None, "none"):
        reasons.append(f"trained biases (bias {values['bias']!r})")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OWN_BASE):
        reasons.append(
            f"a base model of its own (init_lora_weights {start!r}: save it with "
            "path_initial_model_for_weight_conversion)"
        )
    elif (start.lower() if isinstance(start, str) else start) not in _STARTS:
        reasons.append(f"init_lora_weights {start!r}")
    return reasons


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that fits the name or the end of it behind a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _matches(wanted: tuple[str, ...] | str | None, name: str) -> bool:
    if wanted is None:
        return False
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in wanted)


def _regular_expressions(config: PeftConfig) -> Iterable[str]:
    yield from (*config.ranks, *config.alphas, *config.layers_pattern)
    yield from (w for w in (config.targets, config.excluded) if isinstance(w, str))


def _pattern(names: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) and names else tuple(names or ())


def _names(values: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | str | None:
    value = values.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ModelLoadError(f"{where}: {key} ({value!r}) must be a string or a list of strings")


def _layers(values: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    value = values.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise ModelLoadError(f"{where}: layers_to_transform ({value!r}) must be whole numbers")
    return tuple(layers)


def _numbers(
    values: Mapping[str, Any], key: str, where: str, *, whole: bool = False
) -> dict[str, float]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"{where}: {key} ({value!r}) must be a JSON object")
    return {name: _number(item, key, where, whole=whole) for name, item in value.items()}


def _number(value: Any, key: str, where: str, *, whole: bool = False) -> float:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (whole and value < 1):
        needed = "a whole number of at least 1" if whole else "a number"
        raise ModelLoadError(f"{where}: {key} ({value!r}) must be {needed}")
    return value
