"""Environment variables that are on or off."""

from __future__ import annotations

from collections.abc import Mapping

from mistralrs_sdk.errors import ConfigError

_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off")


def switched_on(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to anything but blank or off, as mistral.rs reads its own."""
    return environ.get(name, "").strip().lower() not in ("", *_OFF)


def read_switch(environ: Mapping[str, str], name: str, *, default: bool, unset: str) -> bool:
    """What a switch says; `default` if it is unset or blank. `unset` says what that is for.

    Raises: ConfigError for a value that is neither on nor off.
    """
    text = environ.get(name, "").strip().lower()
    if text and text not in _ON + _OFF:
        raise ConfigError(
            f"{name} ({environ[name]!r}) must be one of {', '.join(_ON + _OFF)}; "
            f"unset it for {unset}"
        )
    return text in _ON if text else default
