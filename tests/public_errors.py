"""Reads the source of the package for the typed errors a call can raise, as far as names lead."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import attrs

from mistralrs_sdk import MistralRsError

Errors = frozenset[type[MistralRsError]]
NONE: Errors = frozenset()


def errors_of(function: Any, owner: type | None = None) -> Errors:
    """The errors that the body of `function` raises, and those of what it calls and not catches.

    Followed are plain names, `self.method`, `Class.method`, `module.function` and classes that are
    made; what is called through any other object is not. `owner` is the class `self` is one of.
    """
    return _errors(inspect.unwrap(function), owner, ())


def errors_of_making(kind: type) -> Errors:
    """The errors of `kind(...)`: of an attrs class's converters and validators too."""
    return _making(kind, ())


_KNOWN: dict[tuple[Any, type | None], Errors] = {}

_Path = tuple[Any, ...]
"""What is being read already, so that a recursion ends."""


@functools.cache
def _tree(function: types.FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):  # made by attrs or by exec; a lambda within a line
        return None
    return tree if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _errors(function: Any, owner: type | None, path: _Path) -> Errors:
    if not isinstance(function, types.FunctionType) or function in path or not _ours(function):
        return NONE
    known = _KNOWN.get((function, owner))
    if known is not None:
        return known
    tree = _tree(function)
    if tree is None:
        return NONE
    reader = _Reader(function, owner or _class_of(function), (*path, function))
    found = _KNOWN[function, owner] = NONE.union(*(reader.read(child) for child in tree.body))
    return found


def _making(kind: type, path: _Path) -> Errors:
    if kind in path or not _ours(kind):
        return NONE
    functions = {getattr(kind, name, None) for name in ("__init__", "__attrs_post_init__")}
    checks = _checks(kind) if attrs.has(kind) else ()
    return NONE.union(
        *(_errors(function, kind, (*path, kind)) for function in functions),
        *(_errors(check, None, (*path, kind)) for check in checks),
    )


def _checks(kind: type) -> Iterator[Any]:
    for field in attrs.fields(kind):
        yield from _plain_functions(field.validator)
        yield from _plain_functions(field.converter)


def _plain_functions(check: Any) -> Iterator[types.FunctionType]:
    """The functions in attrs' wrappers: and_, optional, deep_iterable, pipe ..."""
    if isinstance(check, tuple | list):
        for each in check:
            yield from _plain_functions(each)
    elif isinstance(check, types.FunctionType):
        yield check
        for cell in check.__closure__ or ():
            if isinstance(cell.cell_contents, types.FunctionType | tuple):
                yield from _plain_functions(cell.cell_contents)
    else:
        for name in ("_validators", "validator", "member_validator", "converter"):
            if getattr(check, name, None) is not None:
                yield from _plain_functions(getattr(check, name))


def _ours(thing: Any) -> bool:
    return thing.__module__.partition(".")[0] == "mistralrs_sdk"


def _class_of(function: types.FunctionType) -> type | None:
    name, dot, _ = function.__qualname__.partition(".")
    found = getattr(sys.modules[function.__module__], name, None) if dot else None
    return found if isinstance(found, type) else None


class _Reader:
    """Walks the body of one function; `try` takes off what its handlers catch."""

    def __init__(self, function: types.FunctionType, owner: type | None, path: _Path) -> None:
        self.names = {**vars(builtins), **function.__globals__}
        self.names |= inspect.getclosurevars(function).nonlocals
        self.owner = owner
        self.path = path

    def read(self, node: ast.AST) -> Errors:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return NONE  # made here, called elsewhere
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                self.names[alias.asname or alias.name] = getattr(module, alias.name, None)
        if isinstance(node, ast.Try):
            caught = tuple(self._caught(node))
            inside = self._all(node.body)
            left = frozenset(error for error in inside if not issubclass(error, caught))
            return left | self._all([*node.handlers, *node.orelse, *node.finalbody])
        found = self._all([*ast.iter_child_nodes(node)])
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = self._thing(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if isinstance(error, type) and issubclass(error, MistralRsError):
                found |= {error}
        if isinstance(node, ast.Call):
            found |= self._called(node)
        return found

    def _all(self, nodes: list[Any]) -> Errors:
        return NONE.union(*(self.read(node) for node in nodes))

    def _caught(self, node: ast.Try) -> Iterator[type[BaseException]]:
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            for kind in kinds:
                error = BaseException if kind is None else self._thing(kind)
                if isinstance(error, type):
                    yield error

    def _called(self, call: ast.Call) -> Errors:
        of_self = isinstance(call.func, ast.Attribute) and _is_self(call.func.value)
        called = self._thing(call.func)
        if isinstance(call.func, ast.Name) and call.func.id == "cls":
            called = self.owner
        if called is attrs.evolve and call.args and _is_self(call.args[0]):
            called = self.owner
        if isinstance(called, type) and not issubclass(called, BaseException):
            return _making(called, self.path)
        return _errors(called, self.owner if of_self else None, self.path)

    def _thing(self, node: ast.AST) -> Any:
        """What an expression of plain names and dots means; None if that cannot be seen."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        holder = self.owner if _is_self(node.value) else self._thing(node.value)
        if not isinstance(holder, type | types.ModuleType):
            return None
        found = inspect.getattr_static(holder, node.attr, None)
        return getattr(found, "__func__", found)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
