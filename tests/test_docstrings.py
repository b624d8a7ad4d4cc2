"""What the docstrings of public names must say: errors, units, shapes and defaults."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import mistralrs_sdk
from mistralrs_sdk import MistralRsError, Model
from mistralrs_sdk.errors import EngineDeadError, RequestError
from tests.public_errors import errors_of, errors_of_making

KINDS = {
    name: thing
    for name in mistralrs_sdk.__all__
    if inspect.isclass(thing := getattr(mistralrs_sdk, name))
    and not (inspect.getdoc(thing) or "").startswith("Not done")
}
FUNCTIONS = {
    name: thing
    for name in mistralrs_sdk.__all__
    if inspect.isfunction(thing := getattr(mistralrs_sdk, name))
}
UNITS = {  # what a number's name holds, and what its docstring must then
    r"seconds|(^|_)secs?(_|$)|timeout|deadline|(^|_)time(_|$)": r"\b(s|min)\b|second",
    r"(^|_)mb(_|$)": "MiB",
    r"bytes": r"byte|GiB",
    r"tokens|(^|_)len(_|$)": "token",
}
ARRAYS = r"Tensor|RawLogits|list\[list\[float\]\]|list\[float\]|array\[float\]"
SHAPE = r"\[[a-z_]\w*(, [a-z_]\w*)*\]"
NO_DEFAULT = {  # builder methods that add something: there is nothing to be set before
    "with_adapter",
    "with_adapter_revision",
    "with_adapters",
    "with_async_tool",
    "with_chat_template_kwargs",
    "with_lora_adapter",
    "with_lora_adapter_revision",
    "with_lora_adapters",
    "with_mcp_client",
    "with_pattern",
    "with_range",
    "with_sync_tool",
    "with_tool",
    "with_tool_callback",
    "with_tool_callback_and_tool",
}
CANNOT_HAPPEN = {  # where the reader of sources sees an error that no argument can bring about
    "serve": RequestError,  # sampling settings out of a model's defaults are checked before
    "EmbeddingModelBuilder": RequestError,  # its settings have no adapters
}


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the package wrote, as plain functions."""
    for name, member in inspect.getmembers_static(kind):
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        if (
            not name.startswith("_")
            and isinstance(function, types.FunctionType)
            and function.__module__.startswith("mistralrs_sdk")
        ):
            yield name, function


def text_of(function: Any, owner: type) -> str:
    """A method's docstring; with `As `x`` that of x of the same class."""
    text = inspect.getdoc(function) or ""
    other = re.match(r"As `(\w+)`", text)
    named = inspect.getattr_static(owner, other[1], None) if other else None
    return f"{text}\n{inspect.getdoc(named)}" if named else text


def class_text(kind: type) -> str:
    """The docstrings of a class and of those it is made from."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("mistralrs_sdk")]
    return "\n".join(vars(base).get("__doc__") or "" for base in bases)


def class_errors(kind: type) -> str:
    """What these say under `Raises:`, which holds for making one and for each method."""
    return "\n".join(part for part in re.findall(r"Raises:\n((?: {8}.*\n)+)", class_text(kind)))


def field_texts(kind: type) -> dict[str, str]:
    """The docstrings that stand below the fields of a class."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("mistralrs_sdk"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
            body = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)).body
            for field, below in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def unnamed(name: str, errors: frozenset[type[MistralRsError]], text: str) -> set[str]:
    """The errors of `name` that a text names neither themselves nor by a parent."""
    return {
        error.__name__
        for error in errors
        if not issubclass(error, CANNOT_HAPPEN.get(name, ()))
        and not any(
            issubclass(parent, MistralRsError)
            and parent is not MistralRsError
            and re.search(rf"\b{parent.__name__}\b", text)
            for parent in error.__mro__
        )
    }


def numbers(function: Any) -> Iterator[str]:
    """The parameters of a function that are numbers."""
    for name, parameter in inspect.signature(function).parameters.items():
        if re.match(r"(int|float)\b", str(parameter.annotation)):
            yield name


def without_unit(name: str, text: str) -> bool:
    """Whether a unit that the name of a number asks for is not in the text."""
    return any(
        re.search(part, name) and not re.search(unit, text, re.IGNORECASE)
        for part, unit in UNITS.items()
    )


@pytest.mark.parametrize("name", KINDS)
def test_docstrings_name_every_error_that_comes_out(name):
    """What a public method raises, also through what it calls, is named by it or its class."""
    kind, about = KINDS[name], class_errors(KINDS[name])
    missing = {
        f"{name}.{method}": errors
        for method, function in methods(kind)
        if (errors := unnamed(method, errors_of(function, kind), text_of(function, kind) + about))
    }

    assert missing == {}
    assert unnamed(name, errors_of_making(kind), about) == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_name_their_errors(name):
    """The same of the functions of the package."""
    assert unnamed(name, errors_of(FUNCTIONS[name]), inspect.getdoc(FUNCTIONS[name]) or "") == set()


@pytest.mark.parametrize("name", KINDS)
def test_numbers_have_their_units(name):
    """Whoever reads of a time, a size or a count of tokens learns in what it is counted."""
    kind, about = KINDS[name], class_text(KINDS[name])
    missing = [
        f"{name}.{method}({parameter})"
        for method, function in methods(kind)
        if not (inspect.getdoc(function) or "").startswith("Not done")
        for parameter in numbers(function)
        if without_unit(parameter, text_of(function, kind))
    ]
    if attrs.has(kind):
        texts = field_texts(kind)
        missing += [
            f"{name}.{field.name}"
            for field in attrs.fields(kind)
            if re.match(r"(int|float)\b", str(field.type))
            and without_unit(field.name, texts.get(field.name, "") + about)
        ]

    assert missing == []


@pytest.mark.parametrize("name", [*KINDS, *FUNCTIONS])
def test_arrays_have_their_shapes(name):
    """A docstring of what takes or gives an array says its shape, as [tokens, vocab]."""
    thing = getattr(mistralrs_sdk, name)
    members = methods(thing) if inspect.isclass(thing) else [(name, thing)]
    missing = [
        member
        for member, function in members
        if re.search(ARRAYS, str(inspect.signature(function)))
        and not re.search(SHAPE, text_of(function, thing))
    ]

    assert missing == []


@pytest.mark.parametrize("name", [name for name in KINDS if name.endswith("Builder")])
def test_settings_say_what_holds_without_them(name):
    """A builder method that sets one thing says its default, or the value that turns it off."""
    told = re.compile(r"efault|\boff\b|None|takes all|see `|Not done")
    missing = [
        method
        for method, function in methods(KINDS[name])
        if method.startswith(("with_", "set_"))
        and len(inspect.signature(function).parameters) > 1
        and method not in NO_DEFAULT
        and not told.search(text_of(function, KINDS[name]))
    ]

    assert missing == []


@pytest.mark.parametrize("name", [*KINDS, *FUNCTIONS])
def test_docstrings_open_with_a_sentence(name):
    """The first line stands alone and ends like a sentence."""
    thing = getattr(mistralrs_sdk, name)
    texts = {name: inspect.getdoc(thing) or ""}
    if inspect.isclass(thing):
        texts |= {key: inspect.getdoc(function) or "" for key, function in methods(thing)}
    first = {key: text.partition("\n\n")[0] for key, text in texts.items()}

    wrong = [key for key, line in first.items() if "\n" in line or not re.search(r"[.:)]$", line)]
    assert wrong == []


class Sample:
    """A sample whose methods fail in ways that the reader of sources must see."""

    def direct(self) -> None:
        raise RequestError("x")

    def through(self) -> None:
        self.direct()

    def caught(self) -> None:
        try:
            self.direct()
        except ValueError:
            raise EngineDeadError("x") from None


Sample.__module__ = "mistralrs_sdk.sample"


def test_errors_are_followed_through_calls_and_handlers():
    """What a callee raises counts, and what a handler catches does not."""
    for function in (Sample.direct, Sample.through, Sample.caught):
        function.__module__ = "mistralrs_sdk.sample"

    assert errors_of(Sample.direct, Sample) == {RequestError}
    assert errors_of(Sample.through, Sample) == {RequestError}
    assert errors_of(Sample.caught, Sample) == {EngineDeadError}
    assert RequestError in errors_of(Model.tokenize, Model)
