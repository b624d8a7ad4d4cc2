"""What code for the `mistralrs` package may name and this package does not do: never ignored."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, ClassVar, NoReturn

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


def unsupported_method(name: str, way_out: str) -> Callable[..., NoReturn]:
    """A method that exists so that calling it says why it does nothing, whatever it is given.

    `await` before the call changes nothing. The method raises `UnsupportedError`.
    """

    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(f"{name} is not supported: {way_out}")

    method.__name__ = name
    method.__doc__ = f"Not done: `UnsupportedError`. {way_out[0].upper()}{way_out[1:]}."
    return method


class _Refusing(type):
    """Whatever is looked up on such a class, `AudioInput.read_wav` for example, is refused too."""

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # what Python itself looks for
        raise UnsupportedError(f"{cls.__name__}.{name} is not supported: {cls._way_out}")


class UnsupportedName(metaclass=_Refusing):
    """A class that exists so that using it says why it does nothing.

    Raises:
        UnsupportedError: it is made, or something is looked up on it.
    """

    _way_out: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(f"{type(self).__name__} is not supported: {self._way_out}")
