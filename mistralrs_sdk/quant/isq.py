"""Which type each weight is quantised to, from the settings, the device and the weight's name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.isq import (
    CUDA_BITS,
    CUDA_TYPES,
    Isq,
    IsqBits,
    IsqType,
    isq_type,
    parse_isq,
)
from mistralrs_sdk.topology import Topology

_GGML_NAMES = {
    IsqType.Q2K: "Q2_K",
    IsqType.Q3K: "Q3_K",
    IsqType.Q4K: "Q4_K",
    IsqType.Q5K: "Q5_K",
    IsqType.Q6K: "Q6_K",
}
_PROMOTED = {
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q4_0", "Q4_1"), "Q6_K"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"), "Q8_0"),
    **dict.fromkeys(("HQQ4", "HQQ8"), "HQQ8"),
    **dict.fromkeys(("INT4", "INT8"), "INT8"),
    "F8E4M3": "F8E4M3",
}
"""What embedding and head get instead: every token passes through them, and errors there cost most.

As mistral.rs; it says nothing of HQQ4, which here becomes the other type of its kind, and nothing
of the last two lines, which are CUDA's.
"""
_ENDS = ("embed_tokens", "lm_head")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def target_type(
    name: str,
    layer: int | None,
    *,
    isq: Isq | None,
    topology: Topology | None,
    on_cuda: bool = False,
) -> str | None:
    """The type a matrix is quantised to, or None: it stays as it is.

    `name` is the module's in a Hugging Face checkpoint, such as "model.layers.3.mlp.up_proj", of a
    fused module the name of a part; `layer` is None outside the layers. A topology that has a type
    for the matrix wins over `isq`; otherwise embedding and head get a wider type than asked for.
    """
    resolve = resolve_cuda_type if on_cuda else resolve_type
    own = None if topology is None else topology.isq_of(name, layer)
    if own is not None:
        return resolve(own)
    if isq is None:
        return None
    wanted = resolve(isq)
    return _PROMOTED[wanted.partition("/")[0]] if name.rpartition(".")[2] in _ENDS else wanted


def resolve_type(isq: Isq) -> str:
    """The type's GGML name on a CPU, such as "Q4_K"; HQQ4 and HQQ8 keep theirs.

    Raises:
        UnsupportedError: nothing computes with it there; the nearest type is named.
    """
    kind = isq_type(parse_isq(isq))
    if kind is IsqType.F8E4M3:
        raise UnsupportedError(
            f"isq ({kind.value}) is computed with on CUDA only: use {IsqType.Q8_0.value}, the "
            "nearest that a CPU computes with"
        )
    return _GGML_NAMES.get(kind, kind.value.upper())


def resolve_cuda_type(isq: Isq) -> str:
    """The form's name on CUDA: "INT4/32 (Q4_K)", "INT8" or "F8E4M3".

    The types of 4 bits keep their numbers, which are those of int4 in groups of 32; Q8_0's are not
    those of int8 with a scale for each row, so that 8 bits have to be asked for as a number.

    Raises:
        UnsupportedError: nothing computes with it there; the nearest is named.
    """
    asked = parse_isq(isq)
    if asked is IsqBits.EIGHT:
        return "INT8"
    kind = isq_type(asked)
    if asked not in (*CUDA_BITS, *CUDA_TYPES):
        bits = int(asked) if isinstance(asked, IsqBits) else _bits_of(kind)
        nearest = IsqBits.FOUR if bits <= IsqBits.FOUR else IsqBits.EIGHT
        known = ", ".join(str(each.value) for each in (*CUDA_BITS, *CUDA_TYPES))
        raise UnsupportedError(
            f"isq ({asked.value}) is not computed with on CUDA: use {nearest.value}, the nearest "
            f"of {known}"
        )
    if kind is IsqType.F8E4M3:
        return "F8E4M3"
    return f"INT4/32 ({resolve_type(kind)})"


def _bits_of(kind: IsqType) -> int:
    """How many bits a type's name says it has."""
    return next(int(letter) for letter in kind.value if letter.isdigit())


def layer_of(name: str) -> int | None:
    """The number of the layer a module is in, from its name; None outside the layers."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def refuse_unused(topology: Topology, names: Iterable[str]) -> None:
    """Refuse entries that are about no matrix of the model; `names` has the matrices' modules.

    Raises:
        ConfigError: there are such entries; a range may end beyond the last layer.
    """
    modules = [(name, layer_of(name)) for name in names]
    unused = topology.unused(modules)
    if unused:
        layers = [layer for _, layer in modules if layer is not None]
        shown = f"layers 0 to {max(layers)} and " if layers else ""
        others = ", ".join(name for name, layer in modules if layer is None)
        raise ConfigError(
            f"topology: {', '.join(unused)} is about nothing in this model, which has {shown}"
            f"{others or 'no matrix outside them'}; correct the entry or leave it out"
        )
