"""Whether a device computes with quantised weights, and what becomes of each weight there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from mistralrs_sdk.config import EngineConfig, ModelDType
from mistralrs_sdk.errors import UnsupportedError
from mistralrs_sdk.isq import Isq
from mistralrs_sdk.kernels import native
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.loading.forms import (
    Form,
    Packing,
    Target,
    choose_packing,
    kept_type,
    quantise_target,
)
from mistralrs_sdk.quant import half
from mistralrs_sdk.quant.device_kinds import DENSE_ROWS, FLOAT8, INT8, kind_of, obstacle
from mistralrs_sdk.quant.device_method import DeviceMethod
from mistralrs_sdk.quant.isq import resolve_cuda_type, resolve_type

logger = logging.getLogger("mistralrs_sdk.engine")

_LEAST = (8, 0)
_LEAST_FLOAT8 = (8, 9)


def has_device_kernels(device: torch.device) -> bool:
    """Whether weights are quantised there to the forms of a GPU, not to GGML blocks."""
    return device.type == "cuda"


def asked_target(config: EngineConfig, device: torch.device) -> Target:
    """What the settings quantise, if this device computes with the result.

    Raises:
        UnsupportedError: it does not; the message names settings, device and a way out.
    """
    topology = () if config.topology is None else config.topology.entries
    layers = [layer.isq for _, layer in topology if layer.isq is not None]
    asked = {"isq": [] if config.isq is None else [config.isq], "topology": layers}
    for name, types in asked.items():
        if types:
            refuse_quantising(name, types, device=device, dtype=config.dtype)
    on_cuda = has_device_kernels(device)
    return quantise_target(config.isq, config.topology, on_cuda=on_cuda)


def refuse_quantising(
    asked: str, types: Iterable[Isq], *, device: torch.device, dtype: ModelDType
) -> None:
    """Refuse what `asked` names unless weights of these types can be computed with.

    Raises:
        UnsupportedError: they cannot, on this device, in this dtype or without native kernels.
    """
    if has_device_kernels(device):
        _refuse_on_gpu(asked, types, device=device, dtype=dtype)
        return
    if device.type != "cpu":
        raise UnsupportedError(
            f"{asked}: quantised weights are computed with on a CPU and on CUDA only, and the "
            f"device is {device}; leave it out, or use with_force_cpu()"
        )
    for each in types:
        _resolve(asked, each, on_cuda=False)
    if dtype is not ModelDType.F32:
        raise UnsupportedError(
            f"{asked}: products with quantised weights are float32, and dtype is "
            f'{dtype.value}; leave dtype out, or use with_dtype("f32")'
        )
    if not native.available():
        raise UnsupportedError(
            f"{asked}: quantised weights need the native kernels, and there are none: "
            f"{native.reason()}"
        )


def packing_of(
    checkpoint: Checkpoint, config: EngineConfig, device: torch.device, origins: dict[str, str]
) -> Packing:
    """How weights are kept that nobody asked to quantise.

    The dtype was chosen before, and its origin says who did.
    """
    automatic = origins["dtype"] != "user"
    if has_device_kernels(device):
        if (
            not automatic
            or config.dtype is not ModelDType.BF16
            or config.device_mapping is not None
        ):
            return "none"
        stored = {kept_type(source, "device") for source in checkpoint.tensors.values()} - {None}
        against = [_against(name, device) for name in stored if name is not None]
        reasons = [why for why in against if why is not None]
        for why in reasons:
            logger.warning("what is quantised in the checkpoint is made dense: %s", why)
        return "none" if reasons else "device"
    if device.type != "cpu" or not automatic:
        return "none"  # asking for native kernels may compile them
    packing = choose_packing(
        device=device.type,
        automatic=automatic,
        native=native.reason() if native.available() else None,
        half=half.available(),
    )
    if packing != "none":
        origins["dtype"] += ", of activations: the weights are packed"
    return packing


def refuse_places(forms: Mapping[str, Form], device_of: Callable[[str], torch.device]) -> None:
    """Refuse weights that were to be quantised where nothing computes with them.

    Raises:
        UnsupportedError: naming the weight, its form and the device.
    """
    for name, form in forms.items():
        if not isinstance(form.method, DeviceMethod):
            continue
        device = device_of(name)
        for part in form.method.parts:
            why = "only a GPU computes with it"
            if has_device_kernels(device):
                why = _against(part.kind.name, device)
            if why is not None:
                raise UnsupportedError(
                    f"{name} would be {part.kind.name} on {device}: {why}; leave it out of isq and "
                    "topology, or give device_mapping to other devices"
                )


def warn_of_expanded(
    forms: Mapping[str, Form], tensors: Mapping[str, TensorSource], device: torch.device
) -> None:
    """Say once which weights take more memory on a GPU than in the checkpoint."""
    if not has_device_kernels(device):
        return
    dense: Counter[str] = Counter()
    stored = 0
    for form in forms.values():
        for part, name in zip(form.parts, form.types, strict=True):
            source = tensors[part]
            kind = source.quantised if source.blocks is None else source.blocks.ggml_type
            if kind is not None:
                stored += 1
                dense[kind] += form.method is None or name == DENSE_ROWS.name
    if dense.total():
        shown = ", ".join(f"{kind} x{count}" for kind, count in dense.most_common() if count)
        logger.warning(
            "%d of %d quantised weights of the checkpoint are made dense on %s: %s",
            dense.total(),
            stored,
            device,
            shown,
        )


def _refuse_on_gpu(
    asked: str, types: Iterable[Isq], *, device: torch.device, dtype: ModelDType
) -> None:
    wanted = {_resolve(asked, each, on_cuda=True) for each in types}
    names = sorted({*wanted, INT8.name})  # which takes the place of what does not fit
    for name in names:
        why = _too_old(name, device)
        if why is not None:
            way_out = "use 8 or 4" if name == FLOAT8.name else "leave it out"
            raise UnsupportedError(f"{asked}: {why}; {way_out}, or use with_force_cpu()")
    if dtype is not ModelDType.BF16:
        raise UnsupportedError(
            f"{asked}: products with quantised weights are bfloat16 on {device}, and dtype is "
            f'{dtype.value}; leave dtype out, or use with_dtype("bf16")'
        )
    for name in names:
        why = _against(name, device)
        if why is not None:
            raise UnsupportedError(f"{asked}: {why}; leave it out, or use with_force_cpu()")


def _resolve(asked: str, isq: Isq, *, on_cuda: bool) -> str:
    """The name of the type or form; the error says what `asked` for it."""
    try:
        return resolve_cuda_type(isq) if on_cuda else resolve_type(isq)
    except UnsupportedError as error:
        where = "" if asked == "isq" else f"{asked}: "
        raise UnsupportedError(f"{where}{error}") from None


def _against(name: str, device: torch.device) -> str | None:
    """Why a GPU does not compute with a form; None if it does."""
    too_old = _too_old(name, device)
    if too_old is not None:
        return too_old
    kind = kind_of(name)
    assert kind is not None, "a form of a GPU"
    why = obstacle(kind, device)
    return None if why is None else f"{name} cannot be had on {device}: {why}"


def _too_old(name: str, device: torch.device) -> str | None:
    least = _LEAST_FLOAT8 if name == FLOAT8.name else _LEAST
    found = torch.cuda.get_device_capability(device)
    if found >= least:
        return None
    needed, has = (".".join(map(str, version)) for version in (least, found))
    return f"{name} needs a GPU of compute capability {needed}, and {device} has {has}"
