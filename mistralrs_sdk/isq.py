"""What weights can be quantised to while they are loaded: types by name, or a number of bits."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mistralrs_sdk.errors import ConfigError, UnsupportedError


class IsqType(enum.StrEnum):
    """A way to store quantised weights; read from text in any case, such as "q4k" or "Q4_K"."""

    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q8_1 = "q8_1"
    Q2K = "q2k"
    Q3K = "q3k"
    Q4K = "q4k"
    Q5K = "q5k"
    Q6K = "q6k"
    Q8K = "q8k"
    HQQ8 = "hqq8"
    HQQ4 = "hqq4"
    F8E4M3 = "f8e4m3"
    AFQ8 = "afq8"
    AFQ6 = "afq6"
    AFQ4 = "afq4"
    AFQ3 = "afq3"
    AFQ2 = "afq2"
    F8Q8 = "f8q8"
    MXFP4 = "mxfp4"

    @classmethod
    def _missing_(cls, value: object) -> IsqType | None:
        return _NAMES.get(value.strip().lower()) if isinstance(value, str) else None


_NAMES = (
    {kind.value: kind for kind in IsqType}
    | {f"{kind.value[:-1]}_k": kind for kind in IsqType if kind.value.endswith("k")}
    | {"fp8": IsqType.F8E4M3}
)
"""What each type may be called: its value, and as GGUF and mistral.rs also write it."""


class IsqBits(enum.IntEnum):
    """Bits per weight; the type is chosen for the device. Read from "2" to "8" too."""

    TWO = 2
    THREE = 3
    FOUR = 4
    FIVE = 5
    SIX = 6
    EIGHT = 8
    Two = TWO  # mistral.rs' names
    Three = THREE
    Four = FOUR
    Five = FIVE
    Six = SIX
    Eight = EIGHT

    @classmethod
    def _missing_(cls, value: object) -> IsqBits | None:
        text = value.strip() if isinstance(value, str) else ""
        return next((bits for bits in cls if text == str(bits.value)), None)


Isq = IsqType | IsqBits

TYPE_OF_BITS: Mapping[IsqBits, IsqType] = MappingProxyType(
    {
        IsqBits.TWO: IsqType.Q2K,
        IsqBits.THREE: IsqType.Q3K,
        IsqBits.FOUR: IsqType.Q4K,
        IsqBits.FIVE: IsqType.Q5K,
        IsqBits.SIX: IsqType.Q6K,
        IsqBits.EIGHT: IsqType.Q8_0,
    }
)
"""What a number of bits means on a CPU and on CUDA, but for CUDA's 8: see `CUDA_BITS`."""

CUDA_BITS = (IsqBits.FOUR, IsqBits.EIGHT)
"""The numbers of bits that CUDA computes with; 8 is a form of its own there, with no type's name:
int8 with a scale for each row."""

CUDA_TYPES = (IsqType.Q4_0, IsqType.Q4_1, IsqType.Q4K, IsqType.HQQ4, IsqType.F8E4M3)
"""The types that CUDA computes with."""

_NEAREST = {
    IsqType.Q8_1: IsqType.Q8_0,
    IsqType.Q8K: IsqType.Q8_0,
    IsqType.F8Q8: IsqType.Q8_0,
    IsqType.AFQ8: IsqType.Q8_0,
    IsqType.AFQ6: IsqType.Q6K,
    IsqType.AFQ4: IsqType.Q4K,
    IsqType.AFQ3: IsqType.Q3K,
    IsqType.AFQ2: IsqType.Q2K,
    IsqType.MXFP4: IsqType.Q4K,
}
"""The types that are only known by name, and for each the nearest that is computed with."""

RUNNABLE_TYPES = tuple(
    kind for kind in IsqType if kind not in _NEAREST and kind is not IsqType.F8E4M3
)
"""The types that weights can be quantised to on a CPU."""

_ALL_TYPES = (*RUNNABLE_TYPES, IsqType.F8E4M3)

IMATRIX_TYPES = frozenset({IsqType.Q2K, IsqType.Q3K, IsqType.Q4K, IsqType.Q5K, IsqType.Q6K})
"""The types whose quantiser weighs errors by an importance matrix."""


def parse_isq(value: Any) -> Isq:
    """Read a type or a number of bits: a member, or its text in any case.

    Raises:
        ConfigError: it is neither.
        UnsupportedError: it is a type that no device computes with here; the nearest is named.
    """
    isq = _read(value)
    if isinstance(isq, IsqType) and isq in _NEAREST:
        raise UnsupportedError(
            f"isq ({isq.value}) is not supported: use {_NEAREST[isq].value}, the nearest of "
            f"{', '.join(_ALL_TYPES)}"
        )
    return isq


def isq_type(isq: Isq) -> IsqType:
    """The type itself, or the one that a number of bits means."""
    return TYPE_OF_BITS[isq] if isinstance(isq, IsqBits) else isq


def _read(value: Any) -> Isq:
    if isinstance(value, IsqType | IsqBits):
        return value
    if isinstance(value, str) or type(value) is int:  # 4.0 would equal a member of IsqBits
        for kind in (IsqBits, IsqType):
            with contextlib.suppress(ValueError):
                return kind(value)
    raise ConfigError(
        f"isq ({value!r}) must be 2, 3, 4, 5, 6 or 8 bits, or one of {', '.join(_ALL_TYPES)}"
    )
