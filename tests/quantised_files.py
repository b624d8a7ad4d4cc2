"""Writes weights the way quantisers do, number by number from the definition of each format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mistralrs_sdk.loading.checkpoint import Checkpoint
from mistralrs_sdk.loading.safetensors import open_folder
from tests.checkpoint_files import config_for, write_folder

LAYER = "model.layers.0.self_attn.o_proj"
SHAPE = (264, 96)  # more rows than are dequantised at once
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@attrs.frozen(kw_only=True)
class Numbers:
    """A weight of small integers: codes [out, in], scales and zeros [out, groups]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor
    """The group of each column."""

    @property
    def weight(self) -> Tensor:
        """What they stand for, computed in float64."""
        codes, zeros, scales = (t.double() for t in (self.codes, self.zeros, self.scales))
        return ((codes - zeros[:, self.group_of]) * scales[:, self.group_of]).float()


def random_numbers(
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int = -1,
    symmetric: bool = False,
    shuffled: bool = False,
) -> Numbers:
    """Random codes and scales; `shuffled` spreads the columns of a group over the row."""
    generator = torch.Generator().manual_seed(bits * 1000 + group_size)
    out, width = shape
    size = width if group_size == -1 else group_size
    groups, top = math.ceil(width / size), 2**bits
    zeros = torch.randint(0, top, (out, groups), generator=generator)
    group_of = torch.arange(width) // size
    return Numbers(
        codes=torch.randint(0, top, shape, generator=generator),
        scales=torch.rand((out, groups), generator=generator).half() + 0.01,
        zeros=torch.full_like(zeros, top // 2) if symmetric else zeros,
        group_of=group_of[torch.randperm(width, generator=generator)] if shuffled else group_of,
    )


def rounded(weight: Tensor, *, bits: int, group_size: int, shuffled: bool = False) -> Numbers:
    """A float weight rounded to codes around a zero for each row and group."""
    blank = random_numbers(
        (weight.shape[0], weight.shape[1]), bits=bits, group_size=group_size, shuffled=shuffled
    )
    groups = [weight[:, blank.group_of == g] for g in range(blank.scales.shape[1])]
    low = torch.stack([group.amin(1).clamp(max=0) for group in groups], 1)
    high = torch.stack([group.amax(1).clamp(min=0) for group in groups], 1)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1).long()
    codes = (weight / scales[:, blank.group_of]).round() + zeros[:, blank.group_of]
    codes = codes.clamp(0, 2**bits - 1).long()
    return attrs.evolve(blank, codes=codes, scales=scales, zeros=zeros)


def pack(numbers: Tensor, bits: int, axis: int) -> Tensor:
    """Numbers along `axis` as one long integer, cut into words of 32 bits: int32."""
    lines = numbers.movedim(axis, -1).tolist()
    words = [_words(line, bits) for line in lines]
    return torch.tensor(words, dtype=torch.int32).movedim(-1, axis).contiguous()


def gptq_parts(numbers: Numbers, *, bits: int, less_one: bool = True) -> dict[str, Tensor]:
    """Everything transposed; version 1 stores zeros less one."""
    zeros = (numbers.zeros - int(less_one)) % 2**bits
    return {
        "qweight": pack(numbers.codes.t(), bits, 0),
        "qzeros": pack(zeros.t(), bits, 1),
        "scales": numbers.scales.t().contiguous(),
        "g_idx": numbers.group_of.int(),
    }


def awq_parts(numbers: Numbers) -> dict[str, Tensor]:
    """Four bits, eight outputs to a word in AWQ's order."""

    def pack_outputs(values: Tensor) -> Tensor:
        return pack(values.t().reshape(values.shape[1], -1, 8)[..., _AWQ_ORDER].flatten(1), 4, 1)

    return {
        "qweight": pack_outputs(numbers.codes),
        "qzeros": pack_outputs(numbers.zeros),
        "scales": numbers.scales.t().contiguous(),
    }


def float8(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random numbers as float8_e4m3fn and, decoded from their bits, as float32."""
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(0, 256, shape, generator=generator)
    codes[codes % 128 == 127] = 0  # those are no numbers
    table = [_e4m3(code) for code in range(256)]
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), torch.tensor(table)[codes]


def opened(
    folder: Path,
    settings: Mapping[str, Any] | None,
    parts: Mapping[str, Tensor],
    **config: Any,
) -> Checkpoint:
    """A checkpoint of one layer."""
    tensors = {f"{LAYER}.{leaf}": tensor for leaf, tensor in parts.items()}
    write_folder(folder, config_for("llama", quantization_config=settings, **config), tensors)
    return open_folder(folder, name="tiny")


def compressed(format_: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of one group, by compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
    }


def _e4m3(code: int) -> float:
    """One bit of sign, four of exponent, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def _words(numbers: list[int], bits: int) -> list[int]:
    line = sum(number << bits * i for i, number in enumerate(numbers))
    words = [line >> 32 * i & 0xFFFFFFFF for i in range(math.ceil(len(numbers) * bits / 32))]
    return [word - 2**32 if word >= 2**31 else word for word in words]
