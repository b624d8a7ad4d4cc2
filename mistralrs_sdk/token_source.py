"""Where the token for the Hugging Face hub comes from."""

from __future__ import annotations

import os
from typing import Literal

import attrs

from mistralrs_sdk.errors import ConfigError

_TokenKind = Literal["literal", "env", "path", "cache", "none"]
_HUB_TOKEN_VARIABLE = "HUGGING_FACE_HUB_TOKEN"


@attrs.frozen(repr=False)
class TokenSource:
    """Where the Hugging Face token comes from; made by a class method or `parse`.

    Its repr never shows a token. A pickled `Literal` does hold it.

    Raises:
        ConfigError: a value is empty or no text.
    """

    kind: _TokenKind
    value: str = ""

    @classmethod
    def Literal(cls, token: str) -> TokenSource:  # noqa: N802 (mistral.rs' name)
        """This token."""
        return cls("literal", token)

    @classmethod
    def EnvVar(cls, name: str = _HUB_TOKEN_VARIABLE) -> TokenSource:  # noqa: N802 (mistral.rs' name)
        """The token in that environment variable, read when the model is built."""
        return cls("env", name)

    @classmethod
    def Path(cls, path: str | os.PathLike[str]) -> TokenSource:  # noqa: N802 (mistral.rs' name)
        """The token in that file, read when the model is built."""
        return cls("path", os.fspath(path))

    @classmethod
    def CacheToken(cls) -> TokenSource:  # noqa: N802 (mistral.rs' name)
        """HF_TOKEN or the token of `hf auth login` if there is one; the default."""
        return cls("cache")

    @classmethod
    def None_(cls) -> TokenSource:  # noqa: N802 (None is taken)
        """No token, even if one is stored."""
        return cls("none")

    @classmethod
    def parse(cls, text: str) -> TokenSource:
        """Read `literal:TOKEN`, `env:NAME`, `env`, `path:FILE`, `cache` or `none`.

        Raises:
            ConfigError: it is none of these; the message does not show it.
        """
        kind, colon, value = text.partition(":")
        if kind in ("cache", "none") and not colon:
            return cls(kind)  # type: ignore[arg-type]
        if kind == "env" and not colon:
            return cls.EnvVar()
        if kind in ("literal", "env", "path") and value:
            return cls(kind, value)  # type: ignore[arg-type]
        raise ConfigError(
            "the token source must be literal:TOKEN, env:NAME, path:FILE, cache or none "
            "(what was given is not shown: it may be a token)"
        )

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("literal", "env", "path", "cache", "none"):
            raise ConfigError(
                "a TokenSource is made by Literal, EnvVar, Path, CacheToken, None_ or parse"
            )
        if not isinstance(self.value, str):
            raise ConfigError(f"the value of TokenSource {self.kind} must be a string")
        if self.kind in ("literal", "env", "path") and not self.value:
            raise ConfigError(f"TokenSource {self.kind} needs a value, and it is empty")

    def __repr__(self) -> str:
        name = {"literal": "Literal", "env": "EnvVar", "path": "Path", "cache": "CacheToken"}
        inside = {"literal": "...", "env": repr(self.value), "path": repr(self.value)}
        return f"TokenSource.{name.get(self.kind, 'None_')}({inside.get(self.kind, '')})"

    def resolve(self) -> str | bool | None:
        """The value for huggingface_hub's `token=`: a token, None for a stored one, False for none.

        Raises:
            ConfigError: the variable is not set, or the file cannot be read or is empty.
        """
        if self.kind == "literal":
            return self.value
        if self.kind == "env":
            token = os.environ.get(self.value, "").strip()
            if not token:
                raise ConfigError(
                    f"the token should come from the environment variable {self.value}, "
                    "which is not set: set it or choose another token source"
                )
            return token
        if self.kind == "path":
            try:
                with open(self.value, encoding="utf-8") as file:
                    token = file.read().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the token file {self.value} cannot be read: {error}") from error
            if not token:
                raise ConfigError(f"the token file {self.value} is empty")
            return token
        if self.kind == "none":
            return False
        if os.environ.get("HF_TOKEN") or os.environ.get(_HUB_TOKEN_VARIABLE):
            return None  # huggingface_hub reads these itself
        return os.environ.get("HF_HUB_TOKEN", "").strip() or None
