"""Which GGML type each weight is quantised to, from the settings and the weight's name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mistralrs_sdk.errors import ConfigError
from mistralrs_sdk.isq import Isq, IsqType, isq_type, parse_isq
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
}
"""What embedding and head get instead: every token passes through them, and errors there cost most.

As mistral.rs; it says nothing of HQQ4, which here becomes the other type of its kind.
"""
_ENDS = ("embed_tokens", "lm_head")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def target_type(
    name: str, layer: int | None, *, isq: Isq | None, topology: Topology | None
) -> str | None:
    """The GGML type a matrix is quantised to, or None: it stays as it is.

    `name` is the module's in a Hugging Face checkpoint, such as "model.layers.3.mlp.up_proj", of a
    fused module the name of a part; `layer` is None outside the layers. A topology that has a type
    for the matrix wins over `isq`; otherwise embedding and head get a wider type than asked for.
    """
    own = None if topology is None else topology.isq_of(name, layer)
    if own is not None:
        return resolve_type(own)
    if isq is None:
        return None
    wanted = resolve_type(isq)
    return _PROMOTED[wanted] if name.rpartition(".")[2] in _ENDS else wanted


def resolve_type(isq: Isq) -> str:
    """The type's GGML name, such as "Q4_K"; HQQ4 and HQQ8 keep theirs.

    Raises:
        UnsupportedError: nothing here computes with it; the nearest type is named.
    """
    kind = isq_type(parse_isq(isq))
    return _GGML_NAMES.get(kind, kind.value.upper())


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
