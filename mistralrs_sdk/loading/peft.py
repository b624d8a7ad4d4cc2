"""A LoRA adapter in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError
from mistralrs_sdk.layers.lora import LoraPair, LoraTarget
from mistralrs_sdk.loading.json_file import read_json
from mistralrs_sdk.loading.peft_config import PeftConfig, parse_peft_config
from mistralrs_sdk.loading.safetensors import open_file
from mistralrs_sdk.loading.stored_tensor import FLOAT_TYPES, StoredTensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_OTHERS = (
    (re.compile(r"\.lora_embedding_[AB]"), "LoRA of embeddings"),
    (re.compile(r"\.lora_magnitude_vector"), "DoRA"),
    (re.compile(r"\.lora_[AB]\.bias"), "biases of its matrices"),
    (re.compile(r"(^|\.)(lm_head|embed_tokens)\.lora_"), "LoRA of the head or the embedding"),
    (re.compile(r"(^|\.)(lm_head|embed_tokens)\.(modules_to_save\.)?weight"), "a trained {}"),
)
"""What other tensors than the two matrices mean."""


@attrs.frozen(kw_only=True, eq=False)
class PeftAdapter:
    """An adapter that was opened: checked against a model, its weights still on disk."""

    generation: str
    """SHA-256 of config and weights, in hexadecimal."""
    ranks: Mapping[str, int]
    """By the name of the matrix that is changed."""
    scales: Mapping[str, float]
    """What the product of its two matrices is multiplied by, likewise."""
    tensors: Mapping[str, tuple[StoredTensor, StoredTensor]]
    """The two matrices, likewise."""
    stamps: Mapping[Path, tuple[int, int]]
    """Size and time of the last change of each file when it was opened."""

    @property
    def rank(self) -> int:
        """The highest of all."""
        return max(self.ranks.values())

    def load(self) -> dict[str, LoraPair]:
        """Read the weights.

        Raises:
            ModelLoadError: the files have changed since they were opened.
        """
        pairs = {
            name: LoraPair(a=a.load().float(), b=b.load().float(), scale=self.scales[name])
            for name, (a, b) in self.tensors.items()
        }
        if _stamps(*self.stamps) != self.stamps:
            folder = next(iter(self.stamps)).parent
            raise ModelLoadError(f"the adapter in {folder} changed while being read: load it again")
        return pairs


def open_adapter(folder: Path, targets: Mapping[str, LoraTarget]) -> PeftAdapter:
    """Open the adapter in `folder` for a model in which `targets` can be changed.

    Raises:
        ModelLoadError: a file is missing or damaged, or the tensors do not fit the config or the
            model; the message names them.
        UnsupportedError: it holds something that is not done here; the message says all of it.
    """
    files = (folder / CONFIG, folder / WEIGHTS)
    values = read_json(files[0])
    config, reasons = parse_peft_config(values, where=str(files[0]))
    if not files[1].is_file():
        raise ModelLoadError(
            f"{WEIGHTS} is missing in {folder}: weights in other formats (adapter_model.bin) are "
            "not read"
        )
    stamps = _stamps(*files)
    stored = {tensor.name: tensor for tensor in open_file(files[1])}
    found, unknown = _sort(stored, reasons)
    if reasons:
        raise UnsupportedError(
            f"the adapter in {folder} is not supported: it has {', '.join(reasons)}; supported is "
            "LoRA of the linear layers inside the decoder"
        )
    _check(found, unknown, config, targets, folder=folder)
    return PeftAdapter(
        generation=_hash(*files),
        ranks={name: config.rank_of(name) for name in found},
        scales={name: config.scale_of(name) for name in found},
        tensors={name: (pair["A"], pair["B"]) for name, pair in found.items()},
        stamps=stamps,
    )


def _sort(
    stored: Mapping[str, StoredTensor], reasons: list[str]
) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """The two matrices of each module, and names that mean nothing; adds to `reasons`."""
    found: dict[str, dict[str, StoredTensor]] = {}
    unknown = []
    for name, tensor in stored.items():
        other = next((what for pattern, what in _OTHERS if pattern.search(name)), None)
        match = _NAME.fullmatch(name)
        if other is not None:
            which = "head" if "lm_head" in name else "embedding"
            reason = f"{other.format(which)} ({name})"
            if not any(known.startswith(other.format(which)) for known in reasons):
                reasons.append(reason)
        elif match is None:
            unknown.append(name)
        else:
            found.setdefault(match["module"], {})[match["which"]] = tensor
    return found, unknown


def _check(
    found: Mapping[str, Mapping[str, StoredTensor]],
    unknown: list[str],
    config: PeftConfig,
    targets: Mapping[str, LoraTarget],
    *,
    folder: Path,
) -> None:
    """Everything the config wants is there, and nothing else, in the model's shapes."""
    wanted = {name for name in targets if config.changes(name)}
    expected = {
        f"{name}.lora_{which}" for name in wanted | (found.keys() & targets) for which in "AB"
    }
    there = {f"{name}.lora_{which}" for name, pair in found.items() for which in pair}
    strange = found.keys() - (targets if config.targets is None else wanted)
    misshapen = []
    for name in sorted(found.keys() & targets):
        target, rank = targets[name], config.rank_of(name)
        shapes = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
        for which, tensor in sorted(found[name].items()):
            if tensor.shape != shapes[which] or tensor.dtype not in FLOAT_TYPES:
                misshapen.append(
                    f"{name}.lora_{which} {tensor.dtype} {list(tensor.shape)} for "
                    f"{list(shapes[which])}"
                )
    problems = {
        "missing": sorted(expected - there),
        "not of this model, or not named in its config": sorted([*strange, *unknown]),
        "of the wrong shape or type": misshapen,
    }
    if not any(problems.values()) and not found:
        raise ModelLoadError(f"the adapter in {folder} changes nothing: it holds no tensors")
    if any(problems.values()):
        named = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise ModelLoadError(f"the adapter in {folder} does not fit; {named}")


def _hash(*files: Path) -> str:
    """SHA-256 of all files; each is hashed alone first, so that none runs into the next."""
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()


def _stamps(*files: Path) -> dict[Path, tuple[int, int]]:
    found = {file: file.stat() for file in files}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in found.items()}


def _some(names: list[Any]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
