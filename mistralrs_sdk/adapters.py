"""LoRA adapters as values: where one comes from, what may be loaded, what is."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

import attrs

from mistralrs_sdk.errors import AdapterError, ConfigError

MAX_ALIAS_BYTES = 256
_GENERATION = re.compile(r"[0-9a-f]{64}")
_PolicyKind = Literal["create", "upsert", "compare_and_swap"]


@attrs.frozen(kw_only=True)
class LoraRuntimeConfig:
    """What the adapters of one model may take together.

    Raises:
        ConfigError: a limit is no whole number of at least 1.
    """

    max_adapters: int = 16
    """Most aliases at once."""
    max_rank: int = 256
    """Highest rank of any of an adapter's matrices."""
    max_bytes: int = 8 * 2**30
    """Most bytes of all weights, of those too that only running requests still use."""

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} ({value!r}) must be a whole number of at least 1")


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@attrs.frozen
class LoraAdapterSpec:
    """One adapter to load: the name requests know it by, and the folder or hub id it is in.

    Raises:
        AdapterError: the alias cannot be one.
        ConfigError: the source or the revision is no text, or empty.
    """

    alias: str
    source: str = attrs.field(converter=_text)
    revision: str | None = None
    """Branch, tag or commit on the hub; None for its main branch."""
    base_model_name: str | None = None
    """What the adapter was trained on, in words, for those who list adapters."""

    def __attrs_post_init__(self) -> None:
        check_alias(self.alias)
        if not isinstance(self.source, str) or not self.source.strip():
            raise ConfigError(
                f"source ({self.source!r}) of adapter {self.alias!r} must be a folder or a "
                "Hugging Face id"
            )
        for name in ("revision", "base_model_name"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(
                    f"{name} ({value!r}) of adapter {self.alias!r} must be a non-empty string"
                )

    @classmethod
    def parse(cls, text: str) -> LoraAdapterSpec:
        """Read `alias=source`.

        Raises:
            ConfigError: there is no "=" in it, or nothing on one side.
            AdapterError: the alias cannot be one.
        """
        alias, equals, source = text.partition("=")
        if not equals or not alias.strip() or not source.strip():
            raise ConfigError(f"adapter {text!r} must be written alias=source")
        return cls(alias.strip(), source.strip())


@attrs.frozen(repr=False)
class LoraAdapterLoadPolicy:
    """What loading does to the adapter that already has the alias; made by a class method.

    Raises:
        ConfigError: it was made otherwise, or the generation is none: 64 hexadecimal digits.
    """

    kind: _PolicyKind
    generation: str | None = None

    @classmethod
    def Create(cls) -> LoraAdapterLoadPolicy:  # noqa: N802 (mistral.rs' name)
        """The alias must be free; the default."""
        return cls("create")

    @classmethod
    def Upsert(cls) -> LoraAdapterLoadPolicy:  # noqa: N802 (mistral.rs' name)
        """Replace it if there is one. Running requests go on with the old weights."""
        return cls("upsert")

    @classmethod
    def CompareAndSwap(cls, generation: str) -> LoraAdapterLoadPolicy:  # noqa: N802
        """Replace exactly this generation."""
        return cls("compare_and_swap", generation)

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("create", "upsert", "compare_and_swap"):
            raise ConfigError("a LoraAdapterLoadPolicy is made by Create, Upsert or CompareAndSwap")
        if (self.kind == "compare_and_swap") != is_generation(self.generation):
            raise ConfigError(
                f"CompareAndSwap ({self.generation!r}) takes the generation of a loaded adapter: "
                "64 hexadecimal digits"
            )

    def __repr__(self) -> str:
        name = {"create": "Create", "upsert": "Upsert"}.get(self.kind, "CompareAndSwap")
        return f"LoraAdapterLoadPolicy.{name}({self.generation or ''})"


@attrs.frozen
class AdapterSelection:
    """The adapter a request wants: the newest under an alias, or exactly one generation.

    Raises:
        AdapterError: both are given, or neither, or the generation is no 64 hexadecimal digits.
    """

    alias: str | None = None
    generation: str | None = None

    def __attrs_post_init__(self) -> None:
        if (self.alias is None) == (self.generation is None):
            raise AdapterError(
                f"{self!r} must have an alias or a generation, and not both", kind="invalid_alias"
            )
        if self.generation is not None and not is_generation(self.generation):
            raise AdapterError(
                f"generation {self.generation!r} must be 64 hexadecimal digits",
                kind="generation_not_found",
            )

    @classmethod
    def parse(cls, text: str) -> AdapterSelection:
        """Read what `set_adapter` takes: 64 hexadecimal digits are a generation, all else an alias.

        No alias can look like a generation.
        """
        return cls(generation=text) if is_generation(text) else cls(alias=text)

    def __str__(self) -> str:
        """What `parse` reads."""
        return self.alias or self.generation or ""


@attrs.frozen(kw_only=True)
class LoraAdapterInfo:
    """One loaded adapter."""

    alias: str
    source: str
    revision: str | None
    generation: str
    """SHA-256 of its files in hexadecimal: equal content is one generation, under any alias."""
    rank: int
    """The highest of its matrices."""
    bytes: int
    """Bytes its weights take in memory; aliases of one generation share them."""
    base_model_name: str | None = None


@attrs.frozen(kw_only=True)
class LoraResidentGenerationInfo:
    """Weights that are in memory, and the bytes they take there."""

    generation: str
    rank: int
    bytes: int
    aliases: tuple[str, ...] = attrs.field(converter=tuple)
    """Who lead to it; empty: it is retired, and goes when the last request that uses it ends."""


@attrs.frozen(kw_only=True)
class LoraRuntimeStatus:
    """All adapters of a model and the bytes they take in memory."""

    adapters: tuple[LoraAdapterInfo, ...] = attrs.field(converter=tuple)
    generations: tuple[LoraResidentGenerationInfo, ...] = attrs.field(converter=tuple)
    resident_bytes: int
    limits: LoraRuntimeConfig

    @property
    def resident_generations(self) -> int:
        """Generations in memory, retired ones included."""
        return len(self.generations)

    @property
    def retired_generations(self) -> int:
        """Generations that have no alias any more and that running requests still use."""
        return sum(not generation.aliases for generation in self.generations)


def check_alias(alias: Any) -> None:
    """Refuse what cannot name an adapter.

    Raises:
        AdapterError: it is no text, empty, longer than 256 bytes in UTF-8, or 64 hexadecimal
            digits, as a generation is.
    """
    if not isinstance(alias, str) or not alias.strip():
        raise AdapterError(
            f"adapter alias {alias!r} must be a non-empty string", kind="invalid_alias"
        )
    size = len(alias.encode(errors="surrogatepass"))
    if size > MAX_ALIAS_BYTES:
        raise AdapterError(
            f"adapter alias {alias[:40]!r}... has {size} bytes: use at most {MAX_ALIAS_BYTES}",
            kind="alias_too_long",
        )
    if is_generation(alias):
        raise AdapterError(
            f"adapter alias {alias!r} looks like the generation of an adapter: use another name",
            kind="invalid_alias",
        )


def is_generation(text: Any) -> bool:
    """Whether it is written as a generation is: 64 hexadecimal digits, small letters."""
    return isinstance(text, str) and _GENERATION.fullmatch(text) is not None
