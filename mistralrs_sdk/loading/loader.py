"""Open a checkpoint of any format, then fill a model with its weights."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from mistralrs_sdk.config import ModelSource, Progress
from mistralrs_sdk.errors import ModelLoadError
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource, TokenizerFiles
from mistralrs_sdk.loading.forms import (
    Form,
    choose_forms,
    describe_forms,
    parts_of_parameters,
    total_bytes,
)
from mistralrs_sdk.loading.gguf import open_gguf
from mistralrs_sdk.loading.hub import locate
from mistralrs_sdk.loading.json_file import read_json
from mistralrs_sdk.loading.progress import progress_of
from mistralrs_sdk.loading.safetensors import open_folder
from mistralrs_sdk.loading.tokenizer import load_tokenizer, with_tokenizer
from mistralrs_sdk.loading.weights import bytes_to_read, fill
from mistralrs_sdk.machine import available_memory, is_out_of_memory, physical_memory
from mistralrs_sdk.models import build_model, read_config
from mistralrs_sdk.models.config import ModelConfig
from mistralrs_sdk.models.decoder import CausalLM

logger = logging.getLogger("mistralrs_sdk.loading")

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_DERIVED = ".rotary_emb.inv_freq"
"""A tensor that older checkpoints carry per layer although the config says the same."""


def open_checkpoint(source: ModelSource, *, progress: Progress | None = None) -> Checkpoint:
    """Find and open what `source` names, with its tokenizer and template replaced where asked.

    Downloads if it must. Weights stay on disk.

    Raises:
        ModelLoadError: something is missing, damaged or not readable.
        UnsupportedError: the format holds something this package does not read.
    """
    path = locate(source, progress)
    replaced = source.tokenizer_json and Path(source.tokenizer_json).expanduser()
    if path.is_dir():
        checkpoint = open_folder(path, name=source.model_id, tokenizer_json=replaced or None)
        tokenizer = checkpoint.tokenizer
    else:
        own = load_tokenizer(replaced) if replaced else None
        checkpoint = attrs.evolve(open_gguf(path, tokenizer=own), name=source.model_id)
        tokenizer = checkpoint.tokenizer
        if own is not None:
            tokenizer = with_tokenizer(tokenizer, own)
    return attrs.evolve(checkpoint, tokenizer=_choose_template(tokenizer, source))


def _choose_template(tokenizer: TokenizerFiles, source: ModelSource) -> TokenizerFiles:
    """Apply with_jinja_explicit, else with_chat_template, else keep the model's own."""
    if source.jinja_explicit is not None:
        path = Path(source.jinja_explicit).expanduser()
        return _with_template(tokenizer, _read_text(path), f"with_jinja_explicit ({path.name})")
    text = source.chat_template
    if text is None:
        return tokenizer
    if "{" in text:  # a template without braces would ignore the messages
        return _with_template(tokenizer, text, "with_chat_template")
    path = Path(text).expanduser()
    if path.suffix == ".json":
        template = read_json(path).get("chat_template")
        if not isinstance(template, str):
            raise ModelLoadError(f"{path} has no string under 'chat_template'")
    else:
        template = _read_text(path)
    return _with_template(tokenizer, template, f"with_chat_template ({path.name})")


def _with_template(tokenizer: TokenizerFiles, template: str, origin: str) -> TokenizerFiles:
    return attrs.evolve(tokenizer, chat_template=template, template_source=origin)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"chat template {path} cannot be read: {error}") from error


def prepare_model(checkpoint: Checkpoint) -> CausalLM:
    """Build the model of `checkpoint` with its parameters on "meta"; nothing is read.

    Except for the head and the embedding, compared if the config says they are one and the file
    holds both.

    Raises:
        ModelLoadError: tensors are missing, left over or misshapen; the message names them.
        UnsupportedError: the architecture, or a value in its config, is not supported.
    """
    config = _settle_head(read_config(checkpoint.config), checkpoint.tensors)
    with torch.device("meta"):
        model = build_model(config)
    _check_ledger(checkpoint, model, parts_of_parameters(model))
    return model


def check_weights_fit(
    checkpoint: Checkpoint, forms: Mapping[str, Form], *, device: torch.device
) -> None:
    """Refuse weights that do not fit into the memory that is free now.

    Raises:
        ModelLoadError: with what they take, one tensor as it is read included, and what is free.
    """
    needed, free = bytes_to_load(checkpoint, forms, device), free_memory(device)
    if needed > free:
        raise ModelLoadError(_too_large(checkpoint, forms, needed, free, device=device))


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    device_of: Callable[[str], torch.device] | None = None,
    model: CausalLM | None = None,
    forms: Mapping[str, Form] | None = None,
    importance: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> CausalLM:
    """Build the model of `checkpoint` and read its weights, in `dtype`, onto `device`.

    Each is read by itself and copied there, so that the host holds one at a time. `device_of` says
    where a parameter goes if they do not all go there; that each device has room for its own was
    seen before.
    `model` is what `prepare_model` made of the checkpoint, if that was called before, and `forms`
    how its weights are kept (default: dense); `importance` is for those that are quantised, by the
    name of a tensor; `cancelled` is asked before each tensor.

    Raises:
        ModelLoadError: tensors are missing, left over or misshapen (the message names them), the
            weights do not fit into the memory that is free, or loading was cancelled.
        UnsupportedError: the architecture, or a value in its config, is not supported.
    """
    model = prepare_model(checkpoint) if model is None else model
    if forms is None:
        forms = choose_forms(model, checkpoint, dtype=dtype, packing="none")
    if device_of is None:
        check_weights_fit(checkpoint, forms, device=device)
    needed, free = bytes_to_load(checkpoint, forms, device), free_memory(device)
    short = Path(checkpoint.name).name or checkpoint.name  # a bar is as long as a line
    try:
        with progress_of(progress, f"loading {short}", total=total_bytes(forms)) as advance:
            for name, form in _weights_last(forms):
                if cancelled():
                    raise ModelLoadError(f"loading {checkpoint.name} was cancelled")
                fill(
                    model,
                    name,
                    form,
                    tensors=checkpoint.tensors,
                    dtype=dtype,
                    device=device if device_of is None else device_of(name),
                    importance=importance,
                )
                advance(form.num_bytes)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        too_large = _too_large(checkpoint, forms, needed, free, device=device)
        raise ModelLoadError(too_large) from error
    return model.eval().requires_grad_(False)


def _weights_last(forms: Mapping[str, Form]) -> list[tuple[str, Form]]:
    """Small parameters first: a packed weight may take its module's bias in."""
    return sorted(forms.items(), key=lambda item: item[1].is_matrix)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # macOS does not say what is free, and swaps before it kills
    return physical_memory() if sys.platform == "darwin" else available_memory()


def bytes_to_load(checkpoint: Checkpoint, forms: Mapping[str, Form], device: torch.device) -> int:
    """The weights, and besides what `device` needs while the one that needs most is read.

    A GPU needs nothing for a dense one: it is read, and made what it is to be, on the host.
    """
    reading = [
        bytes_to_read(form, checkpoint.tensors)
        for form in forms.values()
        if device.type != "cuda" or form.method is not None
    ]
    return total_bytes(forms) + max(reading, default=0)


def _too_large(
    checkpoint: Checkpoint,
    forms: Mapping[str, Form],
    needed: int,
    free: int,
    *,
    device: torch.device,
) -> str:
    return (
        f"{checkpoint.name} does not fit: loading its weights as {describe_forms(forms.values())} "
        f"takes {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free on {device}; "
        "quantise it (with_isq), use a smaller dtype (with_dtype) or a smaller model"
    )


def _settle_head(config: ModelConfig, tensors: Mapping[str, TensorSource]) -> ModelConfig:
    """Decide whether the head is the embedding, by what the file really holds."""
    if _EMBEDDING not in tensors:
        return config  # the ledger will name it
    if not config.tie_word_embeddings and _HEAD not in tensors:
        logger.warning("the config unties the head but there is no %s: the embedding serves", _HEAD)
        return attrs.evolve(config, tie_word_embeddings=True)
    if config.tie_word_embeddings and _HEAD in tensors:
        head, embedding = tensors[_HEAD], tensors[_EMBEDDING]
        if not torch.equal(head.load(), embedding.load()):
            logger.warning(
                "the config ties the head but %s differs: the file's head is used", _HEAD
            )
            return attrs.evolve(config, tie_word_embeddings=False)
    return config


def _check_ledger(checkpoint: Checkpoint, model: nn.Module, parts: Mapping[str, list[str]]) -> None:
    """Every parameter is filled and every tensor is used, or the load fails and names them."""
    tensors = checkpoint.tensors
    wanted = {part for names in parts.values() for part in names}
    # a head that is not wanted is the embedding: _settle_head compared them
    unused = {n for n in tensors.keys() - wanted if n != _HEAD and not n.endswith(_DERIVED)}
    misshapen = [
        f"{' + '.join(parts[name])} {shapes} for {tuple(parameter.shape)}"
        for name, parameter in model.named_parameters()
        if tensors.keys() >= set(parts[name])
        and not _stacks_to((shapes := [tensors[p].shape for p in parts[name]]), parameter.shape)
    ]
    problems = {
        "missing": sorted(wanted - tensors.keys()),
        "not used by the architecture": sorted(unused),
        "of the wrong shape": misshapen,
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise ModelLoadError(f"the tensors of {checkpoint.name} do not match its config; {found}")


def _stacks_to(shapes: list[tuple[int, ...]], whole: tuple[int, ...]) -> bool:
    """Whether tensors of these shapes, one under the other, make one of shape `whole`."""
    if any(shape[1:] != whole[1:] or not shape for shape in shapes):
        return False
    return sum(shape[0] for shape in shapes) == whole[0]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
