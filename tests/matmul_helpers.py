"""Random weights as GGUF stores them, and what they mean, for the tests of the matmul kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from mistralrs_sdk.kernels import matmul
from mistralrs_sdk.quant.ggml import GGML_TYPES, GgmlType, dequantise

TYPES = {kind.name: kind for kind in GGML_TYPES.values()} | {"HQQ8": GgmlType(0, "HQQ8", 32, 36)}
QUANTISED = tuple(name for name in matmul.PACKABLE if name != "F16")
SCALES = {
    "Q4_0": (0, 1),
    "Q4_1": (0, 2),
    "Q5_0": (0, 1),
    "Q5_1": (0, 2),
    "Q8_0": (0, 1),
    "HQQ8": (0, 2),
    "Q2_K": (80, 2),
    "Q3_K": (108, 1),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208, 1),
}
"""Where in a block its float16 scale is, and whether a minimum follows."""


def reference(raw: Tensor, ggml_type: str, shape: tuple[int, int]) -> Tensor:
    """The weight in float32."""
    if ggml_type != "HQQ8":
        return dequantise(raw, TYPES[ggml_type], shape)
    blocks = raw.view(-1, 36)
    scales = blocks[:, :4].view(torch.float16).float()
    return (blocks[:, 4:].view(torch.int8) * scales[:, :1] + scales[:, 1:]).view(shape)


def set_scales(blocks: Tensor, ggml_type: str, scales: Tensor) -> None:
    """Give each block its scale and, if the type has one, its minimum."""
    at, count = SCALES[ggml_type]
    blocks[:, at : at + 2 * count] = scales[:, :count].half().contiguous().view(torch.uint8)


def stored(ggml_type: str, n: int, k: int, *, seed: int = 0, scale: float = 0.01) -> Tensor:
    """Bytes of a random weight [n, k] as GGUF stores it."""
    generator = torch.Generator().manual_seed(seed)
    kind = TYPES[ggml_type]
    if ggml_type == "F16":
        values = torch.randn(n, k, generator=generator) * scale
        return values.half().view(torch.uint8).reshape(-1)
    blocks = torch.randint(
        0,
        256,
        (n * k // kind.block_size, kind.block_bytes),
        generator=generator,
        dtype=torch.uint8,
    )
    scales = (torch.rand(len(blocks), 2, generator=generator) + 0.1) * scale
    scales[:, 0] *= torch.randint(0, 2, (len(blocks),), generator=generator) * 2 - 1
    if kind.block_size == 32:
        scales[:, 1] *= -12  # the minimum of the codes' range, or near it
    set_scales(blocks, ggml_type, scales)
    return blocks.reshape(-1)


def make(
    ggml_type: str, n: int, k: int, *, seed: int = 0, scale: float = 0.01
) -> tuple[matmul.PackedWeight, Tensor]:
    """A packed weight, and the same dequantised."""
    raw = stored(ggml_type, n, k, seed=seed, scale=scale)
    return matmul.pack(raw, ggml_type, (n, k)), reference(raw, ggml_type, (n, k))


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
