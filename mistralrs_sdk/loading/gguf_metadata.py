"""The key-value pairs of a GGUF file, read with their types checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mistralrs_sdk.errors import ModelLoadError, UnsupportedError


@attrs.frozen
class GgufMetadata:
    """Key-value pairs of a GGUF file; reading one checks its type and names the key in errors."""

    values: Mapping[str, Any] = attrs.field(repr=False)
    source: str
    """The file, for messages."""

    def __contains__(self, key: object) -> bool:
        return key in self.values

    def integer(self, key: str) -> int | None:
        """A whole number; None if absent. A list of equal numbers counts as one."""
        value = self.values.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            if len(set(value)) > 1:
                raise UnsupportedError(
                    f"{self.source}: {key} differs from layer to layer ({_shorten(value)}); "
                    f"only models with equal layers are supported"
                )
            value = value[0]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str) -> float | None:
        """A finite number; None if absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def text(self, key: str) -> str | None:
        """A string; None if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        """True or false; None if absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def sequence(self, key: str) -> Sequence[Any] | None:
        """An array; None if absent."""
        value = self.values.get(key)
        if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise self._wrong(key, value, "an array")
        return value

    def positive(self, key: str) -> int:
        """A whole number above zero that must be there."""
        value = self.integer(key)
        if value is None:
            raise self.missing(key)
        if value < 1:
            raise self._wrong(key, value, "at least 1")
        return value

    def missing(self, key: str) -> ModelLoadError:
        """The error for a key that must be there."""
        return ModelLoadError(
            f"{self.source}: the metadata has no {key}; the file is incomplete: "
            f"convert the model again, or download another copy"
        )

    def _wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {key} is {_shorten(value)}, not {wanted}")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
