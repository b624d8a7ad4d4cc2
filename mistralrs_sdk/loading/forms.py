"""In which form each weight of a checkpoint is kept, chosen before any is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import attrs
import torch
from torch import nn

from mistralrs_sdk.isq import Isq
from mistralrs_sdk.kernels.matmul import MOST_PEAKS, PACKABLE, PEAKS
from mistralrs_sdk.layers.embedding import Embedding
from mistralrs_sdk.loading.checkpoint import Checkpoint, TensorSource
from mistralrs_sdk.models.decoder import CausalLM
from mistralrs_sdk.quant import device_kinds
from mistralrs_sdk.quant.device_method import DeviceMethod
from mistralrs_sdk.quant.half import HALF, HalfMethod
from mistralrs_sdk.quant.int4_groups import Int4Groups, is_int4
from mistralrs_sdk.quant.isq import layer_of, target_type
from mistralrs_sdk.quant.packed import PackedMethod
from mistralrs_sdk.quant.quantise import fallback
from mistralrs_sdk.topology import Topology

Packing = Literal["none", "half", "native", "device"]
"""What becomes of weights that nobody asked to quantise: dense in the model's dtype; float16 by
torch; blocks as they are stored and floats as float16, by the native kernels; or dense but for what
is stored in a form that a GPU multiplies by."""

Target = Callable[[str, int], "str | None"]
"""The type that a weight is quantised to, by its module's name in the checkpoint and its columns;
None if nobody asked for one."""


@attrs.frozen(kw_only=True)
class Form:
    """How one parameter is kept."""

    parts: tuple[str, ...]
    """The tensors of the checkpoint it is put together from, in order."""
    method: PackedMethod | HalfMethod | DeviceMethod | None
    """None: a tensor in the model's dtype."""
    types: tuple[str, ...]
    """The type of each part: a GGML name, a GPU's form, or the model's dtype such as "f32"."""
    num_bytes: int
    num_values: int
    is_matrix: bool
    """Whether it is the weight of a linear layer or an embedding."""


def choose_packing(*, device: str, automatic: bool, native: str | None, half: bool) -> Packing:
    """How weights are kept by themselves, but for a GPU that keeps what is stored.

    `automatic` says that the user left the dtype open; `native` names the instructions of the
    native kernels, None without them; `half` whether torch multiplies by float16 weights.
    """
    if device != "cpu" or not automatic:
        return "none"
    if native is not None and native != "plain C++":  # which is slower than torch
        return "native"
    return "half" if half else "none"


def quantise_target(isq: Isq | None, topology: Topology | None, *, on_cuda: bool = False) -> Target:
    """What the settings ask for; a type whose blocks do not fill the rows gives way to a similar
    one, as `quantise.fallback` and `device_kinds.fallback` say."""
    fitting = device_kinds.fallback if on_cuda else fallback

    def target(name: str, columns: int) -> str | None:
        wanted = target_type(name, layer_of(name), isq=isq, topology=topology, on_cuda=on_cuda)
        return None if wanted is None else fitting(wanted, columns)

    return target


def choose_forms(
    model: CausalLM,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    packing: Packing,
    target: Target = lambda name, columns: None,
) -> dict[str, Form]:
    """The form of each parameter of `model`, whose parameters may be on "meta"."""
    matrices = {
        f"{name}.weight": module for name, module in model.named_modules() if _has_method(module)
    }
    forms = {}
    for name, parts in parts_of_parameters(model).items():
        parameter = model.get_parameter(name)
        form = Form(
            parts=tuple(parts),
            method=None,
            types=(),
            num_bytes=0,
            num_values=parameter.numel(),
            is_matrix=name in matrices,
        )
        forms[name] = _dense(form, dtype)
        module = matrices.get(name)
        if module is None:
            continue
        types = [
            target(part.removesuffix(".weight"), checkpoint.tensors[part].shape[1])
            or kept_type(checkpoint.tensors[part], packing)
            for part in parts
        ]
        if any(kind is not None and device_kinds.kind_of(kind) for kind in types):
            forms[name] = _on_device(forms[name], types, checkpoint)
        elif any(types):  # parts nobody asked to quantise lie beside the others in float16
            forms[name] = _packed(forms[name], [kind or "F16" for kind in types], checkpoint)
        elif packing == "half" and not isinstance(module, Embedding):
            size = HALF.num_bytes(parameter.numel())
            types = ("F16",) * len(parts)
            forms[name] = attrs.evolve(forms[name], method=HALF, types=types, num_bytes=size)
    return forms


def forms_as_kept(
    forms: Mapping[str, Form], model: CausalLM, *, dtype: torch.dtype
) -> dict[str, Form]:
    """The forms that the weights of a loaded model have: what did not fit float16 is dense."""
    kept = dict(forms)
    for name, form in forms.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if form.method is not None and module.method != form.method:
            kept[name] = _dense(form, dtype)
    return kept


def describe_forms(forms: Iterable[Form]) -> str:
    """The types of the matrices and how many of each there are, most values first."""
    values: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for form in forms:
        for kind in form.types if form.is_matrix else ():
            values[kind] += form.num_values // len(form.types)
            counts[kind] += 1
    return ", ".join(f"{kind} x{counts[kind]}" for kind, _ in values.most_common())


def parts_of_parameters(model: CausalLM) -> dict[str, list[str]]:
    """Map each parameter to the checkpoint tensors it is put together from."""
    packed = model.packed_modules
    result = {}
    for name, _ in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        parent, _, short = module.rpartition(".")
        result[name] = [f"{parent}.{part}.{leaf}" for part in packed.get(short, ())] or [name]
    return result


def total_bytes(forms: Mapping[str, Form]) -> int:
    """What all weights take."""
    return sum(form.num_bytes for form in forms.values())


def kept_type(source: TensorSource, packing: Packing) -> str | None:
    """The type a weight is kept in if nobody asks for another; None for a dense one."""
    blocks = source.blocks
    if packing == "device":
        if source.codes is not None:
            return source.codes.kind
        return Int4Groups(blocks.ggml_type).name if blocks and is_int4(blocks.ggml_type) else None
    if packing != "native":
        return None
    return blocks.ggml_type if blocks is not None and blocks.ggml_type in PACKABLE else "F16"


_ENDS = ("lm_head.weight", "model.embed_tokens.weight")
"""The head, also where it is the embedding: errors there go straight into the scores, and of a
prompt it sees one row only, so more of its inputs are exact."""


def _has_method(module: nn.Module) -> bool:
    return hasattr(module, "method")


def _dense(form: Form, dtype: torch.dtype) -> Form:
    plain = str(dtype).removeprefix("torch.").replace("float", "f")
    size = form.num_values * dtype.itemsize
    return attrs.evolve(form, method=None, types=(plain,) * len(form.parts), num_bytes=size)


def _packed(form: Form, types: list[str], checkpoint: Checkpoint) -> Form:
    shapes = [checkpoint.tensors[part].shape for part in form.parts]
    counts = [shape[0] for shape in shapes]
    method = PackedMethod.of(
        list(zip(types, counts, strict=True)),
        peaks=MOST_PEAKS if form.parts[0] in _ENDS else PEAKS,
    )
    size = method.num_bytes(shapes[0][1])
    return attrs.evolve(form, method=method, types=tuple(types), num_bytes=size)


def _on_device(form: Form, types: list[str | None], checkpoint: Checkpoint) -> Form:
    shapes = [checkpoint.tensors[part].shape for part in form.parts]
    names = [name or device_kinds.DENSE_ROWS.name for name in types]
    kinds = [device_kinds.kind_of(name) for name in names]
    rows = zip(kinds, shapes, strict=True)
    method = DeviceMethod.of([(kind, shape[0]) for kind, shape in rows if kind is not None])
    size = method.num_bytes(shapes[0][1])
    return attrs.evolve(form, method=method, types=tuple(names), num_bytes=size)
