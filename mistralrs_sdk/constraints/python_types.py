"""Python types as JSON schemas, and JSON values as instances of those types."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import types
import typing
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, Union

import attrs

from mistralrs_sdk.errors import RequestError

_SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    type(None): {"type": "null"},
}
_TEXTS: dict[Any, tuple[dict[str, Any], Callable[[str], Any]]] = {
    datetime.datetime: ({"format": "date-time"}, datetime.datetime.fromisoformat),
    datetime.date: ({"format": "date"}, datetime.date.fromisoformat),
    datetime.time: ({"format": "time"}, datetime.time.fromisoformat),
    uuid.UUID: ({"format": "uuid"}, uuid.UUID),
    decimal.Decimal: ({"pattern": r"^-?(0|[1-9]\d{0,30})(\.\d{1,30})?$"}, decimal.Decimal),
}
"""Types whose values are strings in JSON: what holds these, and what reads them."""
_ARRAYS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    Sequence: list,
    Iterable: list,
    Set: frozenset,
}
_OBJECTS = (dict, Mapping)
_ACCEPTED = (
    "use a pydantic model, a dataclass, an attrs class, a TypedDict, or their parts: bool, int, "
    "float, str, None, date, time, datetime, UUID, Decimal, enums, Literal, unions, lists, "
    "tuples, sets and dicts with str keys"
)


def schema_for(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; objects in it have no properties but those it names.

    A pydantic model is asked for its own. Times are strings in RFC 3339's form, an enum is its
    values, a set is an array.

    Raises:
        RequestError: a part of the type has no schema.
    """
    defs: dict[str, Any] = {}
    schema = _Writer(defs).write(kind)
    return {**schema, "$defs": defs} if defs else schema


def build(kind: Any, value: Any) -> Any:
    """Return the instance of `kind` that a parsed JSON value stands for.

    Of a union the first member that fits is taken.

    Raises:
        ValueError: the value does not fit the type.
    """
    kind = _plain(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return value
    if kind in _SCALARS:
        return _scalar(kind, value)
    if kind in _TEXTS:
        return _TEXTS[kind][1](_scalar(str, value))
    if origin is Literal:
        return _member({_json(member): member for member in args}, value)
    if origin in (Union, types.UnionType):
        return _first_fit(args, value)
    if (origin or kind) in _ARRAYS:
        return _array(origin or kind, args, value)
    if (origin or kind) in _OBJECTS:
        inner = args[1] if args else Any
        return {key: build(inner, item) for key, item in _typed(dict, value).items()}
    if _is_pydantic(kind):
        return kind.model_validate(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member({member.value: member for member in kind}, value)
    fields = _fields(kind)
    given = _typed(dict, value)
    missing = {name for name, field in fields.items() if field.required} - given.keys()
    if missing or given.keys() - fields.keys():
        raise ValueError(f"{sorted(given)} are not the fields of {_name(kind)}")
    return kind(**{name: build(fields[name].kind, item) for name, item in given.items()})


@attrs.frozen
class _Field:
    kind: Any
    required: bool


@attrs.define
class _Writer:
    """Writes schemas; classes go to `defs`, where they may refer to each other."""

    defs: dict[str, Any]
    _names: dict[Any, str] = attrs.field(init=False, factory=dict)

    def write(self, kind: Any) -> dict[str, Any]:
        kind = _plain(kind)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind in (Any, object):
            return {}
        if kind in _SCALARS:
            return _SCALARS[kind]
        if kind in _TEXTS:
            return {"type": "string", **_TEXTS[kind][0]}
        if origin is Literal:
            return _enum(args)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.write(member) for member in args]}
        if (origin or kind) in _ARRAYS:
            return self._array(origin or kind, args)
        if (origin or kind) in _OBJECTS:
            if args and args[0] is not str:
                raise RequestError(f"{kind!r} has no JSON schema: the keys of a dict must be str")
            return {"type": "object", "additionalProperties": self.write(args[1]) if args else True}
        return self._class(kind)

    def _array(self, origin: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        if origin is tuple and args and args[-1] is not Ellipsis:
            members = [] if args == ((),) else [self.write(member) for member in args]
            size = len(members)
            exact: dict[str, Any] = {"items": False, "minItems": size, "maxItems": size}
            return {"type": "array", **({"prefixItems": members} if members else {}), **exact}
        return {"type": "array", "items": self.write(args[0]) if args else {}}

    def _class(self, kind: Any) -> dict[str, Any]:
        if kind not in self._names:
            name = self._names[kind] = self._free_name(_name(kind))
            self.defs[name] = {}  # its place is taken: inside, others may be written
            self.defs[name] = self._definition(kind, name)
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def _definition(self, kind: Any, name: str) -> dict[str, Any]:
        if _is_pydantic(kind):
            template = f"#/$defs/{name}/$defs/{{model}}"
            return _closed(kind.model_json_schema(ref_template=template))
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return _enum([member.value for member in kind])
        fields = _fields(kind)
        return {
            "type": "object",
            "properties": {name: self.write(field.kind) for name, field in fields.items()},
            "required": [name for name, field in fields.items() if field.required],
            "additionalProperties": False,
        }

    def _free_name(self, name: str) -> str:
        name = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name)
        number = sum(taken.rstrip("0123456789") == name for taken in self.defs)
        return f"{name}{number + 1}" if number else name


def _plain(kind: Any) -> Any:
    """Strip what says nothing about values: aliases, NewType, descriptions."""
    _require_type(kind)
    while True:
        if kind is None:
            return type(None)
        if hasattr(kind, "__supertype__"):  # NewType
            kind = kind.__supertype__
        elif hasattr(kind, "__value__") and hasattr(kind, "__type_params__"):  # type X = ...
            kind = kind.__value__
        elif typing.get_origin(kind) is typing.Annotated:
            kind, *notes = typing.get_args(kind)
            for note in notes:
                if not isinstance(note, str):
                    raise RequestError(
                        f"{note!r} in Annotated cannot be enforced: say it in a pydantic model"
                    )
        elif typing.get_origin(kind) in (typing.Required, typing.NotRequired):
            (kind,) = typing.get_args(kind)
        else:
            return kind


def _require_type(kind: Any) -> None:
    if not isinstance(kind, Hashable):
        raise RequestError(f"{kind!r:.80} is no type: {_ACCEPTED}")


def _is_pydantic(kind: Any) -> bool:
    return hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate")


def _fields(kind: Any) -> dict[str, _Field]:
    """The fields of a class by the names its constructor takes."""
    if not isinstance(kind, type) or typing.get_origin(kind) is not None:
        raise RequestError(f"{kind!r} has no JSON schema: {_ACCEPTED}")
    hints = _hints(kind)
    if typing.is_typeddict(kind):
        return {name: _Field(hint, _is_required(kind, name, hint)) for name, hint in hints.items()}
    if attrs.has(kind):
        return {
            field.alias or field.name: _Field(hints[field.name], field.default is attrs.NOTHING)
            for field in attrs.fields(kind)
            if field.init
        }
    if dataclasses.is_dataclass(kind):
        absent = dataclasses.MISSING
        return {
            field.name: _Field(
                hints[field.name], field.default is absent and field.default_factory is absent
            )
            for field in dataclasses.fields(kind)
            if field.init
        }
    raise RequestError(f"{kind!r} has no JSON schema: {_ACCEPTED}")


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    """Whether a TypedDict must have the key; it cannot tell itself if its annotations are texts."""
    origin = typing.get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        return origin is typing.Required
    return name in kind.__required_keys__


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError) as error:
        raise RequestError(
            f"{_name(kind)} has an annotation that cannot be read: {error}; define the types it "
            "names at the top of a module"
        ) from error


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def _enum(members: Iterable[Any]) -> dict[str, Any]:
    values = [_json(member) for member in members]
    for value in values:
        if not isinstance(value, str | int | bool | None):
            raise RequestError(f"{value!r} has no JSON schema: use str, int, bool or None")
    return {"enum": values}


def _json(member: Any) -> Any:
    return member.value if isinstance(member, enum.Enum) else member


def _closed(schema: Any) -> Any:
    """The schema with nothing left open that a model did not say is open."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _scalar(kind: type, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _typed(kind, value)


def _typed(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _member(members: dict[Any, Any], value: Any) -> Any:
    for key, member in members.items():
        if type(key) is type(value) and key == value:
            return member
    raise ValueError(f"{value!r:.80} is none of {list(members)}")


def _first_fit(kinds: Sequence[Any], value: Any) -> Any:
    reasons = []
    for kind in kinds:
        try:
            return build(kind, value)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError("; ".join(reasons))


def _array(origin: Any, args: tuple[Any, ...], value: Any) -> Any:
    items = _typed(list, value)
    if origin is tuple and args and args[-1] is not Ellipsis:
        kinds = () if args == ((),) else args
        if len(kinds) != len(items):
            raise ValueError(f"{len(items)} items are not the {len(kinds)} of the tuple")
    else:
        kinds = (args[0] if args else Any,) * len(items)
    return _ARRAYS[origin](build(kind, item) for kind, item in zip(kinds, items, strict=True))
