"""Settings layer by layer: what each is quantised to, and the device it is on."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import attrs

from mistralrs_sdk.errors import ConfigError, UnsupportedError
from mistralrs_sdk.isq import IMATRIX_TYPES, Isq, isq_type, parse_isq

Selector = range | re.Pattern[str]
"""Which weights an entry is about: layers by number, or modules by name."""

_DEVICE = re.compile(r"cpu|mps|metal(?:\[0\])?|cuda(?:\[([0-9]{1,4})\]|:([0-9]{1,4}))?")
_LAYERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NULL = ("", "~", "null", "Null", "NULL")


def _device(value: Any) -> str | None:
    """A device as torch calls it."""
    if value is None:
        return None
    match = _DEVICE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f'device ({value!r}) must be "cpu", "cuda[N]" or "metal[0]"')
    if value.startswith("cuda"):
        return f"cuda:{int(match[1] or match[2] or 0)}"
    return "cpu" if value == "cpu" else "mps"


@attrs.frozen(repr=False)
class LayerTopology:
    """What is set for some layers; None leaves it to the rest of the settings.

    `isq` is an `IsqType`, a number of bits (`IsqBits`) or the text of either; `device` is "cpu",
    "cuda[N]" or "metal[0]".

    Raises:
        ConfigError: a value is neither.
        UnsupportedError: a type that nothing here computes with.
    """

    isq: Isq | None = attrs.field(default=None, converter=attrs.converters.optional(parse_isq))
    device: str | None = attrs.field(default=None, converter=_device)

    def __repr__(self) -> str:
        isq = [] if self.isq is None else [f"isq={self.isq.value!r}"]
        device = [] if self.device is None else [f"device={self.device!r}"]
        return f"LayerTopology({', '.join(isq + device)})"


def _entries(entries: Any) -> tuple[tuple[Selector, LayerTopology], ...]:
    try:
        pairs = tuple((selector, layer) for selector, layer in entries)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the entries of a Topology ({entries!r:.80}) must be pairs: use with_range"
        ) from None
    for selector, layer in pairs:
        if not isinstance(layer, LayerTopology):
            raise ConfigError(f"a layer of a Topology ({layer!r:.80}) must be a LayerTopology")
        if isinstance(selector, range):
            if selector.step != 1 or not 0 <= selector.start < selector.stop:
                raise ConfigError(
                    f"the layers of a Topology ({selector.start}-{selector.stop}, "
                    f"step {selector.step}) must count up one by one from a first layer of at "
                    "least 0 to a larger end, which is not included"
                )
        elif not isinstance(selector, re.Pattern) or not isinstance(selector.pattern, str):
            raise ConfigError(f"the layers of a Topology ({selector!r:.80}) must be a range")
    return pairs


@attrs.frozen(repr=False)
class Topology:
    """Settings for ranges of layers and for modules whose name matches a regular expression.

    `Topology().with_range(range(0, 8), LayerTopology(isq="q3k"))`. Where entries overlap, the
    later one wins, and a regular expression wins over ranges; what an entry leaves out is taken
    from the one below it. Never changed: each method returns a new one.

    Raises:
        ConfigError: a range is empty or negative, or an entry is no `LayerTopology`.
    """

    entries: tuple[tuple[Selector, LayerTopology], ...] = attrs.field(
        default=(), converter=_entries
    )

    @classmethod
    def empty(cls) -> Self:
        """Nothing set for any layer."""
        return cls()

    def with_range(self, layers: range | tuple[int, int], layer: LayerTopology) -> Self:
        """Set it for these layers: a range, or the first layer and the end, not included."""
        return self._and(layers if isinstance(layers, range) else _range(layers), layer)

    def with_pattern(self, pattern: str, layer: LayerTopology) -> Self:
        """Set it for modules in whose name the regular expression is found.

        Names are Hugging Face's, such as "model.layers.3.self_attn.q_proj"; it may also match them
        with ".weight" behind.
        """
        return self._and(_compiled(pattern), layer)

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Read YAML: keys `3`, `0-8` (end not included) or `/regex/`; values `isq` and `device`.

        Raises:
            ConfigError: it is no such YAML; the message names the line and the key.
            UnsupportedError: a type that nothing here computes with.
        """
        return cls(tuple(_read(text, "the topology")))

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Self:
        """Read a YAML file, as `from_str`.

        Raises:
            ConfigError: it cannot be read, or is no such YAML.
            UnsupportedError: a type that nothing here computes with.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"the topology file {path!s} cannot be read: {error}") from error
        return cls(tuple(_read(text, f"the topology file {path!s}")))

    def isq_of(self, name: str, layer: int | None) -> Isq | None:
        """What is set for a module of that name in that layer, or None."""
        for kind in (re.Pattern, range):
            for selector, setting in reversed(self.entries):
                if setting.isq is None or not isinstance(selector, kind):
                    continue
                if _covers(selector, name, layer):
                    return setting.isq
        return None

    def unused(self, modules: Iterable[tuple[str, int | None]]) -> tuple[str, ...]:
        """The keys, as YAML writes them, that are about none of these (name, layer)."""
        known = tuple(modules)
        return tuple(
            _key(selector)
            for selector, _ in self.entries
            if not any(_covers(selector, name, layer) for name, layer in known)
        )

    def __repr__(self) -> str:
        return "Topology()" + "".join(
            f".with_range({selector}, {layer})"
            if isinstance(selector, range)
            else f".with_pattern({selector.pattern!r}, {layer})"
            for selector, layer in self.entries
        )

    def _and(self, selector: Selector, layer: LayerTopology) -> Self:
        return attrs.evolve(self, entries=(*self.entries, (selector, layer)))


def refuse_unused_imatrix(imatrix: str, *, isq: Isq | None, topology: Topology | None) -> None:
    """Refuse an importance matrix that would not be looked at.

    Raises:
        ConfigError: nothing is quantised, or only to types that do not use one.
    """
    layers = () if topology is None else (layer.isq for _, layer in topology.entries)
    asked = [each for each in (isq, *layers) if each is not None]
    if not asked:
        raise ConfigError(
            f"imatrix ({imatrix!r}) has no effect without something to quantise: "
            "set isq, or a topology with isq, before it"
        )
    if not any(isq_type(each) in IMATRIX_TYPES for each in asked):
        raise ConfigError(
            f"imatrix ({imatrix!r}) has no effect on isq "
            f"({', '.join(dict.fromkeys(str(each.value) for each in asked))}): only q2k to q6k "
            "use one; choose such a type, or leave imatrix out"
        )


def require_one_device(topology: Topology, device: str | None) -> None:
    """Refuse layers on another device than the model's; None: not chosen yet.

    Raises:
        UnsupportedError: there are such layers, or they are on several devices.
    """
    own = _device(device)
    for selector, layer in topology.entries:
        own = own or layer.device
        if layer.device not in (None, own):
            raise UnsupportedError(
                f"topology {_key(selector)}: device ({layer.device}) is not supported where the "
                f"model is on {own}: all layers run on one device; leave device out of the "
                "topology and use with_device"
            )


def _range(layers: Any) -> range:
    if not (isinstance(layers, tuple) and len(layers) == 2 and {*map(type, layers)} == {int}):
        raise ConfigError(
            f"with_range({layers!r:.80}): must be a range, or a first layer and an end: (0, 8)"
        )
    return range(*layers)


def _compiled(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ConfigError(f"with_pattern({pattern!r:.80}): must be a regular expression as text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python warns of, Rust would read differently
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ConfigError(f"/{pattern:.80}/ is no regular expression: {error}") from None


def _covers(selector: Selector, name: str, layer: int | None) -> bool:
    if isinstance(selector, range):
        return layer is not None and layer in selector
    return any(selector.search(text) for text in (name, f"{name}.weight"))


def _key(selector: Selector) -> str:
    if isinstance(selector, range):
        single = len(selector) == 1
        return f"{selector.start}" if single else f"{selector.start}-{selector.stop}"
    return f"/{selector.pattern}/"


def _read(text: Any, where: str) -> Iterator[tuple[Selector, LayerTopology]]:
    """The entries of a YAML text, in its order, repeated keys included."""
    import yaml

    if not isinstance(text, str):
        raise ConfigError(f"{where} ({text!r:.80}) must be YAML text")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # what is no YAMLError comes from escapes of no character and from deep nesting
        raise ConfigError(f"{where} is not YAML: {error}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f'{where} must map layers to settings, such as "0-8: {{isq: q4k}}"')
    for key, value in root.value:
        line = f"{where}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{line}: a key must be a layer, a range such as 0-8, or /regex/")
        at = f"{line}, {key.value:.80}"
        try:
            yield _selector(key.value), LayerTopology(**_settings(value))
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"{at}: {error}") from None


def _selector(key: str) -> Selector:
    if len(key) > 1 and key[0] == key[-1] == "/":
        return _compiled(key[1:-1])
    match = _LAYERS.fullmatch(key)
    if match is None:
        raise ConfigError("a key must be a layer, a range such as 0-8, or /regex/")
    start = int(match[1])
    stop = start + 1 if match[2] is None else int(match[2])
    if stop <= start:
        raise ConfigError(f"the end ({stop}) is not included and must be above {start}")
    return range(start, stop)


def _settings(node: Any) -> dict[str, str | None]:
    """The texts under `isq` and `device`."""
    import yaml

    if isinstance(node, yaml.ScalarNode) and node.value in _NULL:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError('must have settings of its own, such as "isq: q4k"')
    settings: dict[str, str | None] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
        if name not in ("isq", "device"):
            raise ConfigError(f"unknown setting ({name!s:.80}); known are isq and device")
        if name in settings:
            raise ConfigError(f"{name} is given twice; keep one")
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{name} must be one value")
        settings[name] = None if value.value in _NULL else value.value
    return settings
