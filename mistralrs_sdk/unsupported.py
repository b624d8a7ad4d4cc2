"""What code for the `mistralrs` package may name and this package does not do: never ignored."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import attrs

from mistralrs_sdk.errors import UnsupportedError


def refuse(owner: str, name: str, value: Any) -> None:
    """Refuse an argument that would be ignored; None, False and what is empty ask for nothing.

    Raises:
        UnsupportedError: `value` asks for something.
    """
    if value is None or value is False or (isinstance(value, Sized) and len(value) == 0):
        return
    raise UnsupportedError(f"{owner}({name}={value!r:.80}) is not supported: leave {name} out")


def unsupported() -> Any:
    """A field of an attrs class that must ask for nothing."""

    def check(instance: Any, field: Any, value: Any) -> None:
        refuse(type(instance).__qualname__, field.name, value)

    return attrs.field(default=None, kw_only=True, validator=check, repr=False)
